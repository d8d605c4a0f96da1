"""Constants that a forward fills or holds: each rank makes, or takes, the part that goes with a split value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.distributed.mesh import Mesh
from tests.mesh.conftest import Run
from tests.mesh.whole import compare_built


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.width = nn.Linear(8, 16), nn.Linear(16, 8), 16

    def scales(self, y: Tensor) -> Tensor:
        """By an attribute that is divided."""
        return torch.ones(self.width, dtype=y.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y * self.scales(y) + y)


class ByASize(Scaled):
    def scales(self, y: Tensor) -> Tensor:
        return torch.ones(y.shape[-1], dtype=y.dtype)


class InRows(Scaled):
    def scales(self, y: Tensor) -> Tensor:
        return torch.zeros(y.shape[0], self.width, dtype=y.dtype)


class OfAnAttribute(Scaled):
    """A tensor that is no buffer: it stays whole, and each rank takes its part."""

    def __init__(self) -> None:
        super().__init__()
        self.held = torch.linspace(0.5, 2, 16, dtype=torch.float64)

    def scales(self, y: Tensor) -> Tensor:
        return self.held


def _error(kind: Callable[[], Any], traced: bool, ranks: int) -> float:
    torch.manual_seed(0)
    sch = slapo.create_schedule(kind().double(), (torch.randn(4, 8, dtype=torch.float64),))
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")
    sch.auto_sync("tp", ranks=ranks)
    if traced:
        sch.trace()
    mesh = Mesh.of({"tp": ranks})
    return compare_built(sch, slapo.build(sch, mesh=mesh.sizes), mesh, given=(torch.randn(4, 8).double(),)).error


@pytest.mark.parametrize("traced", [False, True], ids=["forward", "graph"])
@pytest.mark.parametrize("kind", [Scaled, ByASize, InRows, OfAnAttribute])
def test_each_rank_makes_its_part(kind: Callable[[], Any], traced: bool, on_ranks: Run) -> None:
    for error in on_ranks(2, _error, kind, traced, 2):
        assert error <= 1e-12
