"""torch.compile of what was built on a mesh: one graph for a layer, collectives inside."""

import warnings

import pytest
import torch

import slapo_py as slapo
from slapo_py.distributed.mesh import Mesh
from tests.mesh.conftest import Run
from tests.mesh.whole import compare_built, schedule


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_a_layer_is_one_graph(sequence: bool, on_ranks: Run) -> None:
    for error, where, graphs in on_ranks(2, _compiled, sequence, timeout=300):
        assert error < 1e-9, where
        assert graphs == 1 + sequence, "layers that are alike share one; the first of a sequence also splits its input"


def _compiled(sequence: bool) -> tuple[float, str, int]:
    sch = schedule("llama", sequence, 2, torch.float64)
    built = slapo.build(sch, mesh={"tp": 2})
    torch._dynamo.reset()
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # of torch's own compiler
    warnings.filterwarnings("ignore", message=".*autograd.function.Function'> should not be instantiated")
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        seen.append(len(graph.graph.nodes))
        return graph

    for layer in built.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    found = compare_built(sch, built, Mesh.of({"tp": 2}))
    return found.error, found.where, len(seen)
