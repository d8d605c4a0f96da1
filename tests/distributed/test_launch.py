"""`slapo.launch` in scripts, and ranks that are started from one."""

import gc
import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_py as slapo
from slapo_py.distributed.mesh import Mesh
from slapo_py.errors import ArgumentError, EngineError, RankError
from tests.fingerprint import fingerprint
from tests.ranks import Ranks

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(command: list[str], script: Path, code: str) -> "subprocess.CompletedProcess[str]":
    script.write_text(code, encoding="utf-8")
    paths = os.pathsep.join([str(Path(slapo.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=250, env=environment)


def test_a_world_of_one() -> None:
    with slapo.launch() as world:
        assert (world.rank, world.size, world.first, world.device) == (0, 1, True, torch.device("cpu"))
        built = slapo.build(slapo.create_schedule(nn.Linear(2, 2)), mesh={"dp": 1, "tp": 1})
        assert built(torch.ones(1, 2)).shape == (1, 2)
        with slapo.launch() as again:
            assert again == world
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_an_engine_is_of_its_group(tmp_path: Path) -> None:
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    x = (torch.ones(1, 2),)
    with slapo.launch():
        engine = slapo.build(
            slapo.create_schedule(nn.Linear(2, 2)), target="torch", mesh={"dp": 1, "tp": 1}, optimizer=adamw,
            loss=lambda output, batch: output.square().sum(), count=lambda batch: 1,
        )  # fmt: skip
        engine.train_step(x)
        before = fingerprint(engine.module)
    calls: dict[str, Callable[[], Any]] = {
        "train_step": lambda: engine.train_step(x), "eval_step": lambda: engine.eval_step(x),
        "state_dict": engine.state_dict, "save": lambda: engine.save(tmp_path / "run"),
        "load": lambda: engine.load(tmp_path / "run"),
    }  # fmt: skip
    for world in (nullcontext(), slapo.launch()):  # and another group is not the one that it was built in
        with world:
            for name, call in calls.items():
                with pytest.raises(EngineError, match=rf"^{name}: the process group of Mesh\(dp=1, tp=1\) is gone, .*"):
                    call()
    assert fingerprint(engine.module) == before
    assert not (tmp_path / "run").exists()


def test_a_mesh_is_made_once_for_a_world() -> None:
    with slapo.launch():
        mesh = Mesh.of({"dp": 1, "tp": 1})
        assert Mesh.of({"dp": 1, "tp": 1}) is mesh
        group = weakref.ref(dist.group.WORLD)
    with pytest.raises(EngineError, match="save: the process group of .* is gone"):
        mesh.check_there("save")
    with slapo.launch():
        assert Mesh.of({"dp": 1, "tp": 1}) is not mesh
        with pytest.raises(EngineError, match="is gone"):
            mesh.check_there("save")
        del mesh
        gc.collect()
        assert group() is None  # nothing keeps the first world


def test_it_is_taken_down_after_an_error() -> None:
    with pytest.raises(ValueError, match="of the script"), slapo.launch():
        raise ValueError("of the script")
    assert not dist.is_initialized()


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ArgumentError, match="launch: timeout=0: write a number of seconds above 0"),
        slapo.launch(timeout=0),
    ):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with (
        pytest.raises(ArgumentError, match="WORLD_SIZE=2 and no RANK.* Start the script with torchrun"),
        slapo.launch(),
    ):
        pass


FAILING = """
import os
import torch.distributed as dist
import slapo_py as slapo

with slapo.launch() as world:
    os.write(1, f"rank {world.rank} of {world.size}\\n".encode())
    if world.rank == 1:
        raise ValueError("planted in the script")
    dist.barrier()
"""


def test_torchrun_names_the_rank_and_its_error(tmp_path: Path) -> None:
    done = run(TORCHRUN, tmp_path / "script.py", FAILING)
    assert done.returncode != 0
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    table = done.stderr[done.stderr.index("Root Cause") :]
    assert re.search(r"rank *: 1 ", table)
    assert "ValueError: planted in the script" in table


UNGUARDED = """
import torch
import torch.distributed as dist
from slapo_py.distributed.local_ranks import LocalRanks

class Mine:
    pass

def number():
    return type(Mine()).__module__, dist.get_rank(), torch.get_num_threads()

with LocalRanks(2) as ranks:
    print(ranks.run(number), ranks.run(lambda: dist.get_world_size()))
"""


def test_a_script_without_a_guard_starts_ranks(tmp_path: Path) -> None:
    done = run([sys.executable], tmp_path / "script.py", UNGUARDED)
    assert done.stdout == "[('__main__', 0, 1), ('__main__', 1, 1)] [2, 2]\n", done.stderr


def test_what_ranks_raise(tmp_path: Path) -> None:
    class Own(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} {two}")  # can be pickled, and not be put together again

    def fail() -> None:
        raise Own(1, 2) if dist.get_rank() == 0 else KeyError("x")

    with Ranks(2, tmp_path) as ranks:
        with pytest.raises(RankError, match=r"Rank 0 of 2: Traceback[\s\S]*Own: 1 2") as caught:
            ranks.run(fail)
        assert caught.value.rank == 0 and caught.value.__cause__ is None
        assert ranks.run(dist.get_rank) == [0, 1]


ORPHANS = """
import os
import time
import torch.distributed as dist
from slapo_py.distributed.local_ranks import LocalRanks

def wait():
    os.write(1, f"{os.getpid()}\\n".encode())
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getppid(), 9)
        time.sleep(100)
    dist.barrier()

LocalRanks(2).run(wait)
"""


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    done = run([sys.executable], tmp_path / "script.py", ORPHANS)
    assert done.returncode == -9
    left = {int(one) for one in done.stdout.split()}  # run() returns when all of them have closed their output
    assert len(left) == 2
    for _ in range(100):
        left = {one for one in left if Path(f"/proc/{one}").exists()}
        if not left:
            break
        time.sleep(0.1)
    assert not left
