"""`sch.auto_sync("tp")`: what inference finds, as ordinary steps of the schedule."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from slapo_py.codec import PerRank
from slapo_py.errors import PlacementError, ShardError
from slapo_py.layouts.checking.cheaper import with_parts
from slapo_py.layouts.checking.drawn import to_fork
from slapo_py.layouts.checking.escaped import escaped
from slapo_py.layouts.checking.explain import explained
from slapo_py.layouts.checking.faults import BOTH, LITERAL, MISSING, STEPS, Look, undivided
from slapo_py.layouts.checking.heads import uneven_heads
from slapo_py.layouts.checking.numbers_of_parts import with_lines
from slapo_py.layouts.checking.steps import with_step
from slapo_py.layouts.inference.recorded import Asked, asked_of, divided_of, first_names, summed_nodes
from slapo_py.layouts.inference.state import Conversion, Fault, Typing, is_local, said
from slapo_py.layouts.inference.whole_sizes import gathered_for
from slapo_py.layouts.placement import Placement, Shard
from slapo_py.layouts.recording.borders import ENTER
from slapo_py.layouts.recording.nodes import is_border
from slapo_py.layouts.recording.record import record
from slapo_py.layouts.recording.rows import parts_of
from slapo_py.layouts.syncs import Sync

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


def auto_sync(place: "Schedule", axis: str, pins: Mapping[str, Placement] | None, ranks: int) -> None:
    """Insert every missing sync, reduction and divided attribute at and below a place. See `Schedule.auto_sync`."""
    recording = record(place)
    graph = recording.graph
    asked = asked_of(place, graph, axis)
    asked = replace(asked, syncs={**_pins(place, graph, pins or {}), **asked.syncs})
    look = Look(graph, ranks, axis, first_names(place, graph), recording.computed)
    typing, found = look.at(asked)
    found = with_lines(look, asked, typing, found)
    fused = with_parts(look, asked, typing, found, most=1).told
    if fused:
        raise PlacementError(f'auto_sync at "{place.path}": {with_step(place, axis, fused[0]).message}')
    synced = {node for node, one in asked.syncs.items() if isinstance(one, Sync)}
    single = any(one.kind in MISSING and not one.line for one in found)
    uneven = uneven_heads(typing, synced, axis, single=single)
    if uneven is not None:
        raise ShardError(f'auto_sync at "{place.path}": {uneven.message}')
    if typing.faults:
        raise PlacementError(f'auto_sync at "{place.path}": {_first(place, look, asked, typing, found)}')
    for fault in undivided(typing, asked, axis, recording.computed):
        if fault.kind in (LITERAL, BOTH):
            raise _refused(place, fault)
    for fault in escaped(place, recording, look, asked, typing):
        raise _refused(place, fault)
    done = set[Any]()  # a module that is called several times has each sync once
    for one in typing.conversions():
        stands = isinstance(asked.syncs.get(one.node), Sync) and one is typing.at_node.get(one.node)
        pinned = one.node in asked.syncs and one.at_border  # written down even where nothing is sent
        border = one.node.args[1:] if one.at_border else None
        if not stands and (pinned or not is_local(one)) and border not in done:
            done |= {border} - {None}
            _check_calls(place, typing, one)
            _insert(place, typing, one, axis)
    _configure(place, typing, axis)
    _reduce(place, typing, axis)
    for path in to_fork(place, typing, axis):
        (place[path] if path else place).fork_rng(axis=axis)


def _first(place: "Schedule", look: Look, asked: Asked, typing: Typing, found: list[Fault]) -> str:
    """The first thing that is wrong, and not only missing."""
    told = [one for one in explained(look, asked, typing, found) if one.kind not in STEPS]
    return with_step(place, look.axis, told[0] if told else typing.faults[0]).message


def _refused(place: "Schedule", fault: Fault) -> PlacementError:
    """What is wrong, and where its line belongs."""
    first = "write the line at the end of this message before auto_sync: " if fault.line else ""
    return PlacementError(f'auto_sync at "{place.path}": {first}{fault.message}')


def _pins(place: "Schedule", graph: fx.Graph, pins: Mapping[str, Placement]) -> dict[fx.Node, Placement]:
    found: dict[fx.Node, Placement] = {}
    for path, placement in pins.items():
        nodes = [node for node in graph.nodes if is_border(node) and node.args[1:] == (ENTER, path, 0)]
        if not nodes:
            raise PlacementError(
                f'auto_sync at "{place.path}": pins has {path!r}, and no tensor enters a module of that path here.'
            )
        found |= dict.fromkeys(nodes, placement)
    return found


def _check_calls(place: "Schedule", typing: Typing, one: Conversion) -> None:
    """A module that is called several times does the same in each call, or is refused."""
    if not one.at_border:
        return
    for node in typing.graph.nodes:
        other = typing.at_node.get(node)
        ends = None if other is None else (other.source, other.target, other.forward, other.backward)
        if is_border(node) and node.args[1:] == one.node.args[1:]:
            if ends != (one.source, one.target, one.forward, one.backward):
                raise PlacementError(
                    f'auto_sync at "{place.path}": "{one.node.args[2]}" is called several times, and {said(one.node)} '
                    f"needs a collective in one call ({one}), and none or another in the next. Give each call a module "
                    f"of its own, or put the sync at a module around one call."
                )


def _insert(place: "Schedule", typing: Typing, one: Conversion, axis: str) -> None:
    """One conversion as a sync."""
    if one.at_border:
        _, side, path, index = one.node.args
        _sync(place, str(path), str(side), int(index), one, axis)  # type: ignore[arg-type]
    else:
        wrong = gathered_for(one.node, one.readers or (), typing) if one.forward == "all_gather" else None
        if wrong is not None:
            raise _refused(place, wrong)
        readers = ", ".join(sorted(said(reader) for reader in one.readers or ()))
        raise PlacementError(
            f'auto_sync at "{place.path}": {said(one.node)} is {one.source}, and {readers} needs it {one.target} '
            f"({one.forward}, gradient {one.backward}), at no border of a module. Split another parameter, or give "
            f"pins."
        )


def _sync(place: "Schedule", path: str, side: str, index: int, one: Conversion, axis: str) -> None:
    split = one.source if one.forward == "all_gather" else one.target
    dim: int | None = None
    parts: int | tuple[int, ...] | str = 1
    if isinstance(split, Shard) and one.forward != "none":
        dim, parts = split.dim, parts_of(one.node, split)
    value = None if one.forward == "none" else one.forward
    grad = None if one.backward == "none" else one.backward
    (place[path] if path else place).sync(side, value, grad=grad, dim=dim, axis=axis, index=index, parts=parts)


def _configure(place: "Schedule", typing: Typing, axis: str) -> None:
    """The attributes whose value is a size that each rank has a part of."""
    divided = divided_of(place.root)
    for sizes in typing.resized.values():
        for one in sizes.values():
            if one.owner is None:
                continue
            path, name = one.owner
            full = f"{place.path}.{path}" if place.path and path else path or place.path
            held = divided.get(full, {}).get(name, axis)
            if held != axis:
                raise PlacementError(
                    f'auto_sync at "{place.path}": {name!r} of "{full}" is divided over "{held}" already, and a '
                    f'rank of "{axis}" needs {one.needs} of {one.passes}. An attribute is divided over one '
                    f"axis: read the size from a tensor's shape instead."
                )
            if name not in divided.get(full, {}):
                divided.setdefault(full, {})[name] = axis
                (place[path] if path else place).configure(**{name: PerRank(axis)})


def _reduce(place: "Schedule", typing: Typing, axis: str) -> None:
    names, there = first_names(place, typing.graph), summed_nodes(place, typing.graph, axis)
    for name in dict.fromkeys(names[node] for node in typing.reduced if node not in there):
        path, _, last = name.rpartition(".")
        place.root.cursor(path).reduce_grad(last, axis=axis)
