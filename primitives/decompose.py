"""`sch[path].decompose()`: a Linear, Conv1D or convolution as its product and a separate addition of the bias."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from slapo_py.errors import ArgumentError, StepError
from slapo_py.places import check_forward
from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.schedule import Schedule
from slapo_py.scheduled import Forward, Layer, bare, dress, layer_of
from slapo_py.tracing import trace_of


def autocast_argument(tensor: Tensor) -> Tensor:
    """A tensor as autocast hands it to a product: in the dtype of the region, if there is one.

    Autocast would cast the bias of `F.linear`, but leaves an addition in float32: the output would have another dtype.
    The dtype comes from the region, not from the product, so that in a graph the product has one reader only.
    """
    if has_torch_function_unary(tensor):  # a capture logs this call as one node
        return handle_torch_function(autocast_argument, (tensor,), tensor)  # type: ignore[no-any-return]
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _linear(self: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, self.weight) + autocast_argument(self.bias)


def _conv1d_of_transformers(self: Any, x: Tensor) -> Tensor:
    return x @ self.weight + autocast_argument(self.bias)  # type: ignore[no-any-return]


def _convolution(dims: int) -> Callable[..., Tensor]:
    shape = (-1, *[1] * dims)  # counted from the end: inputs with and without a batch alike

    def convolution(self: Any, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight, None) + autocast_argument(self.bias).view(shape)  # type: ignore[no-any-return]

    return convolution


_TORCH: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution(1),
    nn.Conv2d: _convolution(2),
    nn.Conv3d: _convolution(3),
}
_KINDS = "nn.Linear, transformers' Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d"


@dataclass(frozen=True)
class Decomposed(Layer):
    """The forward in its parts. Its rank is negative: it is the module's own forward, which a trace reads."""

    rank: ClassVar[int] = -10

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        parts = _parts(base)
        if parts is None:
            raise TypeError(f"{base.__name__} has no parts")
        return functools.wraps(base.forward)(parts)

    def describe(self) -> str:
        return "decompose"


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
        if _parts(bare(module)) is None:
            raise ArgumentError(
                f"{where}: {kind} is not a module that has parts. Those are {_KINDS} and subclasses that keep their "
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

    def apply(self, place: Schedule) -> None:
        dress(place.module, Decomposed())


def has_parts(module: nn.Module) -> bool:
    """Whether `decompose` accepts a module, as far as its class and its bias go."""
    return _parts(bare(module)) is not None and module.bias is not None


def _parts(base: type[nn.Module]) -> Callable[..., Tensor] | None:
    """The forward in its parts, if the class computes what one of those that are known does."""
    known = dict(_TORCH)
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None:
        known[transformers.Conv1D] = _conv1d_of_transformers
    for cls, parts in known.items():
        same = all(getattr(base, name, None) is getattr(cls, name, None) for name in ("forward", "_conv_forward"))
        if issubclass(base, cls) and same:
            return parts
    return None


def _below(place: Schedule) -> str:
    """The line to write if there are such modules inside."""
    names = [name for name, one in place.module.named_modules() if name and _parts(bare(one)) is not None]
    return (
        f' Inside it, for example: sch["{".".join(filter(None, (place.path, names[0])))}"].decompose().'
        if names
        else ""
    )


def _above(path: str) -> list[tuple[str, str]]:
    """Every place above, and the path from there."""
    parts = path.split(".") if path else []
    return [(".".join(parts[:depth]), ".".join(parts[depth:])) for depth in range(len(parts))]
