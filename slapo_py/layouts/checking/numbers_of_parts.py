"""Sizes of split values that are used as numbers: what to write, so that the number is that of the whole."""

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from slapo_py.layouts.checking.faults import STEPS, Look, border_before
from slapo_py.layouts.inference.recorded import Asked
from slapo_py.layouts.inference.sizes import sizes_of
from slapo_py.layouts.inference.state import Fault, Typing
from slapo_py.layouts.placement import R
from slapo_py.layouts.recording.nodes import is_size, numbers_of


def with_lines(look: Look, asked: Asked, typing: Typing, found: Iterable[Fault]) -> list[Fault]:
    """Faults, those of a size that is used as a number with what to write."""
    told = []
    for fault in found:
        base = _read_of(fault.node) if fault.kind == "size" and not sizes_of(fault.node) else None
        if base is not None:
            line = gathering(look, asked, typing, base)
            fault = replace(fault, message=f"{fault.message} {remedy(line)}", line=line)
        told.append(fault)
    return told


def remedy(line: str) -> str:
    """The sentence that says what to do. line: what gives each rank the value whole, if anything does."""
    text = "Take the number from an attribute that is not divided, or from the size of a value that is whole"
    return text + (f", or let each rank have this value whole. Write: {line}" if line else ".")


def gathering(look: Look, asked: Asked, typing: Typing, value: fx.Node) -> str:
    """The lines that gather a value at the last border that it has passed, and whatever is missing then."""
    border = border_before(value, typing)
    if border is None or border in asked.syncs:
        return ""
    left = look.at(replace(asked, syncs={**asked.syncs, border: R}))[1]
    if any(not one.line or one.kind not in STEPS for one in left):
        return ""
    first = [one for one in left if one.node is border]
    return "; ".join(one.line for one in (*first, *(one for one in left if one not in first)))


def _read_of(node: fx.Node) -> fx.Node | None:
    """The value whose size is an argument of a node."""
    sizes = [one for _, one in numbers_of(node) if isinstance(one, fx.Node)]
    while sizes:
        size = sizes.pop()
        for base in size.all_input_nodes:
            if "int" in base.meta:
                sizes.append(base)
            elif is_size(base):
                return base.all_input_nodes[0]
            else:
                return base
    return None
