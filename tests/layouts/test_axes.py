"""Schedules on several mesh axes: each is looked at by itself, and one that splits a part splits what is left of it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import ArgumentError, PlacementError
from slapo_py.layouts.checking.axes import axes_of, outer_of, part_shape, splits_of
from slapo_py.layouts.inference.recorded import divided_of, divided_on
from slapo_py.layouts.placement import S, split
from slapo_py.primitive import TABLE
from tests.layouts.plans import PLANS


class Heads(nn.Module):
    """Four heads of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).view(*x.shape[:2], -1, 4).softmax(-1).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def schedule(*axes: str, kind: type[nn.Module] = Mlp) -> slapo.Schedule:
    torch.manual_seed(0)
    sch = slapo.create_schedule(kind(), (torch.randn(2, 3, 8),))
    for axis in axes:
        sch["up"].shard("weight", "bias", dim="out", axis=axis)
        sch["down"].shard("weight", dim="in", axis=axis)
    return sch


def test_the_axes_of_a_schedule() -> None:
    assert axes_of(schedule().root) == ["tp"]
    sch = schedule("ep", "tp")
    assert axes_of(sch.root) == ["ep", "tp"]
    sch["up"].reduce_grad("weight", axis="cp").sync("input", None, grad="all_reduce", axis="dp")
    sch["up"].configure(in_features=slapo.per_rank("pp"))
    assert axes_of(sch.root) == ["ep", "tp", "cp", "dp", "pp"]


def test_an_axis_of_random_numbers_is_used() -> None:
    sch = schedule()
    sch["up"].fork_rng("sp")
    assert axes_of(sch.root) == ["sp"] and sch.check("sp") == []
    with pytest.raises(ArgumentError, match='no step uses the mesh axis "tp"; the schedule uses "sp"'):
        sch.check("tp")


def test_an_axis_that_divides_no_more_is_not_used() -> None:
    sch = schedule("tp")
    sch["up"].configure(in_features=slapo.per_rank("pp"))
    assert axes_of(sch.root) == ["tp", "pp"]
    sch["up"].configure(in_features=8)
    assert axes_of(sch.root) == ["tp"] and not divided_on(sch.root, "pp")["up"]
    assert axes_of(sch.undo().root) == ["tp", "pp"] and axes_of(sch.undo().root) == ["tp"]


@pytest.fixture
def composite() -> Iterator[None]:
    """A primitive that does two steps and fails if asked to."""
    before = dict(TABLE)

    @slapo.register("divide_width")
    class DivideWidth(slapo.Primitive):
        """Divide a width over an axis."""

        def check(self, place: slapo.Schedule, fails: bool = False) -> None:
            """Nothing is asked for."""

        def apply(self, place: slapo.Schedule, fails: bool = False) -> None:
            place["up"].shard("weight", "bias", dim="out").configure(out_features=slapo.per_rank("tp"))
            if fails:
                raise ValueError("no")

    yield
    TABLE.clear()
    TABLE.update(before)
    delattr(slapo.Schedule, "divide_width")


@pytest.mark.usefixtures("composite")
def test_what_a_larger_step_divides_is_divided() -> None:
    sch: Any = schedule()
    with pytest.raises(ValueError, match="no"):
        sch.divide_width(fails=True)
    assert divided_of(sch.root).get("up", {}) == {}
    sch.divide_width()
    assert len(sch.history) == 1 and divided_of(sch.root) == {"up": {"out_features": "tp"}}
    other = slapo.create_schedule(sch.original, sch.root.example_inputs)
    assert divided_of(sch.history.replay(other).root) == divided_of(sch.root)
    assert divided_of(sch.undo().root) == {}


def test_the_earlier_step_is_the_outer_axis() -> None:
    root = schedule("ep", "tp").root
    assert splits_of(root, "up.weight") == [("ep", S(0)), ("tp", S(0))]
    assert outer_of(root, "up.weight", "tp") == [("ep", S(0))] and outer_of(root, "up.weight", "ep") == []
    other = schedule("ep")
    other["up"].shard("weight", dim="in")
    assert outer_of(other.root, "up.weight", "tp") == [], "another dim"


