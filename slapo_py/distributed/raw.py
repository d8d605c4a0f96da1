"""The collectives as custom operations without gradients: opaque to torch.compile, counted where they are issued.

Parts may be uneven. A placement is given as (dim, blocks, size): `encode` and the whole size of the split dim. A group
is given by its name. A gather or a reduction pads uneven parts to the largest; an all-to-all sends exact sizes.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from slapo_py.distributed import traffic
from slapo_py.layouts.placement import Shard, balanced, join, local_size, split

# torch 2.13 has renamed these two and warns of the old names.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _found(group: str) -> dist.ProcessGroup:
    return _resolve_process_group(cast(Any, group))


def encode(shard: Shard) -> list[int]:
    """The blocks as a list of ints: one is their number, more are their sizes."""
    return [shard.blocks] if isinstance(shard.blocks, int) else list(shard.blocks)


def _shard(dim: int, blocks: Sequence[int]) -> Shard:
    return Shard(dim, blocks[0] if len(blocks) == 1 else tuple(blocks))


def _part(whole: Sequence[int], shard: Shard, ranks: int, rank: int) -> list[int]:
    shape = list(whole)
    shape[shard.dim] = local_size(shape[shard.dim], shard, shard.dim, ranks, rank)
    return shape


def _whole(part: Tensor, dim: int, size: int) -> list[int]:
    return [*part.shape[:dim], size, *part.shape[dim + 1 :]]


def _padded(part: Tensor, dim: int, length: int) -> Tensor:
    if part.shape[dim] == length:
        return part.contiguous()
    filler = part.new_zeros(_whole(part, dim, length - part.shape[dim]))
    return torch.cat([part, filler], dim)


@torch.library.custom_op("slapo_py::all_reduce", mutates_args=())
def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The sum, maximum or minimum of the ranks' tensors."""
    ranks = _found(group)
    whole = x.clone(memory_format=torch.contiguous_format)
    own = balanced(x.numel(), ranks.size())[ranks.rank()]
    traffic.record("all_reduce", (x.numel() - own + own * (ranks.size() - 1)) * x.element_size())
    dist.all_reduce(whole, op=_REDUCE[op], group=ranks)
    return whole


