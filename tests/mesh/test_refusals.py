"""What a build on a mesh, and its engine, refuse: on every rank, and before anything is sent."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import slapo_py as slapo
from slapo_py.build.borders import Move
from slapo_py.distributed.collectives import Ranks
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.errors import BuildError, EngineError, PlacementError, ScheduleError
from slapo_py.layouts.placement import P, R
from tests.mesh.conftest import Run


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.heads = nn.Linear(8, 12), nn.Linear(12, 8), 3

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Normed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Windows(Mlp):
    """Two weights that see the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.down.weight = nn.Parameter(self.up.weight.detach().view(8, 12))


def split(model: nn.Module, x: Tensor) -> slapo.Schedule:
    sch = slapo.create_schedule(model, (x,))
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")
    return sch


def _message(error: type[ScheduleError], match: str, function: Callable[[], Any]) -> str:
    with pytest.raises(error, match=match) as refused:
        function()
    return str(refused.value)


def _unsynced() -> str:
    sch = split(Mlp(), torch.randn(3, 8))
    match = 'build on "tp" of 2 ranks: .* is missing. Write: .* And 1 more: sch.check'
    return _message(PlacementError, match, lambda: slapo.build(sch, mesh={"tp": 2}))


def _wrong_world() -> str:
    sch = split(Mlp(), torch.randn(3, 8))
    return _message(BuildError, "has 3 ranks and the world has 2", lambda: slapo.build(sch, mesh={"tp": 3}))


def _no_names() -> str:
    mesh = init_device_mesh("cpu", (2,))
    return _message(BuildError, "the device mesh has no names", lambda: Mesh.of(mesh))


def _indivisible() -> str:
    sch = split(Mlp(), torch.randn(3, 8)).auto_sync("tp")
    sch.configure(heads=slapo.per_rank("tp"))
    match = 'heads=3 does not divide over axis "tp" of size 2. Legal sizes: 1, 3'
    return _message(BuildError, match, lambda: slapo.build(sch, mesh={"tp": 2}))


def _windows_of_one_memory() -> str:
    sch = split(Windows(), torch.randn(3, 8)).auto_sync("tp")
    match = "it is split, and shares memory with 'up.weight', 'down.weight'"
    return _message(BuildError, match, lambda: slapo.build(sch, mesh={"tp": 2}))


def _other_length() -> str:
    sch = split(Normed(), torch.randn(3, 8, 8)).auto_sync("tp", pins={"norm": slapo.Shard(1)})
    built = slapo.build(sch, mesh={"tp": 2})
    built(torch.randn(3, 6, 8))  # divides
    return _message(PlacementError, "dim 1 has 7 elements and was planned with 8", lambda: built(torch.randn(3, 7, 8)))


def _engine(model: nn.Module, x: Tensor, sizes: dict[str, int] | None) -> Any:
    return _train(slapo.create_schedule(model, (x,)), sizes)


def _train(sch: slapo.Schedule, sizes: dict[str, int] | None) -> Any:
    return slapo.build(
        sch,
        target="torch",
        mesh=sizes,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=lambda output, batch: output.square().sum(),
        count=_count,
    )


def _count(batch: Tensor) -> int:
    if len(batch) == 5:
        raise ValueError("five rows")
    return len(batch)


def _batch_norm() -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    match = "build at '1': BatchNorm1d normalises over the batch"
    return _message(BuildError, match, lambda: _engine(model, torch.randn(3, 8), {DATA: 2}))


def _idle_axis() -> str:
    match = r"no step of the schedule uses the axis \"model\" of mesh=.*2 ranks would all do the same.*use: \"tp\"\."
    sch = split(Mlp(), torch.randn(3, 8)).auto_sync("tp")
    return _message(BuildError, match, lambda: slapo.build(sch, mesh={DATA: 1, "model": 2}))


def _no_mesh() -> str:
    sch = split(Mlp(), torch.randn(3, 8)).auto_sync("tp")
    torch.manual_seed(0)
    alone = slapo.build(sch, mesh={})  # each rank by itself
    assert alone.up.weight.shape == sch.original.up.weight.shape
    match = r"the world has 2 ranks, and without mesh= .* Write mesh=\{'tp': 2\}, or mesh=\{\}"
    return _message(BuildError, match, lambda: slapo.build(sch))


def _no_mesh_for_an_engine() -> str:
    match = r"the world has 2 ranks, and without mesh= .* Write mesh=\{'dp': 2\}, or mesh=\{\}"
    return _message(BuildError, match, lambda: _engine(Mlp(), torch.randn(3, 8), None))


def _other_batches() -> str:
    torch.manual_seed(0)
    engine = _train(split(Mlp(), torch.randn(3, 8)).auto_sync("tp"), {"tp": 2})
    torch.manual_seed(torch.distributed.get_rank())
    match = 'ranks of one place on "dp" were given different batches'
    return _message(EngineError, match, lambda: engine.train_step(torch.randn(3, 8)))


def _one_bad_batch() -> str:
    torch.manual_seed(0)
    engine = _engine(Mlp(), torch.randn(3, 8), {DATA: 2})
    rank = torch.distributed.get_rank()
    with pytest.raises((EngineError, ValueError), match="rank 1 can't take its batch|five rows") as refused:
        engine.train_step(torch.randn(3 if rank == 0 else 5, 8))
    engine.train_step(torch.randn(3, 8))  # all goes on
    return str(refused.value)


@pytest.mark.parametrize(
    "case",
    [
        _unsynced, _wrong_world, _no_names, _indivisible, _windows_of_one_memory, _other_length,
        _batch_norm, _other_batches, _idle_axis, _no_mesh, _no_mesh_for_an_engine,
    ],
)  # fmt: skip
def test_every_rank_says_the_same(case: Callable[[], str], on_ranks: Run) -> None:
    first, second = on_ranks(2, case)
    assert first == second


def test_a_batch_that_one_rank_cannot_take_is_refused_by_all(on_ranks: Run) -> None:
    first, second = on_ranks(2, _one_bad_batch)
    assert "rank 1 can't take its batch" in first and "five rows" in first
    assert second == "five rows"


def test_a_collective_planned_for_another_tensor_is_refused() -> None:
    """A module that is called with a mask less has other tensors at the numbers that the schedule says."""
    move = Move(Ranks("tp", 2, 0), R, R, P, R, (3, 4, 8), 'input 1 of "inner"')
    with pytest.raises(PlacementError, match='input 1 of "inner": it was planned for a tensor of 3 dims, .* one of 2'):
        move(torch.ones(3, 8))
