"""All that the next step of an engine depends on, under the original's names."""

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from slapo_py.backends.base import Engine
from slapo_py.backends.held import Held
from slapo_py.backends.original_names import OriginalNames
from slapo_py.backends.parts import Part
from slapo_py.backends.random_state import generators
from slapo_py.replacing.mapped_state import dropped_buffers, own_buffers, to_original


def model_state(held: Held, whole: bool = False) -> dict[str, Any]:
    """The module's state_dict with each parameter's exact value. On a mesh a collective call.

    Parameters are the live tensors; on a mesh a `Part` each, as buffers are that are split, or with `whole` whole
    copies.
    """
    values = held.values(whole)
    # the hooks of state_dict that undo parameter maps need whole tensors
    instead = {f"module.{name}": values[name] for name in held.first.values() if name in held.mapped}
    state: dict[str, Any] = functional_call(_StateOf(held.module), instead) if instead else held.module.state_dict()
    for name, value in {**to_original(held.module, values), **held.buffers(whole)}.items():
        if name in state:
            state[name] = value
    return state


class _StateOf(nn.Module):
    """Its forward is another module's state_dict, so that torch can call it with other parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> dict[str, Any]:
        return self.module.state_dict()


def collect(engine: Engine, held: Held) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors by their names in the folder, all else). On a mesh a collective call.

    A tensor is whole, or a `Part`. Raises: CheckpointError.
    """
    tensors: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    spread = held.mesh is not None
    parameters = {*to_original(held.module, OriginalNames(held.module, held.shapes).stand_ins)}
    for name, value in model_state(held).items():
        if isinstance(value, torch.Tensor):
            plain = value.detach().as_subclass(torch.Tensor)
            tensors[f"model/{name}"] = Part.whole(plain) if spread and name in parameters else plain
        elif isinstance(value, Part):
            tensors[f"model/{name}"] = value
        else:
            extra[name] = value  # what a module's own get_extra_state returned
    buffers = {name: one.detach() for name, one in engine.module.named_buffers(remove_duplicate=False)}
    parts = held.buffers()
    for name, buffer in to_original(engine.module, buffers).items():
        if f"model/{name}" not in tensors:
            tensors[f"buffer/{name}"] = parts.get(name, buffer.as_subclass(torch.Tensor))
    for name in own_buffers(engine.module):
        tensors[f"own/{name}"] = buffers[name].as_subclass(torch.Tensor)
    more, optimizer = _optimizer(engine, held)
    scheduler = engine.scheduler
    return {**tensors, **more}, {
        "step": engine.step_count,
        "extra": extra,
        "optimizer": optimizer,
        "scheduler": scheduler and {"class": type(scheduler).__name__, "state": scheduler.state_dict()},
        "generators": {path: one.get_state() for path, one in generators(engine.module).items()},
        "dropped": dropped_buffers(engine.module),
    }


def _optimizer(engine: Engine, held: Held) -> tuple[dict[str, Any], dict[str, Any]]:
    state, order = engine.optimizer.state_dict(), order_of(engine, held)
    names = OriginalNames(engine.module, held.shapes)
    tensors: dict[str, Any] = {}
    values: dict[str, dict[str, Any]] = {}
    shared: dict[Any, Any] = {}  # what an optimizer keeps for no parameter in particular
    spread = held.mesh is not None
    for key, entries in _entries(state["state"], order, shared).items():
        what = f"the optimizer's {key!r}"
        lying = {name: held.lying(name, value, what=what) for name, value in entries.items()}
        for name, value in names.forth(lying, f"save: {what}").items():
            if isinstance(value, torch.Tensor) and spread and value.numel() > 1:
                tensors[f"optimizer/{name}/{key}"] = Part.whole(value)
            elif isinstance(value, torch.Tensor | Part):
                tensors[f"optimizer/{name}/{key}"] = value
            else:
                values.setdefault(name, {})[key] = value
    groups = [
        {**{key: value for key, value in group.items() if key not in ("params", "param_names")}, "names": []}
        for group in state["param_groups"]
    ]
    for kept, group in zip(groups, state["param_groups"], strict=True):
        kept["names"] = names.of([order[index] for index in group["params"]])
    return tensors, {"class": type(engine.optimizer).__name__, "groups": groups, "values": values, "shared": shared}


def _entries(state: dict[Any, dict[str, Any]], order: list[str], shared: dict[Any, Any]) -> dict[str, dict[str, Any]]:
    """An optimizer's state by the name of the entry, then by that of the parameter."""
    found: dict[str, dict[str, Any]] = {}
    for index, entries in state.items():
        if not isinstance(index, int):
            shared[index] = entries
            continue
        for key, value in entries.items():
            found.setdefault(key, {})[order[index]] = value
    return found


def order_of(engine: Engine, held: Held) -> list[str]:
    """The names of the optimizer's parameters in its own order, which is how its state_dict numbers them."""
    names = {id(one): name for name, one in held.exact.items()}
    return [names[id(parameter)] for group in engine.optimizer.param_groups for parameter in group["params"]]
