"""`sch[path].decompose()`: a Linear, Conv1D or convolution as its product and a separate addition of the bias."""

from slapo_py.decomposed import KINDS, Decomposed, parts_of
from slapo_py.errors import ArgumentError, StepError
from slapo_py.places import check_called, check_forward
from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.schedule import Schedule
from slapo_py.scheduled import bare, dress, layer_of
from slapo_py.tracing import trace_of


@register("decompose")
class Decompose(Primitive):
    """Compute this module in its parts: `F.linear(x, w, b)` before, `F.linear(x, w) + b` after.

    transformers' Conv1D becomes `x @ w + b`, and a convolution one without bias, plus the bias. The module object, its
    class for `isinstance`, its parameters and their names, its ties and hooks stay. A trace made afterwards shows the
    parts: that of this module, and one of a module above with `flatten=True`, where the bias can be fused with what
    follows. Under autocast, the bias is cast as before. The sum is rounded once more than in one operation.

    Requires: a module of one of these classes (or a subclass that keeps their forward) that has a bias and is not
    decomposed, nor traced, nor part of a flattened graph. Raises `ArgumentError`, `StepError`.
    """

    reaches_flattened = True  # never: but the check below can say in which order to write the steps

    def check(self, place: Schedule) -> None:
        where = f'decompose at "{place.path}"'
        check_forward(place, "decompose")
        module, kind = place.module, bare(place.module).__name__
        if parts_of(bare(module)) is None:
            raise ArgumentError(
                f"{where}: {kind} is not a module that has parts. Those are {KINDS} and subclasses that keep their "
                f"forward.{_below(place)}"
            )
        if layer_of(module, Decomposed) is not None:
            raise StepError(f"{where}: this {kind} is decomposed already. Leave out the second decompose().")
        if module.bias is None:
            raise ArgumentError(
                f"{where}: this {kind} has no bias, so it is one product already. Leave out decompose()."
            )
        if trace_of(module) is not None:
            raise StepError(
                f"{where}: this {kind} is traced already, and its graph shows it whole. Take that step back and write "
                f'sch["{place.path}"].decompose() before sch["{place.path}"].trace().'
            )
        for above, below in _above(place.path):
            trace = trace_of(place.root.module(above))
            if trace is not None and below in trace.inlined:
                traced = f'sch["{above}"]' if above else "sch"
                raise StepError(
                    f"{where}: this {kind} is part of the flattened graph of {above!r} already, which shows it whole. "
                    f'Take that step back and write sch["{place.path}"].decompose() before '
                    f"{traced}.trace(flatten=True)."
                )
        check_called(place, "decompose")

    def apply(self, place: Schedule) -> None:
        dress(place.module, Decomposed())


def _below(place: Schedule) -> str:
    """The line to write if there are such modules inside."""
    names = [name for name, one in place.module.named_modules() if name and parts_of(bare(one)) is not None]
    return (
        f' Inside it, for example: sch["{".".join(filter(None, (place.path, names[0])))}"].decompose().'
        if names
        else ""
    )


def _above(path: str) -> list[tuple[str, str]]:
    """Every place above, and the path from there."""
    parts = path.split(".") if path else []
    return [(".".join(parts[:depth]), ".".join(parts[depth:])) for depth in range(len(parts))]
