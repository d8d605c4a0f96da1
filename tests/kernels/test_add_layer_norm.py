"""add_layer_norm: values, gradients, and where fuse finds it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.kernels.add_layer_norm import (
    add_layer_norm,
    add_layer_norm_alone,
    add_layer_norm_flat,
    add_layer_norm_viewed,
)
from tests.kernels.lab import Args, Draw, KernelTests
from tests.kernels.test_layer_norm import calls, weight_and_bias


def inputs(draw: Draw, rows: int = 6) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """x, residual, weight, bias; now and then the residual is float32, as autocast has it."""
    shape = draw.shape(rows=rows)
    x = draw.tensor(shape)
    draw.dtype = draw.one_of(draw.dtype, draw.dtype, torch.float32)
    return x, draw.tensor(shape), *weight_and_bias(draw, shape[-1:])


class TestAddLayerNorm(KernelTests):
    name = "add_layer_norm"

    def inputs(self, draw: Draw) -> Args:
        return *inputs(draw), draw.one_of(1e-5, 1e-12, 0.5)

    def oracle(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
    ) -> tuple[Tensor, Tensor]:
        return F.layer_norm(x + residual, x.shape[-1:], weight, bias, eps), x + residual


def leaves() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((2, 3, 8), (3, 8), (8,), (8,))
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("marked", [pytest.param(0, marks=pytest.mark.triton), 1])
def test_each_form_with_a_residual_that_is_broadcast(marked: int) -> None:
    x, residual, w, b = leaves()
    total = x + residual
    normed = F.layer_norm(total, (8,), w, b)
    forms = {
        "sum": (add_layer_norm(x, residual, w, b), (normed, total)),
        "swapped": (add_layer_norm(residual, x, w, b), (normed, total)),
        "alone": ((add_layer_norm_alone(x, residual, w, b),), (normed,)),
        "viewed": (
            add_layer_norm_viewed(x, residual, w, b, shape=(3, 2, 8)),
            (normed.view(3, 2, 8), total.view(3, 2, 8)),
        ),
        "flat": (add_layer_norm_flat(x, residual, w, b, rows=-1), (normed.view(6, 8), total.view(6, 8), total)),
    }
    for name, (found, usual) in forms.items():
        grads = [torch.randn_like(one) for one in usual]
        found_grads = torch.autograd.grad(found, (x, residual, w, b), grads)
        usual_grads = torch.autograd.grad(usual, (x, residual, w, b), grads, retain_graph=True)
        for one, other in zip((*found, *found_grads), (*usual, *usual_grads), strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("marked", [pytest.param(0, marks=pytest.mark.triton), 1])
def test_over_several_dims_and_as_autocast_has_it(marked: int) -> None:
    x, residual, *_ = leaves()
    normed, total = add_layer_norm(x, residual, normalized_shape=(3, 8))
    torch.testing.assert_close(normed, F.layer_norm(x + residual, (3, 8)))
    assert torch.equal(total, x + residual)
    half, other = x.bfloat16(), x.bfloat16()
    normed, total = torch.ops.slapo.add_layer_norm(half, other, None, None, 1e-5, True, False)
    assert (normed.dtype, total.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(normed, F.layer_norm((half + other).float(), (8,)))


def test_shapes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"add_layer_norm: weight must have the shape \(8,\) of a row of x, found \(4,"
    ):
        add_layer_norm(torch.ones(2, 8), torch.ones(2, 8), torch.ones(4), normalized_shape=8)


class Post(nn.Module):
    """BERT: the sum goes into the norm alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x) + x)


class Pre(Post):
    """GPT-2: the sum is used again."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.fc(x)
        return x + self.fc(self.norm(x))


class Between(Post):
    """OPT, from one layer to the next."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.size(-1))
        y = (flat + self.fc(flat)).view(x.shape)
        return y + self.norm(y)


class Flat(Post):
    """OPT, inside a layer; the shape of the sum is not used later."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.fc(x)
        y = y.reshape(-1, y.size(-1))
        return y + self.norm(y)


class Plain(Post):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(torch.add(self.fc(x), x), (8,)) + F.layer_norm(x + 1, (8,), self.norm.weight)


FORMS: dict[type[nn.Module], str] = {
    Post: "add_layer_norm_alone",
    Pre: "add_layer_norm",
    Between: "add_layer_norm_viewed",
    Flat: "add_layer_norm_flat",
    Plain: "add_layer_norm_alone",
}


@pytest.mark.parametrize("kind", FORMS)
def test_fuse_finds_each_written_form(kind: type[nn.Module]) -> None:
    sch = slapo.create_schedule(kind(), example_inputs=(torch.randn(2, 4, 8),))
    sch.fuse("add_layer_norm")
    assert calls(sch, FORMS[kind]) == 1
    assert calls(sch, "add") + calls(sch, "layer_norm") == (3 if kind is Plain else int(kind is not Post))
    assert sch.verify().grade in ("equal", "rounding")


class Near(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.kind == "dropout between":
            return self.norm(F.dropout(x + y, 0.1, self.training))
        if self.kind == "scaled":
            return self.norm(torch.add(x, y, alpha=2))
        return self.norm(x) + y


NEAR = {
    "dropout between": "1 of 2 operations are there, but 'dropout' .* is dropout where the pattern has add",
    "scaled": "differ in|alpha|'add' .* has 2 where the pattern has 1",
    "add after": "1 of 2 operations are there, but 'norm' .* is given 'x' where the pattern has add",
}


@pytest.mark.parametrize("kind", NEAR)
def test_near_misses_are_not_found(kind: str) -> None:
    sch = slapo.create_schedule(Near(kind), example_inputs=(torch.randn(2, 8), torch.randn(2, 8)))
    with pytest.raises(slapo.errors.NoMatchError, match=NEAR[kind]):
        sch.fuse("add_layer_norm")


@pytest.mark.triton
def test_the_sum_is_rounded_before_the_norm() -> None:
    x = torch.full((2, 8), 256.0, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.tensor([0.25, -0.25] * 4, dtype=torch.bfloat16).expand(2, 8)
    normed, total = add_layer_norm(x, residual)
    assert torch.equal(normed, torch.zeros_like(x)) and torch.equal(total, x)
    g = torch.tensor([1.0, 0.0] * 4, dtype=torch.bfloat16).expand(2, 8)
    plain = F.layer_norm(x + residual, (8,))
    for one, other in zip(torch.autograd.grad(normed, x, g), torch.autograd.grad(plain, x, g), strict=True):
        torch.testing.assert_close(one, other)
