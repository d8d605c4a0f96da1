"""A built model takes batches of other sizes than its example, also where its blocks follow the batch."""

import pytest
import torch

import slapo_py as slapo
from tests.layouts.plans import PLANS
from tests.mesh import whole
from tests.mesh.conftest import Run


def errors(name: str) -> list[float]:
    sch = whole.schedule(name, True, 2, torch.float64)
    built = slapo.build(sch, mesh={"tp": 2})
    found = []
    for batch, length in ((2, 8), (3, 8), (3, 12), (1, 4)):
        inputs = PLANS[name].inputs(batch, length)
        expected = whole.first_tensor(sch.original(**inputs))
        found.append(float((whole.first_tensor(built(**inputs)) - expected).detach().abs().max()))
    return found


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_batches_of_other_sizes(name: str, on_ranks: Run) -> None:
    for found in on_ranks(2, errors, name):
        assert max(found) <= 1e-12
