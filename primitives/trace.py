"""`sch[path].trace()`: the module gets a static graph."""

import difflib
import fnmatch
from collections.abc import Sequence

from slapo_py.errors import ArgumentError, StepError
from slapo_py.places import check_forward, hooks_of
from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.schedule import Schedule
from slapo_py.scheduled import layers
from slapo_py.tracing import trace_of


@register("trace")
class Trace(Primitive):
    """Give this module a static `torch.fx` graph of its own forward; its submodules stay calls.

    Before: the forward runs as Python. After: `sch[path].graph` runs, under the guards of `sch[path].guards`; a call
    that they don't cover runs the Python forward and is counted in `sch[path].misses`. The module object, its class for
    `isinstance`, its names and hooks stay; results are bit-equal. Sizes stay symbolic and both modes, train and eval,
    are in one graph. Modules that behave alike share one capture.

    `flatten`: submodules become part of the graph, too, and then accept only steps on their parameters. `leaves`: paths
    of submodules (seen from here; `*` is any text, dots too) that stay calls all the same.

    Requires: example inputs in `create_schedule` that reach this module, and a forward without branches on data, loops
    over a size or other effects than those of torch. Raises `TraceError` with the line of the forward that forbids it,
    `NoExampleInputs`, `StepError`, `ArgumentError`.
    """

    structural = True

    def check(self, place: Schedule, flatten: bool = False, leaves: Sequence[str] = ()) -> None:
        where = f'trace at "{place.path}"'
        check_forward(place, "trace")
        if isinstance(leaves, str) or not all(isinstance(leaf, str) for leaf in leaves):
            raise ArgumentError(f'{where}: leaves must be a list of paths, found {leaves!r}. Write leaves=["attn"].')
        if leaves and not flatten:
            raise ArgumentError(
                f"{where}: submodules stay calls unless flattened. Leave out leaves=, or add flatten=True."
            )
        below = [name for name, _ in place.module.named_modules() if name]
        for leaf in leaves:
            if not any(fnmatch.fnmatchcase(name, leaf) for name in below):
                close = difflib.get_close_matches(leaf, below, n=3, cutoff=0.4) or below[:5]
                raise ArgumentError(
                    f"{where}: leaves={leaf!r} names no submodule. Such names: {', '.join(map(repr, close))}."
                )
        if trace_of(place.module) is not None:
            raise StepError(
                f"{where}: this module is traced already. To trace it differently, take that step back with sch.undo()."
            )
        place.root.tracer.check(place.path, flatten, tuple(leaves))
        inlined = place.root.tracer.inlined(place.path, flatten, tuple(leaves))
        hooked = [path for path in sorted(inlined) if any(hooks_of(place[path].module))]
        if hooked:
            raise StepError(
                f"{where}: flattening would bypass the hooks on {', '.join(map(repr, hooked))}. Keep them calls: "
                f"trace(flatten=True, leaves={hooked!r})."
            )
        dressed = [path for path in sorted(inlined) if any(one.rank >= 0 for one in layers(place[path].module))]
        if dressed:
            raise StepError(
                f"{where}: flattening would bypass what was done at {', '.join(map(repr, dressed))}. Keep them calls: "
                f"trace(flatten=True, leaves={dressed!r})."
            )

    def apply(self, place: Schedule, flatten: bool = False, leaves: Sequence[str] = ()) -> None:
        place.root.tracer.trace(place.path, flatten, tuple(leaves))
