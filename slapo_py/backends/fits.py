"""Whether what was saved fits an engine: looked at before anything is changed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from slapo_py.errors import CheckpointError


def check_names(place: Path, saved: Iterable[str], live: Iterable[str], dropped: set[str]) -> None:
    """Whether the folder has what this model has, and no more.

    dropped: buffers that one of the two does without, since a module was replaced. Raises: CheckpointError.
    """

    def needed(keys: Iterable[str]) -> set[str]:
        return {key for key in keys if not key.startswith(("optimizer/", "own/")) and key not in dropped}

    ours, theirs = needed(live), needed(saved)
    for found, verb in ((ours - theirs, "misses"), (theirs - ours, "also has")):
        if found:
            raise CheckpointError(
                f"load: {str(place)!r} {verb} {_list(found)} of the model: it was saved from another model. "
                "Build the model that was saved, or load another folder."
            )


def check_tensors(place: Path, saved: dict[str, Any], live: dict[str, Any]) -> None:
    """Whether they have the shapes of this model, and can be taken without rounding. Raises: CheckpointError."""
    for key in live:
        if key in saved and not key.startswith("optimizer/"):
            wanted, got = live[key], saved[key]
            if list(wanted.shape) != got["shape"]:
                raise CheckpointError(
                    f"load: {str(place)!r} has {_list([key])} in shape {tuple(got['shape'])}, and this engine has "
                    f"{tuple(wanted.shape)}. Build the model that was saved, or load another folder."
                )
            if torch.promote_types(wanted.dtype, long(got["dtype"])) != wanted.dtype:
                raise CheckpointError(
                    f"load: {str(place)!r} has {_list([key])} in {got['dtype']}, which this engine's "
                    f'{short(wanted.dtype)} would round. Build a model of that dtype, or write precision="bf16".'
                )


def check_rest(place: Path, saved: dict[str, Any], live: dict[str, Any]) -> None:
    """Whether optimizer, scheduler and generators are those that were saved. Raises: CheckpointError."""
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


def short(dtype: torch.dtype) -> str:
    """As in the marker: "float32"."""
    return str(dtype).removeprefix("torch.")


def long(name: str) -> torch.dtype:
    """The reverse of `short`."""
    found: torch.dtype = getattr(torch, name)
    return found


def _list(keys: Any) -> str:
    names = sorted(key.split("/", 1)[-1] for key in keys)
    shown = ", ".join(repr(name) for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
