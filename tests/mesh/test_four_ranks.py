"""Four ranks: tp 4, and dp 2 x tp 2. What is sent is what `slapo.plan` says, and training is that of one process."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

import slapo_py as slapo
from slapo_py.distributed.mesh import Mesh
from tests.mesh.conftest import Run
from tests.mesh.training import train
from tests.mesh.whole import compare, compare_built, schedule

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_tp_4(name: str, sequence: bool, on_ranks: Run) -> None:
    for found in on_ranks(4, compare, name, sequence, {"tp": 4}, torch.float64):
        assert found.error <= 1e-12, found.where


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_the_plan_is_what_is_sent(name: str, sequence: bool, on_ranks: Run) -> None:
    for error, planned, calls, sent in on_ranks(4, _planned, name, sequence):
        assert error <= 1e-12
        assert calls == {kind: count for kind, (count, _) in planned.items()}
        assert sent == {kind: size for kind, (_, size) in planned.items()}


def _planned(name: str, sequence: bool) -> tuple[float, dict[str, tuple[int, int]], dict[str, int], dict[str, int]]:
    """Of one tensor-parallel group: the plan's calls and bytes by kind, and what its ranks have counted."""
    sizes = {"dp": 2, "tp": 2}
    sch = schedule(name, sequence, 2, torch.float64)
    calls: Counter[str] = Counter()
    bytes_: Counter[str] = Counter()
    for one in slapo.plan(sch, mesh=sizes).traffic:
        calls[one.kind] += one.count
        bytes_[one.kind] += one.bytes
    mesh = Mesh.of(sizes)
    found = compare_built(sch, slapo.build(sch, mesh=sizes), mesh)
    every = [Counter[str]() for _ in range(2)]
    dist.all_gather_object(every, found.sent, group=mesh.group("tp"))
    return (
        found.error,
        {kind: (calls[kind], bytes_[kind]) for kind in calls},
        dict(found.calls),
        dict(sum(every, Counter())),
    )


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_training_on_dp_2_tp_2(name: str, kind: str, on_ranks: Run) -> None:
    for error, where, differ in on_ranks(4, _train, name, kind):
        assert error < 1e-9, where
        assert not differ


def _train(name: str, kind: str) -> tuple[float, str, list[str]]:
    return train(name, {"dp": 2, "tp": 2}, sequence=True, clip=0.5, data_parallel=kind)
