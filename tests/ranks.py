"""Ranks for tests: p processes over gloo, started once, that run one function after the other.

    with Ranks(2, tmp_path) as ranks:
        assert ranks.run(function, *arguments) == [result of rank 0, result of rank 1]

Functions travel by cloudpickle, so lambdas and closures work. When a rank raises, the others, which may wait for it in
a collective, are ended and its error is raised here as `RankError`. Nothing is left running.
"""

import datetime
import multiprocessing
import os
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import cloudpickle
import torch
import torch.distributed as dist

TIMEOUT = 60.0
"""Seconds for one call of `run`, and for one collective."""
START = 180.0
"""Seconds for a world to start: the first one loads torch."""
_GRACE = 1.0
"""Seconds that the others have, once a rank has raised, to say that they raised too."""
_ENDED = "the process ended without an answer"


class RankError(RuntimeError):
    """A rank raised, ended or kept the others waiting. rank: which; where they all raised, the first."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Ranks:
    """A world of `size` processes with an initialised process group. folder: an empty one, for the file store."""

    def __init__(self, size: int, folder: Path, timeout: float = TIMEOUT) -> None:
        context = _server()
        self.size, self.timeout = size, timeout
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._idle = True
        store = str(folder / f"store-{uuid.uuid4().hex}")
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, rank, size, store, timeout), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._answers(START)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the world still runs: a call in which only some ranks raised ends it."""
        return bool(self._processes)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Call function(*arguments) on every rank; what each returns, by rank. Raises `RankError`."""
        if not self.alive:
            raise RankError("These ranks have ended.", -1)
        payload = cloudpickle.dumps((function, arguments))
        for pipe in self._pipes:
            try:
                pipe.send_bytes(payload)
            except OSError:
                pass  # It has ended: read below as the end of its answers.
        return self._answers(self.timeout if timeout is None else timeout)

    def _answers(self, timeout: float) -> list[Any]:
        """What each rank answers, by rank. If one doesn't, the world is ended."""
        self._idle = False
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[arg-type, call-overload]
                try:
                    fine, content = cloudpickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    fine, content = False, _ENDED
                (results if fine else errors)[rank] = content
                if not fine:
                    end = min(end, time.monotonic() + _GRACE)
        self._idle = not waiting
        if waiting:
            self.close()
        if errors:
            # Those whose peer has ended raise too: it is the one to be told of.
            rank = min(errors, key=lambda one: (errors[one] != _ENDED, one))
            raise RankError(f"Rank {rank} of {self.size}: {errors[rank]}", rank)
        if waiting:
            late = sorted(waiting.values())
            raise RankError(f"Ranks {late} of {self.size} gave no answer in time.", late[0])
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End every process."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10 if self._idle else 0.1)  # One that waits in a collective won't see that its pipe is closed.
            process.kill()
            process.join()
            process.close()
        self._pipes, self._processes = [], []


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


def _serve(pipe: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    """One rank: run what comes through the pipe until it is closed."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        answer = cloudpickle.dumps((True, rank))
    except Exception:
        answer = cloudpickle.dumps((False, traceback.format_exc()))
    while True:
        try:
            pipe.send_bytes(answer)
            payload = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            function, arguments = cloudpickle.loads(payload)
            torch.manual_seed(0)
            answer = cloudpickle.dumps((True, function(*arguments)))
        except BaseException:
            answer = cloudpickle.dumps((False, traceback.format_exc()))
