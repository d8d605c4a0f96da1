"""The state of a module under the names that the original has for it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slapo_py.replacing.mapped_state import dropped_buffers, is_mapped, own_buffers, to_original


def named_state(module: nn.Module, tensors: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """{original name: parameter} of a scheduled module, ties under each of their names.

    `tensors`: other values by the scheduled module's names, such as its gradients, to be named in the same way.
    """
    given = dict(module.named_parameters(remove_duplicate=False)) if tensors is None else dict(tensors)
    with torch.no_grad():
        return to_original(module, given)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """The gradient of every parameter, or None, under the original's names."""
    held = dict(module.named_parameters(remove_duplicate=False))
    if not is_mapped(module):
        return {name: one.grad for name, one in held.items()}
    # None can't go through a map: zeros go in its place, and ones elsewhere tell where they came from
    filled = {name: torch.zeros_like(one) if one.grad is None else one.grad.detach() for name, one in held.items()}
    marks = {name: torch.full_like(one, float(one.grad is not None)) for name, one in held.items()}
    there = {name: bool(one.any()) or not one.numel() for name, one in named_state(module, marks).items()}
    return {name: one if there[name] else None for name, one in named_state(module, filled).items()}


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """{original name: buffer}, without those that a replacement declared as its own."""
    own = set(own_buffers(module))
    every = {name: one for name, one in module.named_buffers(remove_duplicate=False) if name not in own}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        found = to_original(module, {**parameters, **every})
    taken = named_state(module)
    return {name: one for name, one in found.items() if name not in taken}


def facts(module: nn.Module, known: set[str], gone: set[str]) -> dict[tuple[str, str], Any]:
    """What is not a value: names and their order, ties, requires_grad, dtypes, shapes, persistence, training flags.

    `known`: the original's modules by name. `gone`: buffers that a declared replacement does without.
    """
    found: dict[tuple[str, str], Any] = {}
    state = list(module.state_dict())
    parameters, held = named_state(module), buffers(module)
    found["state_dict keys", ""] = tuple(state)
    found["names of parameters", ""] = tuple(parameters)
    found["names of buffers", ""] = tuple(sorted(set(held) - gone))
    first: dict[int, str] = {}
    for name, one in parameters.items():
        found["tie", name] = first.setdefault(id(one), name)
        found["requires_grad", name] = one.requires_grad
        found["dtype", name] = one.dtype
        found["shape", name] = tuple(one.shape)
    for name, one in held.items():
        if name not in gone:
            found["persistence", name] = name in state
            found["dtype", name] = one.dtype
            found["shape", name] = tuple(one.shape)
            found["requires_grad", name] = one.requires_grad
    for name, one in module.named_modules(remove_duplicate=False):
        if name in known:
            found["training flag", name] = one.training
    return found


def dropped(module: nn.Module) -> set[str]:
    """Buffers of the original that a declared replacement does without."""
    return set(dropped_buffers(module))
