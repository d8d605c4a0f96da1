"""From the placements of parameters to all conversions: what `auto_sync` inserts."""

from collections.abc import Iterable, Mapping, Set
from typing import Any

from torch import fx

from slapo_py.layouts.inference.backward import Backward
from slapo_py.layouts.inference.cost import sent
from slapo_py.layouts.inference.forward import Forward, reads_any
from slapo_py.layouts.inference.state import OUTPUT, Conversion, Typing, is_local
from slapo_py.layouts.placement import Placement, R, Shard
from slapo_py.layouts.recording.nodes import carries, is_border, is_record, is_tensor, name_of, readers, slots_of
from slapo_py.layouts.recording.owned import Owner
from slapo_py.layouts.rules.signatures import Signature
from slapo_py.layouts.rules.table import canonical
from slapo_py.layouts.syncs import AUTO, Sync

_ROUNDS = 8


def infer(
    graph: fx.Graph,
    ranks: int,
    params: Mapping[fx.Node, Placement],
    syncs: "Mapping[fx.Node, Placement | Sync] | None" = None,
    inputs: Mapping[str, Placement] | None = None,
    outputs: Placement = R,
    known: dict[Any, list[Signature]] | None = None,
    divided: Set[Owner] = frozenset(),
) -> Typing:
    """The placements of all values and gradients, with every conversion that they need, at module borders if possible.

    params: of the `get_attr` nodes that are split. syncs: what is wanted at borders, a placement of the value or a sync
    of the schedule. inputs, outputs: of what comes and goes. known: signatures that an earlier call has worked out for
    this graph and these ranks; this one adds its own. divided: attributes that a schedule divides; more may have to be.
    What a schedule's syncs do wrong is among the faults.
    """
    known = {} if known is None else known
    given = dict(syncs or {})
    found = _inferred(graph, ranks, params, given, inputs or {}, outputs, known, divided)
    for border in _spreads(found, given):
        more = {**given, border: R}
        early = _inferred(graph, ranks, params, more, inputs or {}, outputs, known, divided)
        if _unplaced(early) <= _unplaced(found) and sent(early) <= sent(found):
            found, given = early, more
    return found


def _inferred(
    graph: fx.Graph,
    ranks: int,
    params: Mapping[fx.Node, Placement],
    syncs: "Mapping[fx.Node, Placement | Sync]",
    inputs: Mapping[str, Placement],
    outputs: Placement,
    known: dict[Any, list[Signature]],
    divided: Set[Owner],
) -> Typing:
    """The same with each operation's choice made by itself."""
    wanted = dict(syncs)
    asked = _dims([*wanted.values(), *inputs.values(), outputs])
    for _ in range(_ROUNDS):
        forward = Forward(graph, ranks, params, wanted, inputs, outputs, known, divided, asked)
        forward.run()
        new, divided = forward.typing.divided - divided, frozenset(forward.typing.divided)
        more = {node: one for node, one in _lifted(forward).items() if node not in wanted}
        if not more and not reads_any(forward.nodes, new):
            break
        gathers = {node: one for node, one in more.items() if one == R}
        wanted.update(gathers or more)  # what is gathered has other sizes below, so that the rest may fall away
    share(forward.typing)
    given = {node: one.grad or "none" for node, one in syncs.items() if isinstance(one, Sync)}
    return Backward(forward, {node: grad for node, grad in given.items() if grad != AUTO}).run()


def _unplaced(typing: Typing) -> int:
    """How much does not fit, or has no border to stand at."""
    inside = [one for one in typing.conversions() if not one.at_border and not is_local(one)]
    return len(typing.faults) + len(inside)


def _spreads(typing: Typing, syncs: "Mapping[fx.Node, Placement | Sync]") -> list[fx.Node]:
    """Where results of split parameters leave their modules split, and what is added to them is then split as well.

    Operation by operation that is cheap; in all it may be dearer than to gather at once, as every reader has to.
    """
    found = []
    for node in typing.graph.nodes:
        if any(one in typing.params for one in slots_of(node)) and is_tensor(node) and node in typing.after:
            while len(ends := readers(node)) == 1 and carries(ends[0]) and not is_border(node):
                node = ends[0]
            if is_border(node) and node not in {**syncs, **typing.at_node} and _splits_others(typing, node):
                if isinstance(typing.after[node][0], Shard):
                    found.append(node)
    return found


