"""layer_norm: values, gradients, and where fuse finds it."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.kernels.layer_norm import layer_norm
from tests.kernels.lab import Args, Draw, KernelTests


def weight_and_bias(draw: Draw, shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Now and then one is missing, or both are float32 whatever x is."""
    weight, bias = draw.one_of((True, True), (True, True), (True, False), (False, True), (False, False))
    dtype = torch.float32 if weight and draw.one_of(True, False, False) else draw.dtype  # torch's bias alone can't be
    return draw.tensor(shape, dtype=dtype) if weight else None, draw.tensor(shape, dtype=dtype) if bias else None


class TestLayerNorm(KernelTests):
    name = "layer_norm"

    def inputs(self, draw: Draw) -> Args:
        shape = draw.shape()
        weight, bias = weight_and_bias(draw, shape[-1:])
        return draw.tensor(shape, 3.0), weight, bias, draw.one_of(1e-5, 1e-12, 0.5)

    def oracle(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


WRONG_SHAPES = [
    ((2, 8), (4,), (4,), None, r"the last dims of x must be \(4,\), which is normalised over, found \(2, 8\)"),
    ((2, 8), (8,), (4,), None, r"bias must have the shape \(8,\) of a row of x, found \(4,\)"),
    ((2, 8), (8,), (8,), (2, 8), r"weight must have the shape \(2, 8\)"),
    ((2, 8), None, None, (3, 2, 8), r"the last dims of x must be \(3, 2, 8\)"),
    ((), None, None, None, r"the last dims of x must be \(\)"),
]


@pytest.mark.parametrize("x, weight, bias, shape, message", WRONG_SHAPES)
def test_shapes_that_do_not_go_together_are_refused(
    x: tuple[int, ...],
    weight: tuple[int, ...] | None,
    bias: tuple[int, ...] | None,
    shape: tuple[int, ...] | None,
    message: str,
) -> None:
    made = [None if one is None else torch.ones(one) for one in (x, weight, bias)]
    with pytest.raises(ValueError, match="layer_norm: " + message):
        layer_norm(*made, normalized_shape=shape)  # type: ignore[arg-type]


def test_as_autocast_on_a_gpu_has_it_the_result_is_float32() -> None:
    x, w, b = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((3, 8), (8,), (8,)))
    found = torch.ops.slapo.layer_norm(x, w, b, 1e-5, True)
    assert found.dtype == torch.float32
    assert torch.equal(found, F.layer_norm(x.float(), (8,), w.float(), b.float()))


@pytest.mark.triton
def test_triton_gives_float32_where_autocast_would() -> None:
    x, w, b = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((3, 8), (8,), (8,)))
    for weight, bias in ((w, b), (None, None)):
        needed = [one for one in (x, weight, bias) if one is not None]
        found = torch.ops.slapo.layer_norm(x, weight, bias, 1e-5, True)
        wide = F.layer_norm(x.float(), (8,), None if weight is None else w.float(), None if bias is None else b.float())
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wide, rtol=1e-6, atol=1e-6)
        g = torch.randn_like(found)
        for one, other in zip(torch.autograd.grad(found, needed, g), torch.autograd.grad(wide, needed, g)):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), 3e38, 0.0])
def test_rows_of_special_values_stay_by_themselves(special: float) -> None:
    x = torch.randn(3, 40)
    x[1] = special
    x[1, :2] = 0.0
    found, usual = layer_norm(x), F.layer_norm(x, (40,))
    torch.testing.assert_close(found[::2], usual[::2])
    torch.testing.assert_close(found[1], usual[1], equal_nan=True)


@pytest.mark.triton
def test_many_rows_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[layer_norm.__module__], "PROGRAMS", 4)  # of 3, 3, 3 and 1 rows
    x, w, b = torch.randn(10, 3, requires_grad=True), torch.randn(3, requires_grad=True), torch.zeros(3)
    b.requires_grad_()
    g = torch.randn(10, 3)
    found = torch.autograd.grad(layer_norm(x, w, b), (x, w, b), g)
    for one, other in zip(found, torch.autograd.grad(F.layer_norm(x, (3,), w, b), (x, w, b), g)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_over_several_dims() -> None:
    x, w, b = torch.randn(3, 4, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)
    found, usual = layer_norm(x, w, b), F.layer_norm(x, (4, 5), w, b)
    assert torch.equal(found, usual)
    for one, other in zip(torch.autograd.grad(found.sum(), (x, w)), torch.autograd.grad(usual.sum(), (x, w))):
        assert torch.equal(one, other)
    assert torch.equal(layer_norm(x, normalized_shape=(4, 5)), F.layer_norm(x, (4, 5)))
    assert torch.equal(layer_norm(x, normalized_shape=5), F.layer_norm(x, (5,)))


class Norms(nn.Module):
    """Each written form, once."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.plain = nn.LayerNorm(8, eps=1e-12), nn.LayerNorm(8, elementwise_affine=False)
        self.unbiased, self.planes = nn.LayerNorm(8, bias=False), nn.LayerNorm((4, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.usual(x) + self.plain(x).relu() + self.unbiased(x)
        x = x + self.planes(x) + F.layer_norm(x, (x.size(-1),), self.usual.weight + 1, self.usual.bias, 0.5)
        return torch.layer_norm(x, [8], self.usual.weight) * F.layer_norm(x, x.shape[-1:])


def calls(sch: slapo.Schedule, name: str) -> int:
    """How many nodes of the graph call a function of this name."""
    return sum(getattr(node.target, "__name__", "") == name for node in sch.graph.nodes)


def test_fuse_finds_each_written_form() -> None:
    model = Norms()
    for one in (model.usual, model.planes):
        nn.init.normal_(one.weight)
        nn.init.normal_(one.bias)
    sch = slapo.create_schedule(model, example_inputs=(torch.randn(2, 4, 8),))
    sch.fuse("layer_norm")
    assert calls(sch, "layer_norm") == 7
    assert {node.target.__module__ for node in sch.graph.nodes if "layer_norm" in node.name} == {layer_norm.__module__}
    assert sch.verify().grade in ("equal", "rounding")


def test_a_norm_of_another_kind_is_not_found() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.RMSNorm(8)), example_inputs=(torch.randn(2, 8),))
    with pytest.raises(slapo.errors.NoMatchError, match="the graph has no layer_norm; it has rms_norm"):
        sch.fuse("layer_norm")


@pytest.mark.triton
def test_a_large_mean_leaves_no_error() -> None:
    x = 1000 + torch.randn(4, 100)
    assert (layer_norm(x) - F.layer_norm(x.double(), (100,))).abs().max() < 2e-6
