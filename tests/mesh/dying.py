"""Steps in which one rank fails, and what is then said on the others."""

import importlib
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from slapo_py.backends import state, torch_target
from slapo_py.backends.base import Engine
from slapo_py.distributed import failures, mesh
from tests.mesh import training
from tests.mesh.failing import MESH, replaced
from tests.mesh.saving import batch_of, engine_of, step_of

OWNERS: dict[str, tuple[Any, str]] = {
    "build": (importlib.import_module("slapo_py.build.build"), "materialize"),
    "build, its mesh": (mesh, "init_device_mesh"),
    "the collective of the loss": (torch_target, "summed"),
    "save": (state, "save"),
    "load": (state, "load"),
}
"""Functions that the rank that fails doesn't reach the end of; the other places are in what the user gives."""
PLACES = [*OWNERS, "count", "forward", "loss", "backward", "optimizer", "forward of eval_step", "loss of eval_step"]


def planted(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("planted")


class Fault:
    """Fails on one rank in the functions of the user, where it is told to."""

    def __init__(self, how: str, rank: int) -> None:
        self.how, self.rank, self.place = how, rank, ""

    def __call__(self, *places: str) -> None:
        if self.place in places and dist.get_rank() == self.rank:
            planted(self.how)

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        self("loss", "loss of eval_step")
        logits = output["logits"]
        if logits.requires_grad:
            logits.register_hook(lambda grad: self("backward"))
        return training.loss(output, batch)

    def count(self, batch: dict[str, Tensor]) -> int:
        self("count")
        return training.count(batch)


def engine(fault: Fault) -> Engine:
    made = engine_of("tiny", MESH, loss=fault.loss, count=fault.count)
    made.module.layers[1].register_forward_pre_hook(lambda *_: fault("forward", "forward of eval_step"))  # type: ignore
    made.optimizer.register_step_pre_hook(lambda *_: fault("optimizer"))
    return made


def act(made: Engine, place: str, directory: Path) -> None:
    """The call in which something fails."""
    if place.startswith("build"):
        engine_of("tiny", {"dp": 1, **MESH} if "mesh" in place else MESH)  # one that this world has not had, or has
    elif place in ("save", "load"):
        getattr(made, place)(directory)
    elif "eval_step" in place:
        made.eval_step(batch_of("tiny", 2))
    else:
        step_of(made, "tiny", 2)


def fail(place: str, how: str, directory: Path, said: Path, quick: bool) -> None:
    """Two steps with a save between, and then a call in which rank 1 fails. Files in `said` keep what the others say.

    A rank that has raised lives on. quick: the others have less patience.
    """
    if quick:
        failures.PATIENCE, failures._LOOK = 1.0, 0.1
    rank = dist.get_rank()
    os.dup2(os.open(said / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    fault = Fault(how, 1)
    made = engine(fault)
    step_of(made, "tiny", 0)
    made.save(directory)
    step_of(made, "tiny", 1)
    fault.place = place
    instead = replaced(*OWNERS[place], 1, lambda *_, **__: planted(how)) if place in OWNERS else nullcontext()
    try:
        with instead:
            act(made, place, directory)
        step_of(made, "tiny", 2)  # where the one that fails has sent all that the others needed
    except Exception as error:
        (said / f"{rank}.txt").write_text("\n".join([str(error), *getattr(error, "__notes__", [])]), encoding="utf-8")
        raise


def losses(directory: Path | None) -> list[float]:
    """Of three steps; or, from a folder that was saved after the first, of those that follow."""
    made = engine_of("tiny", MESH)
    if directory is not None:
        made.load(directory)
    return [step_of(made, "tiny", step) for step in range(made.step_count, 3)]


def all_raise_and_go_on(slow: int) -> tuple[float, float]:
    """A batch that no rank can take; then one rank is late. The losses before and after."""
    failures.PATIENCE, failures._LOOK = 0.3, 0.1
    fault = Fault("raise", dist.get_rank())
    made = engine(fault)
    before = step_of(made, "tiny", 0)
    fault.place = "forward"
    _raises(lambda: step_of(made, "tiny", 1))
    fault.place = ""
    if dist.get_rank() == slow:
        time.sleep(2)
    return before, step_of(made, "tiny", 1)


def one_raises_and_goes_on() -> int:
    """One rank fails after the last collective of a step, comes to the next one, and takes its time there."""
    failures.PATIENCE, failures._LOOK = 1.0, 0.1
    fault = Fault("raise", 1)
    made = engine(fault)
    step_of(made, "tiny", 0)
    fault.place = "optimizer"
    if dist.get_rank() == 1:
        _raises(lambda: step_of(made, "tiny", 1))
        made.module.layers[0].register_forward_pre_hook(lambda *_: time.sleep(2))  # type: ignore
    else:
        step_of(made, "tiny", 1)
    fault.place = ""
    step_of(made, "tiny", 2)
    return made.step_count


def _raises(function: Callable[[], Any]) -> None:
    try:
        function()
    except ValueError as error:
        assert str(error) == "planted" and not hasattr(error, "__notes__")
    else:
        raise AssertionError("nothing was raised")


def elsewhere(said: Path) -> None:
    """One rank comes to the end of the script, and the other goes on with the next step."""
    failures.PATIENCE, failures._LOOK = 1.0, 0.1
    rank = dist.get_rank()
    os.dup2(os.open(said / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    made = engine(Fault("raise", 2))
    step_of(made, "tiny", 0)
    if rank == 0:
        with failures.failing_together("the end of the script"):
            dist.barrier()
    else:
        step_of(made, "tiny", 1)
