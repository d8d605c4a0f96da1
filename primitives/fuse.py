"""`sch[path].fuse("name")`: operations become one kernel."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from slapo_py.errors import ArgumentError, NoMatchError
from slapo_py.kernels import Kernel, find_kernel, list_kernels
from slapo_py.matches import occurrences
from slapo_py.patterns import Occurrence, Pattern, is_known, pattern
from slapo_py.places import hooks_of
from slapo_py.primitive import Primitive
from slapo_py.primitives.compile import Compiled, check_choice
from slapo_py.primitives.decompose import Decomposed, has_parts
from slapo_py.registry import register
from slapo_py.rewriting import check_groups, make_groups, with_function
from slapo_py.schedule import Schedule
from slapo_py.scheduled import dress, layers, undress
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
    found = _prepared(place, pattern(*kernel.patterns), kernel.name)
    dress(place.module, with_function(place, found, kernel.op, "fuse"))


def _prepared(place: Schedule, what: Pattern, name: str) -> list[Occurrence]:
    """Do what a pattern needs in order to match, and no more. Raises `NoMatchError`."""
    trace = trace_of(place.module)
    if trace is not None:
        try:
            return occurrences(place, what, f"fuse({name!r})")
        except NoMatchError:
            if trace.parent is not None:  # its graph can't be made anew
                raise
    kept = [path for path, one in _below(place) if not _opens(one)]
    _retrace(place, kept)
    try:
        return occurrences(place, what, f"fuse({name!r})")
    except NoMatchError:
        parts = [path for path in kept if _decomposes(place[path].module)]
        if not parts:
            raise
    for path in parts:
        place[path].decompose()
    _retrace(place, [path for path in kept if path not in parts])
    found = occurrences(place, what, f"fuse({name!r})")
    idle = [path for path in parts if not _is_taken(place, path, found)]
    if idle:
        for path in idle:
            undress(place[path].module, Decomposed)
        _retrace(place, [path for path in kept if path not in parts or path in idle])
        found = occurrences(place, what, f"fuse({name!r})")
    return found


def _below(place: Schedule) -> Iterator[tuple[str, nn.Module]]:
    """The submodules that are not inside one that stays a call."""
    stack = [("", place.module)]
    while stack:
        prefix, module = stack.pop()
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            yield path, child
            if _opens(child):
                stack.append((f"{path}.", child))


def _opens(module: nn.Module) -> bool:
    """Whether a submodule becomes part of the graph: without state, not known to patterns, and nothing done to it."""
    free = not any(True for _ in module.parameters()) and not any(True for _ in module.buffers())
    return free and not is_known(module) and not any(layers(one) or any(hooks_of(one)) for one in module.modules())


def _decomposes(module: nn.Module) -> bool:
    """Whether a submodule may become its product and its bias in the graph; hooks on it would not run any more."""
    return has_parts(module) and not layers(module) and not any(hooks_of(module))


def _retrace(place: Schedule, leaves: list[str]) -> None:
    undress(place.module, Trace)
    place.trace(flatten=True, leaves=leaves)


def _is_taken(place: Schedule, path: str, found: list[Occurrence]) -> bool:
    """Whether a match covers the addition of the bias of a decomposed submodule."""
    covered = {node for one in found for node in one.nodes}
    waiting = [node for node in place.graph.nodes if node.op == "get_attr" and node.target == f"{path}.bias"]
    while waiting:
        node = waiting.pop()
        if node in covered:
            return True
        if node.op == "get_attr" or getattr(node.target, "__name__", "") == "autocast_argument":
            waiting += list(node.users)
    return False
