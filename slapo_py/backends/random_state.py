"""The random generators that a training step draws from: the process's own, and those that a module holds."""

import random
import sys
from typing import Any

import torch
from torch import nn

from slapo_py.build.tensors import held_by


def process_state() -> dict[str, Any]:
    """The states of torch, Python and numpy, in plain values and tensors."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        found = sys.modules["numpy"].random.get_state()
        if isinstance(found, tuple):  # the legacy generator; another one is the user's own to save
            name, keys, position, has_gauss, gauss = found
            state["numpy"] = (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(gauss))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_process_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        name, keys, *others = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *others))
    if "cuda" in state and torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)


def generators(module: nn.Module) -> dict[str, torch.Generator]:
    """A module's own generators, by the path of what holds them."""
    found = [(path, one) for path, one in held_by(module) if isinstance(one, torch.Generator)]
    return {f"{path}#{index}": one for index, (path, one) in enumerate(found)}
