"""What can't become a static graph is refused, with the user's file and line, and nothing is left changed."""

import contextlib
import dataclasses
import functools
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import slapo_py as slapo
from slapo_py.errors import NoExampleInputs, TraceError
from slapo_py.tracing import Tracer
from tests.fingerprint import fingerprint, global_state
from tests.tracing.modules import linear, module, traced

X, Y = torch.randn(3, 8), torch.randn(5, 8)
OUTSIDE = nn.Parameter(torch.ones(8))
HERE = r"test_refusals\.py:\d+"


def branch_on_data(self, x):
    if x.sum() > 0:
        return x
    return -x


def loop_over_size(self, x):
    for i in range(x.shape[0]):
        x = x + i
    return x


def assigns(self, x):
    self.mean = x.mean()
    return x


def logs(self, x):
    self.seen.append(x.shape[0])
    return x


def inference(self, x):
    with torch.inference_mode():
        x.mean()
    return x


def look_into(self, x, state):
    return x * state.factor


def seeds(self, x):
    torch.manual_seed(0)
    return F.dropout(x)


def own_checkpoint(self, x):
    return checkpoint(self.a, x, use_reentrant=False)


def fails(self, x):
    raise ValueError("planted")


class State:
    factor = 2.0


def writes_field(self, x):
    self.state.factor = 3.0
    return x


# ruff: noqa: E501  a table
SEEN: list[Any] = []


class Box:
    def __init__(self) -> None:
        self.t = torch.ones(8)


@dataclasses.dataclass
class Doubled:
    a: Any

    def __post_init__(self) -> None:
        self.a = self.a * 2


def hooks_a_tensor(self, x):
    y = self.a(x)
    y.register_hook(lambda grad: grad * 0)
    return y


def forks(self, x):
    with torch.random.fork_rng(devices=[]):
        torch.rand(1)
    return x


def chooses(self, x):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(x, x, x)


def past_setattr(self, x):
    self.__dict__["n"] = self.__dict__["n"] + 1
    return x * 2


def appends(self, x):
    SEEN.append(x)
    return x * 2


def tick(self, x):
    return x * next(TICKS)


