"""Blocks as many as the batch has rows: where the number comes from, and what is refused."""

import re

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.build.rows import rows_noted
from slapo_py.errors import ArgumentError, PlacementError
from slapo_py.layouts.checking.check import check
from slapo_py.layouts.inference.state import said
from slapo_py.layouts.placement import S
from slapo_py.layouts.recording.record import record
from slapo_py.layouts.recording.rows import Rows, around, follows_batch, parts_of


class Flat(nn.Module):
    """An MLP over batch and sequence in one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x.flatten(0, 1)).relu())
        return y.unflatten(0, x.shape[:2]) + x


def schedule(batch: int = 2, **keywords: object) -> slapo.Schedule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), Flat(), nn.LayerNorm(4))
    sch = slapo.create_schedule(model, (torch.randn(batch, 6, 4),))
    sch["1.up"].shard("weight", "bias", dim="out")
    sch["1.down"].shard("weight", dim="in")
    return sch


def borders(sch: slapo.Schedule) -> dict[str, torch.fx.Node]:
    return {said(node): node for node in record(sch).graph.nodes if said(node).startswith(("input", "output"))}


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_the_rows_are_those_of_the_module_around(batch: int) -> None:
    found = borders(schedule(batch))
    up, flat = found['input 0 of "1.up"'], found['input 0 of "1"']
    assert around(up) is flat and around(found['output 0 of "1.down"']) is flat
    assert around(found['input 0 of ""']) is None
    assert follows_batch(up, S(0, batch)) and parts_of(up, S(0, batch)) == "batch"
    assert not follows_batch(up, S(0, batch + 1)) and parts_of(up, S(1, 2)) == 2
    assert not follows_batch(flat, S(0, batch))  # batch and sequence are two dims here


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_auto_sync_writes_them(batch: int) -> None:
    sch = schedule(batch).auto_sync("tp", pins={"1": S(1)})
    assert [
        str(one).partition(".sync")[2] for one in sch.history if one.path == "1.up" and one.primitive == "sync"
    ] == ['("input", value="all_gather", grad="reduce_scatter", dim=0, parts="batch")']
    assert sch.check() == []


def by_hand(parts: "int | str", batch: int) -> slapo.Schedule:
    sch = schedule(batch)
    sch["1"].sync("input", "split", grad="all_gather", dim=1)
    sch["1.up"].sync("input", "all_gather", grad="reduce_scatter", dim=0, parts=parts)
    sch["1.down"].sync("output", "reduce_scatter", grad="all_gather", dim=0, parts=parts)
    sch["2"].sync("input", "all_gather", grad="split", dim=1)
    return sch


@pytest.mark.parametrize("batch", [2, 3])
def test_the_number_of_one_batch_is_a_fault(batch: int) -> None:
    assert check(by_hand("batch", batch)) == []
    found = [one.message for one in check(by_hand(2, 2))]
    assert len(found) == 2
    assert 'input 0 of "1.up": parts=2 is the number of rows of the example\'s batch' in found[0]
    assert found[0].endswith(
        'Write instead: sch["1.up"].sync("input", "all_gather", grad="reduce_scatter", dim=0, parts="batch")'
    )


def test_the_wrong_number_of_blocks_is_a_fault() -> None:
    sch = by_hand("batch", 2)
    sch["1.up"].root.syncs.pop("1.up")
    sch["1.up"].sync("input", "all_gather", grad="reduce_scatter", dim=0, parts=3)
    (found,) = check(sch)
    assert 'all_gather on dim 0 at input 0 of "1.up": the value is S(0, blocks=2)' in found.message


def test_it_is_refused_elsewhere() -> None:
    sch = schedule()
    for given in ({"dim": 1, "parts": "batch"}, {"dim": 0, "parts": "rows"}):
        with pytest.raises(ArgumentError, match='parts must be a number, or "batch" with dim=0, found parts='):
            sch["1.up"].sync("input", "all_gather", **given)  # type: ignore[arg-type]


def test_a_module_around_is_needed() -> None:
    sch = schedule()
    sch.sync("input", "split", grad="all_gather", dim=0, parts="batch")
    message = 'sync at input 0 of "": parts="batch" is the size of dim 0 of the first tensor that enters the module'
    with pytest.raises(PlacementError, match=re.escape(message)):
        check(sch)


def test_a_collective_whose_module_around_does_not_run_is_refused() -> None:
    with pytest.raises(
        PlacementError, match="here: its blocks are as many as the batch has rows, and the module around"
    ):
        rows_noted("here")


def test_rows_are_numbers() -> None:
    assert S(0, Rows(3)) == S(0, 3) and str(S(0, Rows(3))) == "S(0, blocks=3)"
