"""`sch[path].fuse("name")`: operations become one kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from slapo_py.errors import ArgumentError, NoMatchError, TraceError
from slapo_py.kernels import Kernel, find_kernel, list_kernels
from slapo_py.patterns import Occurrence, find, is_known, pattern, why_none
from slapo_py.places import hooks_of
from slapo_py.primitive import Primitive
from slapo_py.primitives.compile import Compiled, check_choice
from slapo_py.primitives.decompose import Decomposed, has_parts
from slapo_py.registry import register
from slapo_py.rewriting import Put, check_groups, make_groups, with_functions
from slapo_py.schedule import Schedule
from slapo_py.scheduled import dress, layer_of, layers, undress
from slapo_py.tracing import trace_of
from slapo_py.tracing.trace import Trace


@register("fuse")
class Fuse(Primitive):
    """Replace operations by one kernel: a registered one, or what a compiler makes of a match.

    `fuse("bias_gelu")`: before `gelu(linear(x, w) + b)`, after `bias_gelu(linear(x, w), b)`, at every place in this
    module where a pattern of the kernel matches. What the patterns need is done first: the module is traced, its
    submodules without parameters (activations) become part of its graph, and a Linear whose bias the kernel takes is
    decomposed.

    `fuse(match, compiler="inductor")`: a match of `sch[path].find(pattern)`, or each match of a pattern, becomes a
    submodule (`fused_0`, ...) that torch.compile compiles with this backend; equal ones compile once.

    The arithmetic may differ in rounding; `sch.verify()` grades it.

    Requires: a registered kernel, of which a pattern matches, or a traced module and a match. Raises `NoMatchError`
    with the reason, `ArgumentError`, `StepError`, `TraceError`, `NoExampleInputs`.
    """

    def check(self, place: Schedule, kernel: Any, compiler: str = "triton") -> None:
        where = f'fuse at "{place.path}"'
        if isinstance(kernel, str):
            if compiler != "triton":
                raise ArgumentError(
                    f"{where}: {kernel!r} names a registered kernel, and compiler={compiler!r} compiles a match. Leave "
                    f"compiler= out, or give a match, one of sch[{place.path!r}].find(pattern)."
                )
            _try(place, _kernel(where, kernel))
            return
        if compiler == "triton":
            raise ArgumentError(
                f"{where}: a kernel is given by its name, found {kernel!r}. Registered: "
                f'{", ".join(list_kernels()) or "none"}. To compile a match, write fuse(match, compiler="inductor").'
            )
        check_choice(where, "compiler", compiler, torch._dynamo.list_backends(None))
        check_groups(place, kernel, "fused", "fuse")

    def apply(self, place: Schedule, kernel: Any, compiler: str = "triton") -> None:
        if isinstance(kernel, str):
            _fuse(place, _kernel("fuse", kernel))
            return
        for module in make_groups(place, kernel, "fused", "fuse").values():
            dress(module, Compiled((("backend", compiler),)))


def _kernel(where: str, name: str) -> Kernel:
    try:
        return find_kernel(name)
    except NoMatchError as error:
        raise NoMatchError(f"{where}: {error}") from None


class _Tried(Exception):
    """Takes back what was tried."""


def _try(place: Schedule, kernel: Kernel) -> None:
    """Carry the step out and take it back: only so is it known whether it finds something."""
    try:
        with place.root.transaction(place.path):
            _fuse(place, kernel)
            raise _Tried
    except _Tried:
        pass


def _fuse(place: Schedule, kernel: Kernel) -> None:
    """Where the graph as it is has no match, it is made anew: wider, with the kernels that are in it already."""
    trace = trace_of(place.module)
    if trace is None:
        _open(place, [kernel])
        return
    try:
        _put_in(place, kernel)
    except NoMatchError:
        if any(primitive != "fuse" for primitive, _ in trace.steps):
            raise  # what other steps have put into the graph would be lost
        _open(place, [*(find_kernel(name) for name in dict.fromkeys(name for _, name in trace.steps)), kernel])


def _put_in(place: Schedule, kernel: Kernel) -> list[Occurrence]:
    """One form of the kernel after the other; a later one finds what the earlier ones have left."""
    everything: list[Occurrence] = []
    for form in kernel.forms:
        found = find(place.module, place.graph, pattern(form.pattern))
        if found:
            puts: list[Put] = [(form.op or kernel.op, form.keywords)] * len(found)
            dress(place.module, with_functions(place, found, puts, "fuse", kernel.name))
            everything += found
    if not everything:
        why = why_none(place.module, place.graph, [form.pattern for form in kernel.forms])
        raise NoMatchError(f'fuse({kernel.name!r}) at "{place.path}": {why}')
    return everything


def _open(place: Schedule, kernels: list[Kernel]) -> None:
    """Trace with as few submodules opened and decomposed as the kernels need. Raises `NoMatchError`."""
    closed = _closed(place.module, _opens)
    try:
        found = _attempt(place, kernels, closed)
    except TraceError:  # somewhere below is what no graph can say: stay above
        closed = _closed(place.module, _is_free)
        found = _attempt(place, kernels, closed)
    parts: list[str] = []
    if isinstance(found, NoMatchError):
        parts = [path for path in closed if _decomposes(place[path].module)]
        if not parts:
            raise found
        for path in parts:
            place[path].decompose()
        closed = [path for path in closed if path not in parts]
        found = _attempt(place, kernels, closed)
        if isinstance(found, NoMatchError):
            raise found
    needed = {node.meta.get("within", "") for one in found for node in one.nodes}
    needed |= {path for path in parts if _is_taken(place, path, found)}
    for path in set(parts) - needed:
        undress(place[path].module, Decomposed)
    narrow = _closed(place.module, lambda path, _: any(f"{one}.".startswith(f"{path}.") for one in needed))
    if set(narrow) != set(closed):
        again = _attempt(place, kernels, narrow)
        if isinstance(again, NoMatchError):
            raise again


def _attempt(place: Schedule, kernels: list[Kernel], closed: list[str]) -> list[Occurrence] | NoMatchError:
    """Trace anew and put the kernels in, one after the other: where they were found, or why one was not."""
    undress(place.module, Trace)
    # a forward may call what is below one of them without calling the one itself
    below = [f"{path}.*" for path in closed if any(True for _ in place[path].module.children())]
    place.trace(flatten=True, leaves=[*closed, *below])
    try:
        return [one for kernel in kernels for one in _put_in(place, kernel)]
    except NoMatchError as error:
        return error


Opens = Callable[[str, nn.Module], bool]


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
