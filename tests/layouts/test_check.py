"""The checker: every planted fault gives exactly one message, with the place, the placements and the line to write."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import ArgumentError, PlacementError, ShardError, StepError
from slapo_py.layouts.check import checked
from slapo_py.layouts.record import record
from slapo_py.layouts.simulate import simulate
from tests.layouts.plans import PLANS


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.drop(F.gelu(self.up(x)))))


class AddsOne(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(F.gelu(self.up(x))) + 1)


class Literal(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(x.shape[0], x.shape[1], 4, 8)
        return self.down(F.gelu(heads).flatten(2))


class DropsPartial(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.down(F.gelu(self.up(x)))))


def mlp(kind: type[Mlp] = Mlp, *, up: bool = True, down: bool = True) -> slapo.Schedule:
    """Split by hand; up, down: whether the two collectives are there."""
    torch.manual_seed(0)
    sch = slapo.create_schedule(kind(), (torch.randn(4, 6, 16),))
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")
    if up:
        sch["up"].sync("input", None, grad="all_reduce")
    if down:
        sch["down"].sync("output", "all_reduce")
    return sch


def sequence() -> slapo.Schedule:
    """Sequence parallelism, as auto_sync writes it, without the summed gradients of the norm."""
    sch = mlp(up=False, down=False)
    sch["up"].sync("input", "all_gather", dim=1)
    sch["down"].sync("output", "reduce_scatter", dim=1)
    return sch


def llama(change: Callable[[slapo.Schedule], None] = lambda sch: None) -> slapo.Schedule:
    plan = PLANS["llama"]
    sch = plan.schedule().auto_sync("tp")
    change(sch)
    return sch


FAULTS: dict[str, tuple[Callable[[], slapo.Schedule], str, str]] = {
    "missing forward all-reduce": (
        lambda: mlp(down=False), "missing in forward",
        'output 0 of "down" is P and is needed R: all_reduce is missing. '
        'Write: sch["down"].sync("output", "all_reduce")',
    ),
    "missing backward all-reduce": (
        lambda: mlp(up=False), "missing in backward",
        'the gradient of input 0 of "up" is P and is needed R: all_reduce is missing. '
        'Write: sch["up"].sync("input", None, grad="all_reduce")',
    ),
    "doubled forward": (
        lambda: mlp()["norm"].sync("input", "all_reduce").root.cursor(""), "wrong in forward",
        'all_reduce at input 0 of "norm": the value is R, not a partial sum: it would be added up once for each rank',
    ),
    "doubled backward": (
        lambda: mlp()["norm"].sync("input", None, grad="all_reduce").root.cursor(""), "doubled in backward",
        'input 0 of "norm": all_reduce of a gradient that is R: it becomes 2 times too large. Leave it out.',
    ),
    "x + 1 on a partial sum": (
        lambda: mlp(AddsOne, down=False), "missing in forward", 'output 0 of "down" is P and is needed R',
    ),
    "dropout on a partial sum": (
        lambda: mlp(DropsPartial, down=False), "missing in forward", 'output 0 of "down" is P and is needed R',
    ),
    "a literal size that belongs to no attribute": (
        lambda: mlp(Literal), "literal size",
        "is given the literal size 4, and a rank needs 2. It comes from no attribute",
    ),
    "gradient of a whole parameter": (
        lambda: llama(lambda sch: sch["model.norm"].reduce_grad("weight")), "gradient summed twice",
        'the gradient of the parameter "model.norm.weight" is whole already',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_gives_one_message(name: str) -> None:
    make, kind, text = FAULTS[name]
    found = make().check()
    assert [one.kind for one in found] == [kind], [one.message for one in found]
    assert text in found[0].message


def test_what_is_right_is_silent() -> None:
    assert mlp().check() == []
    assert mlp(up=False, down=False).auto_sync("tp").check() == []


def test_the_line_of_a_message_mends_it() -> None:
    sch = mlp(up=False, down=False)
    for _ in range(2):
        line = sch.check()[0].message.partition("Write: ")[2]
        eval(line, {"sch": sch})
    assert sch.check() == []


def test_fused_weights_need_parts() -> None:
    plan = PLANS["gpt2"]
    torch.manual_seed(0)
    sch = slapo.create_schedule(plan.build("sdpa"), plan.inputs())
    sch["transformer.h.0.attn.c_attn"].shard("weight", "bias", dim="out")
    sch["transformer.h.0.attn.c_proj"].shard("weight", dim="in")
    assert 'output 0 of "transformer.h.0.attn.c_attn" is S(2)' in sch.check()[0].message


def test_shard_refuses() -> None:
    sch = slapo.create_schedule(Mlp(), (torch.randn(4, 6, 16),))
    with pytest.raises(ArgumentError, match="needs names of parameters"):
        sch["up"].shard(dim=0)
    with pytest.raises(ArgumentError, match="there is no parameter 'weigth' here. .* 'weight'"):
        sch["up"].shard("weigth", dim=0)
    with pytest.raises(ArgumentError, match="axis must be the name of a mesh axis"):
        sch["up"].shard("weight", dim=0, axis="t p")
    with pytest.raises(ArgumentError, match='dim must be a number, "out" or "in"'):
        sch["up"].shard("weight", dim="width")
    with pytest.raises(ShardError, match="has no dim 2"):
        sch["up"].shard("weight", dim=2)
    with pytest.raises(ShardError, match="is said of a Linear, Conv1D or convolution, and this is a LayerNorm"):
        sch["norm"].shard("weight", dim="out")
    with pytest.raises(ShardError, match='a bias has no "in" dim. Leave it whole'):
        sch["down"].shard("weight", "bias", dim="in")
    with pytest.raises(ShardError, match="parts=3 don't fill dim 0, which has 32 elements"):
        sch["up"].shard("weight", dim="out", parts=3)
    sch["up"].shard("weight", dim="out", parts=[8, 8, 16])
    with pytest.raises(ShardError, match=r"'weight' \('up.weight'\) is S\(0, blocks=\(8, 8, 16\)\) on \"tp\" already"):
        sch["up"].shard("weight", dim="in")
    sch["up"].shard("weight", dim="in", axis="ep")


def test_a_tie_is_split_at_both_ends() -> None:
    plan = PLANS["gpt2"]
    sch = plan.schedule()
    with pytest.raises(ShardError, match="already"):
        sch["lm_head"].shard("weight", dim="out")


def test_sync_and_reduce_grad_refuse() -> None:
    sch = slapo.create_schedule(Mlp(), (torch.randn(4, 6, 16),))
    with pytest.raises(ArgumentError, match='at must be "input" or "output"'):
        sch["up"].sync("before", "all_reduce")
    with pytest.raises(ArgumentError, match="value must be None or one of"):
        sch["up"].sync("output", "allreduce")
    with pytest.raises(ArgumentError, match="does nothing"):
        sch["up"].sync("output")
    with pytest.raises(ArgumentError, match="all_gather needs the dim"):
        sch["up"].sync("output", "all_gather")
    with pytest.raises(ArgumentError, match="axis must be the name of a mesh axis"):
        sch["up"].sync("output", "all_reduce", axis="")
    sch["up"].sync("output", "all_reduce")
    with pytest.raises(StepError, match='output 0 has a sync on "tp" already'):
        sch["up"].sync("output", "all_gather", dim=1)
    with pytest.raises(ArgumentError, match="needs names of parameters"):
        sch["norm"].reduce_grad()
    with pytest.raises(ArgumentError, match="there is no parameter 'wieght' here"):
        sch["norm"].reduce_grad("wieght")
    sch["norm"].reduce_grad("weight")
    with pytest.raises(StepError, match="the gradient of 'weight' is summed over \"tp\" already"):
        sch["norm"].reduce_grad("weight")


def test_auto_sync_refuses_what_has_no_place_and_changes_nothing() -> None:
    sch = mlp(Literal, up=False, down=False)
    before = (str(sch), str(sch.history))
    with pytest.raises(PlacementError, match="is given the literal size 4, and a rank needs 2"):
        sch.auto_sync("tp")
    with pytest.raises(PlacementError, match="pins has 'nothing', and no tensor enters"):
        sch.auto_sync("tp", pins={"nothing": slapo.Shard(1)})
    assert (str(sch), str(sch.history)) == before


class Flat(nn.Module):
    """Without submodules: there is no border between its products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 32))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down).softmax(-1)


