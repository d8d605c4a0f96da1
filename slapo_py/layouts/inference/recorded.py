"""What a schedule says, at the nodes of a flat recording: split parameters, syncs, summed gradients."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import fx

from slapo_py.errors import PlacementError
from slapo_py.layouts.inference.state import said
from slapo_py.layouts.placement import Placement
from slapo_py.layouts.recording.nodes import is_border, shape_of
from slapo_py.layouts.recording.rows import BATCH, Rows, around
from slapo_py.layouts.syncs import Sync, placements_of, reduced_of

if TYPE_CHECKING:
    from slapo_py.root import Root
    from slapo_py.schedule import Schedule


@dataclass(frozen=True)
class Asked:
    """What a schedule asks for on one axis, at the nodes of a recording of a place.

    params: how split parameters lie. syncs: what is at borders; a placement stands for whatever leads to it. summed:
    parameters whose gradient is summed. divided: attributes that `build` divides, path from the place -> names.
    """

    params: Mapping[fx.Node, Placement]
    syncs: "Mapping[fx.Node, Placement | Sync]"
    summed: Set[fx.Node]
    divided: Mapping[str, Set[str]]


def asked_of(place: "Schedule", graph: fx.Graph, axis: str) -> Asked:
    """All that the schedule says of an axis at and below a place."""
    start = f"{place.path}." if place.path else ""
    divided = {
        path.removeprefix(start) if path != place.path else "": {one for one, its in names.items() if its == axis}
        for path, names in divided_of(place.root).items()
        if f"{path}.".startswith(start)
    }
    return Asked(
        split_nodes(place, graph, axis), sync_nodes(place, graph, axis), summed_nodes(place, graph, axis), divided
    )


def split_nodes(place: "Schedule", graph: fx.Graph, axis: str) -> dict[fx.Node, Placement]:
    """The placement of each node of a recording that reads a split parameter; ties have that of their parameter."""
    root = place.root
    first = {id(one): name for name, one in root.copy.named_parameters()}
    known = placements_of(root, axis)
    named: dict[str, Any] = dict(place.module.named_parameters(remove_duplicate=False))
    found: dict[fx.Node, Placement] = {}
    for node in graph.nodes:
        if node.op == "get_attr" and node.target in named:
            placement = known.get(first.get(id(named[node.target]), ""))
            if placement is not None:
                found[node] = placement
    return found


def sync_nodes(place: "Schedule", graph: fx.Graph, axis: str) -> dict[fx.Node, Sync]:
    """The borders of a recording at which a schedule has a sync."""
    found: dict[fx.Node, Sync] = {}
    for node in graph.nodes:
        if is_border(node):
            _, side, path, index = node.args
            for one in place.root.syncs.get(".".join(filter(None, (place.path, path))), {}).values():
                if (one.side, one.index, one.axis) == (side, index, axis):
                    found[node] = replace(one, parts=_rows(node)) if one.parts == BATCH else one
    return found


def _rows(node: fx.Node) -> Rows:
    top = around(node)
    if top is None:
        raise PlacementError(
            f'sync at {said(node)}: parts="batch" is the size of dim 0 of the first tensor that enters the module '
            f"around, and there is none. Give a number."
        )
    return Rows(shape_of(top)[0])


def divided_of(root: "Root") -> dict[str, dict[str, str]]:
    """The attributes that `build` divides over a mesh axis, by path and name; what is returned is the caller's."""
    return {path: dict(names) for path, names in root.divided.items()}


def divided_on(root: "Root", axis: str) -> dict[str, set[str]]:
    """The attributes that `build` divides over one axis, by path."""
    return {path: {one for one, its in names.items() if its == axis} for path, names in divided_of(root).items()}


def first_names(place: "Schedule", graph: fx.Graph) -> dict[fx.Node, str]:
    """The parameter's first name in the whole model, for each node that reads one."""
    first = {id(one): name for name, one in place.root.copy.named_parameters()}
    named: dict[str, Any] = dict(place.module.named_parameters(remove_duplicate=False))
    reads = [node for node in graph.nodes if node.op == "get_attr" and node.target in named]
    return {node: first[id(named[node.target])] for node in reads}


def summed_nodes(place: "Schedule", graph: fx.Graph, axis: str) -> set[fx.Node]:
    """The nodes of parameters whose gradient the schedule sums."""
    asked = reduced_of(place.root, axis)
    return {node for node, name in first_names(place, graph).items() if name in asked}
