"""Ranks for tests: as `slapo_py.distributed.local_ranks`, forked from one process that has loaded torch once.

    with Ranks(2, tmp_path) as ranks:
        assert ranks.run(function, *arguments) == [result of rank 0, result of rank 1]

Functions travel by cloudpickle, so lambdas and closures work. When a rank raises, the others, which may wait for it in
a collective, are ended and its error is raised here as `RankError`. Nothing is left running. Warnings are errors.
"""

import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from slapo_py.distributed.local_ranks import LocalRanks, Process
from slapo_py.distributed.one_rank import serve
from slapo_py.errors import RankError as RankError
from tests import refusals


class Ranks(LocalRanks):
    """A world of `size` processes with an initialised process group. folder: for the store."""

    def __init__(self, size: int, folder: Path, timeout: float = 60.0) -> None:
        super().__init__(size, timeout, folder)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> list[Any]:
        """As `LocalRanks.run`. The refusals that a `pytest.raises` of a rank has met are remembered here."""
        answers = super().run(_watched, function, *arguments, timeout=timeout)
        refusals.met.update(one for _, met in answers for one in met)
        return [answer for answer, _ in answers]

    def _start(self, pipe: Connection, rank: int, store: str) -> Process:
        return _Forked(_server(), pipe, rank, self.size, store, self.timeout)


class _Forked:
    def __init__(self, context: Any, *arguments: Any) -> None:
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def ended(self, seconds: float) -> int | None:
        self._process.join(seconds)
        status: int | None = self._process.exitcode
        return status


def _server() -> Any:
    """What the ranks fork from: it loads torch and slapo_py once, has one thread, and ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "cloudpickle", "pytest", "slapo_py"])
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
    return context


_watching: list[bool] = []


def _watched(function: Callable[..., Any], *arguments: Any) -> tuple[Any, list[tuple[str, int]]]:
    """What a function returns on a rank, and the refusals that were met there."""
    if not _watching:
        _watching.append(True)
        refusals.watch()
    return function(*arguments), list(refusals.met)


def _serve(*arguments: Any) -> None:
    """One rank."""
    warnings.simplefilter("error")
    serve(*arguments)
