"""Placements: how one tensor lies on the p ranks of one mesh axis.

`Replicate()` (R): every rank holds it whole. `Partial(op)` (P): each rank holds a summand (or a term of max or min).
`Shard(dim, blocks)` (S): a dim is split. A plain split is balanced: sizes differ by at most one, larger ones first.
A fused weight (q, k and v in one) is several blocks, each of which is split: `blocks=3` for equal ones, or a tuple of
their sizes. (Split, broadcast and partial of OneFlow, arXiv 2110.15032; Shard, Replicate and Partial of torch.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slapo_py.errors import PlacementError


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on one mesh axis."""


@dataclass(frozen=True)
class Replicate(Placement):
    """Whole on every rank."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial(Placement):
    """A term on every rank; the tensor is their sum, maximum or minimum."""

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in ("sum", "max", "min"):
            raise PlacementError(f'Partial: op must be "sum", "max" or "min", found {self.op!r}.')

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


@dataclass(frozen=True)
class Shard(Placement):
    """Split along a dim, counted from 0. blocks: how many equal blocks the dim has, or their sizes; each is split."""

    dim: int
    blocks: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or self.dim < 0:
            raise PlacementError(f"Shard: dim must be an int of at least 0, found {self.dim!r}.")
        sizes = self.blocks if isinstance(self.blocks, tuple) else (self.blocks,)
        if not sizes or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in sizes):
            raise PlacementError(
                f"Shard: blocks must be a positive int, or a tuple of positive sizes, found {self.blocks!r}."
            )
        if isinstance(self.blocks, tuple) and len(set(self.blocks)) == 1:
            object.__setattr__(self, "blocks", len(self.blocks))

    def __str__(self) -> str:
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim}, blocks={self.blocks})"

    def block_sizes(self, size: int) -> list[int]:
        """The sizes of the blocks of a dim of `size` elements. Raises `PlacementError` if they don't fill it."""
        if isinstance(self.blocks, tuple):
            if sum(self.blocks) != size:
                raise PlacementError(f"{self}: the blocks have {sum(self.blocks)} elements in all, the dim has {size}.")
            return list(self.blocks)
        if size % self.blocks:
            raise PlacementError(f"{self}: {size} elements don't divide into {self.blocks} equal blocks.")
        return [size // self.blocks] * self.blocks


R, P = Replicate(), Partial()
S = Shard


def balanced(size: int, ranks: int) -> list[int]:
    """How many of `size` elements each rank holds: they differ by at most one, larger shares first."""
    return [size // ranks + (rank < size % ranks) for rank in range(ranks)]


def local_size(size: int, placement: Placement, dim: int, ranks: int, rank: int) -> int:
    """How many elements of a dim a rank holds."""
    if not isinstance(placement, Shard) or placement.dim != dim:
        return size
    return sum(balanced(block, ranks)[rank] for block in placement.block_sizes(size))


def local_shape(shape: Sequence[int], placement: Placement, ranks: int, rank: int) -> tuple[int, ...]:
    """The shape of a rank's part. Raises `PlacementError` if the tensor has no such dim."""
    if isinstance(placement, Shard) and placement.dim >= len(shape):
        raise PlacementError(
            f"{placement} of a tensor of {len(shape)} dims {tuple(shape)}: it has no dim {placement.dim}."
        )
    return tuple(local_size(size, placement, dim, ranks, rank) for dim, size in enumerate(shape))


def is_even(shape: Sequence[int], placement: Placement, ranks: int) -> bool:
    """Whether all ranks hold parts of one shape."""
    if not isinstance(placement, Shard):
        return True
    return all(block % ranks == 0 for block in placement.block_sizes(shape[placement.dim]))


def split(tensor: Tensor, shard: Shard, ranks: int) -> list[Tensor]:
    """The parts of a whole tensor, rank by rank: views where the dim is one block, else copies."""
    local_shape(tensor.shape, shard, ranks, 0)
    pieces: list[list[Tensor]] = [[] for _ in range(ranks)]
    for block in tensor.split(shard.block_sizes(tensor.shape[shard.dim]), shard.dim):
        for rank, piece in enumerate(block.split(balanced(block.shape[shard.dim], ranks), shard.dim)):
            pieces[rank].append(piece)
    return [one[0] if len(one) == 1 else torch.cat(one, shard.dim) for one in pieces]


def join(parts: Sequence[Tensor], shard: Shard, size: int | None = None) -> Tensor:
    """The whole tensor of its parts. size: of the whole dim; needed only where blocks are sizes that don't divide."""
    ranks = len(parts)
    total = sum(part.shape[shard.dim] for part in parts) if size is None else size
    blocks = shard.block_sizes(total)
    if len(blocks) == 1:
        return torch.cat(list(parts), shard.dim)
    cut = [part.split([balanced(block, ranks)[rank] for block in blocks], shard.dim) for rank, part in enumerate(parts)]
    return torch.cat([cut[rank][block] for block in range(len(blocks)) for rank in range(ranks)], shard.dim)
