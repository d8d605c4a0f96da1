"""masked_softmax: values, gradients, and where fuse finds it."""

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import NoMatchError
from slapo_py.kernels.masked_softmax import masked_softmax
from tests.kernels.lab import DEVICE, DTYPES, Args, Draw, KernelTests, close

module = sys.modules[masked_softmax.__module__]


def plain(
    scores: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, scale: float = 1.0, causal: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    z = scores * scale
    z = z if bias is None else z + bias
    if mask is not None:
        z = torch.where(mask, z, float("-inf")) if mask.dtype == torch.bool else z + mask
    if causal:
        queries, keys = z.shape[-2:]
        seen = torch.arange(keys, device=z.device) <= torch.arange(queries, device=z.device)[:, None] + keys - queries
        z = torch.where(seen, z, float("-inf"))
    if dtype is None or z.dtype == torch.float64:
        return F.softmax(z, dim=-1)
    return F.softmax(z, dim=-1, dtype=torch.float32).to(dtype)


class TestMaskedSoftmax(KernelTests):
    name = "masked_softmax"

    def inputs(self, draw: Draw) -> Args:
        shape = draw.shape(rows=8)
        mask = draw.one_of(None, "added", "boolean", "finfo")
        bias = draw.one_of(None, None, draw.dtype, torch.float32)
        return (
            draw.tensor(shape, 3.0),
            None if mask is None else self.mask(mask, self.some(shape, draw), draw),
            None if bias is None else self.added(self.some(shape, draw), bias, draw),
            draw.one_of(1.0, 0.125, 2.5),
            draw.one_of(False, False, True),
            draw.one_of(None, None, torch.float32, draw.dtype),
        )

    def mask(self, kind: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        if kind == "added":
            return self.added(shape, draw.one_of(draw.dtype, torch.float32), draw)
        seen = (torch.rand(shape, generator=draw.generator) < draw.one_of(0.0, 0.5, 0.9)).to(DEVICE)
        if kind == "boolean":
            return seen
        hidden = draw.one_of(float("-inf"), torch.finfo(draw.dtype).min)
        return torch.where(seen, 0.0, hidden).to(draw.dtype)

    def added(self, shape: tuple[int, ...], dtype: torch.dtype, draw: Draw) -> Tensor:
        """What is the same for all keys has a gradient of 0, of which only noise could be compared."""
        return draw.tensor(shape, dtype=dtype).requires_grad_(shape[-1] > 1)

    def some(self, shape: tuple[int, ...], draw: Draw) -> tuple[int, ...]:
        """A shape that broadcasts to this one."""
        kept = tuple(draw.one_of(size, size, 1) for size in shape)
        return kept[draw.one_of(0, 0, len(shape) - 1) :]

    def oracle(self, *args: Any) -> Tensor:
        return plain(*args)


@pytest.mark.triton
@pytest.mark.parametrize("causal", [False, True])
def test_rows_longer_than_a_block(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first blocks are hidden whole, or all are."""
    monkeypatch.setattr(module, "LONGEST", 16)
    torch.manual_seed(0)
    scores = (3 * torch.randn(2, 5, 70, device=DEVICE)).requires_grad_()
    mask = torch.zeros(1, 5, 70, device=DEVICE)
    mask[0, 1, :40], mask[0, 2], mask[0, 3, 20:] = float("-inf"), float("-inf"), torch.finfo(torch.float32).min
    mask.requires_grad_()
    values = []
    for kind, function in ((torch.float32, masked_softmax), (torch.float64, plain), (torch.float32, plain)):
        made = function(scores.to(kind), mask.to(kind), None, 0.5, causal)
        grad = torch.linspace(-1, 1, 70, device=DEVICE).expand(2, 5, 70).to(kind)
        values.append([made, *torch.autograd.grad(made, (scores, mask), grad)])
    for found, exact, usual in zip(*values):
        close(found, exact, usual, "a long row")
    assert values[0][0].isnan().any(-1).tolist() == [[False, False, True, False, False]] * 2


@pytest.mark.triton
def test_it_rounds_where_the_model_does() -> None:
    """The product is bfloat16, the sum with the bias, and the one with the mask."""
    torch.manual_seed(0)
    scores, bias, mask = (3 * torch.randn(4, 500, device=DEVICE).bfloat16() for _ in range(3))
    for args in ((None, None), (None, bias), (mask, None), (mask, bias)):
        made = [one(scores, *args, 0.3, False, torch.float32) for one in (masked_softmax, plain)]
        torch.testing.assert_close(*made)


@pytest.mark.triton
@pytest.mark.parametrize("longest", [2**13, 64])
def test_a_large_mean_costs_the_gradient_no_digits(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """sum p is not quite 1: torch's gradient shows how much a mean of 30 makes of it."""
    monkeypatch.setattr(module, "LONGEST", longest)
    torch.manual_seed(0)
    scores, grad = 3 * torch.randn(16, 257, device=DEVICE), 30 + torch.randn(16, 257, device=DEVICE)
    found = []
    for function, dtype in ((masked_softmax, torch.float32), (plain, torch.float32), (plain, torch.float64)):
        given = scores.to(dtype).requires_grad_()
        found.append(torch.autograd.grad(function(given), given, grad.to(dtype))[0])
    errors = [(one - found[2]).square().mean().sqrt() for one in found[:2]]
    assert errors[0] < 0.2 * errors[1]


@pytest.mark.triton
def test_a_mask_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broadcast over batch, heads and queries, it is never laid out anew."""
    given = []
    monkeypatch.setattr(module, "launch", lambda function, grid, *args, **constants: given.extend(args))
    mask = torch.zeros(2, 1, 1, 4, device=DEVICE)
    masked_softmax(torch.zeros(2, 3, 5, 4, device=DEVICE), mask)
    assert given[1].data_ptr() == mask.data_ptr()
    assert given[-8:-4] == [4, 0, 0, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [float("-inf"), "finfo", False], ids=str)
def test_rows_of_which_nothing_is_seen(hidden: Any, dtype: torch.dtype) -> None:
    """NaN as in torch, or uniform with the smallest number; the gradient past a boolean mask is 0."""
    mask = torch.full((3, 1, 4), torch.finfo(dtype).min if hidden == "finfo" else hidden, device=DEVICE)
    mask = mask if hidden is False else mask.to(dtype)
    scores = torch.randn(3, 2, 4, device=DEVICE, dtype=dtype, requires_grad=True)
    made = masked_softmax(scores, mask)
    (grad,) = torch.autograd.grad(made.sum(), scores)
    assert made.isnan().all() if hidden != "finfo" else torch.equal(made, torch.full_like(made, 0.25))
    assert grad.isnan().all() if hidden not in ("finfo", False) else torch.equal(grad, torch.zeros_like(grad))


def forms() -> dict[str, Any]:
    """Attention weights as the models write them; q stands for what tells the dtype."""

    def bert(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(s * 0.25 + mask, dim=-1)

    def gpt2(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(s * 0.25 + mask, dim=-1).type(q.dtype)

    def t5(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(s * 1.0 + bias + mask, dim=-1)

    def t5_unpadded(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(s * 1.0 + bias, dim=-1)

    def llama(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(s * 0.25 + mask, dim=-1, dtype=torch.float32).to(q.dtype)

    def gemma(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        s = torch.tanh(s * 0.25 / 50.0) * 50.0
        return F.softmax(s + mask, dim=-1, dtype=torch.float32).to(q.dtype)

    def unscaled(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return torch.softmax(s + mask, -1)

    def unscaled_wide(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(s + mask, dim=-1, dtype=torch.float32).to(q.dtype)

    def unmasked(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return (s * 0.25).softmax(dim=-1)

    def unmasked_wide(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(s * 0.25, dim=-1, dtype=torch.float32).to(q.dtype)

    def learned_temperature(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(s * bias.mean() + mask, dim=-1)

    return dict(locals())


class Attention(nn.Module):
    def __init__(self, form: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.form, self.fc = form, nn.Linear(8, 8, dtype=dtype)
        self.bias = nn.Parameter(torch.randn(1, 2, 5, 5, dtype=dtype))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.fc(x)
        heads = q.view(2, 5, 2, 4).transpose(1, 2)
        weights = F.dropout(self.form(heads @ heads.transpose(-1, -2), q, mask, self.bias), 0.0, self.training)
        return (weights @ heads).transpose(1, 2).reshape(2, 5, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", forms())
def test_fuse_finds_every_form(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mask = torch.zeros(2, 1, 5, 5, dtype=dtype)
    mask[1, :, :, 3:] = torch.finfo(dtype).min
    inputs = (torch.randn(2, 5, 8, dtype=dtype), mask)
    sch = slapo.create_schedule(Attention(forms()[name], dtype), example_inputs=inputs)
    sch.fuse("masked_softmax")
    (node,) = [one for one in sch.graph.nodes if getattr(one.target, "__name__", "") == "masked_softmax"]
    assert len(node.args) == {"t5": 3, "unmasked": 1, "unmasked_wide": 1}.get(name, 2)
    assert not [one for one in sch.graph.nodes if getattr(one.target, "__name__", one.target) == "softmax"]
    assert sch.verify().grade in ("equal", "rounding")
    assert slapo.misses(sch.module) == {}


def another_dim(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    return F.softmax(s * 0.25 + mask, dim=1)


def dropped_before(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    return F.softmax(F.dropout(s * 0.25 + mask, 0.1), dim=-1)


def kept_wide(s: Tensor, q: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    weights = F.softmax(s * 0.25 + mask, dim=-1, dtype=torch.float32)
    return weights.to(q.dtype) * weights.sum().to(q.dtype)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (another_dim, "_.* does not match: .*softmax"),
        (dropped_before, "_biased .* dropout where the pattern has add"),
        (kept_wide, "_scaled_wide .* is used outside"),
    ],
)
def test_what_only_looks_like_it_stays(form: Any, reason: str) -> None:
    inputs = (torch.randn(2, 5, 8), torch.zeros(2, 1, 5, 5))
    sch = slapo.create_schedule(Attention(form, torch.float32), example_inputs=inputs)
    with pytest.raises(NoMatchError, match=reason):
        sch.fuse("masked_softmax")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"mask": torch.ones(4, dtype=torch.int64)},
            "masked_softmax: mask must be boolean or floating, found torch.int64",
        ),
        ({"bias": torch.ones(4, dtype=torch.bool)}, "masked_softmax: bias must be floating, found torch.bool"),
        ({"causal": True}, r"masked_softmax: causal needs scores of \(..., Q, K\), found \(4,\)"),
    ],
)
def test_what_it_cannot_take_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        masked_softmax(torch.ones(4), **given)
