"""Which steps of a history made what does not fit, so that a message can name them by number and text."""

import re
from collections.abc import Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_py.history import Step
from slapo_py.layouts.inference.sizes import sizes_of
from slapo_py.layouts.inference.state import Fault
from slapo_py.layouts.recording.nodes import is_border
from slapo_py.primitive import TABLE, parameters_of

if TYPE_CHECKING:
    from slapo_py.root import Root
    from slapo_py.schedule import Schedule

Numbered = tuple[int, Step]
"""A step with its number in the history, counted from 1."""


def sync_step(root: "Root", path: str, side: str, index: int, axis: str) -> Numbered | None:
    """The step that put the sync at a border; None if it is part of a larger step."""
    for number, step in reversed(list(enumerate(root.history, 1))):
        if step.primitive == "sync" and step.path == path:
            given = _given(step)
            if (given["at"], given["index"], given["axis"]) == (side, index, axis):
                return number, step
    return None


def parameter_steps(root: "Root", primitive: str, names: Set[str], axis: str) -> list[tuple[Numbered, list[str]]]:
    """The steps that split, or sum the gradient of, any of these parameters, each with its others.

    names: first names in the model. The others are as the step names them.
    """
    found = []
    for number, step in enumerate(root.history, 1):
        if step.primitive == primitive and _given(step)["axis"] == axis:
            first = {name: _first(root, step.path, name) for name in _given(step)["params"]}
            if names & set(first.values()):
                found.append(((number, step), [name for name, one in first.items() if one not in names]))
    return found


def said_step(one: Numbered) -> str:
    """A step as a message names it."""
    return f"step {one[0]}, {one[1]}"


def or_change(root: "Root", one: Numbered | None) -> str:
    """How a message that refuses a step goes on: how the one that is there is changed."""
    if one is None:
        return ", or take the other back with sch.undo(); sch.blame() lists the steps."
    count = len(root.history) - one[0] + 1
    back = "take it back with sch.undo()" if count == 1 else f"take it and all after it back with sch.undo({count})"
    return f"; to change it, edit the line of {said_step(one)}, or {back}."


def with_step(place: "Schedule", axis: str, fault: Fault) -> Fault:
    """A fault of a step that is there: which one, and whether the line replaces it or it is to go."""
    root = place.root
    goes = re.search("Leave (it|reduce_grad) out", fault.message)
    do = "Replace" if fault.line else "Leave out" if goes else "Look at"
    if fault.kind in ("wrong in forward", "wrong in backward", "doubled in backward", "parts of one batch"):
        if not is_border(fault.node):
            return fault
        _, side, below, index = fault.node.args
        path = ".".join(filter(None, (place.path, str(below))))
        one = sync_step(root, path, str(side), int(index), axis)  # type: ignore[arg-type]
        return fault if one is None else replace(fault, message=f"{do} {said_step(one)}: {fault.message}")
    if fault.kind == "size divided":
        return _of_a_size(place, fault)
    if fault.kind not in ("wrong split", "gradient summed twice"):
        return fault
    primitive = "shard" if fault.kind == "wrong split" else "reduce_grad"
    names = _of_module(root, place, str(fault.node.target), primitive == "shard")
    steps = parameter_steps(root, primitive, names, axis)
    whole = " and ".join(said_step(one) for one, others in steps if not others)
    parts = [f"take {', '.join(_named(one[1], others))} out of {said_step(one)}" for one, others in steps if others]
    text = ", and ".join([*([f"{do} {whole}"] if whole else []), *parts])
    return replace(fault, message=f"{text[0].upper()}{text[1:]}: {fault.message}") if text else fault


def _of_a_size(place: "Schedule", fault: Fault) -> Fault:
    """The step that divides an attribute."""
    owners = [owner for _, size in sizes_of(fault.node) if (owner := getattr(size, "owner", None))]
    for path, name in owners:
        full = ".".join(filter(None, (place.path, path)))
        for number, step in enumerate(place.root.history, 1):
            if (step.primitive, step.path) == ("configure", full) and name in step.kwargs:
                return replace(fault, message=f"Leave out step {number}, {step}: {fault.message}")
    return fault


def _named(step: Step, others: list[str]) -> list[str]:
    return [f'"{name}"' for name in _given(step)["params"] if name not in others]


def _of_module(root: "Root", place: "Schedule", target: str, every: bool) -> set[str]:
    """The first name of a parameter, or those of every parameter of its module."""
    path, _, last = target.rpartition(".")
    owner = ".".join(filter(None, (place.path, path)))
    module = root.find(owner)
    names = [last] if module is None or not every else list(module._parameters)
    return {first for name in names if (first := _first(root, owner, name)) is not None}


def _first(root: "Root", path: str, name: str) -> str | None:
    """The first name of a parameter that is named at a path; None if it is not there any more."""
    owner, _, last = ".".join(filter(None, (path, name))).rpartition(".")
    module = root.find(owner)
    found = None if module is None else module._parameters.get(last)
    return root.first_name(found) if isinstance(found, nn.Parameter) else None


def _given(step: Step) -> dict[str, Any]:
    """All arguments of a step by name."""
    bound = parameters_of(TABLE[step.primitive]).bind(*step.args, **step.kwargs)
    bound.apply_defaults()
    return bound.arguments
