"""checkpoint: bit-equal in everything, whatever the module does; fewer activations kept."""

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import slapo_py as slapo
from slapo_py.errors import ArgumentError, RecomputeError, StepError
from tests.core import policies
from tests.fingerprint import changes, fingerprint, global_state
from tests.models import Block, ids, net, tiny_gpt2
from tests.running import equal, record, run

MATMULS = ["aten.addmm", "aten.mm", "aten.bmm"]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    assert [name for name in a if not equal(a[name], b[name])] == []


def both(model: nn.Module, kwargs: dict[str, Any], select: str = "*", policy: Any = None, train: bool = True) -> None:
    """The law: everything bit-equal, over two steps, starting from the same state."""
    sch = slapo.create_schedule(model)
    sch.select(select).checkpoint(policy=policy)
    before = fingerprint(model)
    for seed in (0, 1):
        same(record(model, kwargs, train, seed), record(sch.module, kwargs, train, seed))
    if not train:
        assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("policy", [None, MATMULS, policies.keep_matmuls], ids=["all", "names", "function"])
@pytest.mark.parametrize("select", ["blocks.*", "**.up", "norm", "head"])
def test_bit_equal(select: str, policy: Any, train: bool) -> None:
    both(net(), {"ids": ids()}, select, policy, train)


@pytest.mark.parametrize("select", ["transformer.h.*", "transformer", "**.attn", "**.mlp", "**.ln_1"])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_bit_equal_on_gpt2_with_and_without_its_cache(select: str, use_cache: bool, train: bool) -> None:
    given = torch.randint(0, 31, (2, 6))
    both(tiny_gpt2(), {"input_ids": given, "labels": given, "use_cache": use_cache}, select, None, train)


def test_nested_checkpoints() -> None:
    model = net()
    sch = slapo.create_schedule(model)
    sch.checkpoint()
    sch.select("blocks.*").checkpoint()
    sch.select("**.norm").checkpoint()
    sch["blocks.0.up"].checkpoint()
    same(record(model, {"ids": ids()}), record(sch.module, {"ids": ids()}))


def test_transformers_own_checkpointing_around_it() -> None:
    model = tiny_gpt2(use_cache=False)
    given = {"input_ids": torch.randint(0, 31, (2, 6))}
    expected = record(model, given)
    sch = slapo.create_schedule(model)
    sch.select("transformer.h.*").checkpoint()
    sch.module.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    same(expected, record(sch.module, given))


def test_it_really_keeps_less() -> None:
    def kept(model: nn.Module) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            output = model(ids(16, 16))
        del output
        return sum(sizes.values())

    model = net()
    plain = kept(model)
    sch = slapo.create_schedule(model)
    sch.select("blocks.*").checkpoint(policy=MATMULS)
    some = kept(sch.module)
    sch.undo(2).select("blocks.*").checkpoint()
    assert kept(sch.module) < plain / 2
    assert kept(sch.module) <= some < plain


# What modules do


