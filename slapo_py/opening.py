"""Which submodules become part of a graph, so that a rewrite finds what it looks for: no more than it needs."""

from collections.abc import Callable

from torch import fx, nn

from slapo_py.decomposed import Decomposed, has_parts
from slapo_py.errors import NoMatchError, TraceError
from slapo_py.patterns import Occurrence, is_known
from slapo_py.places import hooks_of
from slapo_py.schedule import Schedule
from slapo_py.scheduled import dress, layer_of, layers, undress
from slapo_py.tracing.trace import Trace

PutIn = Callable[[], list[Occurrence]]
Opens = Callable[[str, nn.Module], bool]


def trace_for(place: Schedule, put_in: PutIn) -> None:
    """Trace a place with as few submodules opened and decomposed as `put_in` needs.

    put_in: rewrites the trace that is there, says what it has covered, and raises `NoMatchError` if it finds nothing;
    it is called for several traces, the last of which stays. Raises `NoMatchError`, `TraceError`.
    """
    closed = _closed(place.module, _opens)
    try:
        found = _attempt(place, put_in, closed)
    except TraceError:  # somewhere below is what no graph can say: stay above
        closed = _closed(place.module, _is_free)
        found = _attempt(place, put_in, closed)
    parts: list[str] = []
    if isinstance(found, NoMatchError):
        parts = [path for path in closed if _decomposes(place[path].module)]
        if not parts:
            raise found
        for path in parts:
            dress(place[path].module, Decomposed())
        closed = [path for path in closed if path not in parts]
        found = _attempt(place, put_in, closed)
        if isinstance(found, NoMatchError):
            raise found
    needed = {node.meta.get("within", "") for one in found for node in one.nodes}
    needed |= {path for path in parts if _is_taken(place, path, found)}
    for path in set(parts) - needed:
        undress(place[path].module, Decomposed)
    narrow = _closed(place.module, lambda path, _: any(f"{one}.".startswith(f"{path}.") for one in needed))
    if set(narrow) != set(closed):
        again = _attempt(place, put_in, narrow)
        if isinstance(again, NoMatchError):
            raise again


def _attempt(place: Schedule, put_in: PutIn, closed: list[str]) -> list[Occurrence] | NoMatchError:
    """Trace anew and rewrite: what was covered, or why nothing was."""
    undress(place.module, Trace)
    # a forward may call what is below one of them without calling the one itself
    below = [f"{path}.*" for path in closed if any(True for _ in place[path].module.children())]
    place.trace(flatten=True, leaves=[*closed, *below])
    try:
        return put_in()
    except NoMatchError as error:
        return error


def _closed(module: nn.Module, opens: Opens) -> list[str]:
    """The submodules that stay calls: the uppermost that don't open."""
    closed, waiting = [], [("", module)]
    while waiting:
        prefix, one = waiting.pop()
        for name, child in one.named_children():
            path = f"{prefix}{name}"
            if opens(path, child):
                waiting.append((f"{path}.", child))
            else:
                closed.append(path)
    return closed


def _opens(path: str, module: nn.Module) -> bool:
    """Whether a submodule may become part of the graph: it is no single operation, and nothing was done to it."""
    if layer_of(module, Decomposed) is None and (is_known(module) or has_parts(module)):
        return False
    return not any(hooks_of(module)) and all(isinstance(one, Decomposed) for one in layers(module))


def _is_free(path: str, module: nn.Module) -> bool:
    """The same, and it is without parameters and buffers."""
    free = not any(True for _ in module.parameters()) and not any(True for _ in module.buffers())
    return free and all(_opens(path, one) for one in module.modules())


def _decomposes(module: nn.Module) -> bool:
    """Whether a submodule may become its product and its bias in the graph; hooks on it would not run any more."""
    return has_parts(module) and not layers(module) and not any(hooks_of(module))


def _is_taken(place: Schedule, path: str, found: list[Occurrence]) -> bool:
    """Whether a match covers the addition of the bias of a decomposed submodule."""
    return any(
        isinstance(value, fx.Node) and _reads(value, f"{path}.bias") for one in found for value in one.inputs.values()
    )


def _reads(node: fx.Node, target: str) -> bool:
    if node.op == "get_attr":
        return node.target == target
    return getattr(node.target, "__name__", "") == "autocast_argument" and _reads(node.args[0], target)  # type: ignore[arg-type]
