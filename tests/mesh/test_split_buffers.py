"""Buffers of which each rank has a part: running statistics of a split norm, constants that go with split values."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.backends.parts import Part
from slapo_py.errors import BuildError
from tests.mesh.conftest import Run

TP2 = {"dp": 1, "tp": 2}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Conv1d(6, 9, 3, padding=1), nn.BatchNorm1d(9), nn.Conv1d(9, 6, 3)
        self.register_buffer("scales", torch.arange(1.0, 10.0).view(9, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu() * self.scales)


def engine(sizes: dict[str, int] | None, *names: str) -> Any:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Normed().double(), (torch.randn(4, 6, 8, dtype=torch.float64),))
    if sizes:
        sch["up"].shard("weight", "bias", dim="out")
        sch["down"].shard("weight", dim="in")
        sch.auto_sync("tp")
        if names:
            sch["norm"].shard(*names, dim=0)
    return slapo.build(
        sch, target="torch", mesh=sizes, optimizer=partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
        loss=lambda output, batch: output.square().sum(), count=lambda batch: len(batch[0]),
    )  # fmt: skip


def batch(seed: int) -> tuple[Tensor]:
    return (torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)),)


def trained(made: Any, first: int, last: int) -> list[float]:
    return [float(made.train_step(batch(seed))) for seed in range(first, last)] + [float(made.eval_step(batch(9)))]


def _saved(folder: Path) -> tuple[list[float], dict[str, Tensor], list[tuple[int, ...]]]:
    made = engine(TP2, "weight", "bias")
    losses = trained(made, 0, 2)
    parts = made.state_dict(whole=False)
    held = [tuple(one.tensor.shape) for name, one in parts.items() if isinstance(one, Part) and "running" in name]
    state = made.state_dict()
    made.save(folder)
    return losses, state, held


def _loaded(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    made = engine(TP2, "weight", "bias")
    made.load(folder)
    assert made.module.scales.flatten().tolist() in ([1, 2, 3, 4, 5], [6, 7, 8, 9])
    return trained(made, 2, 3), made.state_dict()


def off(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_they_train_and_are_saved_whole_and_loaded_anywhere(on_ranks: Run, tmp_path: Path) -> None:
    alone = engine(None)
    expected, state = trained(alone, 0, 2), {name: one.clone() for name, one in alone.state_dict().items()}
    found = on_ranks(2, _saved, tmp_path / "run")
    for losses, whole, _ in found:
        assert losses == pytest.approx(expected, rel=1e-12)
        assert off(whole, state) < 1e-12
        assert float((whole["norm.running_mean"]).abs().max()) > 1e-3
    assert [held for _, _, held in found] == [[(5,), (5,)], [(4,), (4,)]]
    after = trained(alone, 2, 3)
    other = engine(None)
    other.load(tmp_path / "run")
    assert trained(other, 2, 3) == pytest.approx(after, rel=1e-12)
    assert off(other.state_dict(), alone.state_dict()) < 1e-12
    for losses, whole in on_ranks(2, _loaded, tmp_path / "run"):
        assert losses == pytest.approx(after, rel=1e-12)
        assert off(whole, alone.state_dict()) < 1e-12


def _whole_weights() -> bool:
    line = r'Write: sch\["norm"\].shard\("weight", "bias", dim=0, axis="tp"\)'
    with pytest.raises(BuildError, match=rf'at "norm": .* in training than in evaluation \(self.training is .*{line}'):
        engine(TP2)
    return True


def test_a_norm_whose_weights_are_whole_could_not_evaluate(on_ranks: Run) -> None:
    assert on_ranks(2, _whole_weights) == [True, True]
