"""Syncs at which no tensor goes by: of modules that are not called, or whose border lies inside one operation."""

from typing import TYPE_CHECKING

from torch import fx

from slapo_py.layouts.checking.steps import said_step, sync_step
from slapo_py.layouts.inference.state import Fault
from slapo_py.layouts.recording.nodes import is_border

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


def astray(place: "Schedule", graph: fx.Graph, axis: str) -> list[Fault]:
    """The syncs of an axis at and below a place that a recording has no border for."""
    start = f"{place.path}." if place.path else ""
    there = {(node.args[2], node.args[1], node.args[3]) for node in graph.nodes if is_border(node)}
    found = []
    for path, syncs in place.root.syncs.items():
        if not f"{path}.".startswith(start):
            continue
        below = path.removeprefix(start) if path != place.path else ""
        for one in syncs.values():
            if one.axis == axis and (below, one.side, one.index) not in there:
                step = sync_step(place.root, path, one.side, one.index, axis)
                this = "this sync" if step is None else said_step(step)
                text = (
                    f'sync at {one.side} {one.index} of "{path}" takes effect nowhere: no tensor goes by there. This '
                    f"module has no such tensor, or is not called, or a kernel or another step has put one operation "
                    f"in the place of what is on both sides. Leave {this} out, or that step; "
                    f'print(sch.blame("{path.rpartition(".")[0]}")) lists them.'
                )
                found.append(Fault("sync nowhere", graph.output_node(), text))
    return found
