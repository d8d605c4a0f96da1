"""Layers on a private copy of a built module: what passes the borders of its modules, on this rank.

From the outside, these lie around a module: `_Outside`, its input sync, `_Between`, its output sync, `_Inside`.
So values are seen behind the collectives of a border and gradients, on their way back, behind them, too.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from slapo_py.layouts.recording.borders import ENTER, EXIT, Border, tensors_at
from slapo_py.scheduled import Forward, Layer, bare, dress
from slapo_py.tracing.values import map_tensors
from slapo_py.verify.borders import is_backward, numbered, of_gradient
from slapo_py.verify.probes import Probe


@dataclass
class Watch:
    """seen: the value and the gradient at each border, in the order in which they passed. raised_in: the module.

    arrived: where a gradient has come to a collective and not left it: where a backward pass was broken off.
    """

    seen: dict[Probe, Tensor] = field(default_factory=dict)
    raised_in: str | None = None
    arrived: Border | None = None
    _values: Counter[Border] = field(default_factory=Counter)
    _gradients: Counter[Border] = field(default_factory=Counter)

    def put_on(self, module: nn.Module) -> None:
        """Look at every module that has a forward."""
        for path, one in list(module.named_modules()):
            if bare(one).forward is not nn.Module.forward:
                for layer in (_Outside, _Between, _Inside):
                    dress(one, layer(self, path))

    def note(self, path: str, side: str, values: Any) -> None:
        """Values behind a border."""
        if not is_backward():
            for index, tensor in enumerate(tensors_at(values)):
                self.seen[numbered(self._values, path, side, index)] = tensor.detach().clone()

    def leaving(self, path: str, side: str, values: Any) -> Any:
        """Values with a view for each tensor, whose gradient is noted when it has left the border."""
        if is_backward():
            return values
        passed = {}
        for index, tensor in enumerate(tensors_at(values)):
            key = of_gradient(numbered(self._gradients, path, side, index))
            if tensor.requires_grad:
                passed[id(tensor)] = tensor.view_as(tensor)
                passed[id(tensor)].register_hook(self._left(key))
        return map_tensors(values, lambda one: passed.get(id(one), one))

    def arriving(self, path: str, side: str, values: Any) -> None:
        """Note when a gradient comes to a border."""
        for index, tensor in enumerate(tensors_at(values)):
            if tensor.requires_grad and not is_backward():
                tensor.register_hook(functools.partial(self._arrived, (side, path, index)))

    def _arrived(self, border: Border, _: Tensor) -> None:
        self.arrived = border

    def _left(self, key: Probe) -> Callable[[Tensor], None]:
        def note(grad: Tensor) -> None:
            self.arrived = None
            self.seen[key] = grad.detach().clone()

        return note


@dataclass(frozen=True, eq=False)
class _Looking(Layer):
    watch: Watch
    path: str


class _Outside(_Looking):
    rank: ClassVar[int] = 41

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        @functools.wraps(forward)
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.watch.leaving(self.path, ENTER, (args, kwargs))
            try:
                out = forward(module, *args, **kwargs)
            except Exception:
                if self.watch.raised_in is None:
                    self.watch.raised_in = self.path
                raise
            self.watch.arriving(self.path, EXIT, out)
            return out

        return watched


class _Between(_Looking):
    rank: ClassVar[int] = 39

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        @functools.wraps(forward)
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.watch.note(self.path, ENTER, (args, kwargs))
            self.watch.arriving(self.path, ENTER, (args, kwargs))
            out = forward(module, *args, **kwargs)
            self.watch.note(self.path, EXIT, out)
            return out

        return watched


class _Inside(_Looking):
    rank: ClassVar[int] = 19

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        @functools.wraps(forward)
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.watch.leaving(self.path, EXIT, forward(module, *args, **kwargs))

        return watched
