"""A model's own initialisation, one tensor at a time: what its modules' methods write, run on a stand-in on "meta"."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slapo_py.clone import clone
from slapo_py.errors import BuildError

Init = Callable[[str, Tensor], object]

_RESETS = ("reset_parameters", "_reset_parameters")


def own_init(model: nn.Module) -> Init:
    """The model's own initialisation, for a model on "meta": `slapo.build(sch, init=slapo.own_init(model))`.

    For a parameter or buffer it runs `reset_parameters()` of the module that holds it and of those around it, as
    torch's modules have it, and then `_init_weights(module)` of the model around them, as transformers' models have
    it. Numbers that a constructor writes by other means are not known to it: build refuses what nobody has written.
    The distributions are those of the model; the numbers are drawn for each name, so no schedule and no mesh changes
    them.

    Raises: BuildError, called with a name that the model has not.
    """
    twin = on_meta(model)

    def init(name: str, tensor: Tensor) -> None:
        fill_by_own_methods(twin, name, tensor)

    return init


def fill_by_own_methods(twin: nn.Module, name: str, tensor: Tensor) -> None:
    """Let the methods of a stand-in write one of its tensors; where none does, it stays as it was."""
    path, _, leaf = name.rpartition(".")
    chain = list(_chain(twin, path))
    tables: list[dict[str, Any]] = [chain[0]._parameters, chain[0]._buffers] if chain else []
    table = next((one for one in tables if leaf in one), None)
    if table is None:
        raise BuildError(f"own_init: the model has no parameter or buffer {name!r}. Give own_init the scheduled model.")
    before = dict(table)
    table[leaf] = nn.Parameter(tensor, requires_grad=False) if table is tables[0] else tensor
    try:
        for module in chain:
            for reset in _RESETS:
                method: Any = getattr(module, reset, None)
                if callable(method):
                    method()
        for place, module in enumerate(chain):
            # the nearest model around a module initialises it: one model may hold others
            around: Any = next((one for one in chain[place:] if callable(getattr(one, "_init_weights", None))), None)
            if around is not None:
                around._init_weights(module)
        now = table.get(leaf)
        if now is not None and now.data_ptr() != tensor.data_ptr() and not now.is_meta:
            tensor.copy_(now)  # registered anew, as some rotary tables are
    finally:
        table.clear()
        table.update(before)


def _chain(module: nn.Module, path: str) -> Iterator[nn.Module]:
    """The module at a path and those around it, the innermost first; nothing if there is no such path."""
    found: list[nn.Module] = [module]
    for part in path.split(".") if path else ():
        child = found[-1]._modules.get(part)
        if child is None:
            return
        found.append(child)
    yield from reversed(found)


def on_meta(model: nn.Module) -> nn.Module:
    """A second model with every tensor on "meta": methods that write to all of it cost nothing and change nothing."""
    twin = clone(model)
    made: dict[int, Tensor] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            plain = torch.empty_like(tensor, device="meta", requires_grad=False)
            made[id(tensor)] = nn.Parameter(plain, requires_grad=False) if isinstance(tensor, nn.Parameter) else plain
        return made[id(tensor)]

    for module in twin.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = stand_in(tensor)  # type: ignore[assignment]
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                module.__dict__[name] = stand_in(value)
    return twin
