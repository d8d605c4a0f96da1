"""softcap: values, gradients, and where fuse finds it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import NoMatchError
from slapo_py.kernels.launch import recording
from slapo_py.kernels.softcap import softcap
from tests.families import decoder, gemma2
from tests.kernels.lab import DEVICE, Args, Draw, KernelTests


class TestSoftcap(KernelTests):
    name = "softcap"

    def inputs(self, draw: Draw) -> Args:
        shape = draw.shape(most=2100) if draw.one_of(False, False, False, True) else draw.shape()
        # |x / cap| stays below 18: from there on the oracle's 1 - t^2 is 0 in float64 as well, and no longer the truth.
        return draw.tensor(shape, draw.one_of(1e-4, 1.0, 10.0)), draw.one_of(30.0, 50.0, 7.3, -5.0)

    def oracle(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap

    @pytest.mark.triton
    @pytest.mark.parametrize("cap", [30.0, 0.1])
    def test_each_element_is_exact(self, cap: float) -> None:
        """Near 0 and near the cap, each beside its own size; `close` looks at a whole tensor."""
        u = torch.cat([torch.logspace(-30, 1, 4000), torch.linspace(0.5, 0.9, 1000)]).to(DEVICE)
        x = torch.cat([u, -u]).mul(cap).requires_grad_()
        wide = x.detach().double().requires_grad_()
        y, exact = softcap(x, cap), self.oracle(wide, cap)
        (dx,) = torch.autograd.grad(y.sum(), x)
        t = (wide / cap).abs()
        slope = 4 * torch.exp(-2 * t) / (1 + torch.exp(-2 * t)) ** 2  # torch's 1 - t^2 cancels in float64 as well
        assert ((y - exact) / exact).abs().max() < 3e-7
        assert ((dx - slope) / slope).abs().max() < 3e-6  # the exponent itself is rounded

    @pytest.mark.triton
    @pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # numpy's, of -2 * 3e38 and inf * 0
    def test_far_from_zero(self) -> None:
        far = [0.0, -0.0, 1e-38, 1e3, -1e3, 5e3, -5e3, 3e38, -3e38, torch.inf, -torch.inf, torch.nan]
        x = torch.tensor(far, device=DEVICE, requires_grad=True)
        found, plain = (f(x, 30.0) for f in (softcap, self.oracle))
        assert torch.allclose(found, plain, rtol=1e-6, atol=0.0, equal_nan=True)
        grads = [torch.autograd.grad(one.sum(), x)[0] for one in (found, plain)]
        assert torch.allclose(*grads, rtol=1e-6, atol=1e-20, equal_nan=True)

    @pytest.mark.triton
    def test_of_other_numbers_the_plain_form(self) -> None:
        for x, cap in ((torch.randn(3, 5, dtype=torch.double), 2.0), (torch.randn(3, 5), 1e-40), (torch.arange(9), 4)):
            x = x.to(DEVICE)
            assert torch.equal(softcap(x, cap), self.oracle(x, cap))


def test_a_vocabulary_is_no_row_too_long() -> None:
    with recording() as noted:
        softcap(torch.empty(2, 256000), 30.0)
    assert [one.grid for one in noted] == [(2, 250)]


class Capped(nn.Module):
    """Gemma2's scores and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.tanh, self.learned = nn.Linear(8, 12), nn.Tanh(), nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.cap(self.proj(x))

    def cap(self, x: Tensor) -> Tensor:
        x = x / 3.0
        x = torch.tanh(x)
        return x * 3.0


class CapFirst(Capped):
    def cap(self, x: Tensor) -> Tensor:
        return 3 * self.tanh(x.div(3.0))


class Below(Capped):
    def cap(self, x: Tensor) -> Tensor:
        return (x / -3.0).tanh() * -3.0


class Learned(Capped):
    def cap(self, x: Tensor) -> Tensor:
        return torch.tanh(x / self.learned) * self.learned


class TwoCaps(Capped):
    def cap(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3.0) * 5.0


class KeepsTanh(Capped):
    def cap(self, x: Tensor) -> Tensor:
        t = torch.tanh(x / 3.0)
        return t * 3.0 + t


class Bare(Capped):
    def cap(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 3.0


def times_called(place: slapo.Schedule) -> int:
    return sum(node.target is softcap for node in place.graph.nodes)


@pytest.mark.parametrize("make", [Capped, CapFirst, Below, Learned])
@pytest.mark.parametrize("train", [True, False])
def test_fuse_finds_what_the_models_write(make: Callable[[], nn.Module], train: bool) -> None:
    sch = slapo.create_schedule(make().train(train), (10 * torch.randn(2, 3, 8),))
    sch.fuse("softcap")
    assert times_called(sch) == 1 and "tanh(" not in str(sch)
    assert sch.verify().grade == "equal"


def test_fuse_finds_scores_and_logits_of_gemma2() -> None:
    torch.manual_seed(0)
    sch = slapo.create_schedule(gemma2("eager"), decoder())
    for layer in sch.select("model.layers.*"):
        layer.fuse("softcap")
        assert times_called(layer) == 1
    sch.fuse("softcap")
    assert times_called(sch) == 1
    assert sch.verify().grade == "equal"
    assert slapo.misses(sch.module) == {}


@pytest.mark.parametrize(("make", "reason"), [
    (TwoCaps, "slapo.wild\\('cap'\\) would be 3.0 and 5.0"),
    (KeepsTanh, "the inner value 'tanh' .* is used outside, by 'add_1'"),
    (Bare, "the graph has no div"),
])  # fmt: skip
def test_fuse_leaves_what_is_something_else(make: Callable[[], nn.Module], reason: str) -> None:
    sch = slapo.create_schedule(make(), (torch.randn(2, 3, 8),))
    with pytest.raises(NoMatchError, match=reason):
        sch.fuse("softcap")


@pytest.mark.parametrize("cap", [0, 0.0, torch.inf, torch.nan])
def test_what_is_no_cap_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match=f"softcap: cap must be a number, finite and not 0, found {cap}"):
        softcap(torch.ones(2, 2), cap)
