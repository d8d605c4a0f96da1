"""add_rms_norm: values, gradients, and where fuse finds it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import NoMatchError
from slapo_py.kernels.add_rms_norm import add_rms_norm, functional_add_rms_norm
from tests.kernels.lab import DEVICE, Args, Draw, KernelTests, same
from tests.kernels.test_rms_norm import GemmaNorm, LlamaNorm, T5Norm, TorchNorm, calls


class TestAddRmsNorm(KernelTests):
    name = "add_rms_norm"

    def inputs(self, draw: Draw) -> Args:
        shape = draw.shape()
        weight = draw.tensor(shape[-1:], dtype=draw.one_of(draw.dtype, draw.dtype, torch.float32, torch.bfloat16))
        residual = draw.tensor(shape, dtype=draw.one_of(draw.dtype, draw.dtype, draw.dtype, torch.float32))
        if draw.one_of(True, True, True, False) is False:
            residual = residual[:1].detach().requires_grad_()  # a residual that is broadcast
        casting = draw.one_of("early", "late"), draw.one_of(None, weight.dtype, torch.float32)
        return draw.tensor(shape), residual, weight, draw.one_of(1e-6, 1e-2), draw.one_of(0.0, 0.0, 1.0), *casting

    def oracle(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0,
        casting: str = "early", dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total = residual + x
        wide = total if x.dtype == torch.float64 else total.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if x.dtype == torch.float64:
            return normed * (offset + weight), total
        if casting == "late":
            return (normed * (offset + weight.float())).to(dtype or total.dtype), total
        return (offset + weight if offset else weight) * normed.to(dtype or total.dtype), total


@pytest.mark.triton
def test_each_gradient_alone() -> None:
    """The gradient that is not asked for is not computed, and x and residual may have different dtypes."""
    torch.manual_seed(0)
    x, residual = torch.randn(5, 33, device=DEVICE), torch.randn(5, 33, device=DEVICE)
    weight = torch.randn(33, device=DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        args = [one.requires_grad_() for one in (x.to(dtype), residual, weight)]
        expected = _grads(args, args)
        for place, one in enumerate(args):
            others = [other if other is one else other.detach() for other in args]
            assert torch.equal(_grads(others, [one])[0], expected[place])


@pytest.mark.triton
def test_one_gradient_serves_both() -> None:
    args = [torch.randn(3, 8, device=DEVICE, requires_grad=True) for _ in range(2)]
    weight = torch.ones(8, device=DEVICE)
    grads = _grads([*args, weight], args)
    assert grads[0].data_ptr() == grads[1].data_ptr()


@pytest.mark.triton
def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(4, 500, device=DEVICE).bfloat16() for _ in range(2))
    weight = torch.ones(500, device=DEVICE).bfloat16()
    normed, total = add_rms_norm(x, residual, weight, 1e-5, 0.0, "early", torch.float32)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, LlamaNorm.compute(total.float(), weight.float(), 1e-5))


def _grads(args: list[Tensor], wanted: list[Tensor]) -> tuple[Tensor, ...]:
    normed, total = add_rms_norm(*args)
    return torch.autograd.grad(normed.float().sin().sum() + total.float().cos().sum(), wanted)


class Block(nn.Module):
    """residual + x as in Llama, the sum used again or not."""

    def __init__(self, norm: nn.Module, dtype: torch.dtype, reused: bool = True, swapped: bool = False) -> None:
        super().__init__()
        self.norm, self.fc, self.reused, self.swapped = norm, nn.Linear(16, 16, dtype=dtype), reused, swapped

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.fc(x)
        x = x + residual if self.swapped else residual + x
        y = self.fc(self.norm(x))
        return x + y if self.reused else y


@pytest.mark.parametrize("reused", [True, False], ids=["sum used again", "sum used once"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("form", "name"),
    [
        (LlamaNorm, "add_rms_norm"),
        (T5Norm, "add_rms_norm"),
        (GemmaNorm, "add_rms_norm"),
        (TorchNorm, "functional_add_rms_norm"),
        (nn.RMSNorm, "functional_add_rms_norm"),
    ],
)
def test_fuse_finds_every_form(form: type[nn.Module], name: str, dtype: torch.dtype, reused: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, dtype=dtype)
    block = Block(form(16, dtype=dtype), dtype, reused, swapped=form is GemmaNorm)
    sch = slapo.create_schedule(block, example_inputs=(x,))
    sch.fuse("add_rms_norm")
    (node,) = calls(sch, name)
    assert str(node.args[2].target) == "norm.weight"
    adds = [one for one in sch.graph.nodes if getattr(one.target, "__name__", one.target) == "add"]
    assert len(adds) == (1 if reused else 0)
    assert sch.verify().grade in ("equal", "rounding")
    assert slapo.misses(sch.module) == {}


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = LlamaNorm(16), nn.Dropout(0.1)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.drop(x + residual))


class NoAdd(Between):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(x) + residual


@pytest.mark.parametrize("form", [Between, NoAdd])
def test_what_only_looks_like_it_stays(form: type[nn.Module]) -> None:
    x = torch.randn(2, 3, 16)
    sch = slapo.create_schedule(form(), example_inputs=(x, x.clone()))
    with pytest.raises(NoMatchError, match="_llama .* but .* where the pattern has add"):
        sch.fuse("add_rms_norm")


def test_functional_is_torchs() -> None:
    x, residual, weight = torch.randn(3, 4, 8), torch.randn(3, 4, 8), torch.randn(4, 8)
    for scale, shape in ((weight, (4, 8)), (weight[0], (8,))):
        made = functional_add_rms_norm(x, residual, scale, None)
        same(list(made), [nn.functional.rms_norm(x + residual, shape, scale), x + residual])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight": torch.ones(1)}, r"add_rms_norm: weight must have the shape of a row, \(4,\), found \(1,\)"),
        ({"casting": "never"}, "add_rms_norm: casting must be .* found 'never'"),
    ],
)
def test_what_it_cannot_take_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        add_rms_norm(torch.ones(2, 4), torch.ones(4), **{"weight": torch.ones(4), **given})
