"""Hooks on a private copy: what each module took, gave back, left behind, and which gradients it saw."""

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slapo_py.verify.leaves import leaves, once, tensors_of
from slapo_py.verify.world import global_state, random_states


class Probe(NamedTuple):
    """One thing that was seen at a module: `kind` is what, `number` the how manieth call of the module."""

    path: str
    number: int
    kind: str
    name: str


class Probes:
    """While it is entered, `seen` fills with a table of what passes through each module; in order of their returns."""

    def __init__(self, module: nn.Module, original: nn.Module) -> None:
        known = {name for name, _ in original.named_modules()}
        self._modules = [(name, one) for name, one in module.named_modules() if name in known]
        self.seen: dict[Probe, Any] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._open: list[tuple[str, int, dict[str, Any]]] = []
        self._handles: list[Any] = []
        self._backward = False

    @property
    def innermost(self) -> str | None:
        """The module that had been entered and not left when the run was broken off."""
        return self._open[-1][0] if self._open else None

    def __enter__(self) -> "Probes":
        for name, one in self._modules:
            self._handles.append(one.register_forward_pre_hook(self._before(name), with_kwargs=True, prepend=True))
            self._handles.append(one.register_forward_hook(self._after(name), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, path: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            kind = "recomputed" if torch._C._current_graph_task_id() != -1 else "called"
            number = self._calls[path, kind]
            self._calls[path, kind] += 1
            self._open.append((path, number, global_state()))
            if kind == "called":
                self._note(path, number, "input", (args, kwargs))
                self._note_random(path, number, "before")
            if not torch.is_grad_enabled():
                return None
            given = _separate((args, kwargs), once(lambda one: one.view_as(one) if one.requires_grad else one))
            self._note_gradients(path, "gradient of its input", given)
            return given

        return before

    def _after(self, path: str) -> Any:
        def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            while self._open and self._open[-1][0] != path:  # what raised within and was caught
                self._open.pop()
            _, number, world = self._open.pop() if self._open else (path, 0, global_state())
            if torch._C._current_graph_task_id() == -1:
                self._note(path, number, "output", out)
                self._note(path, number, "input afterwards", (args, kwargs))
                self._note_random(path, number, "after")
                for name, state in global_state().items():
                    if state != world.get(name):  # what it was called under, such as a checkpoint, is not its doing
                        self.seen[Probe(path, number, "global state after", name)] = state
                for name, one in module.named_buffers(recurse=False):
                    self._note(path, number, "buffer", one, name)
            self._note_gradients(path, "gradient of its output", out)

        return after

    def _note(self, path: str, number: int, kind: str, value: Any, name: str = "") -> None:
        for at, leaf in leaves(value, name):
            self.seen[Probe(path, number, kind, at)] = leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
            if isinstance(leaf, Tensor) and torch.is_grad_enabled() and kind in ("input", "output"):
                self.seen[Probe(path, number, f"requires_grad of the {kind}", at)] = leaf.requires_grad

    def _note_random(self, path: str, number: int, when: str) -> None:
        for name, state in random_states().items():
            self.seen[Probe(path, number, f"random state {when}", name)] = state

    def _note_gradients(self, path: str, kind: str, value: Any) -> None:
        if not torch.is_grad_enabled():
            return
        number = self._calls[path, kind]
        self._calls[path, kind] += 1
        for name, tensor in tensors_of(value):
            if tensor.requires_grad:
                key = Probe(path, number, kind, name)
                self.seen[key] = None

                def hook(grad: Tensor, key: Probe = key) -> None:
                    self.seen[key] = grad.detach().clone()

                tensor.register_hook(hook)


def _separate(value: Any, change: Any) -> Any:
    """Arguments with a view for each tensor: its gradient is what comes from this module, not from other readers."""
    if type(value) in (tuple, list):
        return type(value)(_separate(one, change) for one in value)
    if type(value) is dict:
        return {name: _separate(one, change) for name, one in value.items()}
    return change(value) if type(value) is Tensor else value