class Stateful(nn.Module):
    """Changes all that a forward may change besides its output."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(4))
        self.register_buffer("late", None)
        self.register_buffer("ints", torch.zeros(2, dtype=torch.long))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.loose = torch.ones(4)
        self.calls = 0
        self.seen: list[int] = []
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.last = self.lin(x)
        factor = 1.0
        if not hasattr(self, "factor"):
            self.factor = factor = 2.0
        with torch.no_grad():
            self.ema.mul_(0.9).add_(x.mean(0) * 0.1)
            self.replaced = self.replaced + 1
            self.ints += 1
            self.loose.mul_(1.5)
            self.late = x.detach().mean(0) if self.late is None else self.late + 1
        y = torch.sigmoid(self.norm(self.last) * self.ema + self.replaced * self.calls * self.loose + self.ints.sum())
        return torch.sin(y * factor * len(self.seen)) + self.late


def test_state_is_changed_once() -> None:
    x = torch.randn(5, 4)
    for policy in (None, ["aten.addmm"]):
        torch.manual_seed(0)
        model = Stateful()
        other = copy.deepcopy(model)
        sch = slapo.create_schedule(other)
        sch.checkpoint(policy=policy)
        for _ in range(3):
            for one in (model, sch.module):
                one.zero_grad()
                one(x).square().sum().backward()
            assert (model.calls, model.seen, model.factor) == (sch.module.calls, sch.module.seen, sch.module.factor)
            assert torch.equal(model.loose, sch.module.loose)
            assert torch.equal(model.last, sch.module.last)
            assert list(vars(model)) == list(vars(sch.module))
            for (name, a), (_, b) in zip(model.named_buffers(), sch.module.named_buffers()):
                assert torch.equal(a, b), name
            for a, b in zip(model.parameters(), sch.module.parameters()):
                assert torch.equal(a.grad, b.grad)


def test_two_calls_before_one_backward_pass() -> None:
    """A module that is called twice (as ALBERT's are) starts each recomputation from its own entry."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), 0
            self.register_buffer("mean", torch.ones(4))
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            self.mean = self.mean * 0.5 + x.detach().mean(0)
            return torch.sigmoid(self.norm(self.lin(x)) * self.mean) * self.calls

    x = torch.randn(5, 4)
    model = Counts()
    other = copy.deepcopy(model)
    sch = slapo.create_schedule(other)
    sch.checkpoint()
    for one in (model, sch.module):
        one(one(x)).square().sum().backward()
    for a, b in zip(model.parameters(), sch.module.parameters()):
        assert torch.equal(a.grad, b.grad)
    assert torch.equal(model.norm.running_mean, sch.module.norm.running_mean)
    assert model.seen == sch.module.seen == [1, 2]
    assert model.norm.num_batches_tracked == sch.module.norm.num_batches_tracked == 2


def test_switching_to_eval_before_the_backward_pass() -> None:
    model = Block()
    sch = slapo.create_schedule(model)
    sch.checkpoint()
    x, gradients = torch.randn(3, 8), []
    for one in (model, sch.module):
        torch.manual_seed(0)
        loss = one(x).square().sum()
        one.eval()
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in one.parameters()])
        one.zero_grad()
        assert not one.training
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


class Draws(nn.Module):
    """Draws from everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.generator = torch.Generator()

    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        y = F.dropout(self.lin(x), 0.5) * random.random() * float(numpy.random.rand())
        y = y * torch.rand(4, generator=self.generator) * torch.rand(4, generator=generator)
        return torch.tanh(torch.rrelu(y, training=True)) * torch.rand(())


@pytest.mark.parametrize(
    "policy", [None, ["aten.addmm"], ["aten.rand", "aten.rrelu_with_noise_functional"], ["aten.rand"]], ids=str
)
def test_every_random_state(policy: Any) -> None:
    model = Draws()
    sch = slapo.create_schedule(model)
    sch.checkpoint(policy=policy)
    found = []
    for one in (model, sch.module):
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0), model.generator.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        x = torch.ones(3, 4, requires_grad=True)
        output = one(x, generator)
        output.square().sum().backward()
        states = torch.get_rng_state(), generator.get_state(), model.generator.get_state()
        grads = [one.lin.weight.grad.clone(), x.grad]
        found.append(([output.detach(), *states, *grads], random.random(), numpy.random.rand()))
        one.zero_grad()
    (a, *rest), (b, *others) = found
    assert all(torch.equal(one, two) for one, two in zip(a, b))
    assert rest == others


def test_a_kept_random_result_does_not_shift_the_later_ones() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(4)
            return torch.sin(torch.cos(x * noise) * torch.randn(4)) * torch.rand(4)

    for policy in (["aten.rand"], ["aten.randn"], ["aten.rand", "aten.randn"]):
        sch = slapo.create_schedule(nn.Sequential(Two()))
        sch["0"].checkpoint(policy=policy)
        grads = []
        for one in (sch.original, sch.module):
            torch.manual_seed(0)
            x = torch.ones(4, requires_grad=True)
            one(x).sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


# How modules are called


@dataclasses.dataclass
class Pack:
    value: Tensor
    label: str = "x"


class Nested(nn.Module):
    """Keyword arguments, containers, None, flags and objects, in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, *more: Any, pack: Pack, parts: Any = None, flag: bool = False, log: Any = None) -> Any:
        log.append(len(log))
        y = torch.sigmoid(self.lin(x) * pack.value)
        for part in more:
            y = y + part["a"][0] * len(log)
        pack.label += "!"
        return {"y": y, "none": None, "flag": flag, "parts": (parts, [y.sum()]), "pack": Pack(y * 2, pack.label)}


