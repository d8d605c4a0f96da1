"""Public bug reports of sharding, synchronising and resizing, on real ranks. Numbers as in `tests/test_cases.py`.

G04 slapo#15; G06 slapo#10; G07 pytorch#150336; G08 slapo#46; G09 transformers#44421; G14 slapo#21; G27 DeepSpeed#2898.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.build.slicing import part_of
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.layouts.placement import Shard
from tests.layouts.test_cases import Attention, Tied
from tests.mesh.conftest import Run
from tests.mesh.whole import compare_built


class Drops(nn.Module):
    """Dropout on what is split and on what is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)
        self.split, self.whole = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.down(self.split(self.up(x))))


def built_on(model: nn.Module, inputs: Any, steps: Any, ranks: int) -> tuple[slapo.Schedule, nn.Module]:
    sch = slapo.create_schedule(model.double(), inputs)
    steps(sch)
    sch.auto_sync("tp", ranks=ranks)
    return sch, slapo.build(sch, mesh={"tp": ranks})


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["g04", "g06", "g06_bias_only", "g07", "g08"])
def test_outputs_and_gradients_of_the_whole(case: str, ranks: int, on_ranks: Run) -> None:
    for error, fact in on_ranks(ranks, globals()[f"_{case}"], ranks):
        assert error < 1e-12
        assert fact


def _g04(ranks: int) -> tuple[float, bool]:
    torch.manual_seed(0)
    ids = torch.randint(12, (2, 5))
    sch, built = built_on(Tied(), (ids,), lambda sch: sch["emb"].shard("weight", dim=0), ranks)
    return _error(sch, built, (ids,), ranks), built.head.weight is built.emb.weight


def _g06(ranks: int, train: tuple[str, ...] = ("weight", "bias")) -> tuple[float, bool]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 4)), torch.randn(3, 8, dtype=torch.float64)
    for name, one in model[0].named_parameters():
        one.requires_grad_(name in train)
    sch, built = built_on(model, (x,), lambda sch: sch["0"].shard("weight", dim="in"), ranks)
    return _error(sch, built, (x,), ranks), built[0].weight.shape == (4, 8 // ranks)


def _g06_bias_only(ranks: int) -> tuple[float, bool]:
    return _g06(ranks, ("bias",))


def _g07(ranks: int) -> tuple[float, bool]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 8)), torch.randn(2, 8, dtype=torch.float64)

    def steps(sch: slapo.Schedule) -> None:
        sch["0"].shard("weight", "bias", dim="out")
        sch["2"].shard("weight", dim="in")

    sch, built = built_on(model, (x,), steps, ranks)
    rows = torch.tensor(built[0].weight.shape[0])
    torch.distributed.all_reduce(rows)
    return _error(sch, built, (x,), ranks), int(rows) == 5


def _g08(ranks: int) -> tuple[float, bool]:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 5, 16, dtype=torch.float64)

    def steps(sch: slapo.Schedule) -> None:
        sch["qkv"].shard("weight", "bias", dim="out", parts=3)
        sch["o"].shard("weight", dim="in")

    sch, built = built_on(model, (x,), steps, ranks)
    mine = part_of(model.qkv.weight.detach(), {"tp": Shard(0, 3)}, Mesh.of({"tp": ranks}))
    return _error(sch, built, (x,), ranks), torch.equal(built.qkv.weight, mine)


def _error(sch: slapo.Schedule, built: nn.Module, inputs: tuple[Tensor, ...], ranks: int) -> float:
    return compare_built(sch, built, Mesh.of({"tp": ranks}), given=inputs).error


def test_g09_sizes_of_a_module_stay_those_of_the_whole(on_ranks: Run) -> None:
    for features, shape, shown in on_ranks(2, _sizes):
        assert features == 12 and shape == (6, 8)
        assert "out_features=12" in shown


def _sizes() -> tuple[int, tuple[int, ...], str]:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))

    def steps(sch: slapo.Schedule) -> None:
        sch["0"].shard("weight", "bias", dim="out")
        sch["1"].shard("weight", dim="in")

    _, built = built_on(model, (torch.randn(3, 8, dtype=torch.float64),), steps, 2)
    return built[0].out_features, tuple(built[0].weight.shape), repr(built[0])


@pytest.mark.parametrize("checkpoint", [False, True])
def test_g14_masks_of_what_is_split_differ(checkpoint: bool, on_ranks: Run) -> None:
    (split, whole, again, grads), (other_split, other_whole, _, _) = on_ranks(2, _masks, checkpoint)
    assert (split == other_split).float().mean() < 0.6
    assert torch.equal(whole, other_whole)
    assert torch.equal(split, again), "the same seed draws the same"
    assert torch.equal(split, grads), "backward drops what forward has dropped"


def _masks(checkpoint: bool) -> tuple[Tensor, ...]:
    def steps(sch: slapo.Schedule) -> None:
        sch["up"].shard("weight", "bias", dim="out")
        sch["down"].shard("weight", dim="in")
        sch["split"].fork_rng()
        if checkpoint:
            sch["split"].checkpoint()

    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    _, built = built_on(Drops(), (x,), steps, 2)
    kept: dict[str, Tensor] = {}
    built.split.register_forward_hook(lambda module, given, out: kept.update(split=out.detach() != 0))
    built.whole.register_forward_hook(lambda module, given, out: kept.update(whole=out.detach() != 0))
    built.up.register_full_backward_hook(lambda module, given, out: kept.update(gradient=out[0] != 0))
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        built(x).square().sum().backward()
        found.append(dict(kept))
    return found[0]["split"], found[0]["whole"], found[1]["split"], found[0]["gradient"]


OPTIMIZER = partial(torch.optim.AdamW, lr=1e-2)


@pytest.mark.slow
def test_g27_four_ranks_then_three_then_four(on_ranks: Run, tmp_path: Path) -> None:
    expected = on_ranks(1, _steps, {DATA: 1}, None, None, 0, 4)[0]
    on_ranks(4, _steps, {DATA: 4}, None, str(tmp_path / "a"), 0, 2)
    on_ranks(3, _steps, {DATA: 3}, str(tmp_path / "a"), str(tmp_path / "b"), 2, 3)
    for found in on_ranks(4, _steps, {DATA: 4}, str(tmp_path / "b"), None, 3, 4):
        assert (found - expected).abs().max() < 1e-6


def _steps(sizes: dict[str, int], load: str | None, save: str | None, first: int, last: int) -> Tensor:
    """The weight of a 6 x 4 layer after some steps of fully sharded training, each on twelve rows in all."""
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Linear(4, 6).double(), (torch.randn(2, 4, dtype=torch.float64),))
    engine = slapo.build(
        sch,
        target="torch",
        mesh=sizes,
        data_parallel="fsdp",
        optimizer=OPTIMIZER,
        loss=lambda output, batch: output.square().sum(),
        count=len,
    )
    if load:
        engine.load(load)
    for step in range(first, last):
        rows = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        engine.train_step(rows.tensor_split(sizes[DATA])[Mesh.of(sizes).coordinate(DATA)])
    if save:
        engine.save(save)
    return engine.state_dict()["weight"].clone()