TICKS = iter(range(1000))


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "branch on data": (branch_on_data, {}, rf"reads the value of a tensor \(__bool__\) at .*{HERE}"),
    "item": (lambda self, x: x * x.max().item(), {}, rf"reads the value of a tensor \(item\) at .*{HERE}"),
    "boolean index": (lambda self, x: x[x > 0], {}, rf"needs the data of a tensor .*{HERE}"),
    "nonzero": (lambda self, x: x.nonzero(), {}, rf"needs the data of a tensor .*{HERE}"),
    "loop over a size": (loop_over_size, {}, rf"operations depend on the size of the input, first at .*{HERE}"),
    "value from a size": (lambda self, x: x / x.shape[0] ** 0.5, {}, rf"the value 1\.73.* depends on the size .*{HERE}"),
    "size that parts": (lambda self, x: x if x.shape[0] > 4 else x * 1, {}, r"operations depend on the size"),
    "python random": (lambda self, x: x * random.random(), {}, r"draws from or sets python's `random`"),
    "numpy random": (lambda self, x: x * np.random.rand(), {}, r"draws from or sets `numpy.random`"),
    "seeding": (seeds, {}, r"draws from or sets torch's generator"),
    "assignment": (assigns, {"mean": 0.0}, rf"assigns self\.mean at .*{HERE}; write in place \(self\.mean\.copy_"),
    "a field of an object": (writes_field, {"state": State()}, rf"sets \.factor of self\.state at .*{HERE}"),
    "a global list": (appends, {}, r"changes 'SEEN' outside itself: a graph would not"),
    "a value from elsewhere": (tick, {}, rf"a value at .*{HERE} is another one in each run although"),
    "a tensor in an object": (lambda self, x: x * self.box.t, {"box": Box()}, rf"self\.box\.t, which an object .*{HERE}: reg"),
    "a hook on a tensor": (hooks_a_tensor, {"a": linear()}, rf"calls \.register_hook\(\) of a tensor at .*{HERE}"),
    "forked randomness": (forks, {}, rf"sets the state of torch's generator at .*{HERE}"),
    "a choice of kernels": (chooses, {}, rf"chooses attention kernels at .*{HERE}"),
    "an attribute past setattr": (past_setattr, {"n": 0}, r"changes the attribute self\.n: a graph would not"),
    "a record with __post_init__": (lambda self, x: Doubled(x), {}, r"dataclass Doubled, which has a __post_init__, is"),
    "a memory format": (lambda self, x: x if x.is_contiguous(memory_format=torch.contiguous_format) else -x, {},
                        rf"reads \.is_contiguous\(memory_format\) of a tensor at .*{HERE}"),
    "container": (logs, {"seen": []}, r"changes the container self\.seen: a graph would not"),
    "inference mode": (inference, {}, rf"enters torch\.inference_mode at .*{HERE}; use torch\.no_grad"),
    "own checkpoint": (own_checkpoint, {"a": linear()}, rf"calls torch\.utils\.checkpoint itself at .*{HERE}; take that"),
    "an object": (lambda self, x: torch.rand(8, generator=self.g), {"g": torch.Generator()}, r"an object of type Generator"),
    "a parameter from outside": (lambda self, x: x * OUTSIDE, {}, r"from outside this module that requires a gradient"),
    "strides in between": (lambda self, x: x * (x * 2).stride(0), {}, rf"reads \.stride of a tensor at .*{HERE}"),
    "gradient": (lambda self, x: x if x.grad is None else -x, {}, rf"reads \.grad of a tensor at .*{HERE}"),
    "an error": (fails, {}, r"the model does not run on the example inputs: ValueError: planted"),
    "data set": (lambda self, x: setattr(x, "data", x * 2) or x, {}, rf"sets \.data of a tensor at .*{HERE}"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    forward, attributes, message = REFUSED[case]
    model = module(forward, **attributes)
    sch = slapo.create_schedule(model, example_inputs=[(X,), (Y,)])
    before = fingerprint(model), fingerprint(sch.module), global_state(), len(sch.history)
    for _ in range(2):  # the second time from memory
        with pytest.raises(TraceError, match=message):
            sch.trace()
    assert (fingerprint(model), fingerprint(sch.module), global_state(), len(sch.history)) == before


def test_an_unknown_object_among_the_arguments_is_handed_on_but_not_looked_into() -> None:
    class Child(nn.Module):
        def forward(self, x: Any, state: Any) -> Any:
            return x * state.factor

    model = module(lambda self, x, state: self.a(x, state) + 1, a=Child())
    sch = traced(model, (X, State()), (Y, State()))
    assert torch.equal(sch.module(X, State()), X * 2 + 1)
    assert sch.misses == 0
    with pytest.raises(TraceError, match=rf"looks into an argument of type State \(\.factor\) at .*{HERE}"):
        sch["a"].trace()


def test_a_container_among_the_arguments_that_the_forward_changes() -> None:
    def forward(self, x, seen):
        seen["x"] = x
        return x * 2

    with pytest.raises(TraceError, match=r"changes the container that is given as seen: a graph would not"):
        traced(module(forward), (X, {}), (Y, {}))


def look(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def around(self: Any, x: Any, extra: Any = None) -> Any:
        return forward(self, x)

    return around


class ByMode(nn.Module):
    @property
    def factor(self) -> float:
        return 2.0 if self.training else 3.0

    def forward(self, x: Any) -> Any:
        return x * self.factor


def only_real(self, x):
    if type(x) is not torch.Tensor:
        raise ValueError("only real ones")
    return x * 2


def unseen(self, x):
    with torch._C.DisableTorchFunction():
        y = x * 2
    return y + 1


def sized(self, x):
    return lower(int(x.shape[0]), torch.float32) @ x


RARE: dict[str, tuple[nn.Module, Any, str]] = {
    "a value that is another in train": (ByMode(), [(X,), (Y,)], r"self\.factor with another value in train than in eval"),
    "an idle comparison": (module(lambda self, x: x * 2 if x.shape[0] > 4 or True else x), [(X,), (Y,)],
                           r"a comparison of sizes comes out differently at the second input size"),
    "a check for real tensors": (module(only_real), [(X,), (Y,)], r"failed on fake tensors at .*: ValueError: only real"),
    "an unseen operation": (module(unseen), [(X,), (Y,)], r"comes from an operation that torch does not show"),
    "a wrapper with more arguments": (module(look(lambda self, x: x * 2)), {"x": X, "extra": 1},
                                      r"the recorded call does not fit the forward's signature"),
    "a cached tensor of each size": (module(sized), [(X,), (Y,)], r"a tensor from outside the module, which is another"),
}  # fmt: skip


@pytest.mark.parametrize("case", RARE)
def test_rare(case: str) -> None:
    model, inputs, message = RARE[case]
    lower.cache_clear()
    sch = slapo.create_schedule(model, example_inputs=inputs)
    with pytest.raises(TraceError, match=message):
        sch.trace()


def test_a_forward_on_the_object_past_the_primitive() -> None:
    model = linear()
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(TraceError, match=r"hides the forward of its class; delete it first"):
        Tracer(lambda: model, (X,)).trace("")


def test_a_global_list_keeps_no_fake_tensors() -> None:
    SEEN.clear()
    with pytest.raises(TraceError, match=r"changes 'SEEN' outside itself"):
        traced(module(appends), (X,), (Y,))
    assert [type(one) for one in SEEN] == [torch.Tensor] * 2  # of the two recordings, which are real runs


def test_an_iterator_among_the_arguments() -> None:
    model = module(lambda self, x: self.b(x, iter([2.0, 3.0])), b=module(lambda self, x, it: x * next(it)))
    sch = slapo.create_schedule(model, example_inputs=[(X,), (Y,)])
    with pytest.raises(TraceError, match=r"the argument it is an iterator, which a call uses up: give a list"):
        sch["b"].trace()


def test_flattening_over_hooks() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[0].register_forward_hook(lambda m, a, out: out + 1)
    sch = slapo.create_schedule(model, example_inputs=[(X,), (Y,)])
    with pytest.raises(slapo.errors.StepError, match=r"would bypass the hooks on '0'.*leaves=\['0'\]"):
        sch.trace(flatten=True)
    sch.trace(flatten=True, leaves=["0"])
    assert torch.equal(sch.module(X), model(X))


def test_a_recording_leaves_tensors_generators_and_lists_alone() -> None:
    def forward(self, ids):
        self.log.append(1)
        self.total.add_(1)
        return self.fc(self.emb(ids)) + torch.rand(8, generator=self.generator) + self.total

    model = module(
        forward, emb=nn.Embedding(10, 8, max_norm=0.5), fc=linear(), log=[], generator=torch.Generator(), lists=[[0]]
    )
    model.total = torch.zeros(8)
    weight, state = model.emb.weight.detach().clone(), model.generator.get_state()
    before = fingerprint(model)
    sch = slapo.create_schedule(model, example_inputs=(torch.arange(6).reshape(2, 3),))
    sch["fc"].trace()
    assert torch.equal(model.emb.weight, weight) and torch.equal(model.generator.get_state(), state)
    assert model.total.tolist() == [0.0] * 8 and model.log == [] and sch.module.log == []
    assert fingerprint(model) == before


@functools.cache
def lower(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(n, n, dtype=dtype).tril()


def test_a_cache_of_the_users_keeps_no_fake_tensors() -> None:
    cls = type("Cached", (nn.Module,), {"__module__": __name__, "forward": lambda self, x: x @ lower(8, x.dtype)})
    with contextlib.suppress(TraceError):
        slapo.create_schedule(cls(), example_inputs=[(X,), (Y,)]).trace()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert type(lower(8, dtype)) is torch.Tensor


def test_another_thread_keeps_its_hooks_while_one_traces() -> None:
    class Slow(nn.Module):
        def forward(self, x: Any) -> Any:
            time.sleep(0.05)
            return x * 2

    other = linear()
    other.register_forward_hook(lambda m, a, out: out * 2)
    expected, wrong, stop = other(X), [], threading.Event()

    def run() -> None:
        while not stop.is_set():
            wrong.extend([1] if not torch.equal(other(X), expected) else [])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        slapo.create_schedule(Slow(), example_inputs=[(X,), (Y,)]).trace()
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_no_example_inputs() -> None:
    sch = slapo.create_schedule(linear())
    with pytest.raises(NoExampleInputs, match=r"write create_schedule\(model, example_inputs=\{\.\.\.\}\)"):
        sch.trace()
    with pytest.raises(NoExampleInputs, match=r"example_inputs is a int; give a dict"):
        slapo.create_schedule(linear(), example_inputs=3).trace()


def test_example_inputs_that_do_not_fit() -> None:
    sch = slapo.create_schedule(linear(), example_inputs=(torch.randn(2, 3),))
    with pytest.raises(TraceError, match=r"the model does not run on the example inputs: RuntimeError"):
        sch.trace()
    second = slapo.create_schedule(linear(), example_inputs=[(X,), (torch.randn(2, 3),)])
    with pytest.raises(TraceError, match=r"the model does not run on the example inputs: RuntimeError"):
        second.trace()


def test_a_module_that_is_never_called() -> None:
    sch = slapo.create_schedule(module(lambda self, x: x, a=linear()), example_inputs=(X,))
    with pytest.raises(TraceError, match=r"'a' \(Linear\) was not called when the model ran on the example inputs"):
        sch["a"].trace()


def test_a_forward_on_the_object() -> None:
    model = linear()
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(slapo.errors.ScheduleError, match=r"forward"):
        slapo.create_schedule(model, example_inputs=(X,)).trace()


def test_a_train_and_eval_difference_without_reading_training() -> None:
    class Switch(nn.Module):
        def forward(self, x: Any) -> Any:
            return (x, x) if self.training else (x, None)

    def forward(self, x):
        out = self.a(x)
        return x * 2 if out[1] is None else x * 3

    model = module(forward, a=Switch())
    sch = traced(model, (X,), (Y,))
    for train in (True, False, True):
        assert torch.equal(sch.module.train(train)(X), model.train(train)(X))


def test_what_a_forward_says_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    def forward(self, x):
        logging.getLogger("model").warning("said")
        print("also said")
        return x * 2

    model = module(forward)
    with caplog.at_level(logging.WARNING, "model"):
        sch = traced(model, (X,), (Y,))
    assert "said" in caplog.text
    assert [note.split(" at ")[0] for note in sch.notes] == ["the forward logs", "the forward prints"]


def test_steps_that_contradict() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
    sch = slapo.create_schedule(model, example_inputs=(X,))
    sch["0.0"].checkpoint()
    with pytest.raises(slapo.errors.StepError, match=r"would bypass what was done at '0\.0'.*leaves=\['0\.0'\]"):
        sch.trace(flatten=True)
    sch.undo()
    sch.trace(flatten=True)
    with pytest.raises(slapo.errors.StepError, match=r"this module is traced already"):
        sch.trace()
    for step in ("trace", "checkpoint", "compile"):
        with pytest.raises(slapo.errors.StepError, match=r'part of the flattened graph of "".*leaves=\["0\.0"\]'):
            getattr(sch["0.0"], step)()
    sch["0.0"].annotate("weight", "lr", 0.1)  # a step on a parameter
    with pytest.raises(
        slapo.errors.ArgumentError, match=r'leaves must be a list of paths, found .0.\. Write leaves=\["attn"\]'
    ):
        slapo.create_schedule(model, example_inputs=(X,)).trace(flatten=True, leaves="0")
    with pytest.raises(slapo.errors.ArgumentError, match=r"leaves='0\.2' names no submodule\. Such names: '0\.1'"):
        slapo.create_schedule(model, example_inputs=(X,)).trace(flatten=True, leaves=["0.2"])
    with pytest.raises(slapo.errors.ArgumentError, match=r"add flatten=True"):
        slapo.create_schedule(model, example_inputs=(X,)).trace(leaves=["0"])
