"""What a rank computes otherwise than the whole model, inside a forward: the module's graph says so.

Where a value is taken in part, added by one rank only, looked up in some of the rows, or compared over some of the
classes, and this stands at no border of a module, the module that does it gets a trace, if it has none, and the node of
its graph is changed.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from slapo_py.build.borders import Move
from slapo_py.build.local_guards import localised
from slapo_py.build.local_operations import REPLACEMENTS
from slapo_py.distributed.collectives import Ranks
from slapo_py.errors import BuildError, TraceError
from slapo_py.layouts.inference.sizes import local_number
from slapo_py.layouts.inference.state import Conversion, Typing, said
from slapo_py.layouts.placement import Shard
from slapo_py.layouts.recording.nodes import is_border, is_tensor, name_of, numbers_of
from slapo_py.patterns.rewrite import copied
from slapo_py.rewriting import Called
from slapo_py.scheduled import dress
from slapo_py.tracing import trace_of

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule
    from slapo_py.tracing.trace import Trace

Path = tuple[int | str, ...]
"""Where an argument of a call stands: a position or a name, and positions within lists."""


@dataclass
class Change:
    """Of one node: the function that stands for its own, and moves of its arguments.

    sizes: among its arguments, those that are others on a rank: of the whole, and of the rank. Python reads them from a
    shape or from an attribute that is divided; in a graph they may stand as numbers.
    """

    function: Callable[..., Any] | None = None
    arguments: dict[Path, Move] = field(default_factory=dict)
    sizes: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.function or self.arguments)


Changes = dict[str, dict[fx.Node, Change]]
"""What has to change in the graph of each module, by its path and the plan's nodes."""


def changes_for(place: "Schedule", typing: Typing, axis: str, ranks: Ranks, cut: Container[fx.Node]) -> Changes:
    """What the plan of one axis changes; every module that it concerns has a graph after this.

    cut: what a rank holds in part. Raises `BuildError`.
    """
    root, moved = place.root, _moved(typing, cut)
    found: Changes = defaultdict(dict)
    for node in typing.graph.nodes:
        if node.op in ("call_function", "call_method") and not is_border(node) and "within" in node.meta:
            found[graph_of(root, node.meta["within"])][node] = _change(node, typing, ranks, moved)
    for path, changes in found.items():
        first = next((node for node, change in changes.items() if change), None)
        if first is not None and _trace(place, path, said(first), axis):
            _check_modes(place, path, said(first), axis, [one for node in changes for one in moved.get(node, ())])
    return found


def rewrite(place: "Schedule", typing: Typing, axis: str, ranks: Ranks, found: Changes) -> None:
    """Put changes into the graphs. No module is traced after it: the whole model can't run any more."""
    root = place.root
    for path, changes in found.items():
        module = root.module(path)
        trace = trace_of(module)
        if trace is not None:
            graph = _changed(trace, path, changes, axis)
            local = localised(trace, module, root.tracer.recorded(path), path, typing, ranks.rank)
            if graph is not None or local is not trace:
                dress(module, local.rewritten(graph or trace.graph, False, ("build", axis), guards=local._guards))


def graph_of(root: Any, path: str) -> str:
    """The module in whose graph a module's operations are: itself, or one above that was flattened."""
    for above in parents(path):
        trace = trace_of(root.module(above))
        if trace is not None and (path.removeprefix(f"{above}.") if above else path) in trace.inlined:
            return above
    return path


def _moved(typing: Typing, cut: Container[fx.Node]) -> dict[fx.Node, list[Conversion]]:
    """For each node, the conversions of what it reads that stand at no border."""
    found: dict[fx.Node, list[Conversion]] = defaultdict(list)
    for one in typing.conversions():
        if one.readers is None:
            if not is_border(one.node):
                raise BuildError(f"build: {said(one.node)} is converted for all that read it, inside a forward.")
            continue
        for reader in one.readers:
            if isinstance(reader, fx.Node) and one.node not in cut:
                found[reader].append(one)
    return found


def _change(node: fx.Node, typing: Typing, ranks: Ranks, moved: dict[fx.Node, list[Conversion]]) -> Change:
    change = Change()
    for one in moved.get(node, ()):
        for path in _stands(node, one.node):
            change.arguments[path] = Move.of(one, ranks, said(one.node))
    signature = typing.signature.get(node)
    needs = signature.needs if signature is not None else ""
    if needs in REPLACEMENTS:
        change.function = REPLACEMENTS[needs](node, ranks)
    resized = typing.resized.get(node, {})
    for path, value in numbers_of(node):
        whole = int(value.meta["int"]) if isinstance(value, fx.Node) else int(value)
        local = resized[path].needs if path in resized else local_number(typing, value)
        if local != whole:
            change.sizes[path] = (whole, local)
    return change


