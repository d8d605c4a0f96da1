"""Collectives with gradients: what happens to the value, and, chosen apart, what happens to its gradient.

    y = all_gather(x, S(1), group, gradient="reduce_scatter")

A move is one thing done to a tensor by the ranks of a group: `AllReduce`, `AllGather`, `ReduceScatter`, `AllToAll`, or
without communication `Split`, `Pad`, `Mask`. `paired(x, value, gradient)` runs moves on the value in forward and others
on its gradient in backward; the functions below name the usual pairs. Autograd's own transposes aren't used: they can't
know whether a gradient that arrives is whole on each rank or a term of a sum. All of it goes through
torch.compile(fullgraph=True).
"""

import abc
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slapo_py.distributed import raw
from slapo_py.errors import PlacementError
from slapo_py.layouts.placement import Shard, join, local_shape
from slapo_py.layouts.placement import split as split_whole

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Mask",
    "Move",
    "Pad",
    "Ranks",
    "ReduceScatter",
    "Split",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "identity",
    "paired",
    "reduce_scatter",
    "split",
    "winners",
]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group as plain data: its name, how many they are, and which this one is."""

    name: str
    size: int
    rank: int

    @staticmethod
    def of(group: dist.ProcessGroup | None = None) -> "Ranks":
        """Of a process group; None is the default one."""
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise PlacementError("There is no process group: call torch.distributed.init_process_group first.")
        return Ranks(group.group_name, group.size(), group.rank())


@dataclass(frozen=True)
class Move(abc.ABC):
    """One thing done to a tensor by the ranks of a group."""

    ranks: Ranks

    @abc.abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The tensor after it."""


@dataclass(frozen=True)
class AllReduce(Move):
    """A term on each rank -> their sum, maximum or minimum on each. 2(p-1)T bytes in all."""

    op: str = "sum"

    def __call__(self, x: Tensor) -> Tensor:
        return raw.all_reduce(x, self.op, self.ranks.name)


@dataclass(frozen=True)
class AllGather(Move):
    """A part on each rank -> the whole on each. size: of the whole dim. (p-1)T bytes in all."""

    shard: Shard
    size: int

    def __call__(self, x: Tensor) -> Tensor:
        return raw.all_gather(x, self.shard.dim, raw.encode(self.shard), self.size, self.ranks.name)


@dataclass(frozen=True)
class ReduceScatter(Move):
    """A term on each rank -> a part of their sum, maximum or minimum. (p-1)T bytes in all."""

    shard: Shard
    op: str = "sum"

    def __call__(self, x: Tensor) -> Tensor:
        if self.op == "sum":
            return raw.reduce_scatter(x, self.shard.dim, raw.encode(self.shard), self.ranks.name)
        return _best(raw.scatter_terms(x, self.shard.dim, raw.encode(self.shard), self.ranks.name), self.op)[0]


@dataclass(frozen=True)
class AllToAll(Move):
    """A part along one dim -> a part along another. size: of the first dim, whole. (p-1)/p T bytes in all."""

    source: Shard
    target: Shard
    size: int

    def __call__(self, x: Tensor) -> Tensor:
        source, target = self.source, self.target
        blocks, to_blocks = raw.encode(source), raw.encode(target)
        return raw.all_to_all(x, source.dim, blocks, self.size, target.dim, to_blocks, self.ranks.name)


@dataclass(frozen=True)
class Split(Move):
    """The whole on each rank -> a part on each. Nothing is sent."""

    shard: Shard

    def __call__(self, x: Tensor) -> Tensor:
        # A copy, always: a view would keep the whole alive, and could not be written to in place.
        part = split_whole(x, self.shard, self.ranks.size)[self.ranks.rank]
        return part.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Pad(Move):
    """A part on each rank -> a term on each: the part, and around it what the op ignores. Nothing is sent."""

    shard: Shard
    size: int
    op: str = "sum"

    def __call__(self, x: Tensor) -> Tensor:
        whole = [*x.shape]
        whole[self.shard.dim] = self.size
        shapes = [local_shape(whole, self.shard, self.ranks.size, rank) for rank in range(self.ranks.size)]
        fill = _neutral(x.dtype, self.op)
        parts = [x if rank == self.ranks.rank else x.new_full(shape, fill) for rank, shape in enumerate(shapes)]
        return join(parts, self.shard, self.size)


@dataclass(frozen=True)
class Mask(Move):
    """The whole on each rank -> a term of a sum on each: rank 0 keeps it, the others hold zeros. Nothing is sent."""

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.ranks.rank == 0 else torch.zeros_like(x)


def _neutral(dtype: torch.dtype, op: str) -> float | int | bool:
    """What a sum, a maximum or a minimum ignores."""
    if op == "sum":
        return 0
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def paired(x: Tensor, value: tuple[Move, ...], gradient: tuple[Move, ...] = ()) -> Tensor:
    """Run moves on the value, and in backward others on its gradient. Both in the order in which they are written.

    Where nothing is done to the value the result is a view of it; torch refuses to write to that in place.
    """
    if not value and not gradient:
        return x
    return _Paired.apply(x, value, gradient)


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: tuple[Move, ...], gradient: tuple[Move, ...]) -> Tensor:
        ctx.gradient = gradient
        y = x
        for move in value:
            y = move(y)
        return x.view_as(x) if y is x else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        for move in ctx.gradient:
            grad = move(grad)
        return grad, None, None


