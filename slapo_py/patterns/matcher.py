"""One function of a pattern laid onto a graph, along the edges of the data."""

import bisect
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from torch import fx

from slapo_py.patterns.binding import parts, same_literal
from slapo_py.patterns.pattern import Body, operands
from slapo_py.patterns.terms import CALL, Term, Terms
from slapo_py.patterns.words import MODE, Attribute, Child, Dim, Wild

NEAREST = 8
"""Of the users of one value, how many on either side are tried as another output. Else a value that all blocks share, a
mask say, would make the work grow with the square of the graph."""

Pairs = list[tuple[Any, Any]]


class Matcher:
    """One function of a pattern against a graph: `solutions` walks over all ways to lay the one onto the other."""

    def __init__(self, body: Body, terms: Terms, taken: dict[fx.Node, int]) -> None:
        self.body, self.terms, self.taken = body, terms, taken
        self.visits = 0
        self.bound: dict[fx.Node, Any] = {}
        self.image: dict[fx.Node, fx.Node] = {}
        self.touched: dict[fx.Node, None] = {}
        self.wilds: dict[str, Any] = {}
        self.conflict: tuple[fx.Node | str, Any, Any] | None = None
        """What last could not be two values at once: an input, an operation or the name of a wild, and the values."""
        self.missing: tuple[fx.Node, Any] | None = None
        """The operation of another output that was last looked for, and the value from which."""
        self._ways: dict[tuple[fx.Node, fx.Node], list[Pairs]] = {}
        self._children: dict[tuple[fx.Node, fx.Node], Pairs | None] = {}
        self._users: dict[fx.Node, list[fx.Node]] = {}
        self._by_operand: dict[Hashable, dict[Any, list[fx.Node]]] = {}
        for node in body.nodes:
            for one in operands(node, body.terms):
                self._users.setdefault(one, []).append(node)
        self._kinds = {node: _shape(node, body, self._users) for node in body.nodes}
        self._outputs = set(body.outputs)

    # Where to begin

    def op(self, p: fx.Node) -> Hashable:
        """The name of the operation of a pattern's node."""
        return CALL if isinstance(p.target, Child) else self.body.terms.term(p).op

    def possible(self) -> bool:
        """Whether the graph has each operation of the pattern at all."""
        return all(self.op(p) in self.terms.ops for p in self.body.nodes)

    def anchors(self) -> list[fx.Node]:
        """The nodes that could be the first output."""
        return self.terms.ops.get(self.op(self.body.outputs[0]), [])

    # Whether a node of the graph could be one of the pattern: this depends on nothing else, and is worked out once

    def fits(self, p: fx.Node, g: fx.Node) -> bool:
        """Whether what lies below a node of the graph looks as it does in the pattern."""
        return bool(self.ways(p, g))

    def ways(self, p: fx.Node, g: fx.Node) -> list[Pairs]:
        """Each way to lay the operands of one onto those of the other that looks right."""
        known = self._ways.get((p, g))
        if known is None:
            self.visits += 1
            fitting = [pairs for pairs in self._candidates(p, g) if all(self.alike(a, b) for a, b in pairs)]
            known = self._ways[p, g] = fitting if self.used_inside(p, g) else []
        return known

    def _candidates(self, p: fx.Node, g: fx.Node) -> Iterable[Pairs]:
        if isinstance(p.target, Child):
            pairs = self.child_pairs(p, g)
            return () if pairs is None else (pairs,)
        if self.terms.head(g) != self.op(p) or self.terms.writes(g):
            return ()
        return self.orders(self.body.terms.term(p), self.terms.term(g))

    def child_pairs(self, p: fx.Node, g: fx.Node) -> Pairs | None:
        """The arguments of a `slapo.call` beside those of a submodule's call; None if it can't be that call."""
        if (p, g) not in self._children:
            self._children[p, g] = self._bind_child(p, g)
        return self._children[p, g]

    def _bind_child(self, p: fx.Node, g: fx.Node) -> Pairs | None:
        if g.op != "call_module" or not p.target.names(str(g.target)):  # type: ignore[union-attr]
            return None
        wanted, given = self.terms.call(g, p), self.terms.call(g, g)
        if wanted is None or given is None:
            return None
        return [(wanted[name], given[name]) for name in wanted]

    def orders(self, mine: Term, theirs: Term) -> Iterator[Pairs]:
        """The operands side by side; those of a commutative operation in either order, where that differs."""
        pairs = pairs_of(mine, theirs)
        if pairs is None:
            return
        yield pairs
        if mine.commutative and theirs.commutative:
            a, b = mine.operands["input"], mine.operands["other"]
            x, y = theirs.operands["input"], theirs.operands["other"]
            if not self._alike_below(a, b) and (not isinstance(x, fx.Node) or x is not y):
                swapped = [pair for pair in pairs if pair[0] is not a and pair[0] is not b]
                yield [(a, y), (b, x), *swapped]

    def _alike_below(self, a: Any, b: Any) -> bool:
        """Whether two operands of the pattern stand for the same set of things, so that their order does not matter."""
        return self._kind(a) is not None and self._kind(a) == self._kind(b)

    def _kind(self, value: Any) -> Hashable | None:
        if not isinstance(value, fx.Node):
            return None
        if value.op == "placeholder":
            return "input" if len(self._users[value]) == 1 else None
        return self._kinds[value]

    def alike(self, a: Any, b: Any) -> bool:
        """Whether an operand of the graph looks like this one of the pattern."""
        if isinstance(a, fx.Node):
            if a.op == "placeholder":
                return isinstance(b, fx.Node | Attribute)
            return isinstance(b, fx.Node) and self.fits(a, b)
        if isinstance(a, Wild):
            return True
        if a is MODE:
            return is_mode(self.terms.same(b))
        if isinstance(a, tuple | list):
            same_kind = isinstance(b, tuple if isinstance(a, tuple) else list) and len(a) == len(b)
            return same_kind and all(map(self.alike, a, b))
        if isinstance(a, slice):
            return isinstance(b, slice) and all(map(self.alike, (a.start, a.stop, a.step), (b.start, b.stop, b.step)))
        if isinstance(a, dict):
            return isinstance(b, dict) and a.keys() == b.keys() and all(self.alike(a[key], b[key]) for key in a)
        return not isinstance(b, fx.Node | Attribute) and same_literal(a, b)

    def users_of(self, p: fx.Node) -> list[fx.Node]:
        """The operations of the pattern that use one of its values."""
        return list(dict.fromkeys(self._users.get(p, ())))

    def used_inside(self, p: fx.Node, g: fx.Node) -> bool:
        """Whether an inner value has no more users than in the pattern; who they are shows only in the end."""
        if p in self._outputs or self.body.terms.is_book(p):
            return True
        mine = sum(not self.body.terms.is_book(one) for one in self.users_of(p))
        return sum(not self.terms.is_book(one) for one in g.users) <= mine

    # All ways

    def solutions(self, anchor: fx.Node) -> Iterator[None]:
        """All ways to lay the pattern onto the graph with its first output here; `bound` holds the present one."""
        for used in (self.bound, self.image, self.touched, self.wilds):
            used.clear()
        yield from self._solve([(self.body.outputs[0], anchor)])

    def _solve(self, goals: Pairs) -> Iterator[None]:
        undo: list[tuple[dict[Any, Any], Any]] = []
        try:
            while goals:
                p, g = goals.pop()
                if isinstance(p, Wild):
                    if p.name is not None and not self._bind_wild(p.name, g, undo):
                        return
                    continue
                if not isinstance(p, fx.Node):
                    if isinstance(p, tuple | list | slice | dict):
                        goals += zip(parts(p), parts(g), strict=False) if not _holds_wild(p) else _zipped(p, g)
                    continue
                if p in self.bound:
                    self._touch(g, undo)
                    if self.terms.same(self.bound[p]) != self.terms.same(g):
                        self.conflict = (p, self.bound[p], g)
                        return
                    continue
                if p.op == "placeholder":
                    self._set(self.bound, p, g, undo)
                    continue
                self.visits += 1
                if not self.fits(p, g) or not self._free(g):
                    return
                self._set(self.bound, p, g, undo)
                self._touch(g, undo)
                if not self.body.terms.is_book(p) or p in self._outputs:
                    self._set(self.image, g, p, undo)
                ways = self.ways(p, g)
                if len(ways) > 1:
                    for pairs in ways:
                        yield from self._solve([*goals, *reversed(pairs)])
                    return
                goals += reversed(ways[0])
            following = self._next()
            if following is None:
                yield
                return
            for p, g in following:
                yield from self._solve([(p, g)])
        finally:
            for table, key in undo:
                del table[key]

    @staticmethod
    def _set(table: dict[Any, Any], key: Any, value: Any, undo: list[tuple[dict[Any, Any], Any]]) -> None:
        table[key] = value
        undo.append((table, key))

    def _touch(self, g: Any, undo: list[tuple[dict[Any, Any], Any]]) -> None:
        if isinstance(g, fx.Node) and g not in self.touched and self.terms.is_book(g):
            self._set(self.touched, g, None, undo)

    def _free(self, g: fx.Node) -> bool:
        if g in self.image:
            self.conflict = (self.image[g], g, g)
        return g not in self.taken and g not in self.image

    def _bind_wild(self, name: str, g: Any, undo: list[tuple[dict[Any, Any], Any]]) -> bool:
        if name in self.wilds:
            if self._equal(self.wilds[name], g):
                return True
            self.conflict = (name, self.wilds[name], g)
            return False
        self._set(self.wilds, name, int(g) if isinstance(g, Dim) else g, undo)
        return True

    def _equal(self, a: Any, b: Any) -> bool:
        """Whether two values of the graph are the same."""
        left, right = list(parts(a)), list(parts(b))
        if len(left) != len(right) or isinstance(a, tuple | list) != isinstance(b, tuple | list):
            return False
        for x, y in zip(left, right, strict=True):
            x, y = self.terms.same(x), self.terms.same(y)
            nodes = isinstance(x, fx.Node | Attribute) or isinstance(y, fx.Node | Attribute)
            if x != y if nodes else not same_literal(x, y):
                return False
        return True

    def _next(self) -> Iterator[tuple[fx.Node, fx.Node]] | None:
        """What to go on with when an output was not reached yet: users of a value that is bound already."""
        if all(one in self.bound for one in self.body.outputs):
            return None
        best: list[fx.Node] | None = None
        for p in self.body.nodes:
            if p in self.bound:
                continue
            for one in operands(p, self.body.terms):
                if one in self.bound:
                    users = self._graph_users(p, one)
                    if best is None or len(users) < len(best):
                        best, self.missing = users, (p, self.bound[one])
        if best is None or self.missing is None:
            raise AssertionError("the outputs of a pattern hang together")
        p = self.missing[0]
        return ((p, g) for g in best)

    def _graph_users(self, p: fx.Node, operand: fx.Node) -> list[fx.Node]:
        """The nodes that could be a node of the pattern and use the value that one of its operands is bound to."""
        table = self._by_operand.get(p)
        if table is None:
            table = self._by_operand[p] = {}
            for g in self.terms.ops.get(self.op(p), ()):
                if self.fits(p, g):
                    values = g.all_input_nodes if isinstance(p.target, Child) else _values(self.terms.term(g))
                    for key in dict.fromkeys(self.terms.same(one) for one in values):
                        table.setdefault(key, []).append(g)
        users = table.get(self.terms.same(self.bound[operand]), [])
        return self._nearest(users, self.terms.order[self.bound[self.body.outputs[0]]])

    def _nearest(self, users: list[fx.Node], position: int) -> list[fx.Node]:
        """Those of some nodes that are free and stand nearest to a place in the graph, the nearest first."""
        middle = bisect.bisect_left(users, position, key=self.terms.order.__getitem__)
        found: list[fx.Node] = []
        for index, step in ((middle, 1), (middle - 1, -1)):
            left = NEAREST
            while left and 0 <= index < len(users):
                if users[index] in self.taken:
                    del users[index]  # it stays so for the rest of the search
                    index += min(step, 0)
                    continue
                if users[index] not in self.image:
                    found.append(users[index])
                    left -= 1
                index += step
        return sorted(found, key=lambda one: abs(self.terms.order[one] - position))

    # Whether one way is a match

    def covered(self) -> set[fx.Node]:
        """The nodes that a match takes away: its operations, and books that nothing else needs."""
        covered = set(self.image)
        given = {one for value in self._given() for one in parts(value)}
        books = {node for node in self._books() if node not in covered and node not in given}
        for node in sorted(books, key=self.terms.order.__getitem__, reverse=True):
            if node.users and all(user in covered for user in node.users):
                covered.add(node)
        return covered

    def _books(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        waiting = list(self.touched)
        while waiting:
            node = waiting.pop()
            if node not in found and self.terms.is_book(node):
                found.add(node)
                waiting += node.all_input_nodes
        return {node for node in found if node.op != "get_attr"}

    def _given(self) -> list[Any]:
        return [*(self.bound[one] for one in self.body.inputs.values()), *self.wilds.values()]

    def objection(self, covered: set[fx.Node]) -> tuple[str, fx.Node, fx.Node] | None:
        """Why one way is no match after all: a word for it, and the nodes."""
        outputs = {self.bound[one] for one in self.body.outputs}
        for node in covered:
            if node not in outputs:
                for user in node.users:
                    if user not in covered and not reads_device(user):
                        return ("used outside", node, user)
        for value in self._given():
            for one in parts(value):
                if isinstance(one, fx.Node) and one in covered:
                    return ("an input inside", one, one)
        return self._cycle(covered, outputs) if len(outputs) > 1 else None

    def _cycle(self, covered: set[fx.Node], outputs: set[fx.Node]) -> tuple[str, fx.Node, fx.Node] | None:
        """A node outside that needs one output and is needed for another; not a size that the pattern reads itself."""
        own = self._books()
        last = max(self.terms.order[node] for node in covered)
        reached: set[fx.Node] = set()
        waiting = [user for node in outputs for user in node.users if user not in covered]
        while waiting:
            node = waiting.pop()
            if node in reached or self.terms.order[node] > last:
                continue
            reached.add(node)
            for user in node.users:
                if user not in covered:
                    waiting.append(user)
                elif node not in own:
                    return ("a cycle", node, user)
        return None


def reads_device(node: fx.Node) -> bool:
    """Whether a node reads the device of a value: that of an inner value is that of the inputs as well."""
    return node.op == "call_function" and node.target is getattr and node.args[1] == "device"


def is_mode(value: Any) -> bool:
    """Whether an operand is the training flag of a module."""
    return isinstance(value, Attribute) and value.target.rpartition(".")[2] == "training"


def pairs_of(mine: Term, theirs: Term) -> Pairs | None:
    """The operands of two terms by parameter; None if one has an operand that the other can't have."""
    pairs: Pairs = []
    for name, value in mine.operands.items():
        if name in theirs.operands:
            pairs.append((value, theirs.operands[name]))
        elif name not in mine.defaults and value is not MODE and not isinstance(value, Wild):
            return None
    for name in theirs.operands:
        if name not in mine.operands and name not in theirs.defaults:
            return None
    return pairs


def _values(term: Term) -> list[Any]:
    return [one for value in term.operands.values() for one in parts(value) if isinstance(one, fx.Node | Attribute)]


def _holds_wild(value: Any) -> bool:
    return any(isinstance(one, Wild) for one in parts(value))


def _zipped(p: Any, g: Any) -> Pairs:
    """The leaves of a container of the pattern, each with what stands there in the graph."""
    if isinstance(p, tuple | list):
        return [pair for a, b in zip(p, g, strict=True) for pair in _zipped(a, b)]
    if isinstance(p, dict):
        return [pair for key in p for pair in _zipped(p[key], g[key])]
    if isinstance(p, slice):
        return [*_zipped(p.start, g.start), *_zipped(p.stop, g.stop), *_zipped(p.step, g.step)]
    return [(p, g)]


def _shape(node: fx.Node, body: Body, users: dict[fx.Node, list[fx.Node]]) -> Hashable | None:
    """What a node of a pattern looks like from above, if nothing in it is used twice or has a name; else None."""
    if node in body.outputs or len(users.get(node, ())) != 1 or isinstance(node.target, Child):
        return None
    term = body.terms.term(node)
    found: list[Hashable] = [term.op]
    for name, value in term.operands.items():
        for one in parts(value):
            if isinstance(one, Wild) and one.name is not None:
                return None
            if isinstance(one, fx.Node):
                if len(users.get(one, ())) != 1:
                    return None
                below = "input" if one.op == "placeholder" else _shape(one, body, users)
                if below is None:
                    return None
                found.append((name, below))
            else:
                found.append((name, repr(one)))
        found.append((name, type(value).__name__))
    return tuple(found)
