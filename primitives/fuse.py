"""`sch[path].fuse("name")`: operations become one kernel."""

from typing import Any

import torch

from slapo_py.errors import ArgumentError, NoMatchError
from slapo_py.kernels import Kernel, find_kernel, list_kernels
from slapo_py.opening import trace_for
from slapo_py.patterns import Occurrence, find, pattern, why_none
from slapo_py.primitive import Primitive
from slapo_py.primitives.compile import Compiled, check_choice
from slapo_py.registry import register
from slapo_py.rewriting import Put, check_groups, make_groups, with_functions
from slapo_py.schedule import Schedule
from slapo_py.scheduled import dress
from slapo_py.tracing import trace_of


@register("fuse")
class Fuse(Primitive):
    """Replace operations by one kernel: a registered one, or what a compiler makes of a match.

    `fuse("bias_gelu")`: before `gelu(linear(x, w) + b)`, after `bias_gelu(linear(x, w), b)`, at every place in this
    module where a pattern of the kernel matches. What the patterns need is done first, and no more: the module is
    traced, submodules become part of its graph, and a Linear whose bias the kernel takes is decomposed. A later fuse at
    the same place makes the graph anew, with the kernels that it has.

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
    kernels = [kernel]
    if trace is not None:
        try:
            _put_in(place, kernel)
            return
        except NoMatchError:
            if any(primitive != "fuse" for primitive, _ in trace.steps):
                raise  # what other steps have put into the graph would be lost
            kernels = [*(find_kernel(name) for name in dict.fromkeys(name for _, name in trace.steps)), kernel]
    trace_for(place, lambda: [found for one in kernels for found in _put_in(place, one)])


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
