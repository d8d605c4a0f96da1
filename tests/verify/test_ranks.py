"""`verify(mesh=...)` on processes: what is right passes, what is wrong is named, errors of ranks reach the caller."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor

import slapo_py as slapo
from slapo_py.build.facts import Fact
from slapo_py.build.slicing import part_of
from slapo_py.distributed.local_ranks import LocalRanks
from slapo_py.errors import ArgumentError, RankError, VerificationError
from slapo_py.layouts.placement import Placement, R, Shard
from slapo_py.verify import on_ranks
from slapo_py.verify.grid import Grid
from tests.fingerprint import changes, fingerprint
from tests.verify.test_mesh import Mlp, Pairs, Statistics, _without, family, mlp, statistics

TP2 = {"tp": 2}
lent = pytest.mark.usefixtures("lent_ranks")


# What is right


@lent
def test_a_right_schedule() -> None:
    sch = mlp()
    before = fingerprint(sch.original)
    report = sch.verify(mesh=TP2)
    assert changes(before, fingerprint(sch.original)) == []
    assert report.grade == "rounding" and report.notes == []
    assert str(report).startswith("verify on 2 ranks, tp=2: rounding")
    names = {row.scenario for row in report.rows}
    assert {"train", "eval", "gradients of inputs", "batch of 1", "three micro-batches", "1 optimizer step"} <= names


@lent
def test_ranks_that_draw_alike_for_parts_are_refused() -> None:
    """Masks are drawn by logical index here: no number shows it."""
    with pytest.raises(VerificationError, match="no scenario shows a difference.* the ranks draw alike"):
        mlp().undo().verify(mesh=TP2)


@lent
def test_running_statistics_are_joined() -> None:
    report = statistics().verify(mesh=TP2)
    assert report.grade == "rounding"
    compared = {one.key.name for row in report.rows for one in row.differences if one.key.kind == "buffer"}
    assert compared == {"norm.running_mean", "norm.running_var"}


SCRIPT = """
import torch, slapo_py as slapo
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 8), lambda x: x.relu()

    def forward(self, x):
        return self.down(self.act(self.up(x)))

@slapo.register("nothing")
class Nothing(slapo.Primitive):
    "Does nothing."
    def check(self, place): pass
    def apply(self, place): pass

sch = slapo.create_schedule(Model(), (torch.randn(4, 8),))
sch["up"].shard("weight", "bias", dim="out").nothing()
sch["down"].shard("weight", dim="in")
print(sch.auto_sync("tp").verify(mesh={"tp": 2}).grade)
"""


@pytest.mark.slow
def test_a_plain_script(tmp_path: Path) -> None:
    """Without a guard around its main part, with a class, a lambda and a primitive of its own."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "rounding\n"


@lent
def test_data_parallel_and_split() -> None:
    report = mlp().verify(mesh={"dp": 2, "tp": 2})
    assert str(report).startswith("verify on 4 ranks, dp=2 x tp=2: rounding")
    rows = {row.scenario: row for row in report.rows}
    assert {"train", "eval", "gradients of inputs", "batch of 2", "1 optimizer step"} <= set(rows)
    assert rows["1 optimizer step"].compared > 100
    assert "\"batch of 1\" was left out: a batch of 1 does not divide over 'dp' of size 2." in report.notes


@lent
def test_data_parallel_alone() -> None:
    """Nothing of the schedule: each rank has its rows, and gradients are summed."""
    report = slapo.create_schedule(Mlp(), (torch.randn(4, 6, 16),)).verify(mesh={"dp": 2})
    assert report.grade == "rounding" and len(report.rows) > 5


@lent
def test_sizes_that_the_schedule_is_not_for_are_left_out_and_said() -> None:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Pairs(), (torch.randint(0, 12, (2, 8)),))
    sch["embed"].sync("output", "split", grad="all_gather", dim=1)
    sch["mix"].sync("output", "all_gather", grad="split", dim=1).reduce_grad("weight", "bias")
    (note,) = sch.verify(mesh=TP2).notes
    assert note.startswith('"batch of 7 at another length" was left out: the schedule is not for such sizes: ')


