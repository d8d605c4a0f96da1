"""Faults that are planted on one rank while an engine is saved or loaded, and what each rank then says."""

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from slapo_py.backends import folder
from slapo_py.backends.base import Engine
from slapo_py.errors import CheckpointError
from tests import refusals
from tests.mesh.saving import digest, engine_of, step_of

MESH = {"tp": 2}


@contextmanager
def replaced(owner: Any, name: str, rank: int, instead: Callable[..., Any]) -> Iterator[None]:
    """On one rank, let a function be another one, which is given the first."""
    original = getattr(owner, name)
    if dist.get_rank() == rank:
        setattr(owner, name, lambda *arguments, **options: instead(original, *arguments, **options))
    try:
        yield
    finally:
        setattr(owner, name, original)


def full(original: Any, *arguments: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def lost(original: Any, file: Path) -> Any:
    """The file was written where the other ranks don't see it."""
    value = original(file)
    file.unlink()
    return value


def stubborn(original: Any, scheduler: Any, state: dict[str, Any]) -> Any:
    if state["last_epoch"] == 1:
        raise ValueError("no")
    return original(scheduler, state)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "data": (filesystem, "_write_item", full),
    "sync": (folder, "_sync", full),
    "rest": (Path, "write_bytes", full),
    "rename": (os, "rename", full),
    "folder": (Path, "mkdir", full),
    "lost": (folder, "_crc", lost),
    "scheduler": (torch.optim.lr_scheduler.StepLR, "load_state_dict", stubborn),
}


def fingerprint(engine: Engine) -> str:
    """All that a load changes on this rank."""
    moments = {
        f"{index} {key}": digest(value) if isinstance(value, torch.Tensor) else value
        for index, entries in engine.optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }
    values = {name: digest(one) for name, one in engine.module.named_parameters()}
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    random = digest(torch.get_rng_state())
    return json.dumps([values, moments, rates, engine.scheduler.state_dict(), engine.step_count, random])


def refused(act: Callable[[], Any], message: str) -> list[tuple[str, int]]:
    """Let a call be refused; the lines of the sources that have refused it."""
    with pytest.raises(CheckpointError, match=message) as found:
        act()
    refusals.note(found.value)
    return sorted(refusals.met)


def failing_save(directory: Path, fault: str, rank: int, messages: list[str]) -> tuple[list[tuple[str, int]], int]:
    """Save, go on, and save again with a fault on one rank; messages: what each rank says.

    What has refused it, and the step that is found in the folder by all ranks afterwards.
    """
    engine = engine_of("tiny", MESH)
    step_of(engine, "tiny", 0)
    engine.save(directory)
    step_of(engine, "tiny", 1)
    owner, name, instead = FAULTS[fault]
    with replaced(owner, name, rank, instead):
        lines = refused(lambda: engine.save(directory), messages[dist.get_rank()])
    engine.load(directory)
    step = engine.step_count
    engine.save(directory)  # and what is left over is in nobody's way
    return lines, step


def failing_load(directory: Path, fault: str, rank: int, messages: list[str]) -> list[tuple[str, int]]:
    """Load with a fault on one rank: nothing changes on any."""
    engine = engine_of("tiny", MESH)
    step_of(engine, "tiny", 0)
    engine.save(directory)
    dist.barrier()
    if fault == "damage" and dist.get_rank() == 0:
        file = next(directory.glob("__1_*"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()
    step_of(engine, "tiny", 1)
    before = fingerprint(engine)
    with replaced(*FAULTS[fault][:2], rank, FAULTS[fault][2]) if fault in FAULTS else nullcontext():
        lines = refused(lambda: engine.load(directory), messages[dist.get_rank()])
    assert fingerprint(engine) == before
    return lines


def other_folders(directory: Path, messages: list[str]) -> list[tuple[str, int]]:
    """Each rank names a folder of its own."""
    engine = engine_of("tiny", MESH)
    mine = directory / f"of rank {dist.get_rank()}"
    refused(lambda: engine.load(mine), messages[dist.get_rank()])
    return refused(lambda: engine.save(mine), messages[dist.get_rank()])


class Rows(torch.optim.SGD):
    """Keeps a number for each row of a parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = parameter.detach().flatten(1 if parameter.dim() > 1 else 0).sum(-1)


def unknown_lying(directory: Path, message: str) -> list[tuple[str, int]]:
    engine = engine_of("tiny", MESH, optimizer=partial(Rows, lr=0.1), scheduler=None)
    step_of(engine, "tiny", 0)
    return refused(lambda: engine.save(directory), message)


def another_model(directory: Path, messages: list[str]) -> list[tuple[str, int]]:
    """What was saved without a scheduler is loaded with one: found by each rank itself."""
    engine_of("tiny", MESH, scheduler=None).save(directory)
    engine = engine_of("tiny", MESH)
    before = fingerprint(engine)
    lines = refused(lambda: engine.load(directory), messages[dist.get_rank()])
    assert fingerprint(engine) == before
    return lines


def killed(directory: Path, doing: str, owner: Any, name: str, nth: int, rank: int, said: Path) -> None:
    """Save, go on, and kill one rank in the next save or load, at the n-th call of a function that it uses.

    What the other ranks say is left in the folder `said`, with the lines that refuse.
    """
    engine = engine_of("tiny", MESH)
    step_of(engine, "tiny", 0)
    engine.save(directory)
    step_of(engine, "tiny", 1)
    calls = 0

    def deadly(original: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    with replaced(owner, name, rank, deadly):
        try:
            engine.save(directory) if doing == "save" else engine.load(directory)
        except CheckpointError as error:
            refusals.note(error)
            mine = {"message": str(error), "lines": sorted(refusals.met)}
            (said / f"{dist.get_rank()}.json").write_text(json.dumps(mine), encoding="utf-8")
            raise
