"""When one rank fails, or calls something else, the others must not wait for it: what they are told, and how they end.

A rank whose process has gone closes its connections, and the others raise at once; they are told here who it was. A
rank that raises and lives on (in a notebook, in a test, in an `except`) leaves the others in a collective until the
group's timeout, half an hour by default: nothing can call them back from there, so they say why and end. So do ranks
that wait for each other, because one of them is in another call.
"""

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from slapo_py.distributed.mesh import Mesh

PATIENCE = 15.0
"""Seconds that a rank waits for one that has failed before it ends."""
WAITED = 70
"""The exit status of a rank that ends because it waits for another."""
_LOOK = 1.0
"""Seconds between two looks at how the others are. A call that is shorter costs nothing."""
_SEARCH = 3.0
"""Seconds to find out who has broken a connection."""
_LOST = ("gloo", "nccl", "c10d", "timed out", "connection", "broken pipe", "socket")
"""What torch says, in lower case, where it is another rank that has failed."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Failure:
    """A rank, what it was doing, and what went wrong."""

    rank: int
    what: str
    said: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed in {self.what}: {self.said}" if self.what else f"rank {self.rank} {self.said}"


def fails_together(function: Callable[P, R]) -> Callable[P, R]:
    """For a function that all ranks of a mesh call: where one rank raises in it, the others don't wait for it.

    The mesh is the argument of that name, or that of the object whose method it is; without one nothing is done.

    The rank that fails raises as ever. One that notices it by a broken connection raises torch's error, with a note
    that names the rank and what it said. One that waits `PATIENCE` seconds in such a function, while the failed rank
    comes back to none, prints the same on stderr and ends with exit status 70. Where all ranks raise, all go on.

    All ranks make the same calls of such functions in the same order: those whose calls differ end likewise.
    Raises `EngineError` where the process group is no more.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        mesh = kwargs.get("mesh", getattr(args[0], "mesh", None) if args else None)
        if mesh is None:
            return function(*args, **kwargs)
        if isinstance(mesh, Mesh):
            mesh.check_there(function.__name__)
        with failing_together(function.__name__):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def failing_together(what: str) -> Iterator[None]:
    """The same for a block. what: its name, for the messages."""
    watch = _watch()
    if watch is None or watch.inside:
        yield
        return
    watch.enter(what)
    try:
        yield
    except BaseException as error:
        watch.failed(error)
        raise
    finally:
        watch.leave()


def report(error: BaseException, what: str) -> None:
    """Tell the other ranks of an error that this one ends with, outside of what `failing_together` covers."""
    watch = _watch()
    if watch is not None and not watch.said:
        watch.enter(what)  # the others may be in their next call already
        watch.failed(error)
        watch.leave()


_current: list["_Watch"] = []


