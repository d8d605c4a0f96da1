"""One of the processes that `LocalRanks` starts: `python -m slapo_py.distributed.one_rank`, and not by hand."""

import datetime
import os
import sys
import threading
import traceback
from multiprocessing.connection import Connection

import cloudpickle
import torch
import torch.distributed as dist


def serve(pipe: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    """Join the process group, then run what comes through the pipe and send what it returns, until it is closed.

    store: a file. timeout: of a collective, in seconds. Answers are (True, result) or (False, (traceback, error)), the
    error pickled again, or b"".
    """
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        answer = cloudpickle.dumps((True, rank))
    except Exception as error:
        answer = _refusal(error)
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
        except BaseException as error:
            answer = _refusal(error)


def _refusal(error: BaseException) -> bytes:
    said = "".join(traceback.format_exception(error))
    try:
        packed = cloudpickle.dumps(error)
    except Exception:  # an error may hold anything
        packed = b""
    return bytes(cloudpickle.dumps((False, (said, packed))))


def _end_with(parent: int) -> None:
    """End this process with the one that started it, in whatever collective it waits. parent: a pipe from there."""
    os.read(parent, 1)  # nothing is ever written
    os._exit(1)


def main() -> None:
    """Arguments: the numbers of two open files, rank, size, the file of the store, and the timeout."""
    pipe, parent, rank, size = map(int, sys.argv[1:5])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    serve(Connection(pipe), rank, size, sys.argv[5], float(sys.argv[6]))


if __name__ == "__main__":
    main()
