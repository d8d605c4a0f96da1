"""What a user holds after `sch[path].find(pattern)`, and what a history holds in its place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_py import codec
from slapo_py.errors import ArgumentError, NoMatchError, StaleMatchError
from slapo_py.patterns import Occurrence, Pattern, as_pattern, find, why_not
from slapo_py.tracing import trace_of
from slapo_py.tracing.trace import Trace

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


@codec.value("nth")
@dataclass(frozen=True)
class Nth(codec.Value):
    """The match number `index` of a pattern, as a value: what a history stores for a match."""

    pattern: Any
    index: int

    def __post_init__(self) -> None:
        if isinstance(self.index, bool) or not isinstance(self.index, int) or self.index < 0:
            raise ArgumentError(f"nth(pattern, {self.index!r}): needs the number of a match, counted from 0.")
        as_pattern(self.pattern)

    def written(self, write: Callable[[Any], str]) -> str:
        return f"slapo.nth({write(self.pattern)}, {write(self.index)})"


def nth(pattern: Any, index: int) -> Nth:
    """The match of a pattern with this number, counted from 0 in the order of `sch[path].find(pattern)`."""
    return Nth(pattern, index)


class Match(codec.Handle):
    """One occurrence of a pattern in the graph of a traced place.

    It can be given to `replace`, `group`, `fuse` and `checkpoint`. The matches of one `find` survive each other's
    replacement; after any other step on the same graph they raise `StaleMatchError`.

    Attributes:
        place: the traced place.
        pattern: what was looked for.
        nodes: names of the graph's nodes that it covers, in the order of the graph.
        inputs: for each input of the pattern, the name of the node (or the attribute) that it stands for.
        outputs: names of the nodes whose values are used outside.
        values: what the named `slapo.wild(name)` stand for.
        modules: paths, seen from the place, of the submodules whose calls it covers.
    """

    def __init__(
        self, place: "Schedule", pattern: Any, occurrence: Occurrence, found: frozenset[frozenset[str]]
    ) -> None:
        self.place, self.pattern = place, pattern
        self.nodes = tuple(node.name for node in occurrence.nodes)
        self.inputs = {name: str(value) for name, value in occurrence.inputs.items()}
        self.outputs = tuple(node.name for node in occurrence.outputs)
        self.values = dict(occurrence.wilds)
        self.modules = occurrence.modules
        self._trace = trace_of(place.module)
        self._found = found

    def recorded(self, place: Any) -> Nth:
        if place != self.place:
            raise ArgumentError(
                f'a match of "{self.place.path}" was given to a step at "{place.path}". Write '
                f'sch["{self.place.path}"], or look there: sch["{place.path}"].find(pattern).'
            )
        trace = trace_of(place.module)
        if trace is not None and self._holds_in(trace):
            for index, one in enumerate(find(place.module, trace.graph, as_pattern(self.pattern))):
                if tuple(node.name for node in one.nodes) == self.nodes:
                    return Nth(self.pattern, index)
        raise StaleMatchError(
            f'{self!r} was found in a graph of "{place.path}" that a later step has changed. '
            f'Look again: sch["{place.path}"].find(pattern).'
        )

    def _holds_in(self, trace: Trace) -> bool:
        """Whether a trace is the one that was searched, but for replaced matches of the same search."""
        now: Trace | None = trace
        while now is not None and now is not self._trace and now.consumed and now.consumed <= self._found:
            now = now.parent
        return now is self._trace

    def __repr__(self) -> str:
        return f'<Match of {len(self.nodes)} nodes at "{self.place.path}": {", ".join(self.nodes)}>'


def search(place: "Schedule", pattern: Any) -> list[Match]:
    """All matches of a pattern in the graph of a traced place. Raises `TraceError` if it is not traced."""
    found = find(place.module, place.graph, as_pattern(pattern))
    names = frozenset(frozenset(node.name for node in one.nodes) for one in found)
    return [Match(place, pattern, one, names) for one in found]


def reason(place: "Schedule", pattern: Any) -> str:
    """Why a pattern does not match at a traced place, or how often it does."""
    return why_not(place.module, place.graph, as_pattern(pattern))


def occurrences(place: "Schedule", what: Any, primitive: str) -> list[Occurrence]:
    """What a step is to be done at: every match of a pattern, or those that are named. Raises `NoMatchError`."""
    where = f'{primitive} at "{place.path}"'
    if isinstance(what, Nth) or (isinstance(what, list | tuple) and what and all(isinstance(n, Nth) for n in what)):
        wanted = [what] if isinstance(what, Nth) else list(what)
        chosen: dict[tuple[str, ...], Occurrence] = {}
        for one in wanted:
            found = find(place.module, place.graph, as_pattern(one.pattern))
            if one.index >= len(found):
                raise NoMatchError(
                    f"{where}: there is no match number {one.index} of this pattern, counted from 0; there are "
                    f"{len(found)}. {reason(place, one.pattern)}"
                )
            names = tuple(node.name for node in found[one.index].nodes)
            if any(set(names) & set(other) for other in chosen):
                raise ArgumentError(
                    f"{where}: two of the given matches share the node {names[-1]!r}. Give one of them."
                )
            chosen[names] = found[one.index]
        return sorted(chosen.values(), key=lambda one: one.nodes[0])
    if not isinstance(what, Pattern) and not callable(what):
        raise ArgumentError(
            f"{where}: needs a pattern (a function over torch operations) or matches of sch[path].find(pattern), found "
            f"{what!r}. Write, for example, {primitive}(..., lambda x, y: x + y)."
        )
    found = find(place.module, place.graph, as_pattern(what))
    if not found:
        raise NoMatchError(f"{where}: {reason(place, what)}")
    return found