def _watch() -> "_Watch | None":
    """What looks after this rank in the default process group; None in a world of one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if not _current or _current[0].group is not dist.group.WORLD:
        _current[:] = [_Watch()]
    return _current[0]


class _Watch:
    """Tells the others in the store of the process group when this rank fails, and looks whether one of them has."""

    def __init__(self) -> None:
        self.group = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store: Any = _get_default_store()
        self.store = store.clone()  # a connection of its own: the other one may be waiting
        self.inside = False
        self.what = ""
        self.number = 0  # of the calls so far: alike on all ranks
        self.said = False
        self._told = 0  # the number of the last call that others were told of
        self._failed_in: set[int] = set()
        self._since = 0.0
        self._failing_since: float | None = None
        self.store.set(f"slapo/process/{self.rank}", _process())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="slapo_py: other ranks", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def enter(self, what: str) -> None:
        self.number += 1
        self.what, self._since, self.inside = what, time.monotonic(), True
        if self.said:  # it has gone on after a failure
            self.said = False
            self.store.set(f"slapo/failure/{self.rank}", "")

    def leave(self) -> None:
        self.inside = False

    def _leave(self) -> None:
        """At the end of the process: it isn't missed, unless an error has ended it."""
        self._stop.set()
        self._thread.join(_SEARCH)  # torch would abort the process if it were in the store while Python ends
        with contextlib.suppress(RuntimeError):
            error = getattr(sys, "last_value", None)
            if error is None:
                self.store.set(f"slapo/process/{self.rank}", "")
            elif not self.said:
                self.enter("the script")
                self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Say that this rank fails, or, where another has brought it down, say who, and add it to the error."""
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        mine = Failure(self.rank, self.what, f"{type(error).__name__}: {first.strip().rstrip('.')}")
        root = mine
        with contextlib.suppress(RuntimeError):  # the store may be what has gone
            if _lost(error):
                root = self._culprit() or mine
            self.said = True
            self.store.set(f"slapo/failure/{self.rank}", json.dumps({"number": self.number, **asdict(root)}))
            self.store.add("slapo/failures", 1)
        self._failed_in.add(self.number)
        if root is not mine:
            error.add_note(f"slapo_py: {root}.")

    def _culprit(self) -> Failure | None:
        end = time.monotonic() + _SEARCH
        while True:
            found = self._others()
            if found is not None or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def _others(self) -> Failure | None:
        """The failure of another rank that has come to no call since; one in a call in which all failed is none."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        if self.store.add("slapo/failures", 0):
            for rank in others:
                if not self.store.check([f"slapo/failure/{rank}"]):
                    continue
                said = self.store.get(f"slapo/failure/{rank}")
                failure = json.loads(said) if said else {"number": 0, "rank": self.rank}
                if failure.pop("number") not in self._failed_in and failure["rank"] != self.rank:
                    return Failure(**failure)
        for rank in others:
            if self.store.check([f"slapo/process/{rank}"]) and _gone(self.store.get(f"slapo/process/{rank}").decode()):
                return Failure(rank, "", "was killed, or has ended: its process is gone")
        return None

    def _look(self) -> None:
        while not self._stop.wait(_LOOK):
            if not dist.is_initialized() or dist.group.WORLD is not self.group:
                return
            number, now = self.number, time.monotonic()
            if not self.inside or now - self._since < _LOOK:
                self._failing_since = None
                continue
            try:
                failure = self._others() or self._elsewhere(number)
            except RuntimeError:
                failure = Failure(0, "", "has ended, or whoever holds the store of the process group")
            if failure is None or number != self.number:
                self._failing_since = None
            elif self._failing_since is None:
                self._failing_since = now
            elif now - self._failing_since >= PATIENCE and self.inside:
                self._end(failure)

    def _elsewhere(self, number: int) -> Failure | None:
        """A rank whose call of this number is another one: they would wait for each other."""
        if self._told != number:
            self.store.set(f"slapo/call/{self.rank}", f"{number} {self.what}")
            self._told = number
        for rank in range(self.size):
            if rank == self.rank or not self.store.check([f"slapo/call/{rank}"]):
                continue
            its, what = self.store.get(f"slapo/call/{rank}").decode().split(" ", 1)
            if int(its) == number and what != self.what:
                return Failure(rank, "", f"is in {what}: every rank has to make the same calls, in the same order")
        return None

    def _end(self, failure: Failure) -> None:
        print(
            f"slapo_py: {failure}. Rank {self.rank} waits for it in {self.what}, and ends. Start the ranks again; what "
            f"engine.save has saved is whole.",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        os._exit(WAITED)


def _lost(error: BaseException | None) -> bool:
    """Whether an error comes from a connection to another rank."""
    while error is not None:
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _process() -> str:
    """What tells this process from every other one, where the system says it.

    Which machine, which of its spaces of process numbers (containers have their own), the number, and the start.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{machine}/{os.readlink('/proc/self/ns/pid')} {os.getpid()} {_status(os.getpid())[1]}"
    except OSError:
        return ""


def _gone(process: str) -> bool:
    """Whether a process of this machine has ended. Of one on another machine nothing is known."""
    if not process or process.split()[0] != (_process() or " ").split(" ")[0]:
        return False
    _, number, start = process.split()
    try:
        state, begun = _status(int(number))
    except OSError:
        return True
    return begun != start or state in "ZX"


def _status(number: int) -> tuple[str, str]:
    """The state of a process, as one letter, and when it began."""
    fields: list[Any] = Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return fields[0], fields[19]
