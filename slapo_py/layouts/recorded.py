"""What a schedule says, at the nodes of a flat recording: split parameters, syncs, summed gradients."""

from typing import TYPE_CHECKING, Any

from torch import fx

from slapo_py.codec import PerRank
from slapo_py.layouts.nodes import is_border
from slapo_py.layouts.placement import Placement
from slapo_py.layouts.syncs import Sync, placements_of, reduced_of

if TYPE_CHECKING:
    from slapo_py.root import Root
    from slapo_py.schedule import Schedule


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
                    found[node] = one
    return found


def divided_of(root: "Root") -> dict[str, dict[str, str]]:
    """The attributes that `build` divides over a mesh axis: path -> name -> axis; the last value wins."""
    found: dict[str, dict[str, str]] = {}
    for step in root.history:
        if step.primitive == "configure":
            for name, value in step.kwargs.items():
                held = found.setdefault(step.path, {})
                held.pop(name, None)
                if isinstance(value, PerRank):
                    held[name] = value.axis
    return found


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
