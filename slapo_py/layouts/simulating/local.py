"""Operations that a rank computes otherwise than on the whole: a lookup in its rows, a loss over its classes."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding_in_lock_step(parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Tensor]:
    """F.embedding on every rank, of a table split over its rows, evenly or not. parts: the arguments of each rank.

    Ids of other ranks' rows give zeros, so that the results add up to the whole.
    """
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = [{**dict(zip(names, args)), **kwargs} for args, kwargs in parts]
    rows = [one["weight"].shape[0] for one in given]
    return [_lookup(one, sum(rows[:rank]), sum(rows)) for rank, one in enumerate(given)]


def _lookup(given: dict[str, Any], first: int, total: int) -> Tensor:
    """The rows from `first` on, of `total` in all."""
    ids, weight, padding = given["input"], given["weight"], given.get("padding_idx")
    size = weight.shape[0]
    here = (ids >= first) & (ids < first + size)
    if padding is not None:
        padding = padding % total - first
        padding = padding if 0 <= padding < size else None
    found = F.embedding((ids - first).clamp(0, size - 1), weight, padding)
    return found * here[..., None].to(found.dtype)


class _Loss(torch.autograd.Function):
    """The rows' losses of logits split over the classes: a maximum, a sum and the label's logit are exchanged."""

    @staticmethod
    def forward(ctx: Any, labels: Tensor, ignore: int, smoothing: float, *logits: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        starts = [sum(one.shape[-1] for one in logits[:rank]) for rank in range(len(logits))]
        classes = sum(one.shape[-1] for one in logits)
        top = torch.stack([one.amax(-1) for one in logits]).amax(0)
        terms = [(one - top[..., None]).exp() for one in logits]
        total = torch.stack([one.sum(-1) for one in terms]).sum(0)
        kept = labels != ignore
        picked = torch.zeros_like(top)
        for start, one in zip(starts, logits):
            here = (labels >= start) & (labels < start + one.shape[-1])
            index = (labels - start).clamp(0, one.shape[-1] - 1)[..., None]
            picked = picked + torch.where(here, one.gather(-1, index)[..., 0] - top, torch.zeros_like(top))
        mean = sum((one - top[..., None]).sum(-1) for one in logits) / classes
        losses = (total.log() - (1 - smoothing) * picked - smoothing * mean) * kept
        ctx.save_for_backward(labels, kept, total, *terms)
        ctx.starts, ctx.smoothing, ctx.classes = starts, smoothing, classes
        return tuple(losses.clone() for _ in logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        labels, kept, total, *terms = ctx.saved_tensors
        found = []
        for start, term, grad in zip(ctx.starts, terms, grads):
            at = labels[..., None] == torch.arange(term.shape[-1]) + start
            slope = term / total[..., None] - (1 - ctx.smoothing) * at.to(term.dtype) - ctx.smoothing / ctx.classes
            found.append(slope * (kept * grad)[..., None])
        return (None, None, None, *found)


Names = tuple[tuple[str, str], ...]
"""Of each argument of a loss, in order, its name and that in `F.cross_entropy`, "" where that has no such argument."""


def loss_names(loss: Callable[..., Any]) -> Names:
    """The names of `F.cross_entropy`, or of a function that is one: the logits come first, then the labels."""
    first, second, *options = inspect.signature(loss).parameters
    known = inspect.signature(F.cross_entropy).parameters
    return (first, "input"), (second, "target"), *((one, one if one in known else "") for one in options)


def loss_arguments(names: Names, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a loss, by their names in `F.cross_entropy`."""
    given = {**{name: value for (name, _), value in zip(names, args)}, **kwargs}
    return {there: given[name] for name, there in names if there and name in given}


def cross_entropy_in_lock_step(
    loss: Callable[..., Any], parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> list[Tensor]:
    """F.cross_entropy on every rank, of logits split over the classes.

    loss: the function of the node, which may be a kernel that stands for it. parts: the arguments of each rank.
    """
    names = loss_names(loss)
    given = [loss_arguments(names, args, kwargs) for args, kwargs in parts]
    first = given[0]
    ignore, reduction = first.get("ignore_index", -100), first.get("reduction", "mean")
    losses = _Loss.apply(  # type: ignore[no-untyped-call]
        first["target"], ignore, first.get("label_smoothing", 0.0), *(one["input"] for one in given)
    )
    if reduction == "none":
        return list(losses)
    sums = [one.sum() for one in losses]
    return sums if reduction == "sum" else [one / (first["target"] != ignore).sum() for one in sums]
