"""`slapo.launch()`: the process group of a script, from its first line to its last.

    with slapo.launch() as world:
        engine = slapo.build(sch, mesh={"dp": world.size // 2, "tp": 2}, target="torch", ...)

Run it with `torchrun --nproc-per-node 4 script.py`, or, as a world of one, with `python script.py`.
"""

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from slapo_py.distributed.failures import failing_together, report
from slapo_py.errors import ArgumentError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """All processes of a run. rank: which this is, of `size`. device: where its tensors lie."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes for all."""
        return self.rank == 0


@contextlib.contextmanager
def launch(*, timeout: float = 600.0) -> Iterator[World]:
    """The default process group for the block, taken down at its end: torchrun's ranks, or a world of one.

    timeout: the longest that a rank waits in one collective, in seconds. Without a GPU the backend is gloo; with GPUs
    each rank has the one of its number on the machine as current device, and the backends are NCCL there and gloo for
    tensors on CPU. A group that is initialised already is taken as it is, and left.

    Where a rank raises, `torchrun` prints the error and ends the others. Without torchrun's watch (other launchers, a
    notebook) the others end by themselves: in `build` and in what engines do after 15 s, elsewhere after `timeout`.
    Raises: ArgumentError for an environment that says only part of what torchrun says.
    """
    _check(timeout)
    if dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size(), _device())
        return
    _start(datetime.timedelta(seconds=timeout))
    world = World(dist.get_rank(), dist.get_world_size(), _device())
    try:
        yield world
        with failing_together("the end of the script"):
            dist.barrier()  # whoever holds the store must not be the first to go
    except BaseException as error:
        report(error, "the script")
        if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
            get_error_handler().record_exception(error)  # for the table that torchrun prints
        if world.size == 1:
            dist.destroy_process_group()  # else it stays: that may wait for ranks that are no more
        raise
    dist.destroy_process_group()


def _check(timeout: float) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ArgumentError(f"launch: timeout={timeout!r}: write a number of seconds above 0.")
    missing = [name for name in _NEEDED if name not in os.environ]
    if "WORLD_SIZE" in os.environ and missing:
        raise ArgumentError(
            f"launch: the environment has WORLD_SIZE={os.environ['WORLD_SIZE']} and no {' and no '.join(missing)}. "
            f"Start the script with torchrun --nproc-per-node N, which sets them all, or unset WORLD_SIZE."
        )


def _start(timeout: datetime.timedelta) -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
