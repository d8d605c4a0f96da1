"""What one look at a schedule's syncs finds wrong: inference, with what the schedule asks for, held against that.

Inference puts in what is missing and goes on, so that what is only missing gives one fault each. What is wrong may give
several: `explain.py` looks for the step that is behind them.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from slapo_py.layouts.inference.backward import sync_line
from slapo_py.layouts.inference.infer import infer
from slapo_py.layouts.inference.recorded import Asked
from slapo_py.layouts.inference.sizes import sizes_of
from slapo_py.layouts.inference.state import Conversion, Fault, Typing, is_local, said
from slapo_py.layouts.inference.whole_sizes import gathered_for
from slapo_py.layouts.placement import R, Shard
from slapo_py.layouts.recording.nodes import carries, is_border, is_size, numbers_of
from slapo_py.layouts.recording.owned import Owner
from slapo_py.layouts.recording.rows import Rows, follows_batch
from slapo_py.layouts.rules.signatures import Signature
from slapo_py.layouts.syncs import AUTO, Sync

LITERAL, BOTH = "literal size", "size and number"
MISSING = ("missing in forward", "missing in backward")
STEPS = (*MISSING, "gradient not summed", "size not divided")
"""What `auto_sync` adds."""


def has_remedy(fault: Fault) -> bool:
    """Whether a message says what to write, or is of a kind that says it in words."""
    return bool(fault.line) or fault.kind not in (*MISSING, "no signature", "size")


@dataclass
class Look:
    """A recording that is looked at on one axis. names: of parameters' nodes; ties have one. computed:
    attributes with whose numbers a forward has computed. known: see `infer`."""

    graph: fx.Graph
    ranks: int
    axis: str
    names: dict[fx.Node, str]
    computed: Set[Owner] = frozenset()
    known: dict[Any, list[Signature]] = field(default_factory=dict)

    def at(self, asked: Asked) -> tuple[Typing, list[Fault]]:
        """The placements with what is asked for, and what does not fit."""
        divided = {(path, name) for path, names in asked.divided.items() for name in names}
        typing = infer(self.graph, self.ranks, asked.params, asked.syncs, known=self.known, divided=divided)
        found = list(typing.faults)
        for one in typing.conversions():
            sync = asked.syncs.get(one.node)
            stands = isinstance(sync, Sync) and one is typing.at_node.get(one.node)
            if not stands and not is_local(one):
                inside = one.readers if one.forward == "all_gather" and not one.at_border else ()
                found.append(gathered_for(one.node, inside or (), typing) or _missing(one, self.axis))
            elif stands and isinstance(sync, Sync) and sync.dim is not None and not isinstance(sync.parts, Rows):
                found += _of_one_batch(one, sync, self.axis)
        found += self._sums(typing, asked) + undivided(typing, asked, self.axis, self.computed)
        return typing, list({one.message: one for one in found}.values())

    def _sums(self, typing: Typing, asked: Asked) -> list[Fault]:
        found, due = [], {self.names[node] for node in typing.reduced}
        there = {self.names[node] for node in asked.summed}
        for node in typing.reduced:
            if self.names[node] not in there:
                found.append(_not_summed(node, self.axis))
                there.add(self.names[node])
        for node in (one for one in self.graph.nodes if one in asked.summed):
            if self.names[node] not in due:
                found.append(_summed_twice(node))
                due.add(self.names[node])
        return found


def _missing(one: Conversion, axis: str) -> Fault:
    node, readers = one.node, sorted(map(said, one.readers or ()))
    line = ""
    if one.at_border:
        line = sync_line(node, one.forward, AUTO if one.forward != "none" else one.backward, one, axis)
    write = f" Write: {line}" if line else ""
    if one.forward == "none":
        return Fault(
            MISSING[1], node,
            f"the gradient of {said(node)} is {one.grad_source} and is needed {one.grad_target}: {one.backward} is "
            f"missing.{write}", line,
        )  # fmt: skip
    to = f" by {', '.join(readers)}" if readers else ""
    return Fault(
        MISSING[0], node,
        f"{said(node)} is {one.source} and is needed {one.target}{to}: {one.forward} is missing.{write}", line,
    )  # fmt: skip


def _of_one_batch(one: Conversion, sync: Sync, axis: str) -> list[Fault]:
    """A number of blocks that is right for batches of the example's size alone."""
    if not follows_batch(one.node, sync.shard):
        return []
    line = sync_line(one.node, one.forward, AUTO if sync.grad == AUTO else one.backward, one, axis)
    text = (
        f"{said(one.node)}: parts={sync.parts} is the number of rows of the example's batch, and another batch has "
        f"another. Write instead: {line}"
    )
    return [Fault("parts of one batch", one.node, text, line)]