def test_arguments_and_outputs_of_every_kind() -> None:
    model = Nested()
    sch = slapo.create_schedule(model)
    sch.checkpoint()
    found = []
    for one in (model, sch.module):
        x, a, v = (torch.full((3, 4), float(i), requires_grad=True) for i in (1, 2, 3))
        log: list[int] = [5]
        pack = Pack(v)
        out = one(x, {"a": (a, None)}, pack=pack, parts=x, flag=True, log=log)
        assert log == [5, 1]
        assert pack.label == "x!"
        (out["y"].square().sum() + out["parts"][1][0] + out["pack"].value.sum()).backward()
        assert log == [5, 1]
        assert pack.label == "x!"
        assert (out["none"], out["flag"], out["pack"].label) == (None, True, "x!")
        assert out["parts"][0] is x
        found.append([out["y"].detach(), x.grad, a.grad, v.grad, one.lin.weight.grad.clone()])
        one.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found))


class Registered:
    """A cache that torch knows how to take apart, and that loses its count when it is."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.count = tensors, len(tensors)


torch.utils._pytree.register_pytree_node(
    Registered, lambda one: (one.tensors, None), lambda tensors, context: Registered([])
)


def test_a_cache_that_is_registered_with_torch() -> None:
    class Uses(nn.Module):
        def forward(self, x: Tensor, cache: Registered) -> Tensor:
            cache.count += 1
            cache.tensors.append(x)
            return torch.sin(torch.stack(cache.tensors).sum(0) * cache.count)

    sch = slapo.create_schedule(nn.Sequential(Uses()))
    sch["0"].checkpoint()
    grads = []
    for one in (sch.original, sch.module):
        x, cache = torch.ones(3, requires_grad=True), Registered([torch.ones(3)])
        one[0](x, cache).sum().backward()
        assert (cache.count, len(cache.tensors)) == (2, 2)
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_no_gradient_no_checkpoint() -> None:
    calls: list[bool] = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(torch.is_grad_enabled())
            return super().forward(x)

    sch = slapo.create_schedule(nn.Sequential(Spy(2, 2)))
    sch["0"].checkpoint()
    with torch.no_grad():
        assert not sch.module(torch.ones(1, 2)).requires_grad
    with torch.inference_mode():
        assert sch.module(torch.ones(1, 2)).is_inference()
    sch.module(torch.ones(1, 2)).sum().backward()
    assert calls == [False, False, True, True]


def test_inference_tensors_as_inputs() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.ReLU()))
    sch["0"].checkpoint()
    with torch.inference_mode():
        x = torch.ones(2)
    assert torch.equal(sch.module(x), torch.ones(2))


def test_torch_func_and_double_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    x = torch.randn(3)
    expected = torch.func.jacrev(model)(x)
    assert torch.equal(torch.func.jacrev(sch.module)(x), expected)
    seconds = []
    for one in (model, sch.module):
        y = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(one(y).sum(), y, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), y)[0])
    assert torch.equal(*seconds)


def test_the_graph_can_be_kept_and_used_twice() -> None:
    sch = slapo.create_schedule(net())
    sch.select("blocks.*").checkpoint()
    loss = sch.module(ids()).square().sum()
    once = torch.autograd.grad(loss, list(sch.module.parameters()), retain_graph=True)
    twice = torch.autograd.grad(loss, list(sch.module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(once, twice))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    model = net()
    sch = slapo.create_schedule(model)
    sch.select("blocks.*").checkpoint()
    grads = []
    for one in (model, sch.module):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=dtype):
            loss = one(ids()).float().square().mean()
        loss.backward()
        grads.append([parameter.grad.clone() for parameter in one.parameters()])
        one.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_generation_uses_the_cache() -> None:
    model = tiny_gpt2().eval()
    sch = slapo.create_schedule(model)
    sch.select("transformer.h.*").checkpoint()
    given = {"input_ids": torch.randint(1, 31, (1, 3)), "attention_mask": torch.ones(1, 3), "max_new_tokens": 5}
    given |= {"do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**given), sch.module.generate(**given))


# Names, hooks, copies


def test_names_ties_hooks_and_copies() -> None:
    model = net()
    fired: list[str] = []
    model.blocks[0].register_forward_hook(lambda *args: fired.append("hook"))
    sch = slapo.create_schedule(model)
    sch.select("blocks.*").checkpoint(policy=["aten.addmm"])
    copied = sch.module
    assert isinstance(copied.blocks[0], Block)
    assert list(copied.state_dict()) == list(model.state_dict())
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    copied.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(copied.state_dict(), strict=True)
    assert copied.head.weight is copied.embed.weight is model.embed.weight
    copied(ids()).sum().backward()
    assert fired == ["hook"]
    del fired[:]
    model.blocks[0]._forward_hooks.clear()
    copied.blocks[0]._forward_hooks.clear()
    for other in (copy.deepcopy(copied), pickle.loads(pickle.dumps(copied))):
        assert type(other.blocks[0]) is type(copied.blocks[0])
        for a, b in zip(run(other, {"ids": ids()}), run(copied, {"ids": ids()})):
            assert equal(a, b)


def test_equal_modules_share_a_class() -> None:
    sch = slapo.create_schedule(net())
    sch.select("blocks.*").checkpoint(policy=["aten.mm"])
    assert type(sch["blocks.0"].module) is type(sch["blocks.1"].module)


# Refusals


def test_checkpointed_twice_is_refused() -> None:
    sch = slapo.create_schedule(net())
    sch["blocks.0"].checkpoint(policy=["aten.mm", "aten.addmm.default"])
    before = fingerprint(sch.module)
    message = r'at "blocks.0": this module is checkpointed already \(checkpoint\(keeps aten.mm, aten.addmm.default\)\)'
    with pytest.raises(StepError, match=message):
        sch["blocks.0"].checkpoint()
    assert changes(before, fingerprint(sch.module)) == []


POLICIES: dict[str, tuple[Any, str]] = {
    "a string": (
        "aten.mm",
        r'policy must be a function or a list of names of operations, found \'aten.mm\'. Write policy=\["aten.mm"\]',
    ),
    "a number": (3, r'found 3. Write policy=\["aten.mm", "aten.addmm"\]'),
    "numbers": ([3], r"found \[3\]"),
    "operations": ([torch.ops.aten.mm.default], "must be a function or a list of names"),
    "empty": ([], r"policy=\[\] keeps nothing. Write checkpoint\(\) for that"),
    "unknown": (["aten.mm", "aten.addm"], r"there is no operation 'aten.addm'. Did you mean .*'aten.addmm'"),
    "overload": (["aten.mm.deflt"], "there is no operation 'aten.mm.deflt'. Did you mean .*aten.mm"),
    "space": (["zzzzzz.q"], "there is no operation 'zzzzzz.q'. They are named as in torch.ops"),
    "no space": (["mm"], "there is no operation 'mm'"),
}


@pytest.mark.parametrize(("policy", "message"), POLICIES.values(), ids=POLICIES)
def test_a_wrong_policy_is_refused(policy: Any, message: str) -> None:
    sch = slapo.create_schedule(net())
    before, world = fingerprint(sch.module), global_state()
    with pytest.raises(ArgumentError, match=f'checkpoint at "blocks.0": .*{message}'):
        sch["blocks.0"].checkpoint(policy=policy)
    assert changes(before, fingerprint(sch.module)) == []
    assert changes(world, global_state()) == []


class Overwrites(nn.Module):
    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        if more is not None:
            more.value.mul_(2)
            return x * more.value
        return F.relu_(x) * x


@pytest.mark.parametrize("call", [lambda one, x: one(x), lambda one, x: one(x, more=Pack(torch.ones(3)))])
def test_a_module_that_writes_into_its_inputs_is_refused_when_it_runs(call: Callable[..., Tensor]) -> None:
    sch = slapo.create_schedule(nn.ModuleDict({"bad": Overwrites()}))
    sch["bad"].checkpoint()
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(
        RecomputeError, match=r'checkpoint at "bad": Overwrites writes into an argument of shape \[3\] in place'
    ):
        call(sch["bad"].module, x * 1)
    with torch.no_grad():
        assert call(sch["bad"].module, x * 1).shape == (3,)
    with pytest.raises(RecomputeError, match="checkpoint at a copy of the scheduled model: Overwrites writes into"):
        call(copy.deepcopy(sch["bad"].module), x * 1)


def test_an_input_that_is_overwritten_later_is_noticed() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(3, 3)))
    sch["0"].checkpoint()
    x = torch.ones(3)
    loss = sch.module(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_function_as_policy() -> None:
    asked: list[Any] = []

    def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(op)
        return CheckpointPolicy.MUST_SAVE

    sch = slapo.create_schedule(net())
    sch["blocks.0.up"].checkpoint(policy=keep)
    assert "checkpoint(policy keep)" in str(sch)
    for a, b in zip(run(sch.module, {"ids": ids()}), run(sch.original, {"ids": ids()})):
        assert equal(a, b)
    assert torch.ops.aten.addmm.default in asked


def test_a_parameter_written_into_before_the_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    loss = sch.module(torch.randn(2, 4)).sum()
    with torch.no_grad():
        model[0].bias.sub_(1.0)
    with pytest.raises(RecomputeError, match=r'checkpoint at "0": a parameter of Linear was written into between'):
        loss.backward()
