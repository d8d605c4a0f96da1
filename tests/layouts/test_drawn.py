"""Random numbers and placements: alike where a value is whole, differently where it is split, and one line mends it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.layouts.checking.drawn import ALIKE, APART
from slapo_py.layouts.placement import R, Shard
from tests.layouts.plans import PLANS

Forward = Callable[[Tensor], Tensor]


class Draws(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Mlp(nn.Module):
    """One random module on what is split, and one on what is whole."""

    def __init__(self, split: nn.Module | None = None, whole: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.split, self.whole = split or nn.Dropout(0.5), whole or nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.down(self.split(self.up(x))))


def schedule(model: nn.Module | None = None, axis: str = "tp", synced: bool = True) -> slapo.Schedule:
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Sequential(model or Mlp()), (torch.randn(4, 8),))
    sch["0.up"].shard("weight", "bias", dim="out", axis=axis)
    sch["0.down"].shard("weight", dim="in", axis=axis)
    if synced:
        sch["0.up"].sync("input", None, grad="all_reduce", axis=axis)
        sch["0.down"].sync("output", "all_reduce", grad=None, axis=axis)
    return sch


def forks(sch: slapo.Schedule) -> list[str]:
    return [str(step) for step in sch.history if step.primitive == "fork_rng"]


# Apart where a value is whole


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1)[0]


RANDOM: list[tuple[str, Forward]] = [
    ("dropout", lambda x: F.dropout(x, 0.1)),
    ("scaled_dot_product_attention", attention),
    ("rand_like", lambda x: x * torch.rand_like(x)),
    ("randn", lambda x: x + torch.randn(x.shape)),
    ("bernoulli", lambda x: x * torch.bernoulli(torch.full_like(x, 0.5))),
    ("alpha_dropout", lambda x: F.alpha_dropout(x, 0.1, training=True)),
    ("dropout1d", lambda x: F.dropout1d(x, 0.1)),
    ("uniform_", lambda x: x + torch.empty_like(x).uniform_()),
]


@pytest.mark.parametrize(("name", "forward"), RANDOM, ids=[name for name, _ in RANDOM])
def test_ranks_that_draw_apart_for_a_whole_value(name: str, forward: Forward) -> None:
    sch = schedule(Mlp(nn.Identity(), Draws(forward)))
    assert sch.check() == []
    sch["0.whole"].fork_rng()
    (fault,) = sch.check()
    drops = "dropout" in name or name == "scaled_dot_product_attention"
    does = "drop other elements of it" if drops else "draw other numbers for it"
    assert fault.kind == APART and f"each rank would {does}, and what the ranks hold" in fault.message
    assert (
        f'{name} in "0.whole" draws inside of step 5, sch["0.whole"].fork_rng(): the value is whole (R) on "tp", '
        in (fault.message)
    )
    assert fault.message.endswith("Leave fork_rng out.")
    assert sch.undo().check() == []


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.relu(),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    ],
    ids=["relu", "p=0", "not in training", "attention"],
)
def test_what_draws_nothing_may_be_forked(forward: Forward) -> None:
    sch = schedule(Mlp(nn.Identity(), Draws(forward)))
    sch["0.whole"].fork_rng()
    assert sch.check() == []


def test_a_fork_around_split_and_whole_values_is_told_where_it_belongs() -> None:
    sch = schedule()
    sch["0"].fork_rng()
    (fault,) = sch.check()
    assert fault.kind == APART and 'dropout in "0.whole" draws inside of step 5, sch["0"].fork_rng()' in fault.message
    assert fault.message.endswith('Leave fork_rng out, and write: sch["0.split"].fork_rng()')
    (fault,) = sch["0"].check()
    assert 'dropout in "whole" draws inside of step 5, sch["0"].fork_rng()' in fault.message
    sch.undo()["0.split"].fork_rng()
    assert sch.check() == []


def test_features_that_are_split_leave_the_weights_whole() -> None:
    """Each rank has all weights of an attention whose features alone are split, and must drop the same of them."""

    class Attention(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            value, query = self.up(x)[None], self.whole(x)[None]
            return self.down(F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)[0])

    sch = schedule(Attention(whole=nn.Identity()), synced=False).auto_sync("tp")
    assert forks(sch) == [] and sch.check() == []
    sch["0"].fork_rng()
    (fault,) = sch.check()
    assert fault.kind == APART and "the value is whole (R)" in fault.message


def test_random_numbers_that_every_rank_makes_whole() -> None:
    """Of a constant each rank takes its part: of the same."""
    sch = schedule(Mlp(Draws(lambda x: x + torch.rand(16)), nn.Identity()))
    assert sch.auto_sync("tp").check() == [] and forks(sch) == []
    sch["0.split"].fork_rng()
    (fault,) = sch.check()
    assert fault.kind == APART and 'rand in "0.split"' in fault.message


def test_an_axis_that_splits_nothing_and_data_parallel_ranks() -> None:
    sch = schedule()
    sch["0.split"].fork_rng().fork_rng("sp")
    (fault,) = sch.check()
    assert fault.kind == APART and 'step 6, sch["0.split"].fork_rng(axis="sp")' in fault.message
    assert 'whole (R) on "sp"' in fault.message
    sch.undo()["0.split"].fork_rng("dp")
    assert sch.check() == []


# Alike where a value is split


@pytest.mark.parametrize(("axis", "given"), [("tp", ""), ("sp", 'axis="sp"')])
def test_ranks_that_draw_alike_for_parts(axis: str, given: str) -> None:
    sch = schedule(axis=axis)
    (fault,) = sch.check()
    assert fault.kind == ALIKE and fault.line == f'sch["0.split"].fork_rng({given})'
    assert f'dropout in "0.split" draws for a value that is S(1) on "{axis}", and the ranks draw alike' in fault.message
    exec(fault.line, {"sch": sch})
    assert sch.check() == []
    found = schedule(axis=axis, synced=False).auto_sync(axis)
    assert forks(found) == [fault.line] and found.check() == []


def test_other_faults_come_first() -> None:
    assert {one.kind for one in schedule(synced=False).check()} == {"missing in forward", "missing in backward"}


def test_at_a_place_below() -> None:
    sch = schedule(synced=False)
    sch["0"].auto_sync("tp")
    assert forks(sch) == ['sch["0.split"].fork_rng()']
    sch = schedule()
    assert [one.line for one in sch["0"].check()] == ['sch["split"].fork_rng()']


def test_the_innermost_module_that_makes_them_all() -> None:
    inner = nn.Sequential(nn.Dropout(0.5), Draws(lambda x: F.dropout(F.dropout(x, 0.1).relu(), 0.1)))
    sch = schedule(Mlp(inner)).auto_sync("tp")
    assert forks(sch) == ['sch["0.split.0"].fork_rng()', 'sch["0.split.1"].fork_rng()']
    sch = schedule(Mlp(inner))
    sch["0.split"].fork_rng()
    assert sch.check() == [] and forks(sch.auto_sync("tp")) == ['sch["0.split"].fork_rng()']


class Both(Mlp):
    """One forward draws for both, and a module below it for what is split."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.split(self.up(x)), 0.5, self.training)
        return F.dropout(self.down(hidden), 0.5, self.training)


