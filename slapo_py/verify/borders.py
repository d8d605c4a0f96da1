"""Hooks on a private copy of the original: the tensors that enter and leave each module, numbered as layouts do."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from slapo_py.layouts.recording.borders import ENTER, EXIT, tensors_at
from slapo_py.tracing.values import map_tensors
from slapo_py.verify.probes import Probe

GRADIENT = "gradient of the "


class Borders:
    """While it is entered, `seen` fills with the value and the gradient at each border.

    The gradient is what comes from the readers behind the border, not from others that read the same tensor.
    """

    innermost: str | None = None

    def __init__(self, module: nn.Module, original: nn.Module) -> None:
        self._modules = list(module.named_modules())
        self.seen: dict[Probe, Any] = {}
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._handles: list[Any] = []

    def __enter__(self) -> "Borders":
        for path, one in self._modules:
            self._handles.append(one.register_forward_pre_hook(self._before(path), with_kwargs=True, prepend=True))
            self._handles.append(one.register_forward_hook(self._after(path)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, path: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if is_backward():
                return None
            return self._passed(path, ENTER, (args, kwargs))

        return before

    def _after(self, path: str) -> Any:
        def after(module: nn.Module, args: Any, out: Any) -> Any:
            return None if is_backward() else self._passed(path, EXIT, out)

        return after

    def _passed(self, path: str, side: str, values: Any) -> Any:
        """Values with a view for each tensor, whose gradient is that of its readers behind the border."""
        passed = {id(one): one.view_as(one) if one.requires_grad else one for one in tensors_at(values)}
        self._note(path, side, list(passed.values()))
        return map_tensors(values, lambda one: passed.get(id(one), one))

    def _note(self, path: str, side: str, tensors: list[Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            key = numbered(self._counts, path, side, index)
            self.seen[key] = tensor.detach().clone()
            if tensor.requires_grad:
                tensor.register_hook(self._gradient(key))

    def _gradient(self, key: Probe) -> Any:
        def note(grad: Tensor) -> None:
            self.seen[of_gradient(key)] = grad.detach().clone()

        return note


def numbered(counts: Counter[tuple[str, str, int]], path: str, side: str, index: int) -> Probe:
    """The name of one crossing of a border; a module that is called again crosses it again."""
    counts[path, side, index] += 1
    return Probe(path, counts[path, side, index], side, str(index))


def of_gradient(key: Probe) -> Probe:
    return key._replace(kind=GRADIENT + key.kind)


def is_backward() -> bool:
    """Whether a checkpoint runs a module again."""
    return bool(torch._C._current_graph_task_id() != -1)