@pytest.mark.slow
@pytest.mark.timeout(1800)
@lent
@pytest.mark.parametrize(
    ("name", "sequence"), [("llama", False), ("llama", True), ("gpt2", False), ("gpt2", True), ("t5", False)]
)
def test_families(name: str, sequence: bool) -> None:
    assert family(name, 2, sequence).verify(mesh=TP2).grade == "rounding"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@lent
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_families_on_four_ranks(name: str) -> None:
    """Not T5: of its two rows one is padded, so one "dp" rank would have a mask and the other none, as no trace has."""
    assert family(name, 2, False).verify(mesh={"dp": 2, "tp": 2}).grade == "rounding"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@lent
def test_wide_resnet() -> None:
    assert family("wide_resnet", 2, False).verify(mesh=TP2).grade == "rounding"


# What is wrong


@lent
@pytest.mark.parametrize(
    ("change", "module", "text"),
    [
        (lambda sch: _without(sch, "sync", "down"), "down", 'There output 0 of "down" is not the original\'s.'),
        (lambda sch: _without(sch, "sync", "up"), "up", 'the gradient of input 0 of "up" is not the original\'s.'),
        (lambda sch: sch["norm"].reduce_grad("bias"), "norm", "the gradient of the parameter norm.bias"),
        (lambda sch: sch["norm"].shard("weight", dim=0), "norm", "the scheduled model raises RuntimeError"),
    ],
    ids=["missing forward", "missing backward", "doubled gradient", "parts that do not fit"],
)
def test_a_fault_is_found_and_named(change: Callable[[slapo.Schedule], slapo.Schedule], module: str, text: str) -> None:
    sch = change(mlp()).root.cursor("")
    with pytest.raises(VerificationError, match=r"verify on 2 ranks, tp=2: in the scenario") as caught:
        sch.verify(mesh=TP2)
    report = caught.value.report
    assert report.grade == "bug" and report.module == module and report.step is not None
    assert text in str(caught.value) and f'sch["{module}"].' in str(sch.history[report.step - 1])
    assert 'sch.check("tp", ranks=2) says which line is missing or wrong' in str(caught.value)


@lent
def test_a_fault_is_found_on_four_ranks() -> None:
    sch = _without(mlp(), "sync", "down")
    with pytest.raises(VerificationError, match='There output 0 of "down" is not the original') as caught:
        sch.verify(mesh={"dp": 2, "tp": 2})
    assert caught.value.report.module == "down"


@lent
def test_statistics_of_a_rank_s_own_rows() -> None:
    """Each data-parallel rank normalizes its rows by their own mean: not what one process computes."""
    sch = slapo.create_schedule(Statistics(), (torch.randn(4, 8),))
    with pytest.raises(VerificationError, match='The first module that diverges is "norm"'):
        sch.verify(mesh={"dp": 2})


@lent
@pytest.mark.parametrize("simulate", [False, True])
def test_what_the_checker_alone_finds_is_no_pass(simulate: bool) -> None:
    """A sync where no tensor goes by changes no number, and build refuses it."""
    sch = mlp()["norm"].sync("output", "all_reduce", index=1).root.cursor("")
    with pytest.raises(VerificationError, match="no scenario shows a difference, and build refuses .* takes effect no"):
        sch.verify(mesh=TP2, simulate=simulate)


# What can't be done


