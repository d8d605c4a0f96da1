"""`F.cross_entropy` where each rank has the logits of some of the classes: one exchange of a few numbers a row.

For a row x of logits with label t, over all classes: top = max x, total = sum_j exp(x_j - top), smoothing e of C
classes:

    loss = log(total) + (1 - e) (top - x_t) + (e / C) sum_j (top - x_j)
    dloss/dx_j = exp(x_j - top) / total - (1 - e) [j = t] - e / C

A rank finds the four numbers of its classes: its own top, the rest of the formula relative to it, and x_t where it has
it. These are gathered, and every rank makes the same loss of them. Backward needs no more than its own logits, top and
total. (Online softmax: Milakov and Gimelshein, arXiv 1805.02867; the exchange: Shoeybi et al., arXiv 1909.08053.)
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slapo_py.distributed import raw
from slapo_py.distributed.collectives import Ranks
from slapo_py.errors import PlacementError
from slapo_py.layouts.placement import balanced


class Parts(Protocol):
    """What the loss needs of the classes start, ..., start + W - 1: logits (..., W) and labels (...) to (4, ...).

    Of each row: the largest logit; the sum of exp(x_j - it); the label's logit, 0 where its class lies outside; with
    label smoothing the sum of (it - x_j), else 0. In float32, or float64 for such logits. 0 for an ignored row.
    """

    def __call__(
        self, logits: Tensor, labels: Tensor, start: int, ignore_index: int, label_smoothing: float, /
    ) -> Tensor: ...


class Gradient(Protocol):
    """The gradient of the logits (..., W), in their dtype. grad: of each row's loss; top, total: over all classes."""

    def __call__(
        self, grad: Tensor, logits: Tensor, labels: Tensor, top: Tensor, total: Tensor, start: int, classes: int,
        ignore_index: int, label_smoothing: float, /,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True)
class Slice:
    """How a rank computes what concerns its own classes only: plainly, or by the two functions of a fused kernel."""

    parts: Parts
    gradient: Gradient


def plain_parts(logits: Tensor, labels: Tensor, start: int, ignore_index: int, label_smoothing: float) -> Tensor:
    """See `Parts`."""
    x, counted, width = _wide(logits), labels != ignore_index, logits.shape[-1]
    if not width:
        empty = x.new_zeros((4, *labels.shape))
        return torch.cat((empty[:1] - torch.inf, empty[1:])).masked_fill(~counted, 0.0)
    top = x.amax(-1)
    base = top.masked_fill(top == -torch.inf, 0.0).unsqueeze(-1)  # -inf - -inf would be nan
    here = counted & (labels >= start) & (labels < start + width)
    picked = x.gather(-1, torch.where(here, labels - start, 0).unsqueeze(-1)).squeeze(-1)
    below = (base - x).sum(-1) if label_smoothing else torch.zeros_like(top)
    parts = torch.stack((top, (x - base).exp().sum(-1), torch.where(here, picked, 0.0), below))
    return parts.masked_fill(~counted, 0.0)


def plain_gradient(
    grad: Tensor, logits: Tensor, labels: Tensor, top: Tensor, total: Tensor, start: int, classes: int,
    ignore_index: int, label_smoothing: float,
) -> Tensor:  # fmt: skip
    """See `Gradient`."""
    counted, width = labels != ignore_index, logits.shape[-1]
    grad = torch.where(counted, grad, 0.0)
    top, total = torch.where(counted, top, torch.inf), torch.where(counted, total, 1.0)  # so that these rows give 0
    dx = (_wide(logits) - top.unsqueeze(-1)).exp() * (grad / total).unsqueeze(-1)
    if label_smoothing:
        dx = dx - (label_smoothing / classes * grad).unsqueeze(-1)
    if width:
        here = counted & (labels >= start) & (labels < start + width)
        place = torch.where(here, labels - start, 0).unsqueeze(-1)
        dx = dx.scatter_add(-1, place, torch.where(here, (label_smoothing - 1) * grad, 0.0).unsqueeze(-1))
    return dx.to(logits.dtype)


