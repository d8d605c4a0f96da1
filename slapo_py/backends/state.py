"""The state of an engine under the original's names: collected, saved, checked and taken back.

Tensors lie in the folder as a torch.distributed.checkpoint, named `model/NAME`, `buffer/NAME` (buffers that the
state_dict leaves out), `own/NAME` (those of them that the original does not have) and `optimizer/NAME/KEY`. All else
lies in `engine.pt`, which is read with weights_only=True: loading runs no code from it.
"""

import io
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from slapo_py.backends import folder
from slapo_py.backends.base import Engine
from slapo_py.backends.original_names import OriginalNames
from slapo_py.backends.precision import Weights
from slapo_py.backends.random_state import generators, process_state, set_process_state
from slapo_py.errors import CheckpointError
from slapo_py.replacing.mapped_state import dropped_buffers, from_original, is_mapped, own_buffers, to_original

_REST = "engine.pt"


def model_state(module: nn.Module, weights: Weights) -> dict[str, Any]:
    """The module's state_dict with each parameter's exact value."""
    state: dict[str, Any] = module.state_dict()
    exact = {name: weights.of(one).detach() for name, one in module.named_parameters(remove_duplicate=False)}
    for name, value in to_original(module, exact).items():
        if name in state:
            state[name] = value
    return state


def save(engine: Engine, weights: Weights, directory: str | os.PathLike[str]) -> None:
    """Write everything that the next step depends on. Raises: CheckpointError."""
    tensors, rest = _collect(engine, weights)
    blob = _packed(rest)

    def fill(place: Path) -> dict[str, Any]:
        _dcp(dcp.save, tensors, storage_writer=dcp.FileSystemWriter(place))
        (place / _REST).write_bytes(blob)
        listed = {key: {"shape": list(one.shape), "dtype": _short(one.dtype)} for key, one in tensors.items()}
        return {"step": engine.step_count, "tensors": listed}

    folder.write(directory, fill)


def load(engine: Engine, weights: Weights, directory: str | os.PathLike[str]) -> None:
    """Take back what `save` wrote. All checks come first. Raises: CheckpointError."""
    place, marker = folder.find(directory)
    live, rest = _collect(engine, weights)
    try:
        saved = torch.load(place / _REST, weights_only=True)
    except Exception as error:  # pickle and zip have many ways to refuse
        raise CheckpointError(
            f"load: {str(place)!r}: {_REST!r} holds something that is not loaded ({_first_line(error)}). "
            "Load a folder that engine.save wrote."
        ) from error
    dropped = {f"buffer/{name}" for name in (*saved.get("dropped", ()), *rest["dropped"])}
    _check_tensors(place, marker["tensors"], live, dropped)
    _check_rest(place, saved, rest)
    tensors = {key: torch.empty(one["shape"], dtype=_long(one["dtype"])) for key, one in marker["tensors"].items()}
    _dcp(dcp.load, tensors, storage_reader=dcp.FileSystemReader(place))
    _take(engine, weights, live, tensors, saved)


def _dcp(function: Any, tensors: dict[str, torch.Tensor], **options: Any) -> None:
    with warnings.catch_warnings():
        # said also to those who asked for one process with no_dist=True
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        function(tensors, no_dist=True, **options)


# Collecting


