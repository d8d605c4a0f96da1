"""Comparing two captures of one forward: the same operations, or where they part."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx


class Parting(Exception):
    """Two captures have different operations; the message says where."""


class Difference(NamedTuple):
    """A literal that differs: at `position` among the leaves of `node`'s arguments, `here` against `there`."""

    node: fx.Node
    position: int
    here: Any
    there: Any


def _leaves(node: fx.Node) -> tuple[list[Any], str]:
    """The leaves of a node's arguments (looking into slices), and their nesting."""
    leaves: list[Any] = []
    nesting = fx.node.map_aggregate((node.args, node.kwargs), leaves.append)  # type: ignore[arg-type]
    return leaves, repr(nesting)


class Alignment(NamedTuple):
    """How two graphs of the same operations correspond."""

    found: list[Difference]
    twins: dict[fx.Node, fx.Node]


def is_bookkeeping(node: fx.Node) -> bool:
    """Whether a node only reads a size, a device or an attribute, or picks an item of a result: its place is free."""
    return node.op == "get_attr" or "bookkeeping" in node.meta or "int" in node.meta


def align(a: fx.Graph, b: fx.Graph, alike: Callable[[fx.Node, fx.Node], bool] | None = None) -> Alignment:
    """Match two graphs operation by operation; raises Parting where the operations differ.

    Bookkeeping has no order of its own: it is compared where an operation uses it. `alike` says which placeholders
    stand for each other, where not just those at the same place do.
    """
    found: list[Difference] = []
    twins: dict[fx.Node, fx.Node] = {}

    def match(x: fx.Node, y: fx.Node, parting: Parting) -> None:
        if x.op != y.op or (x.op != "placeholder" and x.target != y.target):
            raise parting
        ours, our_nesting = _leaves(x)
        theirs, their_nesting = _leaves(y)
        if our_nesting != their_nesting:
            raise parting
        twins[x] = y
        for position, (u, v) in enumerate(zip(ours, theirs, strict=True)):
            if isinstance(u, fx.Node) and isinstance(v, fx.Node):
                if u not in twins and is_bookkeeping(u) and is_bookkeeping(v):
                    match(u, v, parting)
                both_given = u.op == v.op == "placeholder" and alike is not None
                if not (alike(u, v) if both_given and alike else _agree(u, v, twins)):
                    raise parting
            elif isinstance(u, fx.Node) or isinstance(v, fx.Node):
                raise parting
            elif not same(u, v):
                found.append(Difference(x, position, u, v))

    ours = [node for node in a.nodes if not is_bookkeeping(node)]
    theirs = [node for node in b.nodes if not is_bookkeeping(node)]
    for x, y in itertools.zip_longest(ours, theirs):
        here = x if x is not None else y
        parting = Parting(here.meta.get("where", str(here)))
        if x is None or y is None:
            raise parting
        match(x, y, parting)
    return Alignment(found, twins)


def counterpart(node: fx.Node, graph: fx.Graph, twins: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """The bookkeeping node of `graph` that computes what `node` of another graph does.

    `twins`: nodes of `graph` -> nodes of the other.
    """
    return next((own for own in graph.nodes if is_bookkeeping(own) and _agree(own, node, twins)), None)


def _agree(u: fx.Node, v: fx.Node, twins: dict[fx.Node, fx.Node]) -> bool:
    """Whether two argument nodes are the same value: twins, or bookkeeping of the same kind on the same values."""
    if twins.get(u) is v:
        return True
    if not (is_bookkeeping(u) and is_bookkeeping(v)) or u.op != v.op or u.target != v.target:
        return False
    ours, our_nesting = _leaves(u)
    theirs, their_nesting = _leaves(v)
    return our_nesting == their_nesting and all(
        _agree(x, y, twins) if isinstance(x, fx.Node) and isinstance(y, fx.Node) else same(x, y)
        for x, y in zip(ours, theirs, strict=True)
    )


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, containers included; nan equals nan."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, functools.partial):
        return a.func is b.func and same(a.args, b.args) and same(a.keywords, b.keywords)
    return bool(a == b or (a != a and b != b))


def substitute(node: fx.Node, position: int, new: Any) -> None:
    """Put `new` at one position among the leaves of a node's arguments."""
    count = itertools.count()

    def pick(leaf: Any) -> Any:
        return new if next(count) == position else leaf

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), pick)  # type: ignore[misc]
    node.args, node.kwargs = args, kwargs  # type: ignore[assignment]


def substitute_node(user: fx.Node, old: fx.Node, new: Any) -> None:
    """Put `new` wherever a node uses `old`."""

    def pick(node: fx.Node) -> Any:
        return new if node is old else node

    user.args, user.kwargs = fx.node.map_arg(user.args, pick), fx.node.map_arg(user.kwargs, pick)
