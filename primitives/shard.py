"""`sch[path].shard("weight", dim="out")`: parameters are split over the ranks of a mesh axis."""

import difflib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slapo_py.errors import ArgumentError, ShardError
from slapo_py.layouts.checking.steps import or_change, parameter_steps
from slapo_py.layouts.placement import Shard
from slapo_py.layouts.syncs import placements_of, tag
from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.schedule import Schedule
from slapo_py.scheduled import bare

_OUT_IN: dict[str, tuple[int, int]] = {
    "Linear": (0, 1),
    "Conv1D": (1, 0),
    "Conv1d": (0, 1),
    "Conv2d": (0, 1),
    "Conv3d": (0, 1),
}


@register("shard")
class ShardParameters(Primitive):
    """Split parameters of this module: before each rank holds them whole, after a part each, from `build` on.

    dim: the dim that is split, counted from 0, or "out" or "in" of a Linear, Conv1D or convolution, whose weights are
    stored either way round. parts: how many weights of one size are fused in that dim (q, k and v: 3), or a list of
    their sizes; each is split by itself. A split is balanced: sizes differ by at most one. The placement belongs to the
    parameter: all its ties have it.

    Requires: names of parameters at or below this module, not split on this axis yet, with that dim. Raises
    `ArgumentError`, `ShardError`.
    """

    structural = True
    reaches_flattened = True

    def check(
        self, place: Schedule, *params: str, dim: int | str, axis: str = "tp", parts: int | Sequence[int] | None = None
    ) -> None:
        _split(place, params, dim, axis, parts)

    def apply(
        self, place: Schedule, *params: str, dim: int | str, axis: str = "tp", parts: int | Sequence[int] | None = None
    ) -> None:
        for name, shard in _split(place, params, dim, axis, parts).items():
            place.root.annotations.setdefault(name, {})[tag(axis)] = shard


def _split(
    place: Schedule, params: tuple[str, ...], dim: int | str, axis: str, parts: int | Sequence[int] | None
) -> dict[str, Shard]:
    """The placement of each named parameter, by its first name in the model."""
    where = f'shard at "{place.path}"'
    if not params:
        raise ArgumentError(f'{where}: needs names of parameters, as in shard("weight", dim="out").')
    if not isinstance(axis, str) or not axis.isidentifier():
        raise ArgumentError(f'{where}: axis must be the name of a mesh axis, as "tp", found {axis!r}.')
    here: dict[str, nn.Parameter] = dict(place.module.named_parameters(remove_duplicate=False))
    held = placements_of(place.root, axis)
    found: dict[str, Shard] = {}
    for name in params:
        if name not in here:
            close = difflib.get_close_matches(str(name), here, n=3) or list(here)[:5]
            raise ArgumentError(
                f"{where}: there is no parameter {name!r} here. Parameters with such names: "
                f"{', '.join(map(repr, close)) or 'none'}."
            )
        shard = _placement(f"{where}: {name!r}", place, name, here[name], dim, parts)
        known = place.root.first_name(here[name])
        if known in held:
            steps = parameter_steps(place.root, "shard", {known}, axis)
            raise ShardError(
                f'{where}: {name!r} ({known!r}) is {held[known]} on "{axis}" already. Leave this step out'
                f"{or_change(place.root, steps[0][0] if steps else None)}"
            )
        found[known] = shard
    return found


def _placement(
    what: str, place: Schedule, name: str, parameter: torch.Tensor, dim: int | str, parts: int | Sequence[int] | None
) -> Shard:
    index = _index(what, place, name, parameter, dim)
    size = parameter.shape[index]
    blocks: Any = 1 if parts is None else parts if isinstance(parts, int) else tuple(parts)
    total = sum(blocks) if isinstance(blocks, tuple) else size
    count = blocks if isinstance(blocks, int) and not isinstance(blocks, bool) else 1
    if count < 1 or total != size or size % count or (isinstance(blocks, tuple) and any(one < 1 for one in blocks)):
        raise ShardError(
            f"{what}: parts={parts!r} don't fill dim {index}, which has {size} elements. Give a number that divides "
            f"{size}, or sizes that add up to it."
        )
    return Shard(index, blocks)


def _index(what: str, place: Schedule, name: str, parameter: torch.Tensor, dim: int | str) -> int:
    """Which dim "out", "in" or a number is."""
    if isinstance(dim, int) and not isinstance(dim, bool):
        if not -parameter.dim() <= dim < parameter.dim():
            raise ShardError(f"{what} of shape {tuple(parameter.shape)} has no dim {dim}.")
        return dim % parameter.dim()
    if dim not in ("out", "in"):
        raise ArgumentError(f'{what}: dim must be a number, "out" or "in", found {dim!r}.')
    owner, _, last = name.rpartition(".")
    module = place.module.get_submodule(owner)
    kinds = [one.__name__ for one in bare(module).__mro__ if one.__name__ in _OUT_IN]
    if not kinds:
        raise ShardError(
            f'{what}: dim="{dim}" is said of a Linear, Conv1D or convolution, and this is a {bare(module).__name__}. '
            f"Give the number of the dim: shard({last!r}, dim=0)."
        )
    if last == "bias":
        if dim == "in":
            raise ShardError(
                f'{what}: a bias has no "in" dim. Leave it whole: it is added once, by one of the ranks, where the '
                f"partial products are summed."
            )
        return 0
    return _OUT_IN[kinds[0]][dim == "in"]
