"""Numbers over all ranks of a mesh: counts, losses and the norm of the gradient, each element counted once."""

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slapo_py.build.facts import Facts
from slapo_py.distributed import raw
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.errors import EngineError


def summed(value: Tensor, mesh: Mesh | None, axis: str = DATA) -> Tensor:
    """The sum of a tensor over the ranks of an axis, on each of them."""
    if mesh is None or mesh.size(axis) == 1:
        return value
    total = value.clone()
    dist.all_reduce(total, group=mesh.group(axis))
    return total


def agreed_count(prepare: Callable[[], tuple[int, int]], batch: Any, mesh: Mesh, first: bool) -> tuple[int, int]:
    """The count of all data-parallel ranks, and the least number of parts of one. prepare: both, of this rank's batch.

    Where one of them raises, all do. Ranks that differ on other axes only must have been given the same batch, which
    is looked at in the first step. Raises `EngineError`, or what `prepare` raises.
    """
    count, parts, error = 0, 0, None
    try:
        count, parts = prepare()
    except Exception as raised:
        error = raised
    digest = _checksum(batch) if first and error is None else 0
    mine = torch.tensor([error is None, count, parts, digest], device=mesh.device_mesh.device_type)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    if not all(bool(one[0]) for one in every):
        said: list[str | None] = [None] * len(every)
        dist.all_gather_object(said, None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        rank = next(rank for rank, one in enumerate(said) if one is not None)
        raise EngineError(f"engine: rank {rank} can't take its batch, so no rank does. It says: {said[rank]}")
    axes = list(mesh.sizes)
    places = mesh.device_mesh.mesh.flatten().tolist()
    table = torch.stack([every[rank] for rank in places]).cpu().reshape(*mesh.sizes.values(), 4)
    table = table.movedim(axes.index(DATA), 0) if DATA in axes else table[None]
    table = table.reshape(table.shape[0], -1, 4)
    if not torch.equal(table, table[:, :1].expand_as(table)):
        raise EngineError(
            f'engine: ranks of one place on "{DATA}" were given different batches. Only "{DATA}" splits the data: let '
            f'each rank take the batch of its place there, mesh.get_local_rank("{DATA}") of {mesh.size(DATA)}.'
        )
    return int(table[:, 0, 1].sum()), int(table[:, 0, 2].min())


def _checksum(batch: Any) -> int:
    """Equal for equal batches."""
    found = 0
    for one in torch.utils._pytree.tree_leaves(batch):
        if isinstance(one, Tensor):
            flat = one.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found = zlib.crc32(flat.numpy().tobytes(), found)
    return found


def local(tensor: Any) -> Tensor:
    """A rank's own part of what FSDP2 has spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_partial(named: Iterable[tuple[str, nn.Parameter]], facts: Facts, mesh: Mesh) -> None:
    """Sum the gradients that the facts say are partial: of whole parameters that have met split data."""
    for name, parameter in named:
        for axis in facts[name].summed if name in facts else ():
            if mesh.size(axis) > 1 and parameter.grad is not None:
                part = local(parameter.grad)
                part.copy_(raw.all_reduce(part, "sum", mesh.ranks(axis).name))


def norm_and_clip_on(named: Iterable[tuple[str, nn.Parameter]], facts: Facts, mesh: Mesh, clip: float | None) -> Tensor:
    """The global L2 norm of the gradient; with `clip`, gradients are scaled in place so that it is at most that.

    What is split over an axis is summed over it; what every rank of an axis holds whole is counted once.
    """
    squares: dict[tuple[str, ...], list[Tensor]] = {}
    parts = []
    named = list(named)
    wide = torch.float64 if any(one.dtype == torch.float64 for _, one in named) else torch.float32
    device = named[0][1].device if named else None
    for name, parameter in named:
        if parameter.grad is None:
            continue
        part = local(parameter.grad)
        parts.append(part)
        axes = [axis for axis in facts[name].placements if mesh.size(axis) > 1] if name in facts else []
        if isinstance(parameter.grad, DTensor):
            axes.append(DATA)
        squares.setdefault(tuple(sorted(axes)), []).append(part.detach().to(wide).square().sum())
    # one number for each set of axes, also where this rank has no such gradient: others may
    chosen = _subsets(sorted(axis for axis in mesh.sizes if mesh.size(axis) > 1))
    none = torch.zeros((), dtype=wide, device=device)
    sums = torch.stack([torch.stack(squares[one]).sum() if one in squares else none for one in chosen])
    for axis in mesh.sizes:
        inside = torch.tensor([axis in one for one in chosen], device=device)
        if inside.any():
            sums = torch.where(inside, summed(sums, mesh, axis), sums)
    norm = sums.sum().sqrt()
    if clip is not None:
        scale = torch.clamp(clip / (norm + 1e-6), max=1.0)
        for part in parts:
            part.mul_(scale.to(part.dtype))
    return norm


def _subsets(axes: list[str]) -> list[tuple[str, ...]]:
    """Every set of some axes, in alphabetical order."""
    found: list[tuple[str, ...]] = [()]
    for axis in axes:
        found += [(*one, axis) for one in found]
    return sorted(found)