def winners(x: Tensor, shard: Shard, op: str, ranks: Ranks) -> Tensor:
    """A part of the maximum (minimum) of the ranks' tensors; each element's gradient goes to the rank that holds it.

    Where several do, to the lowest of them, as `torch.max(dim)` picks one index: the ranks' gradients add up to the
    whole's. (p-1)T bytes each way.
    """
    return _Winners.apply(x, shard, op, ranks)


class _Winners(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard, op: str, ranks: Ranks) -> Tensor:
        best, who = _best(raw.scatter_terms(x, shard.dim, raw.encode(shard), ranks.name), op)
        ctx.save_for_backward(who)
        ctx.shard, ctx.ranks, ctx.size = shard, ranks, x.shape[shard.dim]
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (who,) = ctx.saved_tensors
        shares = torch.stack([torch.where(who == rank, grad, 0) for rank in range(ctx.ranks.size)])
        whole = raw.return_terms(shares, ctx.shard.dim, raw.encode(ctx.shard), ctx.size, ctx.ranks.name)
        return whole, None, None, None


def _best(terms: Tensor, op: str) -> tuple[Tensor, Tensor]:
    """The best of terms (p, *part), and the lowest rank that holds it."""
    best = terms.amax(0) if op == "max" else terms.amin(0)
    holds = (terms == best) | (terms != terms)  # A NaN is what amax and amin give: it has its rank too.
    return best, holds.to(torch.uint8).argmax(0)


def identity(
    x: Tensor, group: dist.ProcessGroup | None = None, *, gradient: Literal["identity", "all_reduce"]
) -> Tensor:
    """Nothing; in backward the ranks' gradients are added up (Megatron's f) or left."""
    _known("identity", gradient, "identity", "all_reduce")
    ranks = Ranks.of(group)
    return paired(x, (), (AllReduce(ranks),) if gradient == "all_reduce" else ())


def all_reduce(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    op: str = "sum",
    *,
    gradient: Literal["identity", "all_reduce"],
) -> Tensor:
    """The ranks' sum on each; the gradient is left (Megatron's g), or added up where each rank uses the sum apart.

    op "max" and "min" are for values that need no gradient: see `winners`.
    """
    _known("all_reduce", gradient, "identity", "all_reduce")
    if op != "sum" and x.requires_grad and torch.is_grad_enabled():
        raise PlacementError(
            f'all_reduce(op="{op}"): the gradient of a {op} goes to the rank that holds it. '
            f'Write redistribute(x, Partial("{op}"), R), or all_reduce(x.detach(), ...).'
        )
    ranks = Ranks.of(group)
    return paired(x, (AllReduce(ranks, op),), (AllReduce(ranks),) if gradient == "all_reduce" else ())


def all_gather(
    x: Tensor,
    shard: Shard,
    group: dist.ProcessGroup | None = None,
    *,
    size: int | None = None,
    gradient: Literal["split", "reduce_scatter"],
) -> Tensor:
    """The whole on each rank; its gradient is split (alike on all ranks) or reduce-scattered (a term on each).

    size: of the whole dim; without it all parts are taken to be as large as this one.
    """
    _known("all_gather", gradient, "split", "reduce_scatter")
    ranks = Ranks.of(group)
    size = x.shape[shard.dim] * ranks.size if size is None else size
    back = Split(ranks, shard) if gradient == "split" else ReduceScatter(ranks, shard)
    return paired(x, (AllGather(ranks, shard, size),), (back,))


def reduce_scatter(
    x: Tensor,
    shard: Shard,
    group: dist.ProcessGroup | None = None,
    *,
    gradient: Literal["all_gather", "pad"],
) -> Tensor:
    """A part of the ranks' sum on each; its gradient is gathered whole, or put in its place with zeros around it."""
    _known("reduce_scatter", gradient, "all_gather", "pad")
    ranks, size = Ranks.of(group), x.shape[shard.dim]
    back = AllGather(ranks, shard, size) if gradient == "all_gather" else Pad(ranks, shard, size)
    return paired(x, (ReduceScatter(ranks, shard),), (back,))


def split(
    x: Tensor,
    shard: Shard,
    group: dist.ProcessGroup | None = None,
    *,
    gradient: Literal["all_gather", "pad"],
) -> Tensor:
    """A part of what all ranks hold on each; its gradient is gathered whole, or a term: zeros around the part's."""
    _known("split", gradient, "all_gather", "pad")
    ranks, size = Ranks.of(group), x.shape[shard.dim]
    back = AllGather(ranks, shard, size) if gradient == "all_gather" else Pad(ranks, shard, size)
    return paired(x, (Split(ranks, shard),), (back,))


def all_to_all(
    x: Tensor,
    source: Shard,
    target: Shard,
    group: dist.ProcessGroup | None = None,
    *,
    size: int | None = None,
) -> Tensor:
    """From a part along one dim to a part along another; the gradient goes back the same way.

    size: of the first dim, whole; without it all parts are taken to be as large as this one.
    """
    ranks = Ranks.of(group)
    size = x.shape[source.dim] * ranks.size if size is None else size
    back = size if target.dim == source.dim else x.shape[target.dim]
    return paired(x, (AllToAll(ranks, source, target, size),), (AllToAll(ranks, target, source, back),))


def _known(name: str, gradient: str, *rules: str) -> None:
    if gradient not in rules:
        known = " or ".join(f'"{rule}"' for rule in rules)
        raise PlacementError(f"{name}: gradient must be {known}, found {gradient!r}.")
