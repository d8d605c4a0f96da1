"""Numbers over all ranks of a mesh: counts, losses and the norm of the gradient, each element counted once."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slapo_py.build.facts import Facts
from slapo_py.distributed import raw
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.distributed.rng import checksum
from slapo_py.errors import EngineError


def summed(value: Tensor, mesh: Mesh | None, axis: str = DATA) -> Tensor:
    """The sum of a tensor over the ranks of an axis, on each of them."""
    if mesh is None or mesh.size(axis) == 1:
        return value
    total = value.clone()
    dist.all_reduce(total, group=mesh.group(axis))
    return total


@dataclass(frozen=True)
class Agreed:
    """What every rank knows of a step before it.

    count: of all data-parallel ranks. parts: the least number of micro-batches of one. apart: ranks that should draw
    alike and would not, the first one and those with another random state; empty where all is well.
    """

    count: int
    parts: int
    apart: Sequence[int] = ()


def agreed(
    prepare: Callable[[], tuple[int, int]], batch: Any, mesh: Mesh, first: bool, logical_masks: bool = False
) -> Agreed:
    """What all ranks have, of what `prepare` says of this rank's batch: its count and its number of parts.

    Where one of them raises, all do. Ranks that differ on other axes than "dp" must have been given the same batch,
    which is looked at in the first step. logical_masks: all ranks should draw alike, and not only these. Raises
    `EngineError`, or what `prepare` raises.
    """
    count, parts, error = 0, 0, None
    try:
        count, parts = prepare()
    except Exception as raised:
        error = raised
    digest = _checksum(batch) if first and error is None else 0
    mine = torch.tensor([error is None, count, parts, digest, checksum()], device=mesh.device_mesh.device_type)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    if not all(bool(one[0]) for one in every):
        said: list[str | None] = [None] * len(every)
        dist.all_gather_object(said, None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        rank = next(rank for rank, one in enumerate(said) if one is not None)
        raise EngineError(f"engine: rank {rank} can't take its batch, so no rank does. It says: {said[rank]}")
    table, ranks = _by_place(torch.stack(every).cpu(), mesh), _by_place(torch.arange(len(every)), mesh)
    together = (1, -1) if logical_masks else (len(table), -1)
    apart = _apart(table[..., 4].reshape(together).tolist(), ranks.reshape(together).tolist())
    table = table[..., :4]
    if not torch.equal(table, table[:, :1].expand_as(table)):
        raise EngineError(
            f'engine: ranks of one place on "{DATA}" were given different batches. Only "{DATA}" splits the data: give '
            f"each rank engine.part(batch) of a batch that all ranks know, or the rows of its place there, "
            f'engine.mesh.coordinate("{DATA}") of {mesh.size(DATA)}.'
        )
    return Agreed(int(table[:, 0, 1].sum()), int(table[:, 0, 2].min()), apart)


def _by_place(values: Tensor, mesh: Mesh) -> Tensor:
    """What the ranks have, as rows of those that are at one place on "dp"."""
    places, axes = mesh.device_mesh.mesh, list(mesh.sizes)
    places = places.movedim(axes.index(DATA), 0) if DATA in axes else places[None]
    return values[places.reshape(len(places), -1)]


def _apart(states: list[list[int]], ranks: list[list[int]]) -> list[int]:
    """In the first row whose states are not all the same, the first rank and those with another state than it."""
    for row, numbers in zip(states, ranks):
        others = [rank for rank, state in zip(numbers, row) if state != row[0]]
        if others:
            return [numbers[0], *others]
    return []


@contextmanager
def drawn_alike(apart: Sequence[int], logical_masks: bool = False) -> Iterator[None]:
    """Within, nothing is drawn where ranks are apart. Raises `EngineError`, on all of them."""
    before = checksum() if apart else 0
    yield
    if not apart or checksum() == before:
        return
    first, *others = apart
    said = f"ranks {', '.join(map(str, others))} have" if len(others) > 1 else f"rank {others[0]} has"
    why = (
        "with logical_masks=True every rank draws the masks of whole tensors"
        if logical_masks
        else f'ranks of one place on "{DATA}" hold the same, and would drop other elements of it'
    )
    raise EngineError(
        f"engine: the model draws random numbers, and {said} another random state than rank {first}: {why}. Call "
        f"torch.manual_seed(...) with the same number on all of them, after data loading is set up, and draw alike on "
        f"them from there on: nothing on one rank alone. Give a data loader that draws a torch.Generator of its own."
    )


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
