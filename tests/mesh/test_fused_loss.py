"""A fused loss over classes that are split: the checker, the plan, the simulation, and real ranks agree."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.build.local_operations import Loss
from slapo_py.distributed.mesh import Mesh
from slapo_py.errors import PlacementError, VerificationError
from slapo_py.kernels import find_kernel
from slapo_py.layouts.simulating import local
from slapo_py.rewriting import Called
from tests.mesh.conftest import Run
from tests.mesh.whole import compare_built


class Language(nn.Module):
    def __init__(self, words: int, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, 8), nn.Linear(8, words)
        self.options = options

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten(), **self.options)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels)


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 12, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels)


def schedule(words: int, first: str = "shard", kernel: str = "cross_entropy", **options: Any) -> slapo.Schedule:
    """A language model with its classes split, and its loss fused before or after that."""
    torch.manual_seed(0)
    ids, labels = torch.randint(words, (2, 5)), torch.randint(words, (2, 5))
    labels[0, 1] = options.get("ignore_index", -100)
    sch = slapo.create_schedule(Language(words, **options).double(), {"ids": ids, "labels": labels})
    if first == "fuse":
        sch.fuse(kernel)
    sch["table"].shard("weight", dim=0)
    sch["head"].shard("weight", "bias", dim="out")
    if first == "shard":
        sch.fuse(kernel)
    return sch


def messages(sch: slapo.Schedule) -> list[str]:
    return [one.message for one in sch.check("tp")]


OPTIONS: list[dict[str, Any]] = [{}, {"reduction": "sum", "ignore_index": 3}, {"reduction": "none"}]


@pytest.mark.parametrize(
    ("words", "first", "options"),
    [(12, "fuse", OPTIONS[0]), (13, "shard", OPTIONS[0]), (13, "fuse", OPTIONS[1]), (12, "fuse", OPTIONS[2])],
)
def test_ranks_compute_what_one_process_does(words: int, first: str, options: dict[str, Any], on_ranks: Run) -> None:
    for error, where, gathered, planned, own in on_ranks(2, _built, words, first, options):
        assert error < 1e-12, where
        assert gathered == planned == 2 * 3 * 10 * 8  # three numbers of each of ten rows, to one other rank
        assert own == ["slice_parts", "slice_gradient"]


def _built(words: int, first: str, options: dict[str, Any]) -> tuple[float, str, int, int, list[str]]:
    sch = schedule(words, first, **options).auto_sync("tp")
    planned = sum(one.bytes for one in slapo.plan(sch, {"tp": 2}).traffic if one.kind == "all_gather")
    built = slapo.build(sch, mesh={"tp": 2})
    found = compare_built(sch, built, Mesh.of({"tp": 2}))
    every = [Counter[str]() for _ in range(2)]
    dist.all_gather_object(every, found.sent)
    (loss,) = (
        one.target.function
        for one in slapo.tracing.trace_of(built).graph.nodes
        if isinstance(one.target, Called) and isinstance(one.target.function, Loss)
    )
    own = [loss.by.parts.__name__, loss.by.gradient.__name__]
    return found.error, found.where, sum(one["all_gather"] for one in every), planned, own


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_checker_asks_for_no_gather(options: dict[str, Any]) -> None:
    sch = schedule(12, **options)
    assert not any("all_gather" in one for one in messages(sch))
    assert messages(sch.auto_sync("tp")) == []
    gathers = [one.bytes for one in slapo.plan(sch, {"tp": 2}).traffic if one.kind == "all_gather"]
    assert gathers == [2 * 3 * 10 * 8]  # the exchange inside of the loss


def test_the_simulation_computes_what_one_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sch = schedule(12).auto_sync("tp")
    sch.verify(mesh={"tp": 2}, simulate=True)
    right = local.cross_entropy_in_lock_step
    monkeypatch.setattr(local, "cross_entropy_in_lock_step", lambda *given: [1.01 * one for one in right(*given)])
    with pytest.raises(VerificationError):
        sch.verify(mesh={"tp": 2}, simulate=True)


def test_label_smoothing_takes_the_classes_whole() -> None:
    (found,) = [one for one in messages(schedule(12, label_smoothing=0.1)) if "all_gather" in one]
    assert found == (
        'output 0 of "head" is S(2) and is needed R: all_gather is missing. '
        'Write: sch["head"].sync("output", "all_gather", dim=2)'
    )


@pytest.mark.parametrize("fused", [False, True])
def test_classes_before_other_dims_are_taken_whole(fused: bool) -> None:
    sch = slapo.create_schedule(Pixels(), (torch.randn(2, 3, 4, 4), torch.randint(12, (2, 4, 4))))
    sch["head"].shard("weight", "bias", dim=0)
    if fused:
        sch.fuse("cross_entropy")
    assert any('Write: sch["head"].sync("output", "all_gather", dim=1)' in one for one in messages(sch))


def test_one_row() -> None:
    sch = slapo.create_schedule(Head().double(), (torch.randn(8).double(), torch.tensor(9)))
    sch["head"].shard("weight", "bias", dim="out")
    sch.auto_sync("tp")
    assert not any(one.kind == "all_gather" and one.bytes > 48 for one in slapo.plan(sch, {"tp": 2}).traffic)
    sch.verify(mesh={"tp": 2}, simulate=True)


def test_options_by_position_are_those_of_the_kernel() -> None:
    names = local.loss_names(find_kernel("cross_entropy").op)
    assert local.loss_arguments(names, ("x", "y", 3, "sum", 0.1, 0.0), {"weight": None}) == {
        "input": "x", "target": "y", "ignore_index": 3, "reduction": "sum", "label_smoothing": 0.1, "weight": None
    }  # fmt: skip
    assert local.loss_arguments(local.loss_names(F.cross_entropy), ("x",), {"target": "y", "ignore_index": 3}) == {
        "input": "x", "target": "y", "ignore_index": 3
    }  # fmt: skip


def test_linear_cross_entropy_takes_the_weight_whole() -> None:
    x, labels = torch.randn(4, 8), torch.randint(12, (4,))
    sch = slapo.create_schedule(Head(), (x, labels))
    sch["head"].shard("weight", "bias", dim="out")
    sch.fuse("linear_cross_entropy")
    message = (
        r'kernel linear_cross_entropy_as_logits takes no such placements: .*the parameter "head.weight" S\(0\).* '
        "Called so, this kernel takes only whole values: don't split what it is given."
    )
    with pytest.raises(PlacementError, match=message):
        sch.auto_sync("tp")
