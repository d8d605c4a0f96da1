"""Random numbers on a mesh axis: drawn alike by ranks that hold the same, and differently by ranks that hold parts.

Ranks of an axis draw alike, but inside of `fork_rng`. Where a value is whole (R), each rank must drop the same elements
of it: otherwise what they hold, and then their parameters, differ from there on. Where it is split, each rank should
draw for its own part: drawn alike, the masks of the parts are copies of each other. That is no error of the ranks
against each other, but not the dropout of one process either.

A module is left alone where some of its draws are on whole values and some on split ones that it makes itself, as in an
attention that drops weights and has a dropout on its result: `fork_rng` is of all that a module draws, so no line mends
it. The masks of the parts stay copies there.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import fx

from slapo_py.distributed.forks import forks_of
from slapo_py.distributed.mesh import DATA
from slapo_py.errors import ArgumentError, StepError
from slapo_py.layouts.inference.state import Fault, Typing, said
from slapo_py.layouts.placement import Placement, R, Shard
from slapo_py.layouts.recording.nodes import name_of, shape_of
from slapo_py.places import check_called, check_forward

if TYPE_CHECKING:
    from slapo_py.history import Step
    from slapo_py.schedule import Schedule

APART, ALIKE = "drawn apart", "drawn alike"
_ATTENTION = "scaled_dot_product_attention"


def drawn(place: "Schedule", typing: Typing, axis: str) -> list[Fault]:
    """Where ranks of an axis draw differently and must not, and where they draw alike and one line mends it.

    typing: of a schedule that is right otherwise. On "dp" ranks have rows of their own, and the engine sets them apart.
    """
    nodes = _drawing(typing.graph)
    if axis == DATA or not nodes:
        return []
    forks = _forks(place, axis)
    whole = [node for node in nodes if not _split(node, typing)]
    wrong = {path: below for path in forks if (below := _below(whole, path))}
    found = [_apart(place, path, nodes, below, typing, axis) for path, below in wrong.items()]
    return found + [_alike(place, path, nodes, typing, axis) for path in _to_fork(place, nodes, typing, forks)]


def to_fork(place: "Schedule", typing: Typing, axis: str) -> list[str]:
    """The modules, by path from a place, that draw for their parts of split values alone, and alike so far."""
    nodes = _drawing(typing.graph)
    return [] if axis == DATA else _to_fork(place, nodes, typing, _forks(place, axis))


def _drawing(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.meta.get("draws")]


def _within(node: fx.Node) -> str:
    return str(node.meta.get("within", ""))


def _below(nodes: Iterable[fx.Node], path: str) -> list[fx.Node]:
    return [node for node in nodes if not path or f"{_within(node)}.".startswith(f"{path}.")]


def _split(node: fx.Node, typing: Typing) -> bool:
    return isinstance(_placement(node, typing), Shard)


def _placement(node: fx.Node, typing: Typing) -> Placement:
    """How what a node draws lies on the ranks."""
    placements = typing.produced[node]
    if any(one != placements[0] for one in placements):
        return R
    first = placements[0]
    if name_of(node) == _ATTENTION and first == Shard(len(shape_of(node)) - 1):
        return R  # the features are split, and each rank has all weights
    return first


def _forks(place: "Schedule", axis: str) -> list[str]:
    """The places that draw differently on an axis, by path from a place; above it they are all of the place."""
    start, found = f"{place.path}." if place.path else "", []
    for path, axes in forks_of(place.root.copy).items():
        if axis in axes and (not path or start.startswith(f"{path}.")):
            found.append("")
        elif axis in axes and path.startswith(start):
            found.append(path.removeprefix(start))
    return found


def _to_fork(place: "Schedule", nodes: list[fx.Node], typing: Typing, forks: list[str]) -> list[str]:
    left = [node for node in nodes if not any(_below([node], path) for path in forks)]
    holders = dict.fromkeys(path for node in left if (path := _called(place, _within(node))) is not None)
    found: list[str] = []
    for path in sorted(holders, key=lambda one: one.count(".") + bool(one)):
        below = _below(nodes, path)
        covered = any(_below(below, one) for one in (*forks, *found))
        if not covered and all(_split(node, typing) for node in below):
            found.append(path)
    return [path for path in holders if path in found]


def _called(place: "Schedule", path: str) -> str | None:
    """The innermost module from a path up that a layer can go around: one in a flattened graph is called no more."""
    for one in (path, *_parents(path)):
        at = place[one] if one else place
        try:
            check_called(at, "fork_rng")
            check_forward(at, "fork_rng")
        except (ArgumentError, StepError):
            continue
        return one
    return None


def _parents(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


# ---------------------------------------------------------------- what is said


def _alike(place: "Schedule", path: str, nodes: list[fx.Node], typing: Typing, axis: str) -> Fault:
    node, line = _below(nodes, path)[0], _line(path, axis)
    text = (
        f'{said(node)} draws for a value that is {_placement(node, typing)} on "{axis}", and the ranks draw alike: '
        f"what they draw for their parts are copies of each other. Write: {line}"
    )
    return Fault(ALIKE, node, text, line)


def _apart(
    place: "Schedule", path: str, nodes: list[fx.Node], wrong: list[fx.Node], typing: Typing, axis: str
) -> Fault:
    node = wrong[0]
    placement = _placement(node, typing)
    how = "whole (R)" if placement == R else str(placement)
    drops = "dropout" in name_of(node) or name_of(node) == _ATTENTION
    text = (
        f'{said(node)} draws inside of {_step(place, path, axis)}: the value is {how} on "{axis}", each rank would '
        f"{'drop other elements of it' if drops else 'draw other numbers for it'}, and what the ranks hold would "
        f"differ from there on. Leave fork_rng out"
    )
    rest = [_line(one, axis) for one in _to_fork(place, _below(nodes, path), typing, [])]
    return Fault(APART, node, f"{text}, and write: {'; '.join(rest)}" if rest else f"{text}.")


def _line(path: str, axis: str) -> str:
    at, given = f'sch["{path}"]' if path else "sch", "" if axis == "tp" else f'axis="{axis}"'
    return f"{at}.fork_rng({given})"


def _step(place: "Schedule", path: str, axis: str) -> str:
    """The step that has set the ranks apart at a place or above it."""
    full = ".".join(filter(None, (place.path, path)))
    for number, step in enumerate(place.root.history, 1):
        above = not step.path or f"{full}.".startswith(f"{step.path}.")
        if step.primitive == "fork_rng" and above and _axis_of(step) == axis:
            return f"step {number}, {step}"
    return "fork_rng"


def _axis_of(step: "Step") -> str:
    return str(step.args[0] if step.args else step.kwargs.get("axis", "tp"))
