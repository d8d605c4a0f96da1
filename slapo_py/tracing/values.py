"""Small questions about the values that a forward handles."""

import copy
import enum
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

Tensor = torch.Tensor

SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout,
          torch.memory_format, enum.Enum)  # fmt: skip
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor inside nested containers."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def is_plain(value: Any) -> bool:
    """Whether a value is simple, or a container of simple values."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, functools.partial):
        return is_plain(value.func) and is_plain(value.args) and is_plain(value.keywords)
    return isinstance(value, (*SIMPLE, *FUNCTIONS))


def signature(value: Any) -> Any:
    """What a forward can see of a value without reading its data; equal signatures may share a capture."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(map(int, value.shape)), value.dtype, value.device.type, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(signature(item) for item in value))
    if isinstance(value, dict):
        return (type(value), tuple((key, signature(item)) for key, item in value.items()))
    if isinstance(value, float):
        return ("float", value.hex())  # tells -0.0 from 0.0, and nan equals itself
    if isinstance(value, SIMPLE):
        return (type(value), value)
    return value if isinstance(value, FUNCTIONS) else type(value)


def structure(value: Any) -> Any:
    """The signature without sizes: what must agree between two recordings of different sizes."""
    if isinstance(value, Tensor):
        return ("tensor", value.ndim, value.dtype)
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(structure(item) for item in value))
    if isinstance(value, dict):
        return (type(value), tuple((key, structure(item)) for key, item in value.items()))
    return signature(value)


def cache_class() -> type | None:
    """transformers' KV cache class, where transformers is in use."""
    module = sys.modules.get("transformers.cache_utils")
    return getattr(module, "Cache", None)


def opaque_methods() -> tuple[tuple[type, str], ...]:
    """Methods of arguments that stay one call in the graph."""
    cache = cache_class()
    return ((cache, "update"),) if cache else ()


def map_tensors(value: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested containers (and of caches, which are mutated during a run) with `f` applied to each tensor."""
    cache = cache_class()

    def go(item: Any) -> Any:
        if isinstance(item, Tensor):
            return f(item)
        if isinstance(item, tuple):
            return type(item)(*map(go, item)) if hasattr(item, "_fields") else tuple(map(go, item))
        if type(item) is list:
            return [go(one) for one in item]
        if isinstance(item, dict):
            new = copy.copy(item)
            for key in item:
                new[key] = go(item[key])
            return new
        if cache and (isinstance(item, cache) or type(item).__module__ == cache.__module__):
            new = copy.copy(item)
            new.__dict__ = {key: go(one) for key, one in vars(item).items()}
            return new
        return item

    return go(value)
