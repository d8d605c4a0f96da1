"""Why a pattern does not match: how far the nearest miss came, and what stopped it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from slapo_py.patterns.children import hindrance, resembles
from slapo_py.patterns.matcher import Matcher, is_mode, pairs_of
from slapo_py.patterns.ops import op_in_place
from slapo_py.patterns.pattern import as_pattern
from slapo_py.patterns.search import Search
from slapo_py.patterns.terms import CALL
from slapo_py.patterns.words import MODE, Attribute, Child, Wild


def why_not(module: nn.Module, graph: fx.Graph, pattern: Any) -> str:
    """How far the best near-miss of a pattern came in a graph, and what stopped it, or how often it matches.

    One or two sentences for each alternative.
    """
    search = Search(module, graph, as_pattern(pattern))
    found = search.run()
    sentences = []
    for index, matcher in enumerate(search.matchers):
        name = matcher.body.said
        count = sum(one.alternative == index for one in found)
        if count:
            sentences.append(f"{name} matches {count} time{'s' * (count != 1)}.")
        else:
            sentences.append(f"{name} does not match: {_Nearest(matcher).reason()}.")
    return " ".join(one[0].upper() + one[1:] for one in sentences)


def why_none(module: nn.Module, graph: fx.Graph, patterns: Sequence[Any]) -> str:
    """The same of the one that came nearest of several patterns, none of which matches."""
    nearest, best = "", -1
    for one in patterns:
        search = Search(module, graph, as_pattern(one))
        for matcher in search.matchers:
            miss = _Nearest(matcher)
            reason = miss.reason()
            if miss.score > best:
                nearest, best = f"{matcher.body.said} does not match: {reason}.", miss.score
    others = f" The other {len(patterns) - 1} forms are no nearer." if len(patterns) > 1 else ""
    return nearest[0].upper() + nearest[1:] + others


class _Miss(NamedTuple):
    """The operations of the pattern that are there, and what stopped the others; "" if all are."""

    matched: frozenset[fx.Node]
    reason: str


class _Nearest:
    def __init__(self, matcher: Matcher) -> None:
        self.matcher, self.terms, self.body = matcher, matcher.terms, matcher.body
        self.score = 0
        """How many of its operations are there."""
        self._known: dict[tuple[fx.Node, fx.Node], _Miss] = {}

    def reason(self) -> str:
        for p in self.body.nodes:
            if self.matcher.op(p) not in self.terms.ops:
                return self._absent(p)
        anchors = self.matcher.anchors()
        for anchor in anchors:
            if self.matcher.fits(self.body.outputs[0], anchor):
                self.score = len(self.body.nodes)
                return self._all_there(anchor)
        best = max((self._compare(self.body.outputs[0], one) for one in anchors), key=lambda one: len(one.matched))
        matched, total = len(best.matched), len(self.body.nodes)
        self.score = matched
        if matched == 0:
            return best.reason
        return f"{'all' if matched == total else f'{matched} of'} {total} operations are there, but {best.reason}"

    def _absent(self, p: fx.Node) -> str:
        op = self.matcher.op(p)
        if isinstance(p.target, Child):
            return "the graph calls no submodule"
        text = f"the graph has no {_op(op) if op != 'getattr' else f'.{p.args[1]}'}"
        for node in self.terms.graph.nodes:
            if op_in_place(node.target) == op:
                return f"{text} except {_at(node)}, which writes in place"
            if node.op == "call_module" and resembles(child := self.terms.child(node)) == op:
                return f"{text} except {_at(node)}, and {type(child).__name__} has a forward of its own"
        heads = {node: self.terms.head(node) for node in self.terms.graph.nodes if not self.terms.is_book(node)}
        there = sorted({op for op in heads.values() if isinstance(op, str) and op not in ("getitem", "getattr")})
        return f"{text}; it has {', '.join(there[:12])}{', ...' if len(there) > 12 else ''}" if there else text

    def _all_there(self, anchor: fx.Node) -> str:
        """Each operation is there; what holds one way to lay the pattern onto the graph back?"""
        matcher = self.matcher
        everything = f"all {len(self.body.nodes)} operations are there, up to {_at(anchor)}, but "
        for _ in matcher.solutions(anchor):
            kind, node, user = matcher.objection(matcher.covered()) or ("", anchor, anchor)
            if kind == "used outside":
                return f"{everything}the inner value {_at(node)} is used outside by {_at(user)}"
            if kind == "an input inside":
                return f"{everything}{_at(node)} would be an input and computed inside"
            return f"{everything}{_at(node)} needs one of the outputs and is needed for another"
        alone = Matcher(self.body, self.terms, {})
        for _ in alone.solutions(anchor):
            return f"{everything}an earlier match has taken some of them"
        if alone.conflict is None:
            p, value = alone.missing or (self.body.outputs[0], anchor)
            return (
                f"what its first output needs is there, up to {_at(anchor)}, but no {_op(matcher.op(p), p)} that fits "
                f"takes {_shown(value)}"
            )
        what, first, second = alone.conflict
        if isinstance(what, str):
            return f"{everything}slapo.wild({what!r}) would be {_shown(first)} and {_shown(second)}"
        if what.op == "placeholder":
            return f"{everything}the input {what.name!r} would be {_shown(first)} and {_shown(second)}"
        if first is second:
            return f"{everything}{_shown(first)} would be two operations of the pattern at once"
        return f"{everything}the operation {what.name!r} would be {_shown(first)} and {_shown(second)}"

    def _compare(self, p: fx.Node, g: fx.Node) -> _Miss:
        """How much of what is below an operation of the pattern is there below a node."""
        if (p, g) not in self._known:
            self._known[p, g] = self._fresh(p, g)
        return self._known[p, g]

    def _fresh(self, p: fx.Node, g: fx.Node) -> _Miss:
        matcher = self.matcher
        if isinstance(p.target, Child):
            pairs = matcher.child_pairs(p, g)
            if pairs is None and g.op == "call_module" and p.target.names(str(g.target)):
                return _Miss(frozenset(), f"the forward of {_at(g)} does not take the arguments of {_op(CALL, p)}")
            if pairs is None:
                return _Miss(frozenset(), f"{_at(g)} is {self._found(g)} where the pattern has {_op(CALL, p)}")
            return self._below(p, g, pairs)
        if self.terms.head(g) != matcher.op(p):
            return _Miss(frozenset(), f"{_at(g)} is {self._found(g)} where the pattern has {_op(matcher.op(p), p)}")
        if self.terms.writes(g):
            return _Miss(frozenset(), f"{_at(g)} writes in place")
        if g.op == "call_module" and (why := hindrance(self.terms.child(g))) is not None:
            return _Miss(frozenset(), f"the call of {str(g.target)!r} is more than the operation: {why}")
        mine, theirs = self.body.terms.term(p), self.terms.term(g)
        if pairs_of(mine, theirs) is None:
            only = sorted(mine.operands.keys() ^ theirs.operands.keys())
            return _Miss(frozenset(), f"{_at(g)} and the pattern's {_op(mine.op)} differ in {_listed(only)}")
        found = [self._below(p, g, pairs) for pairs in matcher.orders(mine, theirs)]
        return max(found, key=lambda one: (len(one.matched), not one.reason))

    def _below(self, p: fx.Node, g: fx.Node, pairs: list[tuple[Any, Any]]) -> _Miss:
        matched: set[fx.Node] = set()
        own, below = "", ""
        for a, b in pairs:
            if isinstance(a, fx.Node) and a.op != "placeholder" and isinstance(b, fx.Node):
                miss = self._compare(a, b) if b.op.startswith("call") else _Miss(frozenset(), self._input(g, a, b))
                matched |= miss.matched
                below = below or miss.reason
            elif not self.matcher.alike(a, b):
                own = own or self._literal(g, a, b)
        if not own:
            matched.add(p)
        if not own and not below and not self.matcher.used_inside(p, g):
            inside = {self.matcher.op(one) for one in self.matcher.users_of(p)}
            outside = [one for one in g.users if self.terms.head(one) not in inside] or list(g.users)
            below = f"the inner value {_at(g)} is used outside, by {_listed(map(_at, outside))}"
        return _Miss(frozenset(matched), own or below)

    def _input(self, g: fx.Node, a: fx.Node, b: fx.Node) -> str:
        return f"{_at(g)} is given {_shown(b)} where the pattern has {_op(self.matcher.op(a), a)}"

    def _literal(self, g: fx.Node, a: Any, b: Any) -> str:
        found = f"{_at(g)} has {_shown(b)}"
        if isinstance(a, fx.Node):
            if a.op != "placeholder":
                return f"{found} where the pattern has {_op(self.matcher.op(a), a)}"
            return (
                f"{found} where the pattern has its input {a.name!r}. Inputs stand for values of the graph; for a "
                f"literal write slapo.wild({a.name!r})"
            )
        if a is MODE:
            return (
                f"{found} for training, where the pattern has a module, which follows the mode. Write the function "
                f"with training={_shown(b)}, or training=slapo.wild()"
            )
        text = f"{found} where the pattern has {_shown(a)}"
        if isinstance(a, bool) and is_mode(self.matcher.terms.same(b)):
            return (
                f"{text}: it drops in train mode only. Make the mode an input of the pattern, as in "
                f"lambda x, training: F.dropout(x, 0.1, training)"
            )
        if isinstance(b, fx.Node | Attribute):
            return f"{text}. For a value that is computed write slapo.wild()"
        return text

    def _found(self, g: fx.Node) -> str:
        if g.op == "call_module":
            return f"a call of {type(self.terms.child(g)).__name__}"
        head = self.terms.head(g)
        return _op(head) if head is not None else f"a {g.op}"


def _op(op: Any, p: fx.Node | None = None) -> str:
    if p is not None and isinstance(p.target, Child):
        return f"slapo.call({p.target.regex!r}, ...)"
    return op if isinstance(op, str) else str(getattr(op, "__name__", op))


def _at(node: fx.Node) -> str:
    where = node.meta.get("where")
    return f"{node.name!r} ({where})" if where else repr(node.name)


def _shown(value: Any) -> str:
    if isinstance(value, fx.Node):
        return _at(value)
    return str(value) if isinstance(value, Attribute | Wild) else repr(value)


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))
