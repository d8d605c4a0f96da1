"""The rewriter: groups of nodes become one call each, and whatever has effects keeps its order."""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx, nn

from slapo_py.errors import StepError
from slapo_py.patterns.effects import draws, is_barrier
from slapo_py.patterns.matcher import reads_device


@dataclass(frozen=True)
class Group:
    """Nodes of a graph that one call will stand for; `outputs` are those of them that are used outside."""

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


NodeOf = Callable[[fx.Node], fx.Node]
Make = Callable[[fx.Graph, int, NodeOf], fx.Node]


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph whose nodes have the same names, and what became of each node."""
    new = fx.Graph()
    table: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = (fx.map_arg(one, table.__getitem__) for one in (node.args, node.kwargs))
        twin = table[node] = new.create_node(node.op, node.target, args, kwargs, node.name)  # type: ignore[arg-type]
        twin.meta = dict(node.meta)
    # names of nodes that are gone are not given again: a match that holds them must not find others
    new._graph_namespace._used_names |= graph._graph_namespace._used_names
    return new, table


def contract(module: nn.Module, graph: fx.Graph, groups: Sequence[Group], make: Make) -> tuple[fx.Graph, list[fx.Node]]:
    """A new graph in which each group of nodes is one call, and those calls.

    `make(graph, index, node_of)` adds the call that stands for `groups[index]` to the new graph and returns it;
    `node_of` gives the new graph's node for one of the old. A group of several outputs is a call that gives a tuple.

    Requires: disjoint groups whose inner nodes are used inside only. Raises `StepError` if the call can't stand
    anywhere without changing the order of what has effects.
    """
    new, table = copied(graph)
    calls = []
    for index, group in enumerate(groups):
        _move_device_reads(sorted(table[node] for node in group.nodes))
        nodes = _with_sizes(new, sorted(table[node] for node in group.nodes))
        after = _movable(module, nodes)
        with new.inserting_before(nodes[-1].next):
            call = make(new, index, table.__getitem__)
        call.meta["within"] = _within(nodes)
        place = call
        for position, output in enumerate(group.outputs):
            value = call
            if len(group.outputs) > 1:
                with new.inserting_before(place.next):
                    value = place = new.call_function(operator.getitem, (call, position))
            value.meta["stands_for"] = table[output].meta.get("stands_for", output.name)
            table[output].replace_all_uses_with(value)
            table[output] = value  # a later group may take it as its input
        for node in after:
            place.append(node)
            place = node
        for node in reversed(nodes):
            new.erase_node(node)
        calls.append(call)
    return new, calls


def _within(nodes: list[fx.Node]) -> str:
    """The innermost submodule that all of these are part of."""
    parts = [str(node.meta.get("within", "")).split(".") for node in nodes if not _is_plain(node)]
    shared = itertools.takewhile(lambda atoms: len(set(atoms)) == 1, zip(*parts))
    return ".".join(atoms[0] for atoms in shared)


def _move_device_reads(nodes: list[fx.Node]) -> None:
    """What reads the device of an inner value reads that of an input instead: the inner value will be gone."""
    inside = set(nodes)
    given = [one for node in nodes for one in node.all_input_nodes if one not in inside and not _is_plain(one)]
    for node in nodes:
        for user in list(node.users):
            if user not in inside and reads_device(user) and given:
                user.replace_input_with(node, given[0])


def _with_sizes(graph: fx.Graph, nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes, and a copy of each size that they read of each other; what reads it outside keeps the one there is."""
    inside = set(nodes)
    twins: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for one in node.all_input_nodes:
            if one not in inside and _is_size(one) and _reads(one, inside):
                node.replace_input_with(one, _twin(graph, one, inside, twins))
    return sorted([*nodes, *twins.values()])


def _twin(graph: fx.Graph, node: fx.Node, inside: set[fx.Node], twins: dict[fx.Node, fx.Node]) -> fx.Node:
    if node not in twins:
        given = {one: _twin(graph, one, inside, twins) for one in node.all_input_nodes if _is_size(one)}
        with graph.inserting_before(node):
            twins[node] = graph.node_copy(node, lambda one: given.get(one, one))
    return twins[node]


def _is_size(node: fx.Node) -> bool:
    """Whether a node reads sizes, picks one or computes with them."""
    if node.op == "call_method":
        return node.target == "size"
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] == "shape"
    picks = node.target in (operator.getitem, *_ARITHMETIC)
    return picks and bool(node.all_input_nodes) and all(map(_is_size, node.all_input_nodes))


def _is_plain(node: fx.Node) -> bool:
    """Whether a node gives no tensor: a size, a dtype or device, the mode."""
    fact = node.op == "call_function" and node.target is getattr and node.args[1] in ("dtype", "device")
    mode = node.op == "get_attr" and str(node.target).rpartition(".")[2] == "training"
    return fact or mode or _is_size(node)


def _reads(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(one in inside or (_is_size(one) and _reads(one, inside)) for one in node.all_input_nodes)


_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg)


def _movable(module: nn.Module, nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes between the first and the last of these that use them: they have to move behind the call."""
    inside, after = set(nodes), []
    follows: set[fx.Node] = set()
    drawn, total = 0, sum(draws(node, module) for node in nodes)  # of the group
    moved_draw = False
    node = nodes[0]
    while True:
        if node in inside:
            if any(one in follows for one in node.all_input_nodes):
                raise StepError(f"{node.name!r} needs a value that is computed from the match itself")
            drawn += draws(node, module)
        else:
            if is_barrier(node, module):
                raise StepError(
                    f"{node.name!r} ({_where(node)}) stands between {nodes[0].name!r} and {nodes[-1].name!r} and "
                    f"writes in place or switches a mode, so they can't become one call. Match fewer operations"
                )
            moves = any(one in inside or one in follows for one in node.all_input_nodes)
            if moves:
                follows.add(node)
                after.append(node)
            drawing = draws(node, module)
            if drawing and (drawn < total if moves else drawn or moved_draw):
                raise StepError(
                    f"{node.name!r} ({_where(node)}) may draw random numbers between those that "
                    f"{nodes[0].name!r} to {nodes[-1].name!r} draw, so they can't become one call. Match fewer "
                    f"operations"
                )
            moved_draw |= moves and drawing
        if node is nodes[-1]:
            return after
        node = node.next


def _where(node: fx.Node) -> str:
    return str(node.meta.get("where", node.op))