@pytest.mark.parametrize("size", [16, 7, 13])
@pytest.mark.parametrize(("outer", "inner"), [(2, 2), (2, 3), (3, 2)])
def test_a_part_of_a_part(size: int, outer: int, inner: int) -> None:
    """The inner axis splits what the outer one has left, not the whole."""
    whole, splits = torch.arange(size * 2).view(size, 2), [("ep", S(0)), ("tp", S(0))]
    found = []
    for at in range(outer):
        for rank in range(inner):
            part = split(split(whole, S(0), outer)[at], S(0), inner)[rank]
            assert part_shape(whole.shape, splits, {"ep": outer, "tp": inner}, {"ep": at, "tp": rank}) == part.shape
            found.append(part)
    assert torch.equal(torch.cat(found), whole)


def test_every_axis_is_checked() -> None:
    sch = schedule("ep", "tp").auto_sync("tp")
    assert sch.check("tp") == [] and len(sch.check("ep")) == 2
    found = sch.check()
    assert [one.message.partition(":")[0] for one in found] == ['on "ep"'] * 2
    for one in found:
        assert 'axis="ep"' in one.line
        eval(one.line, {"sch": sch})
    assert sch.check() == [] and sch.check(ranks={"ep": 2, "tp": 4}) == []
    steps = len(sch.history)
    assert len(sch.auto_sync("ep").history) == steps


def test_lines_name_the_axis() -> None:
    plan = PLANS["gpt2"]
    sch = slapo.create_schedule(plan.model(), plan.inputs())
    block = sch["transformer.h.0"]
    block["attn.c_attn"].shard("weight", "bias", dim="out", axis="ep")
    block["attn.c_proj"].shard("weight", dim="in", axis="ep")
    (wrong, *_) = sch.check()
    place = "transformer.h.0.attn.c_attn"
    assert wrong.line == f'sch["{place}"].shard("weight", "bias", dim="out", parts=3, axis="ep")'


def test_parts_that_do_not_split_once_more() -> None:
    sch = schedule("ep", "tp").auto_sync("tp").auto_sync("ep")
    assert sch.check(ranks={"ep": 4, "tp": 4}) == []
    (found,) = sch.check(ranks={"ep": 8, "tp": 4})
    assert found.message == (
        'on "tp": the parameter "up.weight" is S(0) on "ep" of size 8: a part has 2 elements of dim 0, and does not '
        'split once more as S(0) on "tp" of size 4. Take smaller axes, or split another dim. The same for 2 more: '
        "up.bias, down.weight."
    )
    with pytest.raises(ArgumentError, match="check: ranks={'tp': 2} has no size of the axis \"ep\". Write"):
        sch.check("tp", ranks={"tp": 2})


def test_heads_that_are_split_twice() -> None:
    sch = schedule("ep", "tp", kind=Heads).auto_sync("tp").auto_sync("ep")
    assert sch.check(ranks=2) == [] and sch.check(ranks={"ep": 1, "tp": 4}) == []
    (found,) = sch.check(ranks={"ep": 2, "tp": 4})
    assert found.message.startswith('on "tp": shard("weight", dim="out") at "up": 2 heads do not divide over axis "tp"')
    assert found.message.endswith("of size 4. Legal sizes: 1, 2.")


def test_an_attribute_is_divided_over_one_axis() -> None:
    plan = PLANS["gpt2"]
    sch = slapo.create_schedule(plan.model(), plan.inputs())
    for axis in ("tp", "ep"):
        sch["transformer.h.0.mlp.c_fc"].shard("weight", "bias", dim="out", axis=axis)
        sch["transformer.h.0.mlp.c_proj"].shard("weight", dim="in", axis=axis)
    sch.auto_sync("tp")
    with pytest.raises(PlacementError, match='\'nf\' of "transformer.h.0.mlp.c_fc" is divided over "tp" already'):
        sch.auto_sync("ep")


def test_an_axis_that_no_step_uses_is_refused() -> None:
    text = 'no step uses the mesh axis "zz"; the schedule uses "model"'
    sch = schedule("model")
    with pytest.raises(ArgumentError, match=f"^check: {text}"):
        sch.check("zz")
    with pytest.raises(ArgumentError, match=f'^auto_sync at "": {text}'):
        sch.auto_sync("zz")
    with pytest.raises(ArgumentError, match='"zz"; the schedule uses "ep" and "tp"'):
        schedule("ep", "tp").check("zz")
    assert schedule().auto_sync("zz", pins={"up": S(1)}).check("zz") == [], "a pin is a word on an axis"
    assert slapo.create_schedule(Mlp(), (torch.randn(2, 3, 8),)).check("zz") == []
