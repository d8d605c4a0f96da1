"""From all that does not fit to the steps that are wrong: one fault of the schedule, one message.

A wrong step may make other, right steps look wrong. So changes of single steps near the first thing that does not fit
are tried, in this order: another collective on the gradient, the sync left out or given otherwise, a sync more, a
parameter split otherwise, a parameter not split. The change after which least is left is the message, and the search
goes on from there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from slapo_py.layouts.checking.faults import MISSING, Look, has_remedy
from slapo_py.layouts.checking.resplit import left_out, resplits
from slapo_py.layouts.inference.backward import sync_line
from slapo_py.layouts.inference.recorded import Asked
from slapo_py.layouts.inference.state import Conversion, Fault, Typing, said
from slapo_py.layouts.placement import P, Placement, R, Shard
from slapo_py.layouts.recording.nodes import is_border, is_tensor, shape_of, slots_of
from slapo_py.layouts.rules.shapes import divides
from slapo_py.layouts.syncs import AUTO, Sync

_WRONG = ("wrong in forward", "wrong in backward", "doubled in backward")
# How many are tried at most: borders without a sync, syncs that are not in doubt, modules.
_BORDERS, _SYNCS, _MODULES = 16, 4, 6


@dataclass(frozen=True)
class Change:
    """One step of a schedule otherwise. node: where. removes: whether a sync that is there is left out or replaced.

    fault: the message, if it does not depend on what is found afterwards. last: only if nothing else explains anything.
    """

    asked: Asked
    node: fx.Node
    removes: bool = False
    fault: Fault | None = None
    last: bool = False


def explained(look: Look, asked: Asked, typing: Typing, found: list[Fault]) -> list[Fault]:
    """One fault for each step that is wrong or missing, of all that a look at what is asked for has found."""
    told: list[Fault] = []
    while found and not _plain(typing, found, asked):
        best = _best(look, asked, typing, found)
        if best is None:
            break
        fault, asked, typing, found = best
        told.append(fault)
    return told + found


def _plain(typing: Typing, found: list[Fault], asked: Asked) -> bool:
    """Whether each fault is a step that is missing, with its line."""
    return all(one.kind not in _WRONG and has_remedy(one) for one in found) and not _suspects(typing, found, asked)


def _suspects(typing: Typing, found: list[Fault], asked: Asked) -> list[fx.Node]:
    """Syncs that do not fit, or whose result does not."""
    nodes: dict[fx.Node, None] = {}
    for fault in found:
        if fault.kind in _WRONG:
            nodes[fault.node] = None
        elif fault.kind == MISSING[0]:
            node = fault.node
            while len(slots_of(node)) == 1:  # what has come through one operation after the other
                node = slots_of(node)[0]
                sync = asked.syncs.get(node)
                if isinstance(sync, Sync) and sync.value is not None:
                    nodes[node] = None
                    break
    return list(nodes)


def _best(
    look: Look, asked: Asked, typing: Typing, found: list[Fault]
) -> tuple[Fault, Asked, Typing, list[Fault]] | None:
    """The change that leaves least: with its fault, and what is left."""
    suspects = set(_suspects(typing, found, asked))
    synced = any(isinstance(one, Sync) for one in asked.syncs.values())

    def weight(faults: list[Fault]) -> int:
        # Before any sync is written, one that is missing speaks against nothing.
        return sum(synced or one.kind not in MISSING or not one.line for one in faults)

    best, least = None, weight(found) + 1
    for change in _changes(look, asked, typing, found):
        if change.last and best is not None:
            break
        after, left = look.at(change.asked)
        own = [one for one in left if one.node is change.node and one.kind in MISSING and not change.fault]
        left = [one for one in left if one not in own]
        count = weight(left) + 1
        # A sync that is itself in doubt is better said by its change; another change must explain more than itself.
        if count < least and (count < weight(found) or change.node in suspects):
            fault = _fault(change, asked, typing, after, found, own, look.axis)
            if fault is not None:
                least, best = count, (fault, change.asked, after, left)
                if count == 1:
                    break
    return best


def _fault(
    change: Change, asked: Asked, before: Typing, after: Typing, found: list[Fault], own: list[Fault], axis: str
) -> Fault | None:
    """What is said of a change."""
    if change.fault is not None:
        return change.fault
    if not change.removes:
        return own[0] if own else None
    node, sync = change.node, asked.syncs[change.node]
    said_so = next((one for one in found if one.node is node and one.kind in _WRONG), None)
    right = after.at_node.get(node)
    if isinstance(change.asked.syncs.get(node), Sync) and said_so is not None:
        return said_so
    what = _what(sync) if isinstance(sync, Sync) else ""
    if right is None or (right.forward, right.backward) == ("none", "none"):
        placed, gradient = after.after[node][0], after.gradient.get(node, "-")
        if said_so is not None and "Leave it out" in said_so.message:
            return said_so
        text = f"{what} at {said(node)}: the value is {placed} and its gradient {gradient}, as is needed. Leave it out."
        return Fault("wrong in forward", node, text)
    line = sync_line(node, right.forward, AUTO if right.forward != "none" else right.backward, right, axis)
    text = f"{what} at {said(node)}: the {_needs(right)}. Write instead: {line}"
    stays = isinstance(sync, Sync) and (sync.value or "none") == right.forward and before.produced[node] == (R,)
    return Fault("wrong in backward" if stays else "wrong in forward", node, text, line)


def _needs(one: Conversion) -> str:
    parts = []
    if one.forward != "none":
        parts.append(f"value is {one.source} and is needed {one.target}")
    if one.backward != "none":
        parts.append(f"gradient is {one.grad_source} and is needed {one.grad_target}")
    return ", the ".join(parts)


def _what(sync: Sync) -> str:
    value = sync.value if sync.value is not None else f"{sync.grad} of the gradient"
    return value if sync.dim is None else f"{value} on dim {sync.dim}"


# ---------------------------------------------------------------- what is tried


def _changes(look: Look, asked: Asked, typing: Typing, found: list[Fault]) -> Iterator[Change]:
    order = {node: index for index, node in enumerate(look.graph.nodes)}
    suspects, known = _suspects(typing, found, asked), _splits(asked)
    unfit = [one for one in found if not has_remedy(one)] or found
    start = min(unfit, key=lambda one: order[one.node]).node
    for node in suspects:
        sync = asked.syncs[node]
        if isinstance(sync, Sync) and sync.value is not None and sync.grad != AUTO:
            yield Change(_with_sync(asked, node, replace(sync, grad=AUTO)), node, removes=True)
        yield from _otherwise(asked, node, known, look.ranks)
    for params, fault in resplits(look, asked, unfit, order, _MODULES):
        yield Change(replace(asked, params=params), fault.node, fault=fault)
    whole, synced = _above(start, asked, typing)
    for node in synced:
        if node not in suspects:
            yield from _otherwise(asked, node, known, look.ranks)
    for node in whole:
        for placement in known:
            if isinstance(placement, Shard) and _has_dim(node, placement, look.ranks):
                yield Change(_with_sync(asked, node, placement), node)
    for params, fault in left_out(look, asked, unfit, order, _MODULES):
        yield Change(replace(asked, params=params), fault.node, fault=fault, last=True)


def _otherwise(asked: Asked, node: fx.Node, known: list[Placement], ranks: int) -> Iterator[Change]:
    """A sync that is there left out, or with another result."""
    yield Change(_with_sync(asked, node, None), node, removes=True)
    for placement in known:
        if not isinstance(placement, Shard) or _has_dim(node, placement, ranks):
            yield Change(_with_sync(asked, node, placement), node, removes=True)


def _with_sync(asked: Asked, node: fx.Node, sync: "Placement | Sync | None") -> Asked:
    syncs = {one: value for one, value in asked.syncs.items() if one is not node}
    return replace(asked, syncs=syncs if sync is None else {**syncs, node: sync})


def _splits(asked: Asked) -> list[Placement]:
    """The placements that the schedule's syncs lead to or come from."""
    found: dict[Placement, None] = {R: None}
    for one in asked.syncs.values():
        if isinstance(one, Sync) and one.dim is not None:
            found[one.shard] = None
    return list(found)


def _has_dim(node: fx.Node, shard: Shard, ranks: int) -> bool:
    shape = shape_of(node)
    return shard.dim < len(shape) and divides(shape[shard.dim], shard.blocks, ranks)


def _above(node: fx.Node, asked: Asked, typing: Typing) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nearest borders that a value comes through: those where it is whole or a partial sum, those with a sync."""
    whole: list[fx.Node] = []
    synced: list[fx.Node] = []
    queue = [node, *node.users]  # what it does not fit may come from the other side
    seen = set(queue)
    while queue and len(whole) < _BORDERS:
        node = queue.pop(0)
        if isinstance(asked.syncs.get(node), Sync):
            synced += [node] * (len(synced) < _SYNCS)
        elif is_border(node) and typing.after[node][0] in (R, P):
            whole.append(node)
        for one in node.all_input_nodes:
            if one not in seen and is_tensor(one) and one.op != "get_attr" and len(typing.after.get(one, ())) == 1:
                seen.add(one)
                queue.append(one)
    return whole, synced
