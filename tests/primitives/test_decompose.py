"""decompose: the same numbers within rounding, the same dtypes, and traces that show the parts."""

import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import slapo_py as slapo
from slapo_py.errors import ArgumentError, StepError
from slapo_py.tracing import misses
from tests.fingerprint import changes, fingerprint
from tests.models import tiny_gpt2
from tests.running import record


class Alone(nn.Linear):
    """A subclass that keeps the forward."""


class Doubles(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class DoublesConv(nn.Conv2d):
    """A convolution whose forward is torch's, but not what that calls."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * super()._conv_forward(input, weight, bias)


CASES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "linear": (lambda: nn.Linear(6, 4), [(3, 6), (6,), (2, 3, 6), (0, 6)]),
    "subclass of linear": (lambda: Alone(6, 4), [(3, 6)]),
    "conv1d of transformers": (lambda: Conv1D(4, 6), [(3, 6), (2, 3, 6), (6,)]),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), [(2, 4, 7), (4, 7)]),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), [(2, 4, 7, 5), (4, 7, 5)]),
    "conv2d padding": (lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"), [(2, 4, 7, 5), (4, 7, 5)]),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), [(2, 2, 3, 4, 5), (2, 3, 4, 5)]),
}
MAKERS = {name: maker for name, (maker, _) in CASES.items()}
CALLS = {f"{name} {list(shape)}": (maker, shape) for name, (maker, shapes) in CASES.items() for shape in shapes}


class Holder(nn.Module):
    """Calls one module, under a name that the inputs can use."""

    def __init__(self, one: nn.Module) -> None:
        super().__init__()
        self.one = one

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x)


def made(maker: Callable[[], nn.Module], shape: tuple[int, ...] = ()) -> tuple[Holder, Tensor]:
    torch.manual_seed(0)
    model = Holder(maker())
    nn.init.normal_(model.one.bias)
    return model, torch.randn(shape)


def within_rounding(new: dict[str, Tensor], old: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Of each tensor: maximum and RMS error at most twice the original's and one unit in the last place."""
    assert list(new) == list(old) == list(exact)
    for name, want in exact.items():
        assert (new[name].dtype, new[name].shape) == (old[name].dtype, old[name].shape), name
        if not want.is_floating_point():
            assert torch.equal(new[name], old[name]), name
            continue
        if want.numel() == 0:
            continue
        ours, theirs = (new[name].double() - want).abs(), (old[name].double() - want).abs()
        unit = torch.finfo(new[name].dtype).eps * want.abs().max()
        assert ours.max() <= 2 * theirs.max() + unit, name
        assert ours.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt() + unit, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("maker", "shape"), CALLS.values(), ids=CALLS)