def test_auto_sync_refuses_what_no_sync_can_mend() -> None:
    sch = slapo.create_schedule(Flat(), (torch.randn(4, 16),))
    sch.shard("up", dim=0).shard("down", dim=1)
    with pytest.raises(PlacementError, match="linear is P, and softmax needs it R .* at no border of a module"):
        sch.auto_sync("tp")
    wrong = mlp()
    wrong["norm"].sync("input", "all_reduce")
    with pytest.raises(PlacementError, match="it would be added up once for each rank. Leave it out"):
        wrong.auto_sync("tp")


def test_uneven_heads_are_said() -> None:
    class Heads(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.up(x).view(*x.shape[:2], -1, 16).softmax(-1)
            return self.down(heads.flatten(2))

    assert mlp(Heads).check(ranks=2) == []
    found = mlp(Heads).check(ranks=4)  # 2 heads
    assert found[0].message.startswith('output 0 of "up" is S(2) and is needed R: all_gather is missing.')


@pytest.mark.parametrize("padding", [None, -1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_table_of_seven_rows(ranks: int, padding: int | None) -> None:
    """An uneven split: each rank looks where its own rows begin."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=padding), nn.LayerNorm(4))
    ids = torch.arange(7)[None]
    sch = slapo.create_schedule(model, (ids,))
    sch["0"].shard("weight", dim=0)
    sch.auto_sync("tp", ranks=ranks)
    typing, faults = checked(sch, record(sch), "tp", ranks)
    assert faults == []
    found = simulate(typing, model, {"input": ids})
    expected = model(ids)
    seed = torch.randn_like(expected)
    expected.backward(seed)
    torch.autograd.backward(found.outputs[0], [seed] * ranks)
    for one in found.outputs[0]:
        torch.testing.assert_close(one, expected)
    torch.testing.assert_close(found.gradient("0.weight"), model[0].weight.grad)


def test_a_table_that_rescales_its_rows_is_refused() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)), (torch.arange(8)[None],))
    sch["0"].shard("weight", dim=0)
    with pytest.raises(PlacementError, match='embedding in "0" takes no such placements'):
        sch.auto_sync("tp")


def test_a_refused_selection_leaves_no_sync_behind() -> None:
    sch = mlp(up=False, down=False)
    sch["down"].sync("output", "all_reduce")
    before = [one.message for one in sch.check()]
    with pytest.raises(StepError, match="has a sync"):
        sch.select("[ud]*").sync("output", "all_reduce")  # up, down, drop: the second has one
    assert [one.message for one in sch.check()] == before and "up" not in sch.root.syncs


def test_what_is_split_is_not_replaced() -> None:
    sch = mlp()
    with pytest.raises(slapo.ScheduleError, match="shard"):
        sch["up"].replace(nn.Linear(16, 32))
