"""The checker: do the syncs of a schedule fit what it has split?

It is inference, with the schedule's syncs where they stand, held against what is there. Inference puts in what is
missing and goes on, so that one fault gives one message.
"""

from typing import TYPE_CHECKING

from torch import fx

from slapo_py.layouts.backward import sync_line
from slapo_py.layouts.infer import infer
from slapo_py.layouts.record import Recording, record
from slapo_py.layouts.recorded import divided_of, first_names, split_nodes, summed_nodes, sync_nodes
from slapo_py.layouts.state import Conversion, Fault, Typing, is_local, said
from slapo_py.layouts.syncs import AUTO

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


def check(place: "Schedule", axis: str = "tp", ranks: int = 2) -> list[Fault]:
    """What is wrong with the placements at and below a place, on one mesh axis; empty if they fit.

    Each fault has the place, the placements and, where there is one, the line to write. Raises `TraceError`.
    """
    return checked(place, record(place), axis, ranks)[1]


def checked(place: "Schedule", recording: Recording, axis: str, ranks: int) -> tuple[Typing, list[Fault]]:
    """All placements, as they should be, and where the schedule's own syncs are not what they need."""
    graph = recording.graph
    there = sync_nodes(place, graph, axis)
    typing = infer(graph, ranks, split_nodes(place, graph, axis), there)
    found = list(typing.faults)
    found += [_missing(one) for one in typing.conversions() if one.node not in there and not is_local(one)]
    summed, names = summed_nodes(place, graph, axis), first_names(place, graph)
    found += [_not_summed(node, names[node]) for node in typing.reduced if node not in summed]
    found += [_summed_twice(node, names[node]) for node in sorted(summed) if node not in typing.reduced]
    found += _undivided(place, typing, axis)
    return typing, list({one.message: one for one in found}.values())


def _missing(one: Conversion) -> Fault:
    node, readers = one.node, sorted(one.readers or (), key=str)
    line = ""
    if one.at_border:
        line = f" Write: {sync_line(node, one.forward, AUTO if one.forward != 'none' else one.backward, one)}"
    if one.forward == "none":
        return Fault(
            "missing in backward",
            node,
            f"the gradient of {said(node)} is {one.grad_source} and is needed {one.grad_target}: {one.backward} is "
            f"missing.{line}",
        )
    to = f" by {', '.join(map(said, readers))}" if readers else ""
    return Fault(
        "missing in forward",
        node,
        f"{said(node)} is {one.source} and is needed {one.target}{to}: {one.forward} is missing.{line}",
    )


def _undivided(place: "Schedule", typing: Typing, axis: str) -> list[Fault]:
    """Sizes in the code that are not a rank's, one for each attribute."""
    divided, found = divided_of(place.root), {}
    for node, sizes in typing.resized.items():
        for one in sizes.values():
            if one.owner is None:
                where = node.meta.get("where", "?")
                text = (
                    f"{said(node)} ({where}) is given the literal size {one.passes}, and a rank needs {one.needs}. It "
                    f"comes from no attribute of a module: read it from a tensor's shape, or use -1."
                )
                found[where, str(one.passes)] = Fault("literal size", node, text)
                continue
            path, name = one.owner
            full = ".".join(filter(None, (place.path, path)))
            if divided.get(full, {}).get(name) != axis:
                text = (
                    f"{said(node)} is given the size {one.passes} of the attribute {name!r}, and a rank needs "
                    f'{one.needs}. Write: sch["{full}"].configure({name}=slapo.per_rank("{axis}"))'
                )
                found[full, name] = Fault("size not divided", node, text)
    return list(found.values())


def _not_summed(node: fx.Node, name: str) -> Fault:
    path, _, last = name.rpartition(".")
    return Fault(
        "gradient not summed", node,
        f'the parameter "{name}" is whole on each rank and its gradient is a partial sum. '
        f'Write: sch["{path}"].reduce_grad("{last}")',
    )  # fmt: skip


def _summed_twice(node: fx.Node, name: str) -> Fault:
    return Fault(
        "gradient summed twice", node,
        f'the gradient of the parameter "{name}" is whole already: summed over the ranks it becomes too large. Leave '
        f"reduce_grad out.",
    )  # fmt: skip
