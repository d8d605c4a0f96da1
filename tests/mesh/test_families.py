"""Every family on real ranks: outputs and gradients of one process, and no more collectives than planned."""

import pytest
import torch

from tests.layouts.plans import PLANS
from tests.mesh.conftest import Run
from tests.mesh.whole import compare
from tests.slow import slow_but

EVERY = [(name, sequence) for name, plan in PLANS.items() for sequence in (False, *[True] * bool(plan.pins))]
QUICK = [("llama", False), ("gpt2", True), ("opt", True), ("t5", False), ("mixtral", False), ("wide_resnet", False)]
CASTS = ("gemma2", "mixtral")
"""Cast to float32 by themselves."""


@pytest.mark.parametrize(("name", "sequence"), slow_but(QUICK, EVERY))
def test_two_ranks(name: str, sequence: bool, on_ranks: Run) -> None:
    dtype = torch.float32 if name in CASTS else torch.float64
    for found in on_ranks(2, compare, name, sequence, {"tp": 2}, dtype):
        assert found.error <= (1e-5 if name in CASTS else 1e-12), found.where
        assert not found.misses
        kinds = {"all_gather", "reduce_scatter"} if sequence else {"all_reduce"}
        assert kinds <= set(found.calls)