def _splits_others(typing: Typing, value: fx.Node) -> bool:
    """Whether something is split because it is combined with a value."""
    queue = [value]
    for node in queue:
        for user in readers(node):
            if carries(user):
                queue.append(user)
                continue
            for other in (one for one in slots_of(user) if one is not node and one.op != "get_attr"):
                one = typing.on_edge.get((other, user))
                while one is None and other not in typing.at_node and carries(other):
                    other = other.args[0]  # type: ignore[assignment]
                one = one or typing.at_node.get(other)
                if one is not None and isinstance(one.target, Shard) and not isinstance(one.source, Shard):
                    return True
    return False


def _dims(asked: "Iterable[Placement | Sync]") -> frozenset[int]:
    """The dims that are split by what is asked for."""
    splits = (one.shard if isinstance(one, Sync) and one.dim is not None else one for one in asked)
    return frozenset(one.dim for one in splits if isinstance(one, Shard))


def share(typing: Typing) -> None:
    """Readers that want one conversion of a value share it."""
    together: dict[tuple[fx.Node, Placement], Conversion] = {}
    for (node, user), one in list(typing.on_edge.items()):
        if one.source == one.target:
            del typing.on_edge[node, user]
            continue
        shared = together.setdefault((node, one.target), Conversion(node, one.source, one.target, readers=frozenset()))
        shared.readers = (shared.readers or frozenset()) | {user}
        typing.on_edge[node, user] = shared
    for one in together.values():
        if _serves_all(one, typing):
            for user in one.readers or ():
                del typing.on_edge[one.node, user]
            typing.at_node[one.node] = Conversion(one.node, one.source, one.target)
            typing.after[one.node] = (one.target,)


def _serves_all(one: Conversion, typing: Typing) -> bool:
    """Whether a conversion for all that reads a value can stand at a border: nothing reads the sizes before it."""
    node = one.node
    return is_border(node) and node not in typing.at_node and set(one.readers or ()) == set(node.users)


def _lifted(forward: Forward) -> dict[fx.Node, Placement]:
    """Conversions of split values that stand on edges: the borders at which they can stand, as late as serves all."""
    typing = forward.typing
    want: dict[fx.Node, Placement] = {}
    for node in reversed(forward.nodes):
        if node not in typing.after or node.op in ("get_attr", "placeholder", "output") or len(typing.after[node]) != 1:
            continue
        users = readers(node)
        wants = [_wanted(typing, node, one, want) for one in users]
        if not users or None in wants or len(set(wants)) != 1 or typing.after[node][0] == wants[0]:
            continue
        target = wants[0]
        near = all((node, one) in typing.on_edge or _stands_aside(one) for one in users)
        if target is not None and (target == R or near or is_border(node)):
            want[node] = target
    found: dict[fx.Node, Placement] = {}
    for node in forward.nodes:
        if node in want and is_border(node) and isinstance(typing.after[node][0], Shard):
            if not _has_lower(node, want) and not _has_above(node, found):
                found[node] = want[node]
    return found


def _wanted(typing: Typing, node: fx.Node, user: fx.Node, want: dict[fx.Node, Placement]) -> Placement | None:
    end: fx.Node | str = OUTPUT if user.op == OUTPUT or is_record(user) else user
    conversion = typing.on_edge.get((node, end))
    if conversion is not None:
        return conversion.target
    return want.get(user) if carries(user) and user not in typing.at_node else None


def _stands_aside(user: fx.Node) -> bool:
    return is_border(user) or user.op == OUTPUT or canonical(name_of(user)) in ("to", "contiguous", "dropout")


def _has_lower(node: fx.Node, want: dict[fx.Node, Placement]) -> bool:
    """Whether a border further down serves the same readers; not below a place where the size is read."""
    while True:
        users = readers(node)
        if len(users) != 1 or len(node.users) != 1 or not carries(users[0]) or users[0] not in want:
            return False
        node = users[0]
        if is_border(node):
            return True


def _has_above(node: fx.Node, found: dict[fx.Node, Placement]) -> bool:
    above = node.args[0]
    while isinstance(above, fx.Node) and carries(above):
        if above in found:
            return True
        above = above.args[0]
    return False
