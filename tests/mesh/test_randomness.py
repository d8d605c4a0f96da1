"""Dropout on a mesh: alike over "tp", different where asked, and by logical index what one process drops."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.errors import BuildError, EngineError, PlacementError
from tests.mesh.conftest import Run
from tests.mesh.whole import bit_equal_over, compare_built, schedule
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


class Again(Drops):
    """The same module draws for what is split and for what is whole: no line mends that."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.ones_like(self.up(x)))
        return self.drop(torch.ones_like(self.down(hidden)))


def test_ranks_draw_alike_and_forked_differently(on_ranks: Run) -> None:
    for steps in ((), ("drop",)):
        (hidden, last), (other_hidden, other_last) = on_ranks(2, _drops, Drops, steps)
        assert not torch.equal(hidden, other_hidden)
        assert torch.equal(last, other_last), "what is drawn inside a fork changes nothing outside"
    (hidden, last), (other_hidden, other_last) = on_ranks(2, _drops, Again, ())
    assert torch.equal(hidden, other_hidden) and torch.equal(last, other_last)


def _split(sch: slapo.Schedule) -> slapo.Schedule:
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")
    return sch


def _drops(kind: type[nn.Module], forked: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    sch = _split(slapo.create_schedule(kind(), (torch.randn(4, 8),)))
    for path in forked:
        sch[path].fork_rng()
    built = slapo.build(sch.auto_sync("tp"), mesh={"tp": 2})
    seen: list[Tensor] = []
    built.drop.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    torch.manual_seed(7)
    last = built(torch.randn(4, 8))
    return seen[0], last.detach()


def test_ranks_that_would_drop_from_a_whole_value_apart_are_refused(on_ranks: Run) -> None:
    for steps in on_ranks(2, _forked_wrongly):
        assert steps == [6, 1]


def _forked_wrongly() -> list[int]:
    """The steps that are named: where the axis splits something, and where nothing but this is said of it."""
    found = []
    for split in (True, False):
        sch = slapo.create_schedule(Drops(), (torch.randn(4, 8),))
        if split:
            _split(sch).auto_sync("tp")
        sch["last"].fork_rng()
        with pytest.raises(PlacementError, match="each rank would drop other elements of it") as refused:
            slapo.build(sch, mesh={"tp": 2})
        said = r'step (\d+), sch\["last"\].fork_rng\(\): the value is whole \(R\) on "tp"'
        found += [int(one) for one in re.findall(said, str(refused.value))]
    return found


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
    _split(sch).auto_sync("tp")
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


class Learns(Drops):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(self.drop(self.up(x))))


def _engine(model: nn.Module, sizes: dict[str, int], logical: bool = False) -> Any:
    sch = slapo.create_schedule(model, (torch.randn(4, 8),))
    if "tp" in sizes:
        _split(sch).auto_sync("tp")
    return slapo.build(
        sch, target="torch", mesh=sizes, logical_masks=logical, optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=lambda output, batch: output.square().sum(), count=len,
    )  # fmt: skip


def _rank() -> int:
    return torch.distributed.get_rank()


@pytest.mark.parametrize("when", ["before build", "after build", "one rank draws", "between steps"])
def test_ranks_with_other_random_states_are_refused_before_they_learn(when: str, on_ranks: Run) -> None:
    for message, trained, differ in on_ranks(2, _seeded_apart, when):
        assert 'rank 1 has another random state than rank 0: ranks of one place on "dp" hold the same' in message
        assert "torch.manual_seed(...) with the same number" in message and "a torch.Generator of its own" in message
        assert not trained, "nothing was learned of what they have dropped"
        assert differ == []


def _seeded_apart(when: str) -> tuple[str, bool, list[str]]:
    """What is said, whether the refused step has changed anything, and what differs after steps that are right."""
    torch.manual_seed(0)
    model = Learns()
    torch.manual_seed(_rank() if when == "before build" else 0)
    engine = _engine(model, {"tp": 2})
    mesh, batch = Mesh.of({"tp": 2}), torch.ones(4, 8)
    if when == "between steps":
        engine.train_step(batch)
    if when in ("after build", "between steps"):
        torch.manual_seed(100 + _rank())
    elif when == "one rank draws" and _rank() == 0:
        torch.rand(1)
    before = {name: one.detach().clone() for name, one in engine.module.named_parameters()}
    with pytest.raises(EngineError, match="the model draws random numbers") as refused:
        engine.train_step(batch)
    trained = any(not torch.equal(one, before[name]) for name, one in engine.module.named_parameters())
    engine.eval_step(batch)  # nothing is drawn
    torch.manual_seed(3)
    for _ in range(3):
        engine.train_step(batch)
    differ = bit_equal_over("tp", mesh, {"down.bias": engine.module.down.bias.detach()})
    return str(refused.value), trained, differ


@pytest.mark.parametrize("case", ["draws nothing", "data parallel", "both"])
def test_ranks_that_need_not_draw_alike_are_not_refused(case: str, on_ranks: Run) -> None:
    assert all(on_ranks(4 if case == "both" else 2, _drawn_apart, case))


def _drawn_apart(case: str) -> bool:
    sizes = {"draws nothing": {"tp": 2}, "data parallel": {DATA: 2}, "both": {DATA: 2, "tp": 2}}[case]
    torch.manual_seed(0)
    model = Learns()
    if case == "draws nothing":
        model.drop.p = model.last.p = 0.0
    engine, mesh = _engine(model, sizes), Mesh.of(sizes)
    torch.manual_seed(_rank() if case == "draws nothing" else mesh.coordinate(DATA))
    for _ in range(2):
        engine.train_step(torch.ones(2, 8))
    bias = {"down.bias": engine.module.down.bias.detach()}
    return all(bit_equal_over(axis, mesh, bias) == [] for axis in sizes)


def test_the_ranks_of_a_place_are_named(on_ranks: Run) -> None:
    for message in on_ranks(4, _third_draws):
        assert "rank 3 has another random state than rank 2" in message


def _third_draws() -> str:
    torch.manual_seed(0)
    engine = _engine(Learns(), {DATA: 2, "tp": 2})
    if _rank() == 3:
        torch.rand(1)
    with pytest.raises(EngineError, match="the model draws random numbers") as refused:
        engine.train_step(torch.ones(2, 8))
    return str(refused.value)


def test_masks_by_logical_index_need_one_state_on_all_ranks(on_ranks: Run) -> None:
    for message in on_ranks(2, _logical_apart):
        assert "rank 1 has another random state than rank 0: with logical_masks=True every rank draws" in message


def _logical_apart() -> str:
    torch.manual_seed(0)
    engine = _engine(Learns(), {DATA: 2}, logical=True)
    torch.manual_seed(_rank())
    with pytest.raises(EngineError, match="the model draws random numbers") as refused:
        engine.train_step(torch.ones(2, 8))
    return str(refused.value)
