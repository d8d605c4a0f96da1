"""The checker: do the syncs of a schedule fit what it has split?

It is inference, with the schedule's syncs where they stand, held against what is there (`faults.py`), and led back to
the steps that are wrong (`explain.py`), so that one fault gives one message.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from slapo_py.errors import ArgumentError
from slapo_py.layouts.checking.astray import astray
from slapo_py.layouts.checking.axes import axes_of, outer_ranks, refuse, too_small
from slapo_py.layouts.checking.cheaper import with_other_dims, with_parts
from slapo_py.layouts.checking.drawn import drawn
from slapo_py.layouts.checking.escaped import escaped
from slapo_py.layouts.checking.evaluation import evaluation_of, other_collectives
from slapo_py.layouts.checking.explain import explained
from slapo_py.layouts.checking.faults import MISSING, STEPS, Look
from slapo_py.layouts.checking.heads import uneven_heads
from slapo_py.layouts.checking.hooked import hooked
from slapo_py.layouts.checking.numbers_of_parts import with_lines
from slapo_py.layouts.checking.steps import with_step
from slapo_py.layouts.inference.recorded import asked_of, first_names
from slapo_py.layouts.inference.state import Fault, Typing
from slapo_py.layouts.recording.record import Recording, record

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


def check(place: "Schedule", axis: str | None = None, ranks: int | Mapping[str, int] = 2) -> list[Fault]:
    """What is wrong with the placements at and below a place; empty if they fit.

    axis: the mesh axis that is looked at; None: each that the schedule uses, one after the other. ranks: the size of
    every axis, or of each by name. Each fault has the place, the placements and, where there is one, the line to write.
    Raises `ArgumentError`, `TraceError`.
    """
    refuse(place.root, "check", axis, ranks)
    used = axes_of(place.root)
    axes = used if axis is None else [axis]
    sizes = dict.fromkeys([*axes, *used], ranks) if isinstance(ranks, int) else dict(ranks)
    lacking = next((one for one in (*axes, *used) if one not in sizes), None)
    if lacking is not None:
        raise ArgumentError(
            f'check: ranks={sizes} has no size of the axis "{lacking}". Write: ranks={{"{lacking}": 2}}.'
        )
    recording, found = record(place), list[Fault]()
    for one in (name for name in axes if sizes[name] > 1):  # one rank splits nothing
        names = first_names(place, recording.graph)
        outer = outer_ranks(place.root, names, one, sizes)
        small = too_small(place.root, names, one, sizes)
        faults = [small] if small is not None else checked(place, recording, one, sizes[one], outer)[1]
        on = f'on "{one}": ' if len(axes) > 1 else ""
        found += [replace(fault, message=on + fault.message) for fault in faults]
    return found


def checked(
    place: "Schedule", recording: Recording, axis: str, ranks: int, outer: Mapping[fx.Node, int] | None = None
) -> tuple[Typing, list[Fault]]:
    """All placements, with what is missing put in, and where the schedule's own steps are not what they need.

    outer: over how many ranks of other axes a parameter's dim is split before, where it is.
    """
    typing, found = _checked(place, recording, axis, ranks, outer)
    return typing, [with_step(place, axis, one) for one in found]


def _checked(
    place: "Schedule", recording: Recording, axis: str, ranks: int, outer: Mapping[fx.Node, int] | None
) -> tuple[Typing, list[Fault]]:
    graph = recording.graph
    asked = asked_of(place, graph, axis)
    look = Look(graph, ranks, axis, first_names(place, graph), recording.computed)
    typing, found = look.at(asked)
    found = with_lines(look, asked, typing, found)
    fused = with_parts(look, asked, typing, found)
    asked, typing, found = fused.asked, fused.typing, fused.found
    single = any(one.kind in MISSING and not one.line for one in found)
    uneven = uneven_heads(typing, asked.syncs.keys(), axis, outer, single)
    if uneven is not None:
        return typing, [*fused.told, uneven]
    told = fused.told
    if all(one.kind in STEPS for one in found):  # nothing is wrong, but what is missing may be dear
        other = with_other_dims(look, asked, typing, found)
        told, asked, typing, found = [*told, *other.told], other.asked, other.typing, other.found
    found = explained(look, asked, typing, found)
    found = [*told, *astray(place, graph, axis), *found]
    found = found or escaped(place, recording, look, asked, typing) or drawn(place, typing, axis)
    found = found or hooked(place, typing)
    return typing, found or _in_evaluation(place, recording, typing, axis, ranks, outer)


def _in_evaluation(
    place: "Schedule", recording: Recording, typing: Typing, axis: str, ranks: int, outer: Mapping[fx.Node, int] | None
) -> list[Fault]:
    """What is wrong in evaluation mode alone."""
    evaluation = evaluation_of(place, recording)
    if evaluation is None:
        return []
    evaluation.evaluation = (None,)
    other, found = _checked(place, evaluation, axis, ranks, outer)
    found = found or other_collectives(typing, other)
    return [replace(one, message=f"in evaluation mode: {one.message}") for one in found]
