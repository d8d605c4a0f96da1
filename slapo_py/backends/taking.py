"""An engine takes over what was read: first what may be refused, and is put back then; last what can't fail."""

from typing import Any

import torch

from slapo_py.backends.base import Engine
from slapo_py.backends.collected import order_of
from slapo_py.backends.held import Held
from slapo_py.backends.original_names import OriginalNames
from slapo_py.backends.parts import Part
from slapo_py.backends.precision import Weights
from slapo_py.backends.together import Together
from slapo_py.errors import CheckpointError
from slapo_py.replacing.mapped_state import from_original, is_mapped


@torch.no_grad()
def take(
    engine: Engine,
    weights: Weights,
    held: Held,
    live: dict[str, Any],
    tensors: dict[str, Any],
    saved: dict[str, Any],
    together: Together,
) -> None:
    """Put what was read in its places. live, tensors: by the names in the folder. Raises: CheckpointError."""
    before = engine.optimizer.state_dict(), engine.scheduler and engine.scheduler.state_dict()
    try:
        together.agreed(lambda: _take_optimizer(engine, held, tensors, saved), "load")
    except CheckpointError:
        engine.optimizer.load_state_dict(before[0])
        if engine.scheduler is not None:
            engine.scheduler.load_state_dict(before[1])
        raise
    for key, target in live.items():
        if key in tensors and not key.startswith("optimizer/"):
            _plain(target).copy_(_plain(tensors[key]))
    _take_mapped(engine, held, live)
    for key, value in saved["extra"].items():
        engine.module.get_submodule(key.removesuffix("_extra_state").rstrip(".")).set_extra_state(value)
    weights.drop_gradients()
    weights.publish()
    engine.step_count = saved["step"]
    engine.grad_norm = None


def _plain(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.tensor if isinstance(value, Part) else value
    return found


def _take_mapped(engine: Engine, held: Held, live: dict[str, Any]) -> None:
    """What was put together of several parameters is no window onto them: take it apart again."""
    if not is_mapped(engine.module):
        return
    given = {
        key.split("/", 1)[1]: _plain(value) for key, value in live.items() if key.startswith(("model/", "buffer/"))
    }
    known = {id(value) for value in given.values()}
    buffers = dict(engine.module.named_buffers(remove_duplicate=False))
    for name, value in from_original(engine.module, given).items():
        if id(value) in known and held.first.get(name) not in held.mapped:
            continue
        if name in buffers:
            buffers[name].copy_(value)
        else:
            held.take(name, value)


def _take_optimizer(engine: Engine, held: Held, tensors: dict[str, Any], saved: dict[str, Any]) -> None:
    try:
        _take_state(engine, held, tensors, saved["optimizer"])
        if engine.scheduler is not None:
            engine.scheduler.load_state_dict(saved["scheduler"]["state"])
    except Exception as error:  # what a user's own optimizer or scheduler says to another one's state
        lines = str(error).strip().splitlines()
        raise CheckpointError(
            f"load: the optimizer or scheduler refuses its saved state ({type(error).__name__}: "
            f"{lines[0] if lines else ''}). Build with the optimizer= and scheduler= that it was saved with."
        ) from error


def _take_state(engine: Engine, held: Held, tensors: dict[str, Any], saved: dict[str, Any]) -> None:
    optimizer = engine.optimizer
    before = optimizer.state_dict()
    order = order_of(engine, held)
    entries: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer/"):
            name, entry = key.removeprefix("optimizer/").rsplit("/", 1)
            entries.setdefault(entry, {})[name] = tensor
    for name, values in saved["values"].items():
        for entry, value in values.items():
            entries.setdefault(entry, {})[name] = value
    names = OriginalNames(engine.module, held.shapes)
    state: dict[Any, dict[str, Any]] = {name: {} for name in order}
    for entry, found in entries.items():
        for name, value in names.back(found, f"the optimizer's {entry!r}").items():
            state[name][entry] = held.placed(name, value)
    numbered = {index: state[name] for index, name in enumerate(order) if state[name]}
    groups = [
        {**kept, **{key: value for key, value in group.items() if key != "names"}}
        for kept, group in zip(before["param_groups"], saved["groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": {**numbered, **saved["shared"]}, "param_groups": groups})
    # load_state_dict casts to the parameter's dtype, which rounds what an optimizer keeps in float32 for bfloat16
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, one in numbered.items():
        kept = optimizer.state[parameters[index]]
        for entry, value in one.items():
            now = kept.get(entry)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                kept[entry] = value.to(now.device)
