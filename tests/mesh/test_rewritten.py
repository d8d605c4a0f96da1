"""Schedules that trace, fuse and regroup what they split, on real ranks: no call misses its trace."""

from dataclasses import replace

import pytest

import slapo_py as slapo
from slapo_py.distributed.mesh import Mesh
from tests.layouts.plans import PLANS
from tests.layouts.test_commute import CASES, GPT2, LLAMA
from tests.mesh.conftest import Run
from tests.mesh.whole import compare_built
from tests.slow import slow_but

QUICK = [
    ("llama", "trace layers"),
    ("llama", "swiglu"),
    ("gpt2", "bias_gelu"),
    ("gpt2", "trace attention"),
    ("gpt2", "trace flat"),
]


@pytest.mark.parametrize(("family", "name"), slow_but(QUICK, CASES))
def test_a_rewritten_schedule(family: str, name: str, on_ranks: Run) -> None:
    for error, where, misses in on_ranks(2, _rewritten, family, name):
        assert error < 1e-5, where  # the kernels are made for float32
        assert not misses


def _rewritten(family: str, name: str) -> tuple[float, str, dict[str, int]]:
    plan = PLANS[family]
    if name == "masked_softmax":
        plan = replace(plan, attention="eager")
    sch = slapo.create_schedule(plan.model().eval(), plan.inputs())
    (LLAMA if family == "llama" else GPT2)[name](sch)
    plan.split(sch)
    sch.auto_sync("tp")
    found = compare_built(sch, slapo.build(sch, mesh={"tp": 2}), Mesh.of({"tp": 2}))
    return found.error, found.where, found.misses
