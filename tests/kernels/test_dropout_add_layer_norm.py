"""dropout_add_layer_norm: values, gradients, the mask, and where fuse finds it."""

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.kernels.dropout_add_layer_norm import (
    dropout_add_layer_norm,
    dropout_add_layer_norm_alone,
    dropout_add_layer_norm_flat,
    dropout_add_layer_norm_viewed,
)
from slapo_py.kernels.layer_norm import layer_norm
from tests.kernels.lab import Args, Draw, KernelTests, philox_mask
from tests.kernels.test_add_layer_norm import inputs
from tests.kernels.test_bias_dropout_add import dropped
from tests.kernels.test_layer_norm import calls


class TestDropoutAddLayerNorm(KernelTests):
    name = "dropout_add_layer_norm"

    def inputs(self, draw: Draw) -> Args:
        return *inputs(draw, rows=4), draw.one_of(0.0, 0.1, 0.5, 1.0), 1e-5, draw.one_of(True, True, True, False)

    def oracle(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, p: float = 0.5,
        eps: float = 1e-5, training: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total = dropped(x, p, training) + residual
        return F.layer_norm(total, x.shape[-1:], weight, bias, eps), total


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_what_is_no_probability_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="dropout_add_layer_norm: p must be between 0 and 1, found "):
        dropout_add_layer_norm(torch.ones(2, 8), torch.ones(2, 8), p=p)


def test_shapes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout_add_layer_norm: bias must have the shape \(8,\) of a row of x"):
        dropout_add_layer_norm(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), torch.ones(4))


@pytest.mark.parametrize("marked", [pytest.param(0, marks=pytest.mark.triton), 1])
@pytest.mark.parametrize("x_shape, residual_shape", [((2, 3, 8), (3, 8)), ((3, 8), (2, 3, 8)), ((2, 3, 8), (2, 3, 8))])
def test_each_form(marked: int, x_shape: tuple[int, ...], residual_shape: tuple[int, ...]) -> None:
    x = torch.randn(x_shape[::-1]).permute(*reversed(range(len(x_shape)))).requires_grad_()  # dropped as it lies
    residual, w, b = (torch.randn(shape, requires_grad=True) for shape in (residual_shape, (8,), (8,)))

    def usual() -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        total = dropped(x, 0.25, True) + residual
        return F.layer_norm(total, (8,), w, b), total

    normed, total = usual()
    forms: list[tuple[str, Any, dict[str, Any], tuple[Tensor, ...]]] = [
        ("sum", dropout_add_layer_norm, {}, (normed, total)),
        ("alone", dropout_add_layer_norm_alone, {}, (normed,)),
        (
            "viewed",
            dropout_add_layer_norm_viewed,
            {"shape": (3, 2, 8)},
            (normed.reshape(3, 2, 8), total.reshape(3, 2, 8)),
        ),
        ("flat", dropout_add_layer_norm_flat, {"rows": 6}, (normed.reshape(6, 8), total.reshape(6, 8), total)),
    ]
    for name, function, keywords, expected in forms:
        torch.manual_seed(1)
        found = function(x, residual, w, b, 0.25, **keywords)
        found = found if isinstance(found, tuple) else (found,)
        grads = [torch.randn_like(one) for one in expected]
        found_grads = torch.autograd.grad(found, (x, residual, w, b), grads)
        usual_grads = torch.autograd.grad(expected, (x, residual, w, b), grads, retain_graph=True)
        for one, other in zip((*found, *found_grads), (*expected, *usual_grads), strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), name


@pytest.mark.triton
def test_backward_draws_the_mask_of_many_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[layer_norm.__module__], "PROGRAMS", 4)  # of 3, 3, 3 and 1 rows
    x, residual, g, h = (torch.randn(10, 5) for _ in range(4))
    args = (x, residual, None, None, 0.25, 1e-5, False, False, torch.tensor([5]))
    found = torch.ops.slapo.dropout_add_layer_norm_backward([g, h], [], [True, True, False, False], *args)
    mask = philox_mask(5, (10, 5), 0.25).float()
    leaves = x.requires_grad_(), residual.requires_grad_()
    total = x * mask + residual
    for one, other in zip(found, torch.autograd.grad((F.layer_norm(total, (5,)), total), leaves, (g, h)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_over_several_dims() -> None:
    x, residual, w = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(3, 8)
    torch.manual_seed(1)
    found = dropout_add_layer_norm(x, residual, w, p=0.5)
    torch.manual_seed(1)
    total = F.dropout(x, 0.5) + residual
    assert torch.equal(found[0], F.layer_norm(total, (3, 8), w)) and torch.equal(found[1], total)


class Post(nn.Module):
    """BERT: the sum goes into the norm alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.3), nn.LayerNorm(8, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.fc(x)) + x)


class Pre(Post):
    """GPT-2: the sum is used again."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.fc(x), p=0.3, training=self.training)
        return x + self.fc(self.norm(x))


class Between(Post):
    """OPT, from one layer to the next."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.size(-1))
        y = (flat + self.drop(self.fc(flat))).view(x.shape)
        return y + self.norm(y)


class Flat(Post):
    """OPT, inside a layer; the shape of the sum is not used later."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.drop(self.fc(x))
        y = y.reshape(-1, y.size(-1))
        return y + self.norm(y)


class Always(Post):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(F.dropout(self.fc(x), 0.3) + x, (8,))


FORMS: dict[type[nn.Module], str] = {
    Post: "dropout_add_layer_norm_alone",
    Pre: "dropout_add_layer_norm",
    Between: "dropout_add_layer_norm_viewed",
    Flat: "dropout_add_layer_norm_flat",
    Always: "dropout_add_layer_norm_alone",
}


@pytest.mark.parametrize("kind", FORMS)
def test_fuse_finds_each_written_form(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 4, 8)
    sch = slapo.create_schedule(kind(), example_inputs=(x,))
    sch.fuse("dropout_add_layer_norm")
    assert calls(sch, FORMS[kind]) == 1
    assert calls(sch, "dropout") + calls(sch, "layer_norm") == 0
    assert sch.verify().grade in ("equal", "rounding")
    for train in (True, False):
        outputs = []
        for module in (sch.module, sch.original):
            module.train(train)
            torch.manual_seed(1)
            outputs.append(module(x))
        torch.testing.assert_close(*outputs)


class Near(Post):
    kind = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "no dropout":
            return self.norm(self.fc(x) + x)
        if self.kind == "dropout of the sum":
            return self.norm(self.drop(self.fc(x) + x))
        if self.kind == "dropout used again":
            y = self.drop(self.fc(x))
            return self.norm(y + x) * y
        return self.drop(self.norm(self.fc(x))) + x


NEAR = {
    "no dropout": "the graph has no dropout",
    "dropout of the sum": "'drop' .* is a call of Dropout where the pattern has add",
    "dropout used again": "the inner value 'drop' .*is used outside",
    "norm first": "2 of 3 operations are there, but 'linear' .* is linear where the pattern has dropout",
}


@pytest.mark.parametrize("kind", NEAR)
def test_near_misses_are_not_found(kind: str) -> None:
    model = Near()
    model.kind = kind
    sch = slapo.create_schedule(model, example_inputs=(torch.randn(2, 8),))
    with pytest.raises(slapo.errors.NoMatchError, match=NEAR[kind]):
        sch.fuse("dropout_add_layer_norm")
