"""Law 7: each thing that a trace relies on is turned over: the answer is the original's, never a wrong number."""

import copy as copying
import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_py as slapo
from slapo_py.errors import GuardError, TraceError
from slapo_py.scheduled import dress
from slapo_py.tracing import trace_of
from tests import running
from tests.tracing.modules import linear, misses, module, result, traced

X, Y = torch.randn(3, 8), torch.randn(5, 8)


class Kind(enum.Enum):
    DOUBLE = 1
    TRIPLE = 2


@dataclasses.dataclass
class Settings:
    factor: float = 2.0
    inner: Any = None


class Twice:
    def __call__(self, x: Any) -> Any:
        return x * 2


class Thrice:
    def __call__(self, x: Any) -> Any:
        return x * 3


@dataclasses.dataclass(slots=True)
class Slotted:
    factor: float

    @property
    def double(self) -> float:
        return self.factor * 2


def _through(layers: nn.ModuleList, x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


FACTOR = 2.0


def by_global(self, x):
    return x * FACTOR


def optional(self, x, mask=None, flag=False, scale=2.0, *, extra=None, kind="a", items=(1, 2)):
    y = x * scale if not flag else x - scale
    y = y if mask is None else y * mask
    y = y if extra is None else y + extra["e"]
    return y * (2 if kind == "a" else 3) + sum(items)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "None becomes a tensor": {"mask": torch.ones(8) * 3},
    "a flag": {"flag": True},
    "a float": {"scale": 3.0},
    "an int for a float": {"scale": 2},
    "a string": {"kind": "b"},
    "a tuple": {"items": (1, 3)},
    "a list for a tuple": {"items": [1, 2]},
    "a dict for None": {"extra": {"e": torch.ones(8)}},
    "True for 1": {"items": (True, 2)},
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_argument(case: str) -> None:
    model = module(optional)
    copy = traced(model, (X,), (Y,)).module
    assert torch.equal(copy(X), model(X)) and misses(copy) == 0
    ours, theirs = copy(X, **ARGUMENTS[case]), model(X, **ARGUMENTS[case])
    assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    assert misses(copy) == 1
    assert torch.equal(copy(X), model(X)) and misses(copy) == 1  # and back


Flip = Callable[[nn.Module], None]


def _set(name: str, value: Any) -> Flip:
    owner, _, attribute = name.rpartition(".")
    return lambda model: setattr(_reach(model, owner), attribute, value)


def _reach(model: Any, path: str) -> Any:
    for part in path.split(".") if path else ():
        model = getattr(model, part)
    return model


ATTRIBUTES: dict[str, tuple[Callable[..., Any], dict[str, Any], Flip]] = {
    "a number": (lambda self, x: x * self.f, {"f": 2.0}, _set("f", 3.0)),
    "a number's type": (lambda self, x: x.long() * self.f, {"f": 2}, _set("f", 2.0)),
    "a flag": (lambda self, x: x if self.f else -x, {"f": True}, _set("f", False)),
    "a string": (lambda self, x: x if self.f == "a" else -x, {"f": "a"}, _set("f", "b")),
    "None": (lambda self, x: x if self.f is None else -x, {"f": None}, _set("f", 1)),
    "a bias that is None": (lambda self, x: x if self.a.bias is None else -x, {"a": nn.Linear(8, 8, bias=False)},
                            lambda m: setattr(m.a, "bias", nn.Parameter(torch.zeros(8)))),
    "a list": (lambda self, x: x * self.f[0], {"f": [2.0, 1.0]}, lambda m: m.f.__setitem__(0, 3.0)),
    "a dict": (lambda self, x: x * self.f["k"], {"f": {"k": 2.0}}, lambda m: m.f.__setitem__("k", 3.0)),
    "a nested dict": (lambda self, x: x * self.f["k"][0], {"f": {"k": [2.0]}}, lambda m: m.f["k"].__setitem__(0, 3.0)),
    "an enum": (lambda self, x: x * (2 if self.f is Kind.DOUBLE else 3), {"f": Kind.DOUBLE}, _set("f", Kind.TRIPLE)),
    "a function": (lambda self, x: self.f(x), {"f": torch.relu}, _set("f", torch.tanh)),
    "an object's field": (lambda self, x: x * self.c.factor, {"c": Settings()}, _set("c.factor", 3.0)),
    "an object in an object": (lambda self, x: x * self.c.inner.factor, {"c": Settings(inner=Settings())},
                               _set("c.inner.factor", 3.0)),
    "another object": (lambda self, x: x * self.c.factor, {"c": Settings()}, _set("c", Settings(3.0))),
    "a field of an object with slots": (lambda self, x: x * self.c.factor, {"c": Slotted(2.0)},
                                        _set("c.factor", 3.0)),
    "a tensor in a dict": (lambda self, x: x * self.t["k"], {"t": {"k": torch.full((8,), 2.0)}},
                           lambda m: m.t.__setitem__("k", torch.full((8,), 3.0))),
    "the length of a container": (lambda self, x: _through(self.l, x), {"l": nn.ModuleList([linear(), linear()])},
                                  lambda m: m.l.append(nn.Tanh())),
    "a partial function": (lambda self, x: self.f(x), {"f": functools.partial(torch.clamp, min=0.0)},
                           _set("f", functools.partial(torch.clamp, min=0.5))),
    "a property": (lambda self, x: x * self.c.double, {"c": Slotted(2.0)}, _set("c.factor", 3.0)),
    "a namespace": (lambda self, x: x * self.c.k, {"c": types.SimpleNamespace(k=2.0)}, _set("c.k", 3.0)),
    "a dict in a dict": (lambda self, x: x * self.f["a"]["k"], {"f": {"a": {"k": 2.0}}},
                         lambda m: m.f["a"].__setitem__("k", 3.0)),
    "a buffer that was absent": (lambda self, x: x * 2 if hasattr(self, "late") else x, {},
                                 lambda m: m.register_buffer("late", torch.ones(1))),
    "a child that was absent": (lambda self, x: x * 2 if hasattr(self, "late") else x, {},
                                lambda m: m.add_module("late", nn.ReLU())),
    "the sign of a zero": (lambda self, x: 1 / (x.abs() * self.f), {"f": 0.0}, _set("f", -0.0)),
    "the size of a parameter": (lambda self, x: x * 2 if self.p.shape[0] > 3 else x, {"p": nn.Parameter(torch.ones(3))},
                                lambda m: setattr(m, "p", nn.Parameter(torch.ones(5)))),
    "a callable object": (lambda self, x: self.f(x), {"f": Twice()}, _set("f", Thrice())),
    "an attribute that was absent": (lambda self, x: x * getattr(self, "f", 2.0), {}, _set("f", 3.0)),
    "a field that was absent": (lambda self, x: x * getattr(self.c, "late", 2.0), {"c": Settings()},
                                _set("c.late", 3.0)),
    "a child's attribute": (lambda self, x: x * self.a.p, {"a": nn.Dropout(0.5)}, _set("a.p", 0.25)),
    "an attribute removed": (lambda self, x: x * getattr(self, "f", 3.0), {"f": 2.0}, lambda m: delattr(m, "f")),
    "requires_grad of a parameter": (lambda self, x: x if self.a.weight.requires_grad else -x, {"a": linear()},
                                     lambda m: m.a.weight.requires_grad_(False)),
    "training of a child": (lambda self, x: x * (2 if self.a.training else 3), {"a": nn.Dropout(0.5)},
                            lambda m: m.a.train(not m.a.training)),
}  # fmt: skip


@pytest.mark.parametrize("case", ATTRIBUTES)
def test_attribute(case: str) -> None:
    forward, attributes, flip = ATTRIBUTES[case]
    model = module(forward, **attributes)
    copy = copying.deepcopy(traced(model, (X,), (Y,)).module)  # apart, so that a flip touches one of the two
    copied = case == "a tensor in a dict"  # the copy holds another tensor: its identity is what counts
    assert torch.equal(copy(X), model(X)) and misses(copy) == copied
    flip(model)
    flip(copy)
    assert torch.equal(copy(X), model(X))
    changed = case != "training of a child"  # both modes are in the trace
    assert misses(copy) == copied + changed


SIZES: dict[str, Callable[..., Any]] = {
    "compared": lambda self, x: x * 2 if x.shape[0] > 3 else x * 3,
    "compared after a product": lambda self, x: x * 2 if x.shape[0] * 2 + 1 > 7 else x * 3,
    "compared in between": lambda self, x: x * 2 if x.repeat(2, 1).shape[0] > 7 else x * 3,
    "as a truth": lambda self, x: x * 2 if x.shape[0] - 3 else x * 3,
    "as a plain int": lambda self, x: x * (int(x.shape[0]) // 16 + 1),
    "in a set": lambda self, x: x * 2 if x.shape[0] in {7, 9} else x * 3,
    "as a float": lambda self, x: x * 2 if x.shape[0] / 4 > 1.5 else x * 3,
    "by bits": lambda self, x: x * 2 if x.shape[0] & 8 else x * 3,
    "by length": lambda self, x: x * 2 if len(x) > 6 else x * 3,
    "by numel": lambda self, x: x * 2 if x.numel() > 48 else x * 3,
    "by tuple": lambda self, x: x * 2 if x.shape == (7, 8) else x * 3,
    "by max": lambda self, x: x * max(x.shape[0], 6),
    "of a fixed dim": lambda self, x: x * 2 if x.shape[1] == 8 else x * 3,
    "of the rank": lambda self, x: x * 2 if x.dim() == 2 else x * 3,
    "against a float": lambda self, x: x * 2 if x.shape[0] > 3.5 else x * 3,
    "as a product with a float": lambda self, x: x * int(x.shape[0] * 1.5),
    "halved": lambda self, x: x[: x.shape[0] // 2],
    "in the number of parts": lambda self, x: sum(part.sum() for part in x.split(4)),
    "of a slice": lambda self, x: x * 2 if x[::2].shape[0] > 3 else x * 3,
}


@pytest.mark.parametrize("case", SIZES)
def test_size(case: str) -> None:
    model = module(SIZES[case])
    second = 4 if case == "as a truth" else 3
    try:
        copy = traced(model, (torch.randn(2, 8),), (torch.randn(second, 8),)).module
    except TraceError:
        return  # said aloud, too
    for shape in [(2, 8), (3, 8), (4, 8), (7, 8), (9, 8), (16, 8), (17, 8), (1, 8), (0, 8), (2, 9), (2, 3, 8), (40, 8)]:
        x = torch.randn(shape)
        try:
            theirs = model(x)
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                copy(x)
            continue
        try:
            ours = copy(x)
        except GuardError:
            continue  # said aloud
        assert torch.equal(ours, theirs), shape


def test_a_wrong_conclusion_on_sizes_is_said_aloud() -> None:
    """Two recorded sizes suggest that the eighth of the sequence is the batch; later it is not."""
    model = module(lambda self, x: x * 2 if x[:, ::8].shape[1] > 1 else x * 3)
    copy = traced(model, (torch.randn(2, 16),), (torch.randn(3, 24),)).module
    assert torch.equal(copy(torch.ones(2, 16)), torch.ones(2, 16) * 2)
    with pytest.raises(GuardError, match=r"not what the two recorded sizes suggested; give create_schedule"):
        copy(torch.ones(4, 8))


def test_dtype() -> None:
    model = module(lambda self, x: x * (1 if x.dtype == torch.float32 else 2))
    copy = traced(model, (X,), (Y,)).module
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        assert torch.equal(copy(X.to(dtype)), model(X.to(dtype)))
    smallest = module(lambda self, x: x.masked_fill(x > 0, torch.finfo(x.dtype).min))
    copy = traced(smallest, (X,), (Y,)).module
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(copy(X.to(dtype)), smallest(X.to(dtype)))
    assert misses(copy) == 0  # the literal follows the dtype


def test_dtype_of_a_mask() -> None:
    model = module(lambda self, x, mask: x + (mask.float() * -9 if mask.dtype == torch.bool else mask))
    keep = torch.ones(3, 8, dtype=torch.bool)
    copy = traced(model, (X, keep), (Y, torch.ones(5, 8, dtype=torch.bool))).module
    assert torch.equal(copy(X, keep), model(X, keep)) and misses(copy) == 0
    assert torch.equal(copy(X, X), model(X, X)) and misses(copy) == 1


def test_a_number_of_parts_that_a_size_decides_is_said_aloud() -> None:
    model = module(lambda self, x: sum(part.sum() for part in x.split(4)))
    copy = traced(model, (torch.randn(3, 8),), (torch.randn(4, 8),)).module
    assert torch.equal(copy(torch.ones(2, 8)), torch.tensor(16.0))
    with pytest.raises(GuardError, match=r"split has another number of parts than when it was traced \(1\); trace it"):
        copy(torch.ones(9, 8))


def test_a_global_dict_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = module(lambda self, x: x * TABLE["k"])
    copy = traced(model, (X,), (Y,)).module
    monkeypatch.setitem(TABLE, "k", 3.0)
    assert torch.equal(copy(X), X * 3)


TABLE = {"k": 2.0}


def test_dtype_of_a_parameter_and_of_a_child() -> None:
    model = module(lambda self, x: self.a(x.to(self.a.weight.dtype)).float(), a=linear())
    copy = copying.deepcopy(traced(model, (X,), (Y,)).module)
    for one in (model, copy):
        one.a.to(torch.bfloat16)
    assert torch.equal(copy(X), model(X))
    assert misses(copy) == 1


def test_grad_mode() -> None:
    model = module(lambda self, x: x * 2 if torch.is_grad_enabled() else x * 3)
    copy = traced(model, (X,), (Y,)).module
    with torch.no_grad():
        assert torch.equal(copy(X), X * 3)
    with torch.inference_mode():
        assert torch.equal(copy(X), X * 3)
    assert torch.equal(copy(X), X * 2)


def test_autocast() -> None:
    def forward(self, x):
        y = self.a(x)
        return y.float() if y.dtype == torch.bfloat16 else y * 2

    model = module(forward, a=linear())
    copy = traced(model, (X,), (Y,)).module
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(copy(X), model(X))
    assert torch.equal(copy(X), model(X))


def test_training() -> None:
    model = module(lambda self, x: x * (2 if self.training else 3))
    copy = traced(model, (X,), (Y,)).module
    for train in (True, False, True):
        assert torch.equal(copy.train(train)(X), X * (2 if train else 3))
    assert misses(copy) == 0


def test_requires_grad_of_an_argument() -> None:
    model = module(lambda self, x: x * 2 if x.requires_grad else x * 3)
    copy = traced(model, (X,), (Y,)).module
    assert torch.equal(copy(X), X * 3)
    assert torch.equal(copy(X.clone().requires_grad_()), X * 2)


def test_layout() -> None:
    model = module(lambda self, x: x * 2 if x.is_contiguous() else x * 3)
    copy = traced(model, (torch.randn(8, 8),), (torch.randn(9, 8),)).module
    x = torch.randn(8, 8)
    assert torch.equal(copy(x), x * 2)
    assert torch.equal(copy(x.T), x.T * 3)


def test_identity_of_arguments() -> None:
    model = module(lambda self, q, k: q + k if q is k else q - k)
    copy = traced(model, (X, X), (Y, Y)).module
    assert torch.equal(copy(X, X), X + X)
    assert torch.equal(copy(X, X.clone()), X - X)
    apart = traced(model, (X, X.clone()), (Y, Y.clone())).module
    assert torch.equal(apart(X, X), X + X)


def test_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    model = module(by_global)
    copy = traced(model, (X,), (Y,)).module
    assert torch.equal(copy(X), X * 2)
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    assert torch.equal(copy(X), X * 3)
    assert misses(copy) == 1


def test_a_global_that_only_shares_an_attributes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = module(lambda self, x: x * self.FACTOR, FACTOR=3.0)
    copy = traced(model, (X,), (Y,)).module
    monkeypatch.setattr(f"{__name__}.FACTOR", 5.0)
    assert torch.equal(copy(X), X * 3)
    assert misses(copy) == 0


def test_an_example_of_another_form_is_noted() -> None:
    sch = traced(module(optional), {"x": X}, {"x": Y, "mask": torch.ones(8)})
    assert sch.notes == ["another example calls this module with other arguments (None for a tensor, say): not covered"]
    sch.module(X, mask=torch.ones(8))
    assert sch.missed_guards == {"mask is None": 1}
    assert slapo.missed_guards(sch.module) == {"": {"mask is None": 1}}
    assert slapo.misses(sch.module) == {"": 1}


def test_a_child_that_gives_back_another_structure_is_said_aloud() -> None:
    class Child(nn.Module):
        weights = False

        def forward(self, x: Any) -> Any:
            return x * 2, (x if self.weights else None)

    model = module(lambda self, x: self.a(x), a=Child())
    sch = traced(model, (X,), (Y,))
    sch.module.a.weights = True
    with pytest.raises(GuardError, match=r"a gave back another structure than when its parent was traced"):
        sch.module(X)


def test_default_dtype() -> None:
    model = module(lambda self, x: x.to(torch.get_default_dtype()))
    copy = traced(model, (X,), (Y,)).module
    torch.set_default_dtype(torch.float64)
    try:
        assert copy(X).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_step_that_is_not_bit_exact_forbids_the_original() -> None:
    model = module(lambda self, x, mask=None: x.relu() if mask is None else x * mask)
    sch = traced(model, (X,), (Y,))
    graph = copying.deepcopy(sch.graph)
    next(node for node in graph.nodes if node.target == "relu").target = "tanh"
    trace = trace_of(sch.module)
    assert trace is not None
    dress(sch.module, trace.rewritten(graph, structural=False))
    assert torch.equal(sch.module(X), X.tanh())
    with pytest.raises(GuardError, match=r"Made was called in a way that its trace does not cover: mask is None"):
        sch.module(X, mask=X)
    compiled = torch.compile(sch.module, backend="eager")
    assert torch.equal(compiled(X), X.tanh())
    with pytest.raises(GuardError, match=r"was called in a way that its trace does not cover"):
        compiled(X, mask=X)


def test_a_recording_counts_no_misses() -> None:
    """Recorded anew (after a configure), a module whose trace holds in train mode only is called in eval mode."""

    def ema(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.a(x) - self.mean

    sch = traced(module(ema, mean=torch.zeros(8), a=nn.Dropout(0.5)), (X,), (Y,))
    sch["a"].configure(p=0.25)
    sch["a"].trace()
    assert sch.misses == 0
    sch.module.eval()(X)
    assert sch.misses == 1


def test_the_comparison_would_see_a_wrong_graph() -> None:
    """The planted fault: one literal of a graph is off."""
    model = module(lambda self, x: x * 2)
    sch = traced(model, (X,), (Y,))
    graph = copying.deepcopy(sch.graph)
    product = next(node for node in graph.nodes if node.op == "call_function")
    product.args = (product.args[0], 2.01)
    trace = trace_of(sch.module)
    assert trace is not None
    dress(sch.module, trace.rewritten(graph, structural=True))
    assert running.differences(result(model, (X,), True), result(sch.module, (X,), True))
