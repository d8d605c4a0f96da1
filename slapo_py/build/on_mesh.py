"""A schedule on a mesh: the module of this rank, with its parts of the parameters and its collectives."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx, nn

from slapo_py.build.borders import InputSync, Move, OutputSync
from slapo_py.build.facts import Facts
from slapo_py.build.fast_path import without_fast_path
from slapo_py.build.inlined import put_into_graphs
from slapo_py.build.randomness import mask_by_index
from slapo_py.build.rank_graph import changes_for, parents, rewrite
from slapo_py.build.rows import RowsNoted, paths_noting
from slapo_py.build.slicing import facts_for
from slapo_py.build.unchecked import Written, is_checked, without_what_is_missing
from slapo_py.build.without_cache import fresh_without_cache
from slapo_py.distributed.forks import fork, forks_of
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.errors import BuildError, PlacementError
from slapo_py.layouts.checking.axes import used_axes
from slapo_py.layouts.checking.check import checked
from slapo_py.layouts.inference.buffers import split_buffers
from slapo_py.layouts.inference.recorded import divided_of, divided_on, sync_nodes
from slapo_py.layouts.inference.state import Typing, said
from slapo_py.layouts.recording.borders import ENTER
from slapo_py.layouts.recording.nodes import is_border
from slapo_py.layouts.recording.record import Recording, record
from slapo_py.layouts.syncs import Sync
from slapo_py.scheduled import dress
from slapo_py.tracing import trace_of
from slapo_py.tracing.reads import dotted


def scheduled_on(sch: Any, mesh: Mesh, logical_masks: bool = False) -> tuple[nn.Module, Facts]:
    """The scheduled copy as a rank runs it, around the whole parameters still, and what is known of them.

    Every axis is checked first, so that a wrong schedule is refused on all ranks before anything is sent. Raises
    `PlacementError` with the checker's message, `BuildError`.
    """
    place = fresh_without_cache(sch)
    axes = tuple(axis for axis in mesh.sizes if mesh.size(axis) > 1)
    _refuse_idle(place.root, axes, mesh)
    used = [axis for axis in axes if uses(place.root, axis)]
    recording = record(place) if used or logical_masks else None
    typed = {axis: _typed(place, recording, axis, mesh.size(axis)) for axis in used if recording is not None}
    buffers = {axis: split_buffers(typing, place.root.copy) for axis, typing in typed.items()}
    named = {axis: {str(node.target): shard for node, shard in held.items()} for axis, held in buffers.items()}
    facts = facts_for(place.root, axes, named)
    moves: dict[tuple[str, str], list[tuple[int, Any]]] = defaultdict(list)
    ranks_on = {axis: mesh.ranks(axis) for axis in typed}
    changes = {axis: changes_for(place, one, axis, ranks_on[axis], buffers[axis]) for axis, one in typed.items()}
    for axis, typing in typed.items():
        syncs = {} if is_checked() or recording is None else sync_nodes(place, recording.graph, axis)
        for key, more in _moves(typing, ranks_on[axis], syncs).items():
            moves[key] += more
        for path in paths_noting(typing):
            dress(place.root.module(path), RowsNoted())
    inside = put_into_graphs(place, {key: tuple(found) for key, found in moves.items()})
    for axis, typing in typed.items():
        rewrite(place, typing, axis, ranks_on[axis], changes[axis])
    for (path, side), found in moves.items():
        if (path, side) not in inside:
            layer = InputSync if side == ENTER else OutputSync
            dress(place.root.module(path), layer(tuple(found)))
    if typed:
        without_fast_path(place.root.copy)
    _divide(place.root, mesh)
    if logical_masks and recording is not None:
        mask_by_index(place, recording.graph, typed, mesh)
    else:
        fork(place.root.copy, {axis: mesh.coordinate(axis) for axis in mesh.sizes})
    return place.root.copy, facts


def _refuse_idle(root: Any, axes: Iterable[str], mesh: Mesh) -> None:
    """Refuse an axis over which nothing is split: its ranks would all do the same."""
    used = used_axes(root)
    for axis in axes:
        if axis not in used and axis != DATA:
            others = " and ".join(f'"{one}"' for one in used) or "none"
            raise BuildError(
                f'build: no step of the schedule uses the axis "{axis}" of mesh={mesh.sizes}, so that its '
                f'{mesh.size(axis)} ranks would all do the same. Only "{DATA}" splits the batch. Axes that steps use: '
                f"{others}."
            )


def uses(root: Any, axis: str) -> bool:
    """Whether a schedule says anything of a mesh axis."""
    split = any(f"placement on {axis}" in tags for tags in root.annotations.values())
    synced = any(one.axis == axis for syncs in root.syncs.values() for one in syncs.values())
    return split or synced or any(axis in axes for axes in forks_of(root.copy).values())


def _typed(place: Any, recording: Recording, axis: str, ranks: int) -> Typing:
    typing, faults = checked(place, recording, axis, ranks)
    if not is_checked():
        syncs = sync_nodes(place, recording.graph, axis)
        return without_what_is_missing(typing, syncs, divided_on(place.root, axis))
    if faults:
        more = f" And {len(faults) - 1} more: sch.check() lists them." if len(faults) > 1 else ""
        raise PlacementError(f'build on "{axis}" of {ranks} ranks: {faults[0].message}{more}')
    return typing


def _moves(typing: Typing, ranks: Any, syncs: Mapping[fx.Node, Sync]) -> dict[tuple[str, str], list[tuple[int, Any]]]:
    """The conversions at borders, by module and side. A module that runs several times does the same each time.

    syncs: those that are done as they are written.
    """
    found: dict[tuple[str, str], dict[int, Any]] = {}
    for node in typing.graph.nodes:
        if not is_border(node):
            continue
        _, side, path, index = node.args
        one = typing.at_node.get(node)
        move: Any = Move.of(one, ranks, said(node)) if one is not None else None
        if node in syncs:
            move = Written.of(syncs[node], node, typing, ranks)
        known = found.setdefault((path, side), {})
        if known.setdefault(index, move) != move:
            raise BuildError(
                f'build: {said(node)} goes through a collective in one call of "{path}", and in another one not, or '
                f"through another. Put the sync at the modules around its calls."
            )
    moves = {key: [(index, one) for index, one in held.items() if one is not None] for key, held in found.items()}
    return {key: held for key, held in moves.items() if held}


def _divide(root: Any, mesh: Mesh) -> None:
    """The attributes that are a rank's share of what they are in the whole."""
    for path, names in divided_of(root).items():
        module = root.module(path)
        for name, axis in names.items():
            value, size = getattr(module, name), mesh.size(axis)
            if value % size:
                raise BuildError(
                    f'build at "{path}": {name}={value} does not divide over axis "{axis}" of size {size}. '
                    f"Legal sizes: {', '.join(str(one) for one in range(1, value + 1) if value % one == 0)}."
                )
            setattr(module, name, value // size)
            _read_again(root, path, name)


def _read_again(root: Any, path: str, name: str) -> None:
    """The traces that have read an attribute expect its new value."""
    for above in (path, *parents(path)):
        holder = root.module(above)
        trace = trace_of(holder)
        below = path if not above else path.removeprefix(above).lstrip(".")
        key = (f"self{dotted(below)}", name)
        if trace is not None and key in trace.reads:
            dress(holder, trace.reading(holder, {key: getattr(root.module(path), name)}))
