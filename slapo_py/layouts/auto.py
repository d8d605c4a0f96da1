"""`sch.auto_sync("tp")`: what inference finds, as ordinary steps of the schedule."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import fx

from slapo_py.codec import PerRank
from slapo_py.errors import PlacementError
from slapo_py.layouts.infer import infer
from slapo_py.layouts.nodes import is_border
from slapo_py.layouts.placement import Placement, Shard
from slapo_py.layouts.record import ENTER, record
from slapo_py.layouts.recorded import divided_of, first_names, split_nodes, summed_nodes, sync_nodes
from slapo_py.layouts.state import Conversion, Typing, is_local, said

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


def auto_sync(place: "Schedule", axis: str, pins: Mapping[str, Placement] | None, ranks: int) -> None:
    """Insert every missing sync, reduction and divided attribute at and below a place. See `Schedule.auto_sync`."""
    recording = record(place)
    graph = recording.graph
    there = sync_nodes(place, graph, axis)
    pinned = _pins(place, graph, pins or {})
    typing = infer(graph, ranks, split_nodes(place, graph, axis), {**pinned, **there})
    if typing.faults:
        raise PlacementError(f'auto_sync at "{place.path}": {typing.faults[0].message}')
    for one in typing.conversions():
        if one.node not in there:
            _insert(place, typing, one, axis)
    _configure(place, typing, axis)
    _reduce(place, typing, axis)


def _pins(place: "Schedule", graph: fx.Graph, pins: Mapping[str, Placement]) -> dict[fx.Node, Placement]:
    found: dict[fx.Node, Placement] = {}
    for path, placement in pins.items():
        nodes = [node for node in graph.nodes if is_border(node) and node.args[1:] == (ENTER, path, 0)]
        if not nodes:
            raise PlacementError(
                f'auto_sync at "{place.path}": pins has {path!r}, and no tensor enters a module of that path here.'
            )
        found |= dict.fromkeys(nodes, placement)
    return found


def _insert(place: "Schedule", typing: Typing, one: Conversion, axis: str) -> None:
    """One conversion as a sync, or nothing where each rank does it by itself."""
    if is_local(one):
        return
    if one.at_border:
        _, side, path, index = one.node.args
        _sync(place, str(path), str(side), int(index), one, axis)  # type: ignore[arg-type]
    else:
        readers = ", ".join(sorted(said(reader) for reader in one.readers or ()))
        raise PlacementError(
            f'auto_sync at "{place.path}": {said(one.node)} is {one.source}, and {readers} needs it {one.target} '
            f"({one.forward}, gradient {one.backward}), at no border of a module. Split another parameter, or give "
            f"pins."
        )


def _sync(place: "Schedule", path: str, side: str, index: int, one: Conversion, axis: str) -> None:
    split = one.source if one.forward == "all_gather" else one.target
    dim, parts = (split.dim, split.blocks) if isinstance(split, Shard) and one.forward != "none" else (None, 1)
    value = None if one.forward == "none" else one.forward
    grad = None if one.backward == "none" else one.backward
    (place[path] if path else place).sync(side, value, grad=grad, dim=dim, axis=axis, index=index, parts=parts)


def _configure(place: "Schedule", typing: Typing, axis: str) -> None:
    """The attributes whose value is a size that each rank has a part of."""
    divided = divided_of(place.root)
    for node, sizes in typing.resized.items():
        for one in sizes.values():
            if one.owner is None:
                raise PlacementError(
                    f'auto_sync at "{place.path}": {said(node)} ({node.meta.get("where", "?")}) is given the literal '
                    f"size {one.passes}, and a rank needs {one.needs}. It comes from no attribute of a module: read it "
                    f"from a tensor's shape instead, or use -1."
                )
            path, name = one.owner
            full = f"{place.path}.{path}" if place.path and path else path or place.path
            if divided.get(full, {}).get(name) != axis:
                (place[path] if path else place).configure(**{name: PerRank(axis)})


def _reduce(place: "Schedule", typing: Typing, axis: str) -> None:
    names, there = first_names(place, typing.graph), summed_nodes(place, typing.graph, axis)
    for name in dict.fromkeys(names[node] for node in typing.reduced if node not in there):
        path, _, last = name.rpartition(".")
        place.root.cursor(path).reduce_grad(last, axis=axis)
