"""Nested values as a flat table: what a forward took or gave back, leaf by leaf, with the types of all containers."""

import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slapo_py.build.tensors import has_plain_storage

_OPAQUE = (nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodType)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size)


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value with how it is reached; of a container, its type comes first.

    `{"a": (x, 1)}` -> `("", dict)`, `("['a']", tuple)`, `("['a'][0]", x)`, `("['a'][1]", 1)`. Objects that are not
    known are looked into by their attributes; each object is looked into once.
    """
    yield from _walk(value, at, {})


def _walk(value: Any, at: str, seen: dict[int, str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, *_PLAIN)):
        yield at, value
        return
    if isinstance(value, _OPAQUE):
        yield at, type(value)
        return
    if id(value) in seen:
        yield at, f"the same object as {seen[id(value)] or 'the whole'}"
        return
    seen[id(value)] = at
    yield at, type(value)
    for name, part in parts(value):
        yield from _walk(part, at + name, seen)


def parts(value: Any) -> list[tuple[str, Any]]:
    """What lies directly inside a container or an object, and how it is reached."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", held) for key, held in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", held) for name, held in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", held) for index, held in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [("", sorted(map(repr, value)))]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{one.name}", getattr(value, one.name)) for one in dataclasses.fields(value)]
    return [(f".{name}", held) for name, held in sorted(getattr(value, "__dict__", {}).items()) if not callable(held)]


def tensors_of(value: Any) -> list[tuple[str, Tensor]]:
    """Every tensor with how it is reached; one object at two places comes once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            found.setdefault(id(leaf), (name, leaf))
    return list(found.values())


def once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same tensor at two places stays one."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = (tensor, change(tensor))  # the old one is kept alive, so that its id stays its own
        return made[id(tensor)][1]

    return changed


def shared(output: Tensor, given: Any, outputs: Any) -> str:
    """What a tensor of the outputs is, besides itself: an input, a window onto one, another of the outputs."""
    for _, one in tensors_of(given):
        if one is output:
            return "it is the input itself"
    places = [name for name, leaf in leaves(outputs) if leaf is output]
    if len(places) > 1:
        return f"it is one tensor at {', '.join(places)}"
    if has_plain_storage(output) and output.numel():
        for _, one in tensors_of(given):
            if has_plain_storage(one) and one.numel() and _storage(one) == _storage(output):
                return "it shares memory with an input"
    return "it is a tensor of its own"


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
