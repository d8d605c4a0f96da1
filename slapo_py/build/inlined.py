"""Collectives at the borders of modules that are part of a graph above: they are not called, so the graph has them."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import fx

from slapo_py.build.borders import Moves, by_number
from slapo_py.build.rank_graph import graph_of
from slapo_py.errors import BuildError
from slapo_py.layouts.recording.borders import Border
from slapo_py.layouts.recording.rewritten import borders_between, marks_of
from slapo_py.patterns.rewrite import copied
from slapo_py.rewriting import Called
from slapo_py.scheduled import dress
from slapo_py.tracing import trace_of


def put_into_graphs(place: Any, moves: Mapping[tuple[str, str], Moves]) -> set[tuple[str, str]]:
    """Put the moves of borders that are inside of graphs there. moves: by module and side. Returns which those are.

    Raises `BuildError` for a border that no value passes any more.
    """
    inside: dict[str, dict[tuple[str, str], Moves]] = defaultdict(dict)
    for (path, side), found in moves.items():
        above = graph_of(place.root, path)
        if above != path:
            inside[above][path, side] = found
    for above, below in inside.items():
        _insert(place, above, below)
    return {key for below in inside.values() for key in below}


def _insert(place: Any, above: str, moves: Mapping[tuple[str, str], Moves]) -> None:
    module = place.root.module(above)
    trace, tracer = trace_of(module), place.root.tracer
    assert trace is not None
    marks = marks_of(module, tracer.call(above), tracer.recording.fakes, trace)
    start = f"{above}." if above else ""
    wanted = {(side, path.removeprefix(start)): by_number(found) for (path, side), found in moves.items()}
    missing = {(side, path, index) for (side, path), numbers in wanted.items() for index in numbers}
    graph, _ = copied(trace.graph)
    made: dict[tuple[fx.Node, tuple[Border, ...]], fx.Node] = {}
    for reader in list(graph.nodes):
        for value in reader.all_input_nodes:
            passed: tuple[Border, ...] = ()
            moved = value
            for border in borders_between(marks, value, reader):
                side, path, index = border
                found = wanted.get((side, path), {}).get(index, ())
                if not found:
                    continue
                passed = (*passed, border)
                missing.discard(border)
                if (value, passed) not in made:
                    for move in found:
                        with graph.inserting_before(reader):  # the first one; what else reads it comes later
                            moved = graph.call_function(Called(move), (moved,))
                    made[value, passed] = moved
                moved = made[value, passed]
            if moved is not value:
                reader.replace_input_with(value, moved)
    if missing:
        side, path, index = sorted(missing)[0]
        raise BuildError(
            f'build: a collective stands at {side} {index} of "{start}{path}", which is part of the graph of '
            f'"{above}", and no value passes there any more. Keep it a call: trace(flatten=True, leaves=[{path!r}]).'
        )
    graph.lint()
    dress(module, trace.rewritten(graph, False, ("build", "sync")))
