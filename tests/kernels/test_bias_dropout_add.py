"""bias_dropout_add: values, gradients, the mask, and where fuse finds it."""

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.kernels.bias_dropout_add import bias_dropout_add
from slapo_py.kernels.launch import INTERPRETED
from tests.kernels.lab import DEVICE, Args, Draw, KernelTests, philox_mask


def dropped(x: Tensor, p: float, training: bool) -> Tensor:
    """F.dropout off the GPU; by Triton, with the mask that the kernel has to draw."""
    if not training or p == 0:
        return x
    if DEVICE == "cpu" and not INTERPRETED:
        return F.dropout(x, p)
    seed = int(torch.randint(2**62, (1,), dtype=torch.int64, device=DEVICE))
    return x * philox_mask(seed, tuple(x.shape), p).to(x)


class TestBiasDropoutAdd(KernelTests):
    name = "bias_dropout_add"

    def inputs(self, draw: Draw) -> Args:
        shape = draw.shape()
        other = draw.one_of(draw.dtype, draw.dtype, torch.float32)  # as autocast has it
        x, bias = draw.tensor(shape), draw.tensor(shape[-1:])
        return x, bias, draw.tensor(shape, dtype=other), draw.one_of(0.0, 0.1, 0.5, 1.0), draw.one_of(True, True, False)

    def oracle(self, x: Tensor, bias: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        return dropped(x + bias, p, training) + residual

    def test_second_derivatives_are_the_references(self) -> None:
        """The first ones depend on the gradient of the result alone."""
        found = []
        for function in (self.call, self.oracle):
            x, bias, residual, p = self.example()
            torch.manual_seed(3)
            g = torch.randn(6, 16, requires_grad=True)
            first = torch.autograd.grad(function(x, bias, residual, p), (x, bias, residual), g, create_graph=True)
            found.append(torch.autograd.grad(torch.stack([one.sum() for one in first]).sum(), g)[0])
        assert torch.equal(*found)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_what_is_no_probability_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="bias_dropout_add: p must be between 0 and 1, found "):
        bias_dropout_add(torch.ones(2, 2), torch.ones(2), torch.ones(2, 2), p)


@pytest.mark.parametrize("shapes", [((2, 3, 4), (3, 1), (4,)), ((4,), (2, 4), (2, 4)), ((1, 4), (4,), (3, 4))])
@pytest.mark.parametrize("marked", [pytest.param(0, marks=pytest.mark.triton), 1])
def test_other_shapes_run_in_the_plain_form(shapes: tuple[tuple[int, ...], ...], marked: int) -> None:
    x, bias, residual = map(torch.randn, shapes)
    torch.manual_seed(0)
    found = bias_dropout_add(x, bias, residual, 0.5)
    torch.manual_seed(0)
    assert torch.equal(found, F.dropout(x + bias, 0.5) + residual)


@pytest.mark.triton
def test_many_rows_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[bias_dropout_add.__module__], "PROGRAMS", 4)  # of 3, 3, 3 and 1 rows
    x, bias, g = torch.randn(10, 3), torch.randn(3), torch.randn(10, 3)
    seed = torch.tensor([5])
    (found,) = torch.ops.slapo.bias_dropout_add_backward([g], [], [False, True, False], x, bias, x, 0.25, seed)
    torch.testing.assert_close(found, (g * philox_mask(5, (10, 3), 0.25).float()).sum(0))


@pytest.mark.triton
def test_each_call_has_a_mask_of_its_own_and_backward_the_same() -> None:
    x = torch.ones(4, 50, requires_grad=True)
    one, two = (bias_dropout_add(x, torch.zeros(50), torch.zeros(4, 50), 0.5) for _ in range(2))
    assert not torch.equal(one, two)
    assert {float(value) for value in one.detach().unique()} == {0.0, 2.0}
    assert torch.equal(torch.autograd.grad(one.sum(), x)[0], one)


class Forms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in "abcd")
        self.drop, self.p = nn.Dropout(0.3), 0.2

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.a(x)) + x
        x = x + F.dropout(self.b(x), p=self.p, training=self.training)
        x = x + nn.functional.dropout(self.c(x), 0.1)
        return torch.add(x, torch.dropout(self.d(x), 0.1, self.training))


def calls(sch: slapo.Schedule, name: str) -> list[Any]:
    return [node for node in sch.graph.nodes if getattr(node.target, "__name__", "") == name]


def test_fuse_finds_each_written_form() -> None:
    sch = slapo.create_schedule(Forms(), example_inputs=(torch.randn(2, 4, 8),))
    sch.fuse("bias_dropout_add")
    found = calls(sch, "bias_dropout_add")
    assert [node.kwargs["p"] for node in found] == [0.3, 0.2, 0.1, 0.1]
    assert sch.verify().grade in ("equal", "rounding")
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    for train in (True, False):
        sch.module.train(train), sch.original.train(train)
        torch.manual_seed(1)
        one = sch.module(x)
        torch.manual_seed(1)
        torch.testing.assert_close(one, sch.original(x))


class Near(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.fc, self.drop = kind, nn.Linear(8, 8, bias=kind != "no bias"), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.kind == "no dropout":
            return y + x
        if self.kind == "norm between":
            return self.drop(F.layer_norm(y, (8,))) + x
        if self.kind == "subtracted":
            return x - self.drop(y)
        y = self.drop(y)
        return y * (y + x) if self.kind == "used twice" else y + x


NEAR = {
    "no bias": "2 of 3 operations are there, but 'fc' .* is a call of Linear where the pattern has add",
    "no dropout": "the graph has no dropout",
    "norm between": "is layer_norm where the pattern has add",
    "subtracted": "1 of 3 operations are there, but 'linear' .* is linear where the pattern has dropout",
    "used twice": "the inner value 'drop' .*is used outside",
}


@pytest.mark.parametrize("kind", NEAR)
def test_near_misses_are_not_found(kind: str) -> None:
    sch = slapo.create_schedule(Near(kind), example_inputs=(torch.randn(2, 8),))
    with pytest.raises(slapo.errors.NoMatchError, match=NEAR[kind]):
        sch.fuse("bias_dropout_add")


@pytest.mark.triton
def test_the_sum_with_the_bias_is_rounded_before_the_residual_is_added() -> None:
    x, bias = torch.ones(2, 8, dtype=torch.bfloat16), torch.full((8,), 2.0**-9, dtype=torch.bfloat16)
    assert torch.equal(bias_dropout_add(x, bias, -x, training=False), torch.zeros_like(x))
    x.requires_grad_()
    found = bias_dropout_add(x, bias, torch.zeros(2, 8), 0.7)  # with a residual in float32
    assert torch.equal(found, found.bfloat16().float())


def test_nothing_but_the_mask_is_kept_for_backward() -> None:
    x, bias, residual = (torch.randn(*shape, requires_grad=True) for shape in ((6, 16), (16,), (6, 16)))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        bias_dropout_add(x, bias, residual, 0.5)
    assert sum(one.untyped_storage().nbytes() for one in kept) == 6 * 16 * 4