def _stands(node: fx.Node, slot: fx.Node) -> Iterator[Path]:
    """Where a node has another one among its arguments."""

    def walk(value: Any, path: Path) -> Iterator[Path]:
        if value is slot and is_tensor(value):
            yield path
        elif isinstance(value, tuple | list):
            for index, one in enumerate(value):
                yield from walk(one, (*path, index))

    for index, one in enumerate(node.args):
        yield from walk(one, (index,))
    for name, one in node.kwargs.items():
        yield from walk(one, (name,))


def _trace(place: "Schedule", path: str, what: str, axis: str) -> bool:
    """Give a module a graph, if it has none; whether it had none."""
    root = place.root
    if trace_of(root.module(path)) is not None:
        return False
    try:
        root.tracer.trace(path)
    except TraceError as error:
        raise BuildError(
            f'build on "{axis}" at "{path}": {what} is done otherwise on each rank, so its forward has to become a '
            f"graph, and can't. {error}"
        ) from error
    return True


def _check_modes(place: "Schedule", path: str, what: str, axis: str, moved: list[Conversion]) -> None:
    """A graph that was made for one mode could do nothing else in the other than raise."""
    trace = trace_of(place.root.module(path))
    guard = next((one for one in trace.guards if one.startswith("self.training is ")), "") if trace else ""
    if guard:
        names: dict[int, list[str]] = defaultdict(list)
        for one in moved:
            if one.node.op == "get_attr" and isinstance(one.target, Shard):
                names[one.target.dim].append(f'"{str(one.node.target).rpartition(".")[2]}"')
        lines = [f'sch["{path}"].shard({", ".join(one)}, dim={dim}, axis="{axis}")' for dim, one in names.items()]
        remedy = f"Write: {'; '.join(lines)}" if lines else "Move it to a module that does the same in both modes."
        raise BuildError(
            f'build on "{axis}" at "{path}": {what} is done otherwise on each rank, so its forward has to become a '
            f"graph, and it does other things in training than in evaluation ({guard}). {remedy}"
        )


def _changed(trace: "Trace", path: str, changes: dict[fx.Node, Change], axis: str) -> fx.Graph | None:
    """The module's graph with the changes; its nodes are those of the plan, in the same order. None: none is needed."""
    graph, _ = copied(trace.graph)
    changed = False
    for name in dict.fromkeys(name_of(node) for node in changes):
        ours = [node for node in changes if name_of(node) == name]
        if not any(changes[node] or changes[node].sizes for node in ours):
            continue
        theirs = [node for node in graph.nodes if node.op.startswith("call_") and name_of(node) == name]
        if not any(changes[node] for node in ours) and len(theirs) != len(ours):
            theirs = [node for node in theirs if _has_sizes(node, [changes[one] for one in ours])]
            if not theirs:
                continue  # the whole ran otherwise when it was recorded; no size stands in the graph as a number
        if not theirs or len(ours) % len(theirs):
            raise BuildError(
                f'build on "{axis}" at "{path}": {said(ours[0])} is done otherwise on each rank, and the graph has '
                f"{len(theirs)} calls of {name} where {len(ours)} ran. Take back the step that has rewritten it."
            )
        for index, node in enumerate(theirs):  # a module that runs several times does the same each time
            same = [changes[one] for one in ours[index :: len(theirs)]]
            if any(one != same[0] for one in same):
                raise BuildError(
                    f'build on "{axis}" at "{path}": {said(ours[index])} is done otherwise on each rank in one call of '
                    f"this module, and in another one not, or not so. Give each call a module of its own."
                )
            changed |= _apply(graph, node, same[0])
    if changed:
        graph.lint()
    return graph if changed else None


def _has_sizes(node: fx.Node, changes: list[Change]) -> bool:
    """Whether a number among a node's arguments is one that is another on a rank."""
    wholes = {whole for change in changes for whole, _ in change.sizes.values()}
    return any(value in wholes for _, value in numbers_of(node) if isinstance(value, int))


def parents(path: str) -> Iterator[str]:
    """The paths of the modules above one."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _apply(graph: fx.Graph, node: fx.Node, change: Change) -> bool:
    for path, move in change.arguments.items():
        value = _at(node, path)
        with graph.inserting_before(node):
            converted = graph.call_function(Called(move), (value,))
        _put(node, path, converted)
    resized = {path: size for path, (whole, size) in change.sizes.items() if _at(node, path) == whole}
    for path, size in resized.items():
        _put(node, path, size)
    if change.function is not None:
        node.op, node.target = "call_function", Called(change.function)
    return bool(change or resized)


def _at(node: fx.Node, path: Path) -> Any:
    value: Any = node.kwargs[path[0]] if isinstance(path[0], str) else node.args[path[0]]
    for index in path[1:]:
        value = value[index]  # type: ignore[index]
    return value


def _put(node: fx.Node, path: Path, value: fx.Node | int) -> None:
    def put(held: Any, rest: Path) -> Any:
        if not rest:
            return value
        return type(held)(put(one, rest[1:]) if index == rest[0] else one for index, one in enumerate(held))

    first = path[0]
    if isinstance(first, str):
        node.update_kwarg(first, put(node.kwargs[first], path[1:]))
    else:
        node.update_arg(first, put(node.args[first], path[1:]))
