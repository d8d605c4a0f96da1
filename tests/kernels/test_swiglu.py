"""swiglu: values, gradients, and where fuse finds it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import NoMatchError
from slapo_py.kernels.swiglu import swiglu
from tests.kernels.lab import DEVICE, DTYPES, Args, Draw, KernelTests, close


def gated_inputs(draw: Draw) -> tuple[Tensor, Tensor]:
    """gate and up of one shape; now and then one of another dtype, or one that needs no gradient."""
    shape = draw.shape(most=2100) if draw.one_of(False, False, False, True) else draw.shape()
    gate = draw.tensor(shape, 3.0)
    dtype = draw.one_of(draw.dtype, draw.dtype, draw.dtype, *DTYPES)
    up = draw.tensor(draw.one_of(shape, shape, shape, shape, shape[-1:]), dtype=dtype)
    fixed = draw.one_of(None, None, None, gate, up)
    if fixed is not None:
        fixed.requires_grad_(False)
    return gate, up


class TestSwiglu(KernelTests):
    name = "swiglu"

    def inputs(self, draw: Draw) -> Args:
        return gated_inputs(draw)

    def oracle(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @pytest.mark.triton
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_halves_of_one_tensor(self, dtype: torch.dtype) -> None:
        torch.manual_seed(2)
        both = torch.randn(2, 3, 38, dtype=dtype, device=DEVICE, requires_grad=True)
        grad = torch.randn(2, 3, 19, dtype=dtype, device=DEVICE)
        found, plain, exact = (self.halves(f, one, grad) for f, one in (
            (swiglu, both), (self.oracle, both), (self.oracle, both.detach().double().requires_grad_()),
        ))  # fmt: skip
        for one, other, truth in zip(found, plain, exact):
            close(one, truth, other, "halves")

    def halves(self, function: object, both: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        assert callable(function)
        y = function(*both.chunk(2, dim=-1))
        return y, torch.autograd.grad(y, both, grad.to(y.dtype))[0]

    @pytest.mark.triton
    def test_it_rounds_where_torch_does(self) -> None:
        torch.manual_seed(2)
        gate, up, grad = (torch.randn(4, 250, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
        args = gate.requires_grad_(), up.requires_grad_()
        found, plain = ([y := f(*args), *torch.autograd.grad(y, args, grad)] for f in (swiglu, self.oracle))
        for one, other in zip(found, plain):
            assert (one == other).float().mean() > 0.98

    @pytest.mark.triton
    def test_a_double_factor_is_left_to_torch(self) -> None:
        gate, up = torch.randn(3, 5, device=DEVICE), torch.randn(3, 5, dtype=torch.double, device=DEVICE)
        assert torch.equal(swiglu(gate, up), self.oracle(gate, up))

    @pytest.mark.triton
    @pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of inf * 0
    def test_far_from_zero(self) -> None:
        far = [0.0, -0.0, 1e-30, -17.0, 17.0, -60.0, 60.0, -87.5, -88.9, -104.0, 89.0, 1e4, -1e4, 3e38, -3e38]
        gate = torch.tensor([*far, torch.inf, -torch.inf, torch.nan], device=DEVICE, requires_grad=True)
        up = torch.full_like(gate, 0.5, requires_grad=True)
        wide = (gate.detach().double().requires_grad_(), up.detach().double().requires_grad_())
        found, plain, exact = ([y := f(*args), *torch.autograd.grad(y.sum(), args)] for f, args in (
            (swiglu, (gate, up)), (self.oracle, (gate, up)), (self.oracle, wide),
        ))  # fmt: skip
        for one, other, truth in zip(found, plain, exact):
            strange = ~torch.isfinite(other)
            assert torch.equal(one[strange].nan_to_num(7e4), other[strange].nan_to_num(7e4))
            assert torch.allclose(one[~strange], truth[~strange].float(), rtol=1e-5, atol=1e-35)


class Mlp(nn.Module):
    """As Llama and Qwen3 write it, and T5 with gated silu."""

    def __init__(self, width: int = 8, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 12, bias=bias), nn.Linear(width, 12, bias=bias)
        self.down_proj, self.act_fn = nn.Linear(12, width, bias=bias), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activate(self.gate_proj(x), self.up_proj(x)))

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up


class UpFirst(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return up * F.silu(gate)


class Broadcast(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up[..., :1]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return F.silu(gate) * up


class Ungated(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) + up


class DropsGate(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.dropout(F.silu(gate), 0.1) * up


class KeepsGate(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        a = F.silu(gate)
        return a * up + a


def times_called(sch: slapo.Schedule, name: str) -> int:
    return sum(getattr(node.target, "__name__", "") == name for node in sch.graph.nodes)


@pytest.mark.parametrize("make", [Mlp, UpFirst, Broadcast, Halves, lambda: Mlp(bias=True)])
@pytest.mark.parametrize("train", [True, False])
def test_fuse_finds_what_the_models_write(make: Callable[[], nn.Module], train: bool) -> None:
    sch = slapo.create_schedule(make().train(train), (torch.randn(2, 3, 8),))
    sch.fuse("swiglu")
    assert times_called(sch, "swiglu") == 1
    assert "silu(" not in str(sch)
    assert sch.verify().grade in ("equal", "rounding")


@pytest.mark.parametrize(("make", "reason"), [
    (Ungated, "_silu_times_up .* the graph has no mul"),
    (DropsGate, "1 of 2 operations are there, but 'dropout' .* is dropout where the pattern has silu"),
    (KeepsGate, "the inner value 'silu' .* is used outside, by 'add'"),
])  # fmt: skip
def test_fuse_leaves_what_is_something_else(make: Callable[[], nn.Module], reason: str) -> None:
    sch = slapo.create_schedule(make(), (torch.randn(2, 3, 8),))
    with pytest.raises(NoMatchError, match=reason):
        sch.fuse("swiglu")


def test_what_is_no_gate_is_refused() -> None:
    with pytest.raises(ValueError, match="swiglu: gate must be a floating-point tensor, found dtype torch.int64"):
        swiglu(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2))
    with pytest.raises(ValueError, match="swiglu: up must be a floating-point tensor, found dtype torch.bool"):
        swiglu(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"swiglu: gate and up must have one shape, found \(2, 3\) and \(2, 4\)"):
        swiglu(torch.ones(2, 3), torch.ones(2, 4))