def undivided(typing: Typing, asked: Asked, axis: str, computed: Set[Owner] = frozenset()) -> list[Fault]:
    """Sizes in the code that are not a rank's, one for each attribute."""
    found: dict[tuple[str, str], Fault] = {}
    fits: set[tuple[str, str]] = set()
    for node in typing.graph.nodes:
        resized = typing.resized.get(node, {})
        for one in resized.values():
            if one.owner is None:
                where = node.meta.get("where", "?")
                line = _gathered_before(node.args[0] if node.args else None, typing, axis)
                text = (
                    f"{said(node)} ({where}) is given the literal size {one.passes}, and a rank needs {one.needs}. It "
                    f"comes from no attribute of a module: read it from a tensor's shape, or use -1."
                ) + (f" Or let each rank have it whole there. Write: {line}" if line else "")
                found[where, str(one.passes)] = Fault(LITERAL, node, text, line)
                continue
            path, name = one.owner
            fits.add(one.owner)
            if name not in asked.divided.get(path, ()):
                line = f'{_at(path)}.configure({name}=slapo.per_rank("{axis}"))'
                text = (
                    f"{said(node)} is given the size {one.passes} of the attribute {name!r}, and a rank needs "
                    f"{one.needs}. Write: {line}"
                )
                found[one.owner] = Fault("size not divided", node, text, line)
        for place, value in sizes_of(node):
            owner = getattr(value, "owner", None)
            if owner is not None and place not in resized and owner[1] in asked.divided.get(owner[0], ()):
                text = (
                    f"{said(node)} is given the size {int(value)} of the attribute {owner[1]!r}, which a rank needs "
                    f'whole, and which is divided over "{axis}". Leave configure({owner[1]}=slapo.per_rank("{axis}")) '
                    f'at "{owner[0]}" out.'
                )
                found.setdefault(owner, Fault("size divided", node, text))
    faults = [one for owner, one in found.items() if one.kind != "size divided" or owner not in fits]
    divided = fits | {(path, name) for path, names in asked.divided.items() for name in names}
    return faults + _used_otherwise(typing, divided - found.keys() | fits, computed)


def _used_otherwise(typing: Typing, divided: Set[Owner], computed: Set[Owner]) -> list[Fault]:
    """Attributes that a rank has in part, and that the forward also uses where a rank would need the whole."""
    found: dict[Owner, Fault] = {}
    last = next(reversed(typing.graph.nodes))
    for node in typing.graph.nodes:
        divides = typing.resized.get(node, {})
        for place, value in numbers_of(node):
            owner: Owner | None = getattr(value, "owner", None)
            if owner is not None and owner in divided and place not in divides and not is_size(node):
                found.setdefault(owner, _both(node, owner))
    for owner in sorted(divided & computed):
        found.setdefault(owner, _both(last, owner))
    return list(found.values())


def _both(node: fx.Node, owner: Owner) -> Fault:
    path, name = owner
    return Fault(
        BOTH, node,
        f'a rank has its part of the attribute {name!r} of "{path}", which is a size of something split or was '
        f"configured so, and the forward also uses it otherwise, where a rank would need the whole. Read the one or "
        f"the other from a tensor's shape, use -1, or keep two attributes.",
    )  # fmt: skip


def _gathered_before(value: Any, typing: Typing, axis: str) -> str:
    """The line that gathers a value at the last border that it has passed; empty if there is none."""
    border = border_before(value, typing)
    if border is None:
        return ""
    gathered = Conversion(border, typing.after[border][0], R)
    return sync_line(border, gathered.forward, AUTO, gathered, axis)


def border_before(value: Any, typing: Typing) -> fx.Node | None:
    """The last border that a value has passed, if it is split there."""
    while isinstance(value, fx.Node) and carries(value) and not is_border(value):
        value = value.args[0]
    is_there = isinstance(value, fx.Node) and is_border(value) and isinstance(typing.after[value][0], Shard)
    return value if is_there else None


def _not_summed(node: fx.Node, axis: str) -> Fault:
    path, _, last = str(node.target).rpartition(".")
    line = f'{_at(path)}.reduce_grad("{last}"{_on(axis)})'
    return Fault(
        "gradient not summed", node,
        f"{said(node)} is whole on each rank (R) and its gradient is a partial sum (P). Write: {line}", line,
    )  # fmt: skip


def _summed_twice(node: fx.Node) -> Fault:
    return Fault(
        "gradient summed twice", node,
        f"the gradient of {said(node)} is no partial sum: summed over the ranks it becomes too large. Leave "
        f"reduce_grad out.",
    )  # fmt: skip


def _at(path: str) -> str:
    return f'sch["{path}"]' if path else "sch"


def _on(axis: str) -> str:
    return "" if axis == "tp" else f', axis="{axis}"'
