"""All or nothing: what a step may change is noted before it runs and put back if it raises."""

import functools
import gc
import random
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slapo_py.clone import ATOMIC

_DICTS = (dict, OrderedDict, defaultdict)
_ATOMS = (*ATOMIC, nn.Module, types.MethodType)


class Snapshot:
    """The state of some modules: class, attributes, children, hooks, and the plain objects that hang on them.

    Tensors are not copied: a step that wrote into a parameter would break the original as well. Their `requires_grad`
    and `.grad` are noted.
    """

    def __init__(self, deep: Iterable[nn.Module], shallow: Iterable[nn.Module], *extra: Any) -> None:
        """`deep`: modules that are noted with everything that hangs on them; `shallow`: with their own dicts only."""
        self._classes: list[tuple[nn.Module, type]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._slots: list[tuple[Any, dict[str, Any]]] = []
        self._tensors: list[tuple[torch.Tensor, bool, torch.Tensor | None]] = []
        seen: set[int] = set()
        stack: list[Any] = list(extra)
        for module in deep:
            self._classes.append((module, type(module)))
            stack.append(vars(module))
        for module in shallow:
            self._classes.append((module, type(module)))
            self._note(vars(module), seen)
            for held in vars(module).values():
                if isinstance(held, _DICTS):
                    self._note(held, seen)
        while stack:
            stack.extend(self._note(stack.pop(), seen))

    def _note(self, value: Any, seen: set[int]) -> Iterable[Any]:
        """Note one object; returns what to look at next."""
        if isinstance(value, _ATOMS) or id(value) in seen:
            return ()
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_leaf:
                self._tensors.append((value, value.requires_grad, value.grad))
            return ()
        if type(value) in _DICTS:
            self._contents.append((value, dict(value)))
            return value.values()
        if type(value) in (list, set):
            self._contents.append((value, value.copy()))
            return list(value)
        if isinstance(value, tuple | frozenset):
            return list(value)
        attributes = getattr(value, "__dict__", None)
        found = [attributes] if type(attributes) is dict else []
        kind: Any = type(value)
        slots = {name: getattr(value, name, _EMPTY) for name in _slot_names(kind)}
        if slots:
            self._slots.append((value, slots))
        return [*found, *slots.values()]

    def restore(self) -> bool:
        """Put everything back. Returns whether there was more to it than the classes of modules and their tensors."""
        attributes = False
        for module, cls in self._classes:
            if type(module) is not cls:
                module.__class__ = cls
        for container, content in self._contents:
            if not _same(container, content):
                attributes = True
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
        for value, slots in self._slots:
            for name, held in slots.items():
                if getattr(value, name, _EMPTY) is not held:
                    attributes = True
                    delattr(value, name) if held is _EMPTY else object.__setattr__(value, name, held)
        for tensor, requires_grad, grad in self._tensors:
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not grad:
                tensor.grad = grad
        return attributes


@contextmanager
def nothing_collected() -> Iterator[None]:
    """No garbage collection within: what its callbacks and finalizers do, and take, belongs to nobody in there."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Whatever the body draws (a new layer's weights), the next draw outside is what it would have been."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy:
            numpy.random.set_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


_EMPTY = object()


@functools.lru_cache(maxsize=1024)
def _slot_names(cls: type) -> tuple[str, ...]:
    """The attributes that instances keep in slots, not in `__dict__`."""
    return tuple(
        name
        for base in cls.__mro__
        for name, held in vars(base).items()
        if isinstance(held, types.MemberDescriptorType) and "__slots__" in vars(base)
    )


def _same(now: Any, before: Any) -> bool:
    """Equal by identity and order of the parts: comparing values could run a user's `__eq__`."""
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(a is b and now[a] is before[b] for a, b in zip(now, before))
    return all(a is b for a, b in zip(now, before))