def _collect(engine: Engine, weights: Weights) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in model_state(engine.module, weights).items():
        if isinstance(value, torch.Tensor):
            tensors[f"model/{name}"] = value.detach().as_subclass(torch.Tensor)
        else:
            extra[name] = value  # what a module's own get_extra_state returned
    buffers = {name: one.detach() for name, one in engine.module.named_buffers(remove_duplicate=False)}
    for name, buffer in to_original(engine.module, buffers).items():
        if f"model/{name}" not in tensors:
            tensors[f"buffer/{name}"] = buffer.as_subclass(torch.Tensor)
    for name in own_buffers(engine.module):
        tensors[f"own/{name}"] = buffers[name].as_subclass(torch.Tensor)
    state, order = engine.optimizer.state_dict(), _order(engine, weights)
    names = OriginalNames(engine.module)
    values: dict[str, dict[str, Any]] = {}
    shared: dict[Any, Any] = {}  # what an optimizer keeps for no parameter in particular
    for key, held in _entries(state["state"], order, shared).items():
        for name, value in names.forth(held, f"save: the optimizer's {key!r}").items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer/{name}/{key}"] = value.detach().as_subclass(torch.Tensor)
            else:
                values.setdefault(name, {})[key] = value
    groups = [
        {**{key: value for key, value in group.items() if key not in ("params", "param_names")}, "names": []}
        for group in state["param_groups"]
    ]
    for kept, group in zip(groups, state["param_groups"], strict=True):
        kept["names"] = names.of([order[index] for index in group["params"]])
    scheduler = engine.scheduler
    return tensors, {
        "step": engine.step_count,
        "extra": extra,
        "optimizer": {"class": type(engine.optimizer).__name__, "groups": groups, "values": values, "shared": shared},
        "scheduler": scheduler and {"class": type(scheduler).__name__, "state": scheduler.state_dict()},
        "generators": {path: one.get_state() for path, one in generators(engine.module).items()},
        "random": process_state(),
        "dropped": dropped_buffers(engine.module),
    }


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


def _order(engine: Engine, weights: Weights) -> list[str]:
    """The names of the optimizer's parameters in its own order, which is how its state_dict numbers them."""
    names = {id(parameter): name for name, parameter in weights.named}
    return [names[id(parameter)] for group in engine.optimizer.param_groups for parameter in group["params"]]


def _packed(rest: dict[str, Any]) -> bytes:
    """The bytes of `engine.pt`, read back once: what can't be loaded must not be saved."""
    stream = io.BytesIO()
    for key, value in rest.items():
        trial = io.BytesIO()
        try:
            torch.save(_plain(value), trial)
            trial.seek(0)
            torch.load(trial, weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"save: the engine's {key} state holds something that a checkpoint can't ({_first_line(error)}). Keep "
                "tensors, numbers, strings, lists, tuples and dicts in it."
            ) from error
    torch.save(_plain(rest), stream)
    return stream.getvalue()


def _plain(value: Any) -> Any:
    """numpy's scalars (a learning rate computed with numpy) as Python's."""
    if type(value) in (dict, list, tuple):
        if isinstance(value, dict):
            return {key: _plain(item) for key, item in value.items()}
        return type(value)(_plain(item) for item in value)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 0):
        return value.item()
    return value


# Checking


def _check_tensors(place: Path, saved: dict[str, Any], live: dict[str, torch.Tensor], dropped: set[str]) -> None:
    """`dropped`: buffers that one of the two does without, since a module was replaced."""

    def needed(keys: Any) -> set[str]:
        return {key for key in keys if not key.startswith(("optimizer/", "own/")) and key not in dropped}

    ours, theirs = needed(live), needed(saved)
    for found, verb in ((ours - theirs, "misses"), (theirs - ours, "also has")):
        if found:
            raise CheckpointError(
                f"load: {str(place)!r} {verb} {_list(found)} of the model: it was saved from another model. "
                "Build the model that was saved, or load another folder."
            )
    for key in live:
        if key in saved and not key.startswith("optimizer/"):
            wanted, got = live[key], saved[key]
            if list(wanted.shape) != got["shape"]:
                raise CheckpointError(
                    f"load: {str(place)!r} has {_list([key])} in shape {tuple(got['shape'])}, and this engine has "
                    f"{tuple(wanted.shape)}. Build the model that was saved, or load another folder."
                )
            if torch.promote_types(wanted.dtype, _long(got["dtype"])) != wanted.dtype:
                raise CheckpointError(
                    f"load: {str(place)!r} has {_list([key])} in {got['dtype']}, which this engine's "
                    f'{_short(wanted.dtype)} would round. Build a model of that dtype, or write precision="bf16".'
                )