@all_reduce.register_fake
def _(x: Tensor, op: str, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("slapo_py::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, blocks: Sequence[int], size: int, group: str) -> Tensor:
    """The whole tensor from every rank's part."""
    ranks, shard = _found(group), _shard(dim, blocks)
    lengths = [local_size(size, shard, dim, ranks.size(), rank) for rank in range(ranks.size())]
    part = _padded(x, dim, max(lengths))
    parts = part.new_empty([ranks.size(), *part.shape])
    traffic.record("all_gather", part.nbytes * (ranks.size() - 1))
    _gather_into(parts.flatten(0, 1) if part.dim() else parts, part, group=ranks)
    if dim == 0 and len(blocks) == blocks[0] == 1 and len(set(lengths)) == 1:
        return parts.flatten(0, 1)
    return join([one.narrow(dim, 0, length) for one, length in zip(parts, lengths)], shard, size)


@all_gather.register_fake
def _(x: Tensor, dim: int, blocks: Sequence[int], size: int, group: str) -> Tensor:
    return x.new_empty(_whole(x, dim, size))


@torch.library.custom_op("slapo_py::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, dim: int, blocks: Sequence[int], group: str) -> Tensor:
    """This rank's part of the sum of the ranks' tensors."""
    ranks = _found(group)
    parts = split(x, _shard(dim, blocks), ranks.size())
    length = max(part.shape[dim] for part in parts)
    terms = torch.stack([_padded(part, dim, length) for part in parts])
    own = torch.empty_like(terms[0])
    traffic.record("reduce_scatter", own.nbytes * (ranks.size() - 1))
    _scatter_into(own, terms.flatten(0, 1), group=ranks)
    return own.narrow(dim, 0, parts[ranks.rank()].shape[dim]).clone(memory_format=torch.contiguous_format)


@reduce_scatter.register_fake
def _(x: Tensor, dim: int, blocks: Sequence[int], group: str) -> Tensor:
    ranks = _found(group)
    return x.new_empty(_part(x.shape, _shard(dim, blocks), ranks.size(), ranks.rank()))


@torch.library.custom_op("slapo_py::all_to_all", mutates_args=())
def all_to_all(
    x: Tensor, dim: int, blocks: Sequence[int], size: int, to_dim: int, to_blocks: Sequence[int], group: str
) -> Tensor:
    """This rank's part along one dim from every rank's part along another, or along the same in other blocks."""
    ranks, source, target = _found(group), _shard(dim, blocks), _shard(to_dim, to_blocks)
    count, rank = ranks.size(), ranks.rank()
    if dim != to_dim:
        shapes = [_part(_whole(x, dim, size), source, count, one) for one in range(count)]
        shapes = [_part(shape, target, count, rank) for shape in shapes]
        return join(_exchanged(split(x, target, count), shapes, ranks), source, size)
    # Which elements of the dim each rank holds before and after; what two of them share is sent, in the sender's order.
    places = torch.arange(size)  # Not on x's device: counting there would wait for it.
    held, wanted = split(places, Shard(0, source.blocks), count), split(places, Shard(0, target.blocks), count)
    pieces = [x.index_select(dim, torch.isin(held[rank], one).nonzero().flatten().to(x.device)) for one in wanted]
    coming = [one[torch.isin(one, wanted[rank])] for one in held]
    shapes = [_whole(x, dim, one.shape[0]) for one in coming]
    order = torch.cat(coming).argsort().to(x.device)
    return torch.cat(_exchanged(pieces, shapes, ranks), dim).index_select(dim, order)


@all_to_all.register_fake
def _(
    x: Tensor, dim: int, blocks: Sequence[int], size: int, to_dim: int, to_blocks: Sequence[int], group: str
) -> Tensor:
    ranks = _found(group)
    return x.new_empty(_part(_whole(x, dim, size), _shard(to_dim, to_blocks), ranks.size(), ranks.rank()))


@torch.library.custom_op("slapo_py::scatter_terms", mutates_args=())
def scatter_terms(x: Tensor, dim: int, blocks: Sequence[int], group: str) -> Tensor:
    """(p, *part): every rank's term of this rank's part. A reduce-scatter before its reduction."""
    ranks = _found(group)
    parts = split(x, _shard(dim, blocks), ranks.size())
    own = parts[ranks.rank()]
    return torch.stack(_exchanged(parts, [list(own.shape)] * ranks.size(), ranks))


@scatter_terms.register_fake
def _(x: Tensor, dim: int, blocks: Sequence[int], group: str) -> Tensor:
    ranks = _found(group)
    return x.new_empty([ranks.size(), *_part(x.shape, _shard(dim, blocks), ranks.size(), ranks.rank())])


@torch.library.custom_op("slapo_py::return_terms", mutates_args=())
def return_terms(terms: Tensor, dim: int, blocks: Sequence[int], size: int, group: str) -> Tensor:
    """The transpose of `scatter_terms`: from (p, *part), what is every rank's, back to whole tensors."""
    ranks, shard = _found(group), _shard(dim, blocks)
    whole = _whole(terms[0], dim, size)
    shapes = [_part(whole, shard, ranks.size(), rank) for rank in range(ranks.size())]
    return join(_exchanged(list(terms), shapes, ranks), shard, size)


@return_terms.register_fake
def _(terms: Tensor, dim: int, blocks: Sequence[int], size: int, group: str) -> Tensor:
    return terms.new_empty(_whole(terms[0], dim, size))


def _exchanged(pieces: list[Tensor], shapes: list[list[int]], ranks: dist.ProcessGroup) -> list[Tensor]:
    """Send pieces[r] to rank r; what comes from each, in these shapes."""
    sent, received = [piece.numel() for piece in pieces], [math.prod(shape) for shape in shapes]
    outgoing = torch.cat([piece.reshape(-1) for piece in pieces])
    incoming = outgoing.new_empty(sum(received))
    traffic.record("all_to_all", (sum(sent) - sent[ranks.rank()]) * outgoing.element_size())
    dist.all_to_all_single(incoming, outgoing, received, sent, group=ranks)
    return [one.reshape(shape) for one, shape in zip(incoming.split(received), shapes)]
