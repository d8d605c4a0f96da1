"""geglu: values, gradients, and where fuse finds it."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import NoMatchError
from slapo_py.kernels.geglu import geglu
from tests.kernels.lab import Args, Draw, KernelTests
from tests.kernels.test_swiglu import Mlp, gated_inputs, times_called


class TestGeglu(KernelTests):
    name = "geglu"

    def inputs(self, draw: Draw) -> Args:
        return *gated_inputs(draw), draw.one_of("none", "tanh")

    def oracle(self, gate: Tensor, up: Tensor, approximate: str) -> Tensor:
        return F.gelu(gate, approximate=approximate) * up


class Exact(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate) * up


class Tanh(Mlp):
    """Gemma2."""

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return nn.GELU(approximate="tanh")(gate) * up


class Written(Mlp):
    """T5 v1.1."""

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.gelu_new(gate) * up

    def gelu_new(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class WrittenUpFirst(Written):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return up * self.gelu_new(gate)


class OtherConstant(Written):
    def gelu_new(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.0447 * torch.pow(x, 3.0))))


class Quick(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * torch.sigmoid(1.702 * gate) * up


class DropsGate(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.dropout(F.gelu(gate), 0.1) * up


class KeepsGate(Mlp):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        a = F.gelu(gate)
        return a * up + a


@pytest.mark.parametrize("make", [Exact, Tanh, Written, WrittenUpFirst])
@pytest.mark.parametrize("train", [True, False])
def test_fuse_finds_what_the_models_write(make: Callable[[], nn.Module], train: bool) -> None:
    sch = slapo.create_schedule(make().train(train), (10 * torch.randn(20, 3, 8),))
    sch.fuse("geglu")
    assert times_called(sch, "geglu") == 1
    assert not times_called(sch, "gelu") and not times_called(sch, "tanh")
    assert sch.verify().grade == ("equal" if make in (Exact, Tanh) else "rounding")


@pytest.mark.parametrize(("make", "reason"), [
    (OtherConstant, "8 of 9 operations are there, but 'mul_1' .* has 0.0447 where the pattern has 0.044715"),
    (Quick, "_gelu_times_up .* the graph has no gelu"),
    (DropsGate, "'dropout' .* is dropout where the pattern has gelu"),
    (KeepsGate, "the inner value 'gelu' .* is used outside, by 'add'"),
])  # fmt: skip
def test_fuse_leaves_what_is_something_else(make: Callable[[], nn.Module], reason: str) -> None:
    sch = slapo.create_schedule(make(), (torch.randn(2, 3, 8),))
    with pytest.raises(NoMatchError, match=reason):
        sch.fuse("geglu")


def test_what_has_no_such_form_is_refused() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match="geglu: approximate must be .* found 'sigmoid'"):
        geglu(x, x, "sigmoid")
    with pytest.raises(ValueError, match="geglu: gate must be a floating-point tensor, found dtype torch.int64"):
        geglu(x.long(), x)
    with pytest.raises(ValueError, match=r"geglu: gate and up must have one shape, found \(2, 2\) and \(3, 2\)"):
        geglu(x, torch.ones(3, 2))