def _check_rest(place: Path, saved: dict[str, Any], live: dict[str, Any]) -> None:
    for kind in ("optimizer", "scheduler"):
        was, now = saved[kind] and saved[kind]["class"], live[kind] and live[kind]["class"]
        if was != now:
            raise CheckpointError(
                f"load: {str(place)!r} was saved with {kind} {was} and this engine has {now}. "
                f"Build with the {kind}= that it was saved with."
            )
    was, now = ([group["names"] for group in one["optimizer"]["groups"]] for one in (saved, live))
    if was != now:
        raise CheckpointError(
            f"load: {str(place)!r} has optimizer groups of {[len(names) for names in was]} parameters and this engine "
            f"of {[len(names) for names in now]}, or in another order. Build with the optimizer= it was saved with."
        )
    if list(saved["generators"]) != list(live["generators"]):
        raise CheckpointError(
            f"load: {str(place)!r} has random generators at {list(saved['generators'])} and this engine at "
            f"{list(live['generators'])}. Build the model that was saved."
        )


# Taking


@torch.no_grad()
def _take(
    engine: Engine,
    weights: Weights,
    live: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    saved: dict[str, Any],
) -> None:
    before = engine.optimizer.state_dict(), engine.scheduler and engine.scheduler.state_dict()
    try:
        _take_optimizer(engine, weights, tensors, saved["optimizer"])
        if engine.scheduler is not None:
            engine.scheduler.load_state_dict(saved["scheduler"]["state"])
    except Exception as error:  # what a user's own optimizer or scheduler says to another one's state
        engine.optimizer.load_state_dict(before[0])
        if engine.scheduler is not None:
            engine.scheduler.load_state_dict(before[1])
        raise CheckpointError(
            f"load: the optimizer or scheduler refuses its saved state ({_first_line(error)}). "
            "Build with the optimizer= and scheduler= that it was saved with."
        ) from error
    for key, target in live.items():
        if key in tensors and not key.startswith("optimizer/"):
            target.copy_(tensors[key])
    _take_mapped(engine, weights, live)
    if saved["extra"]:
        engine.module.load_state_dict({**engine.module.state_dict(), **saved["extra"]})
    weights.drop_gradients()
    weights.publish()
    for path, generator in generators(engine.module).items():
        generator.set_state(saved["generators"][path])
    engine.step_count = saved["step"]
    engine.grad_norm = None
    set_process_state(saved["random"])


def _take_mapped(engine: Engine, weights: Weights, live: dict[str, torch.Tensor]) -> None:
    """What was put together of several parameters is no window onto them: take it apart again."""
    if not is_mapped(engine.module):
        return
    given = {key.split("/", 1)[1]: value for key, value in live.items() if key.startswith(("model/", "buffer/"))}
    known = {id(value) for value in given.values()}
    held: dict[str, torch.Tensor] = dict(engine.module.named_buffers(remove_duplicate=False))
    held |= {name: weights.of(one) for name, one in engine.module.named_parameters(remove_duplicate=False)}
    for name, value in from_original(engine.module, given).items():
        if id(value) not in known:
            held[name].copy_(value)


def _take_optimizer(engine: Engine, weights: Weights, tensors: dict[str, torch.Tensor], saved: dict[str, Any]) -> None:
    optimizer = engine.optimizer
    before = optimizer.state_dict()
    order = _order(engine, weights)
    entries: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer/"):
            name, entry = key.removeprefix("optimizer/").rsplit("/", 1)
            entries.setdefault(entry, {})[name] = tensor
    for name, values in saved["values"].items():
        for entry, value in values.items():
            entries.setdefault(entry, {})[name] = value
    names = OriginalNames(engine.module)
    state: dict[Any, dict[str, Any]] = {name: {} for name in order}
    for entry, held in entries.items():
        for name, value in names.back(held, f"the optimizer's {entry!r}").items():
            state[name][entry] = value
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _long(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _list(keys: Any) -> str:
    names = sorted(key.split("/", 1)[-1] for key in keys)
    shown = ", ".join(repr(name) for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
