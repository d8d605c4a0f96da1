"""Every family on real ranks: outputs and gradients of one process, and no more collectives than planned."""

import pytest
import torch

from tests.layouts.plans import PLANS
from tests.mesh.conftest import Run
from tests.mesh.whole import compare

CASTS = ("gemma2", "mixtral")
"""Cast to float32 by themselves."""


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", PLANS)
def test_two_ranks(name: str, sequence: bool, on_ranks: Run) -> None:
    if sequence and not PLANS[name].pins:
        pytest.skip("without a sequence")
    dtype = torch.float32 if name in CASTS else torch.float64
    for found in on_ranks(2, compare, name, sequence, {"tp": 2}, dtype):
        assert found.error <= (1e-5 if name in CASTS else 1e-12), found.where
        assert not found.misses
        kinds = {"all_gather", "reduce_scatter"} if sequence else {"all_reduce"}
        assert kinds <= set(found.calls)