class Loss(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@lent
def test_one_number_for_the_batch_is_refused_on_dp() -> None:
    sch = slapo.create_schedule(Loss(), (torch.randn(4, 6, 16),))
    with pytest.raises(ArgumentError, match='is one number for the whole batch, and on "dp" each rank has that of'):
        sch.verify(mesh={"dp": 2})


@lent
def test_a_batch_that_does_not_divide_is_refused_on_dp() -> None:
    sch = slapo.create_schedule(Mlp(), (torch.randn(3, 6, 16),))
    with pytest.raises(ArgumentError, match="a batch of 3 does not divide over 'dp' of size 2, so its ranks"):
        sch.verify(mesh={"dp": 2})


class Locked(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_what_can_not_be_sent_is_refused() -> None:
    sch = slapo.create_schedule(Locked(), (torch.randn(4, 6, 16),))
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")
    sch.auto_sync("tp")
    with pytest.raises(ArgumentError, match="are sent to other processes, and can't be: .* With simulate=True nothing"):
        sch.verify(mesh=TP2)


class Undivided(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.size = 3

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.size


@lent
def test_a_rank_that_can_not_build_is_named() -> None:
    sch = slapo.create_schedule(Undivided(), (torch.randn(4, 6, 16),))
    sch.configure(size=slapo.per_rank("tp"))
    with pytest.raises(RankError, match=r"verify on 2 ranks, tp=2, build: rank 0 raises BuildError: .*size=3 does not"):
        sch.verify(mesh=TP2)


class Dies(Mlp):
    """In any process but the one that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.home and not isinstance(x, FakeTensor):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def test_a_rank_that_is_killed_is_named_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processes that users have."""
    started: list[LocalRanks] = []

    def start(size: int, timeout: float) -> LocalRanks:
        started.append(LocalRanks(size, timeout))
        return started[-1]

    monkeypatch.setattr(on_ranks, "LocalRanks", start)
    sch = slapo.create_schedule(Dies(), (torch.randn(4, 6, 16),))
    with pytest.raises(RankError, match=r"dp=2, .*: Rank \d of 2: the process ended .* \(killed by SIGKILL\)"):
        sch.verify(mesh={"dp": 2})
    assert len(started) == 1 and not started[0].alive


class Sleeps(Mlp):
    """On one of the ranks, while the other one waits for it."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 1 and self.training and not isinstance(x, FakeTensor):
            time.sleep(60)
        return super().forward(x)


@lent
def test_a_rank_that_gives_no_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ranks, "_PATIENCE", 2.0)
    sch = slapo.create_schedule(Sleeps(), (torch.randn(4, 6, 16),))
    with pytest.raises(RankError, match=r'verify on 2 ranks, dp=2, scenario "train": Ranks .* gave no answer in time'):
        sch.verify(mesh={"dp": 2})


# Putting together


@pytest.mark.parametrize(
    "placements",
    [{"tp": Shard(0)}, {"dp": Shard(1), "tp": Shard(0, 3)}, {"dp": Shard(0, 3), "tp": Shard(0, 3)}, {"tp": Shard(1)}],
    ids=str,
)
def test_parameters_are_put_together(placements: dict[str, Shard]) -> None:
    """The inverse of what a build cuts."""
    whole = torch.randn(24, 10)
    grid = Grid({"dp": 2, "tp": 2})
    parts = [part_of(whole, placements, _At(grid.sizes, place)) for place in grid.places]  # type: ignore[arg-type]
    fact = Fact(("weight",), (24, 10), placements)
    assert all(torch.equal(grid.parameter(parts, fact, rank), whole) for rank in range(4))


class _At:
    """A mesh, for one rank."""

    def __init__(self, sizes: dict[str, int], place: dict[str, int]) -> None:
        self.sizes, self.place = sizes, place

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    def coordinate(self, axis: str) -> int:
        return self.place.get(axis, 0)


def test_values_and_rows_are_put_together() -> None:
    grid = Grid({"dp": 2, "tp": 2})
    assert grid.along("dp", {"dp": 1, "tp": 1}) == [1, 3] and grid.along("sp", {"dp": 1, "tp": 1}) == [3]
    rows = torch.arange(8.0).view(4, 2)
    parts = [rows[:2], rows[:2], rows[2:], rows[2:]]
    placements: dict[str, Placement] = {"tp": R}
    assert torch.equal(grid.rows("dp", [grid.value(parts, placements, one) for one in range(4)], (4, 2), 1), rows)
    assert torch.equal(grid.rows("dp", parts, (2, 2), 3), rows[2:])  # it is as large as the whole is
    split = [rows[:2, :1], rows[:2, 1:], rows[2:, :1], rows[2:, 1:]]
    assert torch.equal(grid.value(split, {"tp": Shard(1)}, 2), rows[2:])
    odd = [rows[:2], rows[:1], rows[2:], rows[3:]]
    assert torch.equal(grid.value(odd, {"tp": Shard(1)}, 3), rows[3:])  # shown as it is
    assert torch.equal(grid.total("dp", [rows, None, rows, None], 0), 2 * rows)  # type: ignore[arg-type]
    assert grid.total("dp", [rows, None, rows, None], 1) is None