def test_numbers(maker: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model, x = made(maker, shape)
    model.to(dtype)
    sch = slapo.create_schedule(model)
    sch["one"].decompose()
    x = x.to(dtype)
    old, new = record(model, {"x": x}), record(sch.module, {"x": x})
    double, y = made(maker, shape)
    double.load_state_dict(model.state_dict())
    within_rounding(new, old, record(double.double(), {"x": x.double()}))
    calls = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Spy():
        sch.module(x)
    assert "add" in calls
    assert "addmm" not in calls


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_the_dtypes_are_those_of_the_original(
    maker: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    model, x = made(maker, next(shapes[0] for make, shapes in CASES.values() if make is maker))
    sch = slapo.create_schedule(model, example_inputs={"x": x})
    sch["one"].decompose().trace()
    found = []
    for one in (model, sch.module):
        with torch.autocast("cpu", dtype):
            out = one(x)
        out.float().square().sum().backward()
        found.append((out, *(parameter.grad for parameter in one.parameters())))
        one.zero_grad()
    for old, new in zip(*found, strict=True):
        assert old.dtype == new.dtype
        assert (new - old).abs().max() <= 0.05 * old.abs().max()
    assert found[0][0].dtype == dtype
    assert misses(sch.module) == {}


def test_float64_is_not_cast_by_autocast() -> None:
    model, x = made(CASES["linear"][0], (3, 6))
    model.double()
    sch = slapo.create_schedule(model)
    sch["one"].decompose()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(sch.module(x.double()), model(x.double()), rtol=1e-14, atol=1e-14)


def test_module_object_names_ties_and_hooks_stay() -> None:
    model = tiny_gpt2()
    seen: list[str] = []
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, args, out: seen.append("hook"))
    sch = slapo.create_schedule(model)
    place = sch["transformer.h.0.mlp.c_fc"]
    module, before, kept = place.module, fingerprint(model), list(sch.module.state_dict())
    place.decompose()
    assert place.module is module
    assert isinstance(module, Conv1D)
    assert type(module).__name__ == "Conv1D"
    assert list(sch.module.state_dict()) == kept
    assert module.weight is model.transformer.h[0].mlp.c_fc.weight
    sch.module(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert seen == ["hook"]
    assert changes(before, fingerprint(model)) == []
    assert pickle.loads(pickle.dumps(module.weight)).shape == module.weight.shape
    sch.undo()
    assert type(place.module) is Conv1D


# Traces


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def two() -> tuple[slapo.Schedule, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    return slapo.create_schedule(Two(), example_inputs={"x": x}), x


def operations(place: slapo.Schedule) -> list[tuple[str, str]]:
    def name(target: Any) -> str:
        return target if isinstance(target, str) else target.__name__

    return [(node.op, name(node.target)) for node in place.graph.nodes if node.op not in ("placeholder", "output")]


PARTS = [
    ("get_attr", "weight"),
    ("call_function", "linear"),
    ("get_attr", "bias"),
    ("call_function", "autocast_argument"),
    ("call_function", "add"),
]


def test_its_own_trace_shows_the_parts() -> None:
    sch, x = two()
    sch["first.up"].decompose().trace()
    assert operations(sch["first.up"]) == PARTS
    node = next(one for one in sch["first.up"].graph.nodes if one.target is operator.add)
    assert len(node.args[0].args) == 2  # no bias in the product
    expected = sch.original(x)
    torch.testing.assert_close(sch.module(x), expected)
    assert misses(sch.module) == {}


def test_a_flattened_trace_above_shows_the_parts() -> None:
    sch, x = two()
    sch["first.up"].decompose()
    sch["first"].trace(flatten=True)
    assert operations(sch["first"])[:5] == [(op, f"up.{name}" if op == "get_attr" else name) for op, name in PARTS]
    assert operations(sch["first"])[5:] == [
        ("call_function", "gelu"),
        ("get_attr", "down.weight"),
        ("get_attr", "down.bias"),
        ("call_function", "linear"),
    ]
    torch.testing.assert_close(sch.module(x), sch.original(x))
    assert misses(sch.module) == {}
    (product,) = (one for one in sch["first"].graph.nodes if one.target is F.linear and len(one.args) == 2)
    assert len(product.users) == 1  # else no pattern could take it together with the addition
    again = pickle.loads(pickle.dumps(sch.module))
    assert torch.equal(again(x), sch.module(x))
    assert misses(again) == {}


def test_traces_of_decomposed_modules_are_not_shared_with_others() -> None:
    sch, x = two()
    sch["second"].trace(flatten=True)
    sch["first.up"].decompose()
    sch["first"].trace(flatten=True)
    assert sum(name == "add" for _, name in operations(sch["first"])) == 1
    assert sum(name == "add" for _, name in operations(sch["second"])) == 0
    sch["second"].module.up.__class__ = type(sch["first"].module.up)  # behind the back of the trace
    sch.module(x)
    assert sch["first"].misses == 0
    assert sch["second"].misses == 1

    sch, x = two()
    sch["first.up"].trace()
    sch["second.up"].decompose().trace()
    assert operations(sch["first.up"]) != operations(sch["second.up"])


def test_a_call_that_misses_runs_the_parts() -> None:
    sch, x = two()
    sch["first.up"].decompose().trace()
    wide = x.double()
    sch.module.double()  # the trace follows float32 only
    try:
        module = sch["first.up"].module
        parts = F.linear(wide, module.weight) + module.bias
        assert torch.equal(module(wide), parts)
    finally:
        sch.module.float()


def test_a_trace_above_that_calls_it_needs_no_new_trace() -> None:
    sch, x = two()
    sch["first"].trace()
    sch["first.up"].decompose()
    torch.testing.assert_close(sch.module(x), sch.original(x))
    assert misses(sch.module) == {}


def test_compiled() -> None:
    sch, x = two()
    sch["first.up"].decompose()
    sch["first"].trace(flatten=True)
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    whole = torch.compile(sch.module, backend=backend, fullgraph=True)
    torch.testing.assert_close(whole(x), sch.module(x))
    assert any(node.target is operator.add for graph in found for node in graph.graph.nodes)


# Refusals

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another class": (lambda: nn.LayerNorm(4), r'decompose at "one": LayerNorm is not a module that has parts'),
    "transposed": (lambda: nn.ConvTranspose1d(2, 2, 1), "ConvTranspose1d is not a module"),
    "own forward": (lambda: Doubles(4, 4), "Doubles is not a module that has parts. Those are nn.Linear, .* keep"),
    "own convolution": (lambda: DoublesConv(2, 2, 1), "DoublesConv is not a module that has parts"),
    "no bias": (lambda: nn.Linear(4, 4, bias=False), r"this Linear has no bias, .* Leave out decompose\(\)"),
    "a module above": (Mlp, r'Mlp is not a .* Inside it, for example: sch\["one.up"\]\.decompose\(\)'),
}


@pytest.mark.parametrize(("maker", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(maker: Callable[[], nn.Module], message: str) -> None:
    sch = slapo.create_schedule(Holder(maker()))
    with pytest.raises(ArgumentError, match=message):
        sch["one"].decompose()
    assert len(sch.history) == 0


def test_the_order_of_steps_is_said() -> None:
    sch, _ = two()
    sch["first.up"].decompose()
    with pytest.raises(StepError, match="this Linear is decomposed already. Leave out the second"):
        sch["first.up"].decompose()
    sch["first.down"].trace()
    with pytest.raises(
        StepError, match=r'traced already.*write sch\["first.down"\]\.decompose\(\) before sch\["first.down"\]\.trace'
    ):
        sch["first.down"].decompose()
    sch["second"].trace(flatten=True)
    with pytest.raises(
        StepError,
        match=r"part of the flattened graph of 'second' .* sch\[\"second.up\"\]\.decompose\(\) before "
        r'sch\["second"\]\.trace\(flatten=True\)',
    ):
        sch["second.up"].decompose()


def test_what_is_around_a_decomposed_module_still_forbids_flattening() -> None:
    sch, _ = two()
    sch["first.up"].decompose().checkpoint()
    with pytest.raises(StepError, match="flattening would bypass what was done at 'up'"):
        sch["first"].trace(flatten=True)


def test_the_history_is_replayed(tmp_path: Any) -> None:
    sch, x = two()
    sch["first.up"].decompose()
    sch["first"].trace(flatten=True)
    sch.history.save(tmp_path / "history.json")
    other = slapo.create_schedule(sch.original, example_inputs={"x": x})
    slapo.History.load(tmp_path / "history.json").replay(other)
    assert other.history == sch.history
    assert torch.equal(other.module(x), sch.module(x))
    assert str(sch["first.up"]).endswith("<- decompose")
