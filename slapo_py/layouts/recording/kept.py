"""Rewriting a graph keeps the borders at which a schedule has syncs, or is refused."""

from typing import TYPE_CHECKING

from torch import fx

from slapo_py.errors import StepError
from slapo_py.layouts.recording.borders import Border
from slapo_py.layouts.recording.rewritten import Marks, borders_between, marks_of
from slapo_py.tracing.trace import Trace

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


def check_syncs_kept(place: "Schedule", trace: Trace, graph: fx.Graph, where: str) -> None:
    """Refuse a new graph of a place that has no border any more where a sync is. Raises `StepError`."""
    start = f"{place.path}." if place.path else ""
    below = {path.removeprefix(start): syncs for path, syncs in place.root.syncs.items() if path.startswith(start)}
    if not below:
        return
    tracer = place.root.tracer
    marks = marks_of(place.module, tracer.call(place.path), tracer.recording.fakes, trace)
    borders = _borders(trace.graph, marks) - _borders(graph, marks)
    gone = _modules(trace.graph) - _modules(graph)
    for path, syncs in below.items():
        for one in syncs.values():
            if (one.side, path, one.index) in borders or any(f"{path}.".startswith(f"{name}.") for name in gone):
                full = f"{start}{path}"
                steps = [str(step) for step in place.root.history if (step.primitive, step.path) == ("sync", full)]
                raise StepError(
                    f'{where}: {one.side} {one.index} of "{full}", where a sync is ({"; ".join(steps)}), would lie '
                    f"inside one operation. Take the sync back and write this step first: auto_sync after it finds "
                    f"where the collective can be. Or leave this step out."
                )


def _borders(graph: fx.Graph, marks: Marks) -> set[Border]:
    edges = [(value, node) for node in graph.nodes for value in node.all_input_nodes]
    return {border for value, node in edges for border in borders_between(marks, value, node)}


def _modules(graph: fx.Graph) -> set[str]:
    """The submodules that a graph calls, or hands to what calls them."""
    return {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
