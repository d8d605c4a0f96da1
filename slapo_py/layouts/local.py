"""Operations that a rank computes otherwise than on the whole: a lookup in its rows, a loss over its classes."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.layouts.placement import balanced


def embedding(
    rank: int, ranks: int, input: Tensor, weight: Tensor, padding_idx: int | None = None, **rest: Any
) -> Tensor:
    """A lookup in the rows that this rank holds; other ids give zeros, so that the ranks' results add up to the whole.

    weight (v_r, n): the rows of this rank; input: ids of the whole table.
    """
    if rest.get("max_norm") is not None:
        raise NotImplementedError("embedding with max_norm changes its weight, and can't be split over its rows")
    sizes = balanced(sum_of_rows(weight, rank, ranks), ranks)
    first = sum(sizes[:rank])
    here = (input >= first) & (input < first + weight.shape[0])
    if padding_idx is not None:
        padding_idx = padding_idx - first if first <= padding_idx < first + weight.shape[0] else None
    found = F.embedding((input - first).clamp(0, weight.shape[0] - 1), weight, padding_idx)
    return found * here[..., None].to(found.dtype)


def sum_of_rows(weight: Tensor, rank: int, ranks: int) -> int:
    """Rows of the whole table; an uneven one says so itself (`whole_rows`)."""
    return int(getattr(weight, "whole_rows", weight.shape[0] * ranks))


class _Loss(torch.autograd.Function):
    """The rows' losses of logits split over the classes: a maximum, a sum and the label's logit are exchanged."""

    @staticmethod
    def forward(ctx: Any, labels: Tensor, ignore: int, smoothing: float, *logits: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        starts = [sum(one.shape[-1] for one in logits[:rank]) for rank in range(len(logits))]
        classes = sum(one.shape[-1] for one in logits)
        top = torch.stack([one.amax(-1) for one in logits]).amax(0)
        terms = [(one - top[:, None]).exp() for one in logits]
        total = torch.stack([one.sum(-1) for one in terms]).sum(0)
        kept = labels != ignore
        picked = torch.zeros_like(top)
        for start, one in zip(starts, logits):
            here = (labels >= start) & (labels < start + one.shape[-1])
            index = (labels - start).clamp(0, one.shape[-1] - 1)[:, None]
            picked = picked + torch.where(here, one.gather(-1, index)[:, 0] - top, torch.zeros_like(top))
        mean = sum((one - top[:, None]).sum(-1) for one in logits) / classes
        losses = (total.log() - (1 - smoothing) * picked - smoothing * mean) * kept
        ctx.save_for_backward(labels, kept, total, *terms)
        ctx.starts, ctx.smoothing, ctx.classes = starts, smoothing, classes
        return tuple(losses.clone() for _ in logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        labels, kept, total, *terms = ctx.saved_tensors
        found = []
        for start, term, grad in zip(ctx.starts, terms, grads):
            at = labels[:, None] == torch.arange(term.shape[-1]) + start
            slope = term / total[:, None] - (1 - ctx.smoothing) * at.to(term.dtype) - ctx.smoothing / ctx.classes
            found.append(slope * (kept * grad)[:, None])
        return (None, None, None, *found)


def cross_entropy_in_lock_step(parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Tensor]:
    """F.cross_entropy on every rank, of logits split over the classes. parts: the arguments of each rank."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = [{**dict(zip(names, args)), **kwargs} for args, kwargs in parts]
    first = given[0]
    ignore, reduction = first.get("ignore_index", -100), first.get("reduction", "mean")
    losses = _Loss.apply(  # type: ignore[no-untyped-call]
        first["target"], ignore, first.get("label_smoothing", 0.0), *(one["input"] for one in given)
    )
    if reduction == "none":
        return list(losses)
    sums = [one.sum() for one in losses]
    return sums if reduction == "sum" else [one / (first["target"] != ignore).sum() for one in sums]
