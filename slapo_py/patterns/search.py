"""Where a pattern occurs in a graph."""

from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from slapo_py.patterns.matcher import Matcher
from slapo_py.patterns.pattern import Pattern, as_pattern
from slapo_py.patterns.terms import Terms
from slapo_py.patterns.words import Attribute, Child


@dataclass(frozen=True, eq=False)
class Occurrence:
    """One match of a pattern in a graph.

    pattern, alternative: what was found, and which of its functions.
    nodes: what the match stands for and would take away, in the order of the graph.
    inputs: the value of each input, in the order of the parameters; a weight that a submodule holds is an Attribute.
    outputs: the nodes of the returned values.
    wilds: the values of named wild literals; where they are no literals, nodes and attributes.
    modules: the submodules whose calls are among the nodes.
    reads: attributes of those that were taken for literals: {(path, attribute): value}.
    kinds: and their classes.
    """

    pattern: Pattern
    alternative: int
    nodes: tuple[fx.Node, ...]
    inputs: dict[str, fx.Node | Attribute]
    outputs: tuple[fx.Node, ...]
    wilds: dict[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    reads: dict[tuple[str, str], Any] = field(default_factory=dict)
    kinds: dict[str, type[nn.Module]] = field(default_factory=dict)


def find(module: nn.Module, graph: fx.Graph, pattern: Any) -> list[Occurrence]:
    """All occurrences of a pattern in a graph, in its order; they never overlap, the earlier one wins.

    Outputs that have no more than an input in common are looked for among the nearest users of that input.
    `module` has the submodules that the graph calls. Raises `PatternError` if the pattern can't be one.
    """
    return Search(module, graph, as_pattern(pattern)).run()


class Search:
    """One search of one graph. `visits` counts what it looked at."""

    def __init__(self, module: nn.Module, graph: fx.Graph, pattern: Pattern) -> None:
        self.pattern = pattern
        self.terms = Terms(module, graph)
        self.taken: dict[fx.Node, int] = {}
        self.matchers = [Matcher(body, self.terms, self.taken) for body in pattern.bodies]

    @property
    def visits(self) -> int:
        """Pairs of a pattern's and a graph's node that were compared, and nodes that were read."""
        return self.terms.built + sum(one.visits for one in self.matchers)

    def run(self) -> list[Occurrence]:
        """All occurrences. A later alternative finds what the earlier ones have left."""
        found: list[Occurrence] = []
        for index, matcher in enumerate(self.matchers):
            for anchor in matcher.anchors() if matcher.possible() else ():
                occurrence = self._at(index, anchor)
                if occurrence is not None:
                    self.taken.update(dict.fromkeys(occurrence.nodes, len(found)))
                    found.append(occurrence)
        return sorted(found, key=lambda one: self.terms.order[one.nodes[0]])

    def _at(self, index: int, anchor: fx.Node) -> Occurrence | None:
        matcher = self.matchers[index]
        for _ in matcher.solutions(anchor):
            nodes = matcher.covered()
            if matcher.objection(nodes) is None:
                return self._occurrence(index, nodes)
        return None

    def _occurrence(self, index: int, nodes: set[fx.Node]) -> Occurrence:
        matcher = self.matchers[index]
        body = matcher.body
        ordered = tuple(sorted(nodes, key=self.terms.order.__getitem__))
        children = [node for node in ordered if node.op == "call_module"]
        reads: dict[tuple[str, str], Any] = {}
        known = {matcher.bound[one] for one in body.nodes if not isinstance(one.target, Child)}
        for node in children:
            if node in known:
                reads.update(self.terms.term(node).reads)
        return Occurrence(
            self.pattern, index, ordered,
            {name: matcher.bound[one] for name, one in body.inputs.items()},
            tuple(matcher.bound[one] for one in body.outputs),
            dict(matcher.wilds),
            tuple(dict.fromkeys(str(node.target) for node in children)),
            reads,
            {str(node.target): type(self.terms.child(node)) for node in children},
        )  # fmt: skip