def test_what_no_line_mends_is_left_alone() -> None:
    sch = schedule(Both()).auto_sync("tp")
    assert forks(sch) == ['sch["0.split"].fork_rng()'] and sch.check() == []
    shared = nn.Dropout(0.5)
    sch = schedule(Mlp(shared, shared)).auto_sync("tp")
    assert forks(sch) == [] and sch.check() == []


def test_a_flattened_module_is_called_no_more() -> None:
    sch = schedule()
    sch["0"].trace(flatten=True, leaves=["up", "down"])
    assert sch.auto_sync("tp").check() == [] and forks(sch) == []
    sch = schedule(Mlp(whole=nn.Identity()))
    sch["0"].trace(flatten=True, leaves=["up", "down"])
    assert forks(sch.auto_sync("tp")) == ['sch["0"].fork_rng()'] and sch.check() == []


def test_a_dropout_within_a_kernel() -> None:
    class Biased(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            return self.down(F.dropout(hidden + self.up.bias, 0.5, self.training) + hidden)

    sch = schedule(Biased())
    sch["0"].trace()
    sch["0"].fuse("bias_dropout_add")
    (fault,) = sch.check()
    assert fault.line == 'sch["0"].fork_rng()' and 'kernel bias_dropout_add in "0" draws' in fault.message


@pytest.mark.parametrize(
    ("name", "sequence", "expected"),
    [
        ("gpt2", False, set()),  # an attention drops its weights, and its whole result
        ("gpt2", True, {"attn", "mlp.dropout"}),
        ("bert", False, {"attention.self"}),
        ("t5", False, {"SelfAttention", "EncDecAttention", "DenseReluDense.dropout"}),
    ],
)
def test_of_families(name: str, sequence: bool, expected: set[str]) -> None:
    plan = PLANS[name]
    sch = plan.schedule().auto_sync("tp", pins=plan.pins if sequence else None)
    found = [step.path for step in sch.history if step.primitive == "fork_rng"]
    assert {next(end for end in expected if path.endswith(end)) for path in found} == expected
    assert sch.check() == []
    if name == "gpt2":
        assert Shard(1) in plan.pins.values() and R not in plan.pins.values()
