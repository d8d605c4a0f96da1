"""Dropout on a mesh: alike over "tp", different where asked, and by logical index what one process drops."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.errors import BuildError
from tests.mesh.conftest import Run
from tests.mesh.whole import compare_built, schedule
from tests.slow import slow_but

DROPS = [("llama", True), ("gpt2", False), ("gpt2", True), ("bert", True), ("t5", False), ("wide_resnet", False)]


@pytest.mark.parametrize(("name", "sequence"), slow_but([("gpt2", True), ("wide_resnet", False)], DROPS))
def test_masks_by_logical_index_are_those_of_one_process(name: str, sequence: bool, on_ranks: Run) -> None:
    for error, where, dropped in on_ranks(2, _by_index, name, sequence):
        assert error <= 1e-12, where
        assert dropped > 1e-3


def _by_index(name: str, sequence: bool) -> tuple[float, str, float]:
    sch = schedule(name, sequence, 2, torch.float64)
    built = slapo.build(sch, mesh={"tp": 2}, logical_masks=True)
    quiet = compare_built(sch, built, Mesh.of({"tp": 2}))
    sch.original.zero_grad()
    built.zero_grad()
    output = quiet.output
    found = compare_built(sch, built, Mesh.of({"tp": 2}), train=True)
    return found.error, found.where, float((found.output - output).abs().max())


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)
        self.last = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.ones_like(self.up(x)))
        return self.last(torch.ones_like(self.down(hidden)))


def test_ranks_draw_alike_and_forked_differently(on_ranks: Run) -> None:
    (hidden, last), (other_hidden, other_last) = on_ranks(2, _drops, ("drop",))
    assert not torch.equal(hidden, other_hidden)
    assert torch.equal(last, other_last), "what is drawn inside a fork changes nothing outside"
    (hidden, last), (other_hidden, other_last) = on_ranks(2, _drops, ())
    assert torch.equal(hidden, other_hidden) and torch.equal(last, other_last)


def _drops(forked: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Drops(), (torch.randn(4, 8),))
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")
    sch.auto_sync("tp")
    for path in forked:
        sch[path].fork_rng()
    built = slapo.build(sch, mesh={"tp": 2})
    seen: list[Tensor] = []
    built.drop.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    torch.manual_seed(7)
    last = built(torch.randn(4, 8))
    return seen[0], last.detach()


class Two(Drops):
    """Two dropouts of a kind each in one forward: a mask of each would lie differently."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.up(x), 0.5, self.training)
        return nn.functional.dropout(self.down(hidden), 0.5, self.training)


def test_one_forward_with_dropouts_of_two_kinds_is_refused(on_ranks: Run) -> None:
    for message in on_ranks(2, _refused):
        assert "the dropouts of this one lie differently on the mesh" in message


def _refused() -> str:
    sch = slapo.create_schedule(Two(), (torch.randn(4, 8),))
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")
    sch.auto_sync("tp")
    with pytest.raises(BuildError, match="the dropouts of this one lie differently") as refused:
        slapo.build(sch, mesh={"tp": 2}, logical_masks=True)
    return str(refused.value)


@pytest.mark.parametrize("logical", [False, True])
def test_data_parallel_ranks_drop_apart(logical: bool, on_ranks: Run) -> None:
    (first, again), (second, _) = on_ranks(2, _dropped_in_steps, logical)
    assert not torch.equal(first, again), "each step draws anew"
    if logical:
        assert torch.equal(torch.cat((first, second)), on_ranks(1, _dropped_in_steps, True)[0][0])
    else:
        assert not torch.equal(first, second)


def _dropped_in_steps(logical: bool) -> tuple[Tensor, Tensor]:
    """What is kept in two steps of training on four rows in all, every rank seeded alike."""
    torch.manual_seed(0)
    parts = torch.distributed.get_world_size()
    engine = slapo.build(
        slapo.create_schedule(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)), (torch.randn(4, 8),)),
        target="torch",
        mesh={DATA: parts},
        logical_masks=logical,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=lambda output, batch: output.square().sum(),
        count=len,
    )
    kept: list[Tensor] = []
    engine.module[1].register_forward_hook(lambda module, given, out: kept.append(out.detach() != 0))
    torch.manual_seed(7)
    for _ in range(2):
        engine.train_step(torch.ones(4 // parts, 8))
    return kept[0], kept[1]
