"""A module for a while on fake tensors, in a given mode: whatever its forward does to it is undone afterwards."""

import contextlib
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

_CONTAINERS = (list, dict, set, OrderedDict)


class Fakes:
    """One FakeTensorMode and the fake of every real tensor that was asked for; identical tensors have one fake."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[tuple[int, Any], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The fake of a tensor; the fake of a `meta` tensor lives on the device where the model would run."""
        key = (id(tensor), dtype)
        if key not in self._made:
            if tensor.device.type == "meta":
                with self.mode:
                    plain = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.get_default_device()
                    )
            else:
                with torch._C.DisableTorchFunction():
                    plain = self.mode.from_tensor(tensor.detach())
            if dtype is not None and plain.is_floating_point():
                plain = plain.to(dtype)
            if isinstance(tensor, nn.Parameter):
                fake: torch.Tensor = nn.Parameter(plain, tensor.requires_grad)
            else:
                fake = plain.requires_grad_(tensor.requires_grad)
            self._made[key] = (tensor, fake)  # keeping the real one keeps its id unique
        return self._made[key][1]


@contextlib.contextmanager
def sandbox(
    root: nn.Module, fakes: Fakes, training: bool, dtype: torch.dtype | None = None
) -> Iterator[dict[int, dict[str, Any]]]:
    """Fake every parameter, buffer and plain tensor attribute below `root`; restore each module's state afterwards.

    Yields {id(module): its attributes as they were}. `dtype` casts floating tensors.
    """
    before = {id(module): _state(module) for module in root.modules()}
    modules = list(root.modules())
    try:
        for module in modules:
            attributes = module.__dict__
            for name in ("_parameters", "_buffers"):
                attributes[name] = {
                    key: None if tensor is None else _fake(fakes, tensor, dtype)
                    for key, tensor in attributes[name].items()
                }
            for name, value in before[id(module)].items():
                if isinstance(value, torch.Tensor):
                    attributes[name] = _fake(fakes, value, dtype)
            attributes["training"] = training
        yield before
    finally:
        for module in modules:
            _restore(module, before[id(module)])


def _fake(fakes: Fakes, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return fakes.of(tensor, dtype if tensor.is_floating_point() else None)


def _state(module: nn.Module) -> dict[str, Any]:
    """A module's attributes; containers as (the object, a copy of what it holds)."""
    return {
        name: _Held(value, value.copy()) if type(value) in _CONTAINERS else value
        for name, value in module.__dict__.items()
    }


class _Held:
    """A container attribute and what it held."""

    def __init__(self, owner: Any, content: Any) -> None:
        self.owner, self.content = owner, content

    def put_back(self) -> Any:
        if isinstance(self.owner, list):
            self.owner[:] = self.content
        else:
            self.owner.clear()
            self.owner.update(self.content)
        return self.owner

    def changed(self) -> bool:
        """Whether the container holds other objects now (by identity: comparing tensors would compute)."""
        if isinstance(self.owner, dict):
            now, then = list(self.owner.items()), list(self.content.items())
            return len(now) != len(then) or any(
                a is not c or b is not d for (a, b), (c, d) in zip(now, then, strict=True)
            )
        if isinstance(self.owner, set):
            return bool(self.owner != self.content)
        return len(self.owner) != len(self.content) or any(
            a is not b for a, b in zip(self.owner, self.content, strict=True)
        )


def changed_container(module: nn.Module, before: dict[str, Any]) -> str | None:
    """The first plain container attribute that a forward has changed since `before`, if any."""
    for name, value in before.items():
        if isinstance(value, _Held) and not name.startswith("_") and value.changed():
            return name
    return None


def changed_attribute(module: nn.Module, before: dict[str, Any]) -> str | None:
    """The first attribute that a forward has made, deleted or replaced since `before`, past `__setattr__`."""
    now = module.__dict__
    for name in [*now, *before]:
        if name.startswith("_") or name == "training" or isinstance(before.get(name), (torch.Tensor, _Held)):
            continue
        if name not in before or name not in now or now[name] is not before[name]:
            return name
    return None


def _restore(module: nn.Module, state: dict[str, Any]) -> None:
    attributes = module.__dict__
    attributes.clear()
    for name, value in state.items():
        attributes[name] = value.put_back() if isinstance(value, _Held) else value


@contextlib.contextmanager
def random_state_kept() -> Iterator[list[str]]:
    """Put every random generator back; afterwards the yielded list names those that had moved."""
    moved: list[str] = []
    numpy = sys.modules.get("numpy")
    pool, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = numpy.random.get_state() if numpy else None
    # a state that nobody seeds to by chance: else seeding to the state that was there already would go unseen
    torch.default_generator.manual_seed(0x51A90)
    torch.rand(3)
    started = torch.get_rng_state()
    try:
        yield moved
    finally:
        if random.getstate() != pool:
            moved.append("python's `random`")
            random.setstate(pool)
        if not torch.equal(torch.get_rng_state(), started):
            moved.append("torch's generator")
        torch.set_rng_state(torch_state)
        if numpy and numpy_state is not None and repr(numpy.random.get_state()) != repr(numpy_state):
            moved.append("`numpy.random`")
            numpy.random.set_state(numpy_state)
