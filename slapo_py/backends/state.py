"""The state of an engine under the original's names: saved, and checked and taken back.

Tensors lie in the folder as a torch.distributed.checkpoint, named `model/NAME`, `buffer/NAME` (buffers that the
state_dict leaves out), `own/NAME` (those of them that the original does not have) and `optimizer/NAME/KEY`. All else
lies in `engine.pt`, which is read with weights_only=True: loading runs no code from it.

On a mesh each rank writes its own parts, and what several ranks hold is written by one of them. So a folder is the same
whichever mesh has saved it, and any other can load it.
"""

import io
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from slapo_py.backends import folder
from slapo_py.backends.base import Engine
from slapo_py.backends.collected import collect, model_state
from slapo_py.backends.fits import check_names, check_rest, check_tensors, long, short
from slapo_py.backends.held import Held
from slapo_py.backends.parts import LoadPlanner, Part, SavePlanner
from slapo_py.backends.precision import Weights
from slapo_py.backends.random_state import axes_of, set_state_here, state_here
from slapo_py.backends.taking import take
from slapo_py.backends.together import Together, gone
from slapo_py.distributed.mesh import Mesh
from slapo_py.errors import CheckpointError

_REST = "engine.pt"


def state_dict(engine: Engine, weights: Weights, mesh: Mesh | None, whole: bool) -> dict[str, Any]:
    """As `Engine.state_dict` says it."""
    held = Held(engine.module, weights, mesh)
    if whole:
        return model_state(held, whole=mesh is not None)
    state = model_state(held)
    return {name: Part.whole(one) if isinstance(one, Tensor) else one for name, one in state.items()}


def save(engine: Engine, weights: Weights, directory: str | os.PathLike[str], mesh: Mesh | None) -> None:
    """Write everything that the next step depends on. On a mesh a collective call. Raises: CheckpointError."""
    together = Together(mesh)
    tensors, rest = together.agreed(lambda: collect(engine, Held(engine.module, weights, mesh)), "save")
    here = state_here(engine.module, mesh)
    together.agreed(lambda: _packed({**rest, **here}), "save")
    rest |= {"mesh": axes_of(mesh), "ranks": together.every(here, "save")}
    listed = {key: {"shape": list(one.shape), "dtype": short(one.dtype)} for key, one in tensors.items()}
    # each rank writes parts; what is no part may differ between ranks, and is that of the first
    mine = {key: one for key, one in tensors.items() if isinstance(one, Part) or together.first}

    def fill(place: Path) -> tuple[list[str], dict[str, Any]]:
        options = {"storage_writer": dcp.FileSystemWriter(place), "planner": SavePlanner()}
        _dcp(dcp.save, mine, "save", together, **options)
        if together.first:
            (place / _REST).write_bytes(_packed(rest))
        written = [one.name for one in place.iterdir() if one.name.startswith(f"__{together.rank}_")]
        return written + [".metadata", _REST] * together.first, {"step": engine.step_count, "tensors": listed}

    folder.write(directory, fill, together)


def load(engine: Engine, weights: Weights, directory: str | os.PathLike[str], mesh: Mesh | None) -> None:
    """Take back what `save` wrote. All checks come first. On a mesh a collective call. Raises: CheckpointError."""
    together = Together(mesh)
    place, marker = folder.find(directory, together)
    held = Held(engine.module, weights, mesh)
    live, rest = together.agreed(lambda: collect(engine, held), "load")
    saved = together.agreed(lambda: _checked(place, marker, live, rest), "load")
    tensors = {key: _room(key, one, live) for key, one in marker["tensors"].items()}
    options = {"storage_reader": dcp.FileSystemReader(place), "planner": LoadPlanner()}
    together.agreed(lambda: _dcp(dcp.load, tensors, "load", together, **options), "load")
    take(engine, weights, held, live, tensors, saved, together)
    set_state_here(engine.module, mesh, saved["mesh"], saved["ranks"])


def _checked(place: Path, marker: dict[str, Any], live: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """What lies beside the tensors, if all fits this engine."""
    try:
        saved: dict[str, Any] = torch.load(place / _REST, weights_only=True)
    except Exception as error:  # pickle and zip have many ways to refuse
        raise CheckpointError(
            f"load: {str(place)!r}: {_REST!r} holds something that is not loaded ({_first_line(error)}). "
            "Load a folder that engine.save wrote."
        ) from error
    dropped = {f"buffer/{name}" for name in (*saved.get("dropped", ()), *rest["dropped"])}
    theirs = [*marker["tensors"], *(f"extra/{name}" for name in saved["extra"])]
    ours = [*live, *(f"extra/{name}" for name in rest["extra"])]
    check_names(place, theirs, ours, dropped)
    check_tensors(place, marker["tensors"], live)
    check_rest(place, saved, rest)
    return saved


def _room(key: str, saved: dict[str, Any], live: dict[str, Any]) -> Part | Tensor:
    """A fresh tensor to read one of the folder into, in parts as what the engine has, or has it for."""
    shape, dtype = tuple(saved["shape"]), long(saved["dtype"])
    name = key.removeprefix("optimizer/").rsplit("/", 1)[0]
    like = live.get(f"model/{name}" if key.startswith("optimizer/") else key)
    if isinstance(like, Part) and like.shape == shape and like.tensor.shape != shape:
        return like.like(torch.empty(like.tensor.shape, dtype=dtype))
    return torch.empty(shape, dtype=dtype)


def _dcp(function: Any, tensors: dict[str, Any], what: str, together: Together, **options: Any) -> None:
    try:
        with warnings.catch_warnings():
            # said also to those who asked for one process with no_dist=True
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            function(tensors, no_dist=together.alone, **options)
    except CheckpointException as error:  # raised on all ranks, and no Exception
        rank, (cause, _) = next(iter(error.failures.items()))
        who = "" if together.alone else f"rank {rank}: "
        raise CheckpointError(f"{what}: {who}{_first_line(cause)}. Nothing was changed.") from cause
    except RuntimeError as error:
        if together.alone:
            raise
        raise gone(what, error) from error


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


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
