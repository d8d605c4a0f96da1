"""Ranks on this machine, started from a script, a notebook or a test: processes over gloo that run functions.

with LocalRanks(2) as ranks:
    assert ranks.run(lambda: torch.distributed.get_rank()) == [0, 1]
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import cloudpickle

from slapo_py.distributed.failures import WAITED
from slapo_py.errors import RankError

START = 180.0
"""Seconds for the processes to start: each loads torch."""


class Process(Protocol):
    """What is asked of a process."""

    def kill(self) -> None:
        """End it at once."""

    def ended(self, seconds: float) -> int | None:
        """Its exit status, negative for a signal, once it has ended; None if it hasn't after some seconds."""


class LocalRanks:
    """`size` processes of one thread each, with an initialised process group, that run one function after the other.

    Functions travel by cloudpickle: lambdas, closures and functions of a script need no `if __name__ == "__main__"`.
    When a rank raises, those that don't answer soon (they may wait for it) are ended, and so is everything when this
    process ends or the `with` block is left. timeout: seconds for one call of `run`, and for one collective.
    folder: for a file by which they find each other; without it one of the system's.
    Raises: RankError.
    """

    grace: ClassVar[float] = 1.0
    """Seconds that the others have, once a rank has raised, to say that they raised too."""

    def __init__(self, size: int, timeout: float = 60.0, folder: Path | None = None) -> None:
        self.size, self.timeout = size, timeout
        self._pipes: list[Connection] = []
        self._processes: list[Process] = []
        self._idle = True
        self._folder = tempfile.mkdtemp(prefix="slapo-ranks-", dir=folder)
        try:
            for rank in range(size):
                ours, theirs = Pipe()
                self._pipes.append(ours)
                self._processes.append(self._start(theirs, rank, str(Path(self._folder) / "store")))
                theirs.close()
            self._answers(START)
        except BaseException:
            self.close()
            raise

    def _start(self, pipe: Connection, rank: int, store: str) -> Process:
        return _Started(pipe, [str(rank), str(self.size), store, str(self.timeout)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the processes still run: a call in which only some ranks raised ends them."""
        return bool(self._processes)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Call function(*arguments) on every rank; what each returns, by rank. Raises: RankError."""
        if not self.alive:
            raise _error("These ranks have ended.", -1)
        payload = cloudpickle.dumps((function, arguments))
        for pipe in self._pipes:
            try:
                pipe.send_bytes(payload)
            except OSError:
                pass  # It has ended: read below as the end of its answers.
        return self._answers(self.timeout if timeout is None else timeout)

    def _answers(self, timeout: float) -> list[Any]:
        """What each rank answers, by rank. If one doesn't, all are ended."""
        self._idle = False
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results: dict[int, Any] = {}
        raised: dict[int, tuple[str, bytes]] = {}
        ended: dict[int, int | None] = {}
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[arg-type, call-overload]
                try:
                    fine, content = cloudpickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    ended[rank] = self._processes[rank].ended(5)
                else:
                    (results if fine else raised)[rank] = content
                if rank not in results:
                    end = min(end, time.monotonic() + self.grace)
        self._idle = not waiting
        if waiting:
            self.close()
        # One whose peer has ended raises, and one that waits for a peer that has raised ends: neither is the cause.
        causes = sorted(rank for rank, status in ended.items() if status != WAITED) or sorted(raised) or sorted(ended)
        if causes:
            rank = causes[0]
            said, packed = raised.get(rank) or (_how(ended[rank]), b"")
            raise _error(f"Rank {rank} of {self.size}: {said}", rank) from _unpacked(packed)
        if waiting:
            late = sorted(waiting.values())
            raise _error(f"Ranks {late} of {self.size} gave no answer in time.", late[0])
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End every process."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.ended(
                10 if self._idle else 0.1
            )  # One that waits in a collective won't see that its pipe is closed.
            process.kill()
            process.ended(10)
        self._pipes, self._processes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


class _Started:
    """A process that this one has started, and that ends with it."""

    def __init__(self, pipe: Connection, arguments: list[str]) -> None:
        theirs, self._ours = os.pipe()
        paths = [os.path.abspath(one) for one in sys.path]
        command = [sys.executable, "-P", "-m", "slapo_py.distributed.one_rank", str(pipe.fileno()), str(theirs)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [*command, *arguments], env=environment, pass_fds=(pipe.fileno(), theirs), stdin=subprocess.DEVNULL
            )
        except BaseException:
            os.close(self._ours)
            raise
        finally:
            os.close(theirs)

    def kill(self) -> None:
        self._process.kill()
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1

    def ended(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


def _how(status: int | None) -> str:
    by = f" (killed by {signal.Signals(-status).name})" if status is not None and status < 0 else ""
    return f"the process ended without an answer{by}"


def _error(message: str, rank: int) -> RankError:
    error = RankError(message)
    error.rank = rank
    return error


def _unpacked(packed: bytes) -> BaseException | None:
    try:
        found = cloudpickle.loads(packed) if packed else None
    except Exception:  # its class may not be what it was pickled from
        return None
    return found if isinstance(found, BaseException) else None
