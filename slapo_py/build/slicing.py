"""This rank's part of every parameter."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slapo_py.build.facts import Fact, Facts
from slapo_py.distributed.mesh import Mesh
from slapo_py.errors import BuildError
from slapo_py.layouts.placement import Shard, balanced, split
from slapo_py.layouts.syncs import placements_of, reduced_of, tag


def facts_for(root: Any, axes: Sequence[str], buffers: Mapping[str, Mapping[str, Shard]]) -> Facts:
    """What the schedule says of each parameter of its copy on these axes, and what follows for buffers.

    An axis on which a parameter was split earlier is an outer one. buffers: by axis, those that are split, by name.
    """
    split_on = {axis: placements_of(root, axis) for axis in axes}
    summed_on = {axis: reduced_of(root, axis) for axis in axes}
    found: Facts = {}
    for (first, *others), parameter in _by_names(root.copy.named_parameters(remove_duplicate=False)):
        order = list(root.annotations.get(first, ()))
        placements = {axis: held[first] for axis, held in split_on.items() if first in held}
        placements = dict(sorted(placements.items(), key=lambda one: order.index(tag(one[0]))))
        summed = tuple(axis for axis, held in summed_on.items() if first in held)
        found[first] = Fact((first, *others), tuple(parameter.shape), placements, summed)
    for names, buffer in _by_names(root.copy.named_buffers(remove_duplicate=False)):
        placements = {axis: held[name] for axis, held in buffers.items() for name in names if name in held}
        if placements:
            found[names[0]] = Fact(names, tuple(buffer.shape), placements)
    return found


def _by_names(named: Iterable[tuple[str, Tensor]]) -> list[tuple[tuple[str, ...], Tensor]]:
    """Each tensor once, with all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [(tuple(held), tensors[key]) for key, held in names.items()]


def parts_of(module: nn.Module, facts: Facts, mesh: Mesh, made: Collection[int] = ()) -> dict[int, Tensor]:
    """id(parameter) -> this rank's part of it with storage of its own, for each that is split and has values.

    made: the ids of those that have a part already. Raises `BuildError` for what can't be cut: a parameter that shares
    memory with another one, or a subclass with a layout of its own.
    """
    named: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    windows = _windows(named)
    found: dict[int, Tensor] = {}
    for name, fact in facts.items():
        if not fact.placements:
            continue
        whole = named[name]
        if whole.is_meta or id(whole) in made:
            continue
        others = windows.get(whole.untyped_storage()._cdata, [])
        if len(others) > 1:
            raise BuildError(
                f"build at {name!r}: it is split, and shares memory with {', '.join(map(repr, others))} without being "
                f"the same parameter. Make them one parameter, or give each its own memory."
            )
        found[id(whole)] = part_of(whole.detach(), fact.placements, mesh)
    return found


def part_of(whole: Tensor, placements: Mapping[str, Shard], mesh: Mesh) -> Tensor:
    """A rank's part of a tensor that is split over axes, the outer one first: a contiguous tensor of its own."""
    part = whole
    for axis, placement in placements.items():
        size = mesh.size(axis)
        part = split(part, local_shard(placement, whole, part), size)[mesh.coordinate(axis)]
    return part.clone(memory_format=torch.contiguous_format)


def indexes_of(dim: int, shape: Sequence[int], placements: Mapping[str, Shard], mesh: Mesh | None) -> Tensor:
    """Which indexes of a dim of the whole a rank holds."""
    every = torch.arange(shape[dim], device="cpu")
    if mesh is None:
        return every
    return part_of(every, {axis: Shard(0, one.blocks) for axis, one in placements.items() if one.dim == dim}, mesh)


def local_shard(placement: Shard, whole: Tensor, part: Tensor) -> Shard:
    """The split of what an outer axis has left of a tensor: blocks of given sizes have become smaller alike."""
    size, left = whole.shape[placement.dim], part.shape[placement.dim]
    if size == left or isinstance(placement.blocks, int):
        return placement
    ranks = size // left
    return Shard(placement.dim, tuple(balanced(block, ranks)[0] for block in placement.blocks))


def _windows(named: Mapping[str, Tensor]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, parameter in named.items():
        if parameter.layout is torch.strided and not parameter.is_meta:
            found.setdefault(parameter.untyped_storage()._cdata, []).append(name)
    return found
