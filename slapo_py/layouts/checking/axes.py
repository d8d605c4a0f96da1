"""The mesh axes that a schedule uses, and parameters that two of them split.

Each axis is looked at by itself. Where two split one dim of a parameter, the axis of the earlier `shard` step is the
outer one: it splits the whole dim, and the later axis splits each of its parts.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import fx

from slapo_py.distributed.forks import forks_of
from slapo_py.errors import ArgumentError
from slapo_py.layouts.inference.recorded import divided_of
from slapo_py.layouts.inference.state import Fault, said
from slapo_py.layouts.placement import Shard, local_shape
from slapo_py.layouts.rules.shapes import divides
from slapo_py.layouts.syncs import reduce_tag, tag

if TYPE_CHECKING:
    from slapo_py.root import Root

Split = tuple[str, Shard]
"""An axis, and how it splits a parameter."""


def axes_of(root: "Root") -> list[str]:
    """The axes that the schedule uses; else "tp"."""
    return used_axes(root) or ["tp"]


def used_axes(root: "Root") -> list[str]:
    """The axes for which the schedule has a split, a sync, a summed gradient, a divided attribute or random numbers."""
    said_of: list[str] = [key for tags in root.annotations.values() for key in tags]
    starts = (tag(""), reduce_tag(""))
    split = [key.removeprefix(start) for key in said_of for start in starts if key.startswith(start)]
    synced = [one.axis for syncs in root.syncs.values() for one in syncs.values()]
    divided = [axis for names in divided_of(root).values() for axis in names.values()]
    forked = [axis for axes in forks_of(root.copy).values() for axis in axes]
    return list(dict.fromkeys([*split, *synced, *divided, *forked]))


def refuse(root: "Root", where: str, axis: str | None = None, ranks: object = 1) -> None:
    """Raise `ArgumentError` for an axis that no step uses while steps use another, and for sizes that are none.

    ranks: a size, or the sizes by name.
    """
    for size in ranks.values() if isinstance(ranks, Mapping) else [ranks]:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ArgumentError(f"{where}: ranks must be whole numbers from 1, as in ranks=2; found {ranks!r}.")
    used = used_axes(root)
    if used and axis is not None and axis not in used:
        others = " and ".join(f'"{one}"' for one in used)
        raise ArgumentError(f'{where}: no step uses the mesh axis "{axis}"; the schedule uses {others}.')


def splits_of(root: "Root", name: str) -> list[Split]:
    """How the axes split a parameter, by its first name, the outer axis first."""
    tags, start = root.annotations.get(name, {}), tag("")
    return [(key.removeprefix(start), value) for key, value in tags.items() if key.startswith(start)]


def part_shape(
    shape: Sequence[int], splits: Sequence[Split], sizes: Mapping[str, int], at: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """The shape of a rank's part of a parameter that several axes split, each the part of the one before.

    sizes: of the axes. at: the rank's place on each axis; 0 if not given. Raises `PlacementError` where blocks do not
    fill a part.
    """
    part = tuple(shape)
    for axis, shard in splits:
        part = local_shape(part, shard, sizes[axis], (at or {}).get(axis, 0))
    return part


def outer_of(root: "Root", name: str, axis: str) -> list[Split]:
    """The splits of the same dim of a parameter that an axis is inside of."""
    splits = splits_of(root, name)
    at = next((index for index, (one, _) in enumerate(splits) if one == axis), 0)
    return [one for one in splits[:at] if one[1].dim == splits[at][1].dim]


def outer_ranks(root: "Root", names: Mapping[fx.Node, str], axis: str, sizes: Mapping[str, int]) -> dict[fx.Node, int]:
    """Over how many ranks the dim that this axis splits is split already, for each node of a parameter."""
    return {node: math.prod(sizes[one] for one, _ in outer_of(root, name, axis)) for node, name in names.items()}


def too_small(root: "Root", names: Mapping[fx.Node, str], axis: str, sizes: Mapping[str, int]) -> Fault | None:
    """The first parameter of which an outer axis leaves parts that this axis can't split."""
    text, first, places = "", None, dict[str, None]()
    for node, name in names.items():
        outer = outer_of(root, name, axis)
        if not outer:
            continue
        own = dict(splits_of(root, name))[axis]
        last = {one: sizes[one] - 1 for one, _ in outer}  # the last rank has the smallest part
        size = part_shape(node.meta["val"].shape, outer, sizes, last)[own.dim]
        if divides(size, own.blocks, sizes[axis]):
            continue
        places[name] = None
        if first is None:
            first = node
            before = ", ".join(f'{shard} on "{one}" of size {sizes[one]}' for one, shard in outer)
            text = (
                f"{said(node)} is {before}: a part has {size} elements of dim {own.dim}, and does not split once more "
                f'as {own} on "{axis}" of size {sizes[axis]}. Take smaller axes, or split another dim.'
            )
    more = f" The same for {len(places) - 1} more: {', '.join(list(places)[1:4])}." if len(places) > 1 else ""
    return None if first is None else Fault("part too small", first, text + more)