PLAIN = Slice(plain_parts, plain_gradient)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    classes: int,
    ranks: Ranks,
    by: Slice = PLAIN,
) -> Tensor:
    """`F.cross_entropy` of logits with `classes` classes in all, split over the ranks as a balanced split has them.

    logits: (N, classes of this rank) or (classes of this rank,); labels: (N,) or (), numbers of classes, the same on
    every rank. The result, the same on every rank, has the dtype of the logits (float32 under autocast); sums are made
    in float32, or in float64 for such logits. Forward is one all-gather of three numbers a row, four with label
    smoothing; backward sends nothing. A label out of range gives nan. by: who computes a rank's own classes.

    Raises `PlacementError` for logits that are not this rank's part, class weights, probabilities as labels, the
    deprecated options, and an unknown reduction.
    """
    _check(logits, labels, classes, ranks, reduction, label_smoothing)
    for name, given in (("weight", weight), ("size_average", size_average), ("reduce", reduce)):
        if given is not None:
            raise PlacementError(
                f"cross_entropy: {name} is not supported where the classes are split over ranks. Leave it out"
                f"{'' if name == 'weight' else ', and say reduction='}."
            )
    kind = logits.device.type
    if torch.is_autocast_enabled(kind) and logits.dtype != torch.float64:
        logits = logits.float()
    start = sum(balanced(classes, ranks.size)[: ranks.rank])
    rows = _Rows.apply(logits, labels, start, classes, ignore_index, label_smoothing, ranks, by)  # type: ignore[no-untyped-call]
    if reduction == "mean":
        rows = rows.sum() / (labels != ignore_index).sum()
    elif reduction == "sum":
        rows = rows.sum()
    return rows.to(logits.dtype)  # type: ignore[no-any-return]


class _Rows(torch.autograd.Function):
    """The loss of each row, in float32 or float64."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, start: int, classes: int, ignored: int, smoothing: float,
        ranks: Ranks, by: Slice,
    ) -> Tensor:  # fmt: skip
        own = by.parts(logits.detach(), labels, start, ignored, smoothing)[: 4 if smoothing else 3]
        every = raw.all_gather(own.unsqueeze(0), 0, [1], ranks.size, ranks.name)
        tops, totals, picked = every[:, 0], every[:, 1], every[:, 2].sum(0)
        top = tops.amax(0)
        lower = tops == -torch.inf  # a rank without classes, or without any that counts: its total is 0
        total = torch.where(lower, totals, totals * (tops - top).exp()).sum(0)
        losses = total.log() + (1 - smoothing) * (top - picked)
        if smoothing:
            widths = torch.tensor(balanced(classes, ranks.size), dtype=top.dtype, device=top.device)
            raised = widths.reshape(-1, *[1] * top.dim()) * (top - tops)
            below = every[:, 3] + torch.where(lower, 0.0, raised)
            losses = losses + smoothing / classes * below.sum(0)
        losses = losses.masked_fill((labels < 0) | (labels >= classes), torch.nan)
        ctx.save_for_backward(logits, labels, top, total)
        ctx.given = start, classes, ignored, smoothing
        ctx.by = by
        return losses.masked_fill(labels == ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.by.gradient(grad, *ctx.saved_tensors, *ctx.given)
        return dx, None, None, None, None, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check(logits: Tensor, labels: Tensor, classes: int, ranks: Ranks, reduction: str, label_smoothing: float) -> None:
    if labels.is_floating_point():
        raise PlacementError(
            f"cross_entropy: labels must be numbers of classes (int64), found {labels.dtype}; probabilities are not "
            f"supported where the classes are split over ranks."
        )
    if logits.dim() not in (1, 2) or labels.shape != logits.shape[:-1]:
        raise PlacementError(
            f"cross_entropy: needs logits (N, classes) and labels (N,), found {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}. Flatten them: logits.flatten(0, -2), labels.flatten()."
        )
    size = balanced(classes, ranks.size)[ranks.rank]
    if logits.shape[-1] != size:
        raise PlacementError(
            f"cross_entropy: rank {ranks.rank} of {ranks.size} holds the logits of {logits.shape[-1]} classes; of "
            f"{classes} in all it should hold {size}. Give the number of all classes as classes=."
        )
    if reduction not in ("mean", "sum", "none"):
        raise PlacementError(f'cross_entropy: reduction must be "mean", "sum" or "none", found {reduction!r}.')
    if not 0 <= label_smoothing <= 1:
        raise PlacementError(f"cross_entropy: label_smoothing must be between 0 and 1, found {label_smoothing}.")
