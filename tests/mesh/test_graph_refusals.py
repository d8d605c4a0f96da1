"""What the graphs of a rank refuse: plans that no schedule of ours makes, handed in as they are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import slapo_py as slapo
from slapo_py.build.borders import Move
from slapo_py.build.inlined import put_into_graphs
from slapo_py.build.on_mesh import _moves
from slapo_py.build.rank_graph import Change, _changed, _moved, _trace
from slapo_py.distributed.collectives import Ranks
from slapo_py.errors import BuildError, PlacementError, TraceError
from slapo_py.layouts.inference.state import Conversion
from slapo_py.layouts.placement import P, R, Shard
from slapo_py.layouts.recording.borders import ENTER, border

RANKS = Ranks("tp", 2, 0)


def graph_of(*calls: Any) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(4, 8)
    nodes = [graph.call_function(function, (x, *args)) for function, *args in calls]
    for node in nodes:
        node.meta["val"] = torch.ones(4, 8)
    graph.output(tuple(nodes))
    return graph, nodes


def test_a_conversion_inside_of_a_forward() -> None:
    _, (node,) = graph_of((torch.relu,))
    typing: Any = SimpleNamespace(conversions=lambda: [Conversion(node, P, R)])
    with pytest.raises(BuildError, match="relu is converted for all that read it, inside a forward"):
        _moved(typing, set())


def test_a_forward_that_cannot_become_a_graph() -> None:
    def refuse(path: str) -> None:
        raise TraceError("a branch on data")

    place: Any = SimpleNamespace(
        root=SimpleNamespace(module=lambda path: nn.Linear(2, 2), tracer=SimpleNamespace(trace=refuse))
    )
    with pytest.raises(BuildError, match="has to become a graph, and can't. a branch on data"):
        _trace(place, "head", "embedding", "tp")


def test_a_graph_without_the_operation() -> None:
    _, (node,) = graph_of((torch.relu,))
    trace: Any = SimpleNamespace(graph=graph_of((torch.tanh,))[0])
    with pytest.raises(BuildError, match="the graph has 0 calls of relu where 1 ran"):
        _changed(trace, "head", {node: Change(function=torch.tanh)}, "tp")


def test_one_call_that_differs_from_the_next() -> None:
    _, (one, other) = graph_of((torch.relu,), (torch.relu,))
    trace: Any = SimpleNamespace(graph=graph_of((torch.relu,))[0])
    with pytest.raises(BuildError, match="in one call of this module, and in another one not"):
        _changed(trace, "head", {one: Change(function=torch.tanh), other: Change()}, "tp")


def test_a_border_that_is_crossed_in_two_ways() -> None:
    graph, (one, _) = graph_of((border, ENTER, "head", 0), (border, ENTER, "head", 0))
    typing: Any = SimpleNamespace(graph=graph, at_node={one: Conversion(one, P, R)})
    with pytest.raises(BuildError, match='goes through a collective in one call of "head", and in another one not'):
        _moves(typing, RANKS, {})


def test_a_border_that_no_value_passes() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.randn(4, 8),))
    sch.trace(flatten=True)
    move = Move(RANKS, R, R, P, R, (4, 8), "")
    with pytest.raises(BuildError, match='at input 7 of "0", which is part of the graph of "", and no value passes'):
        put_into_graphs(sch, {("0", ENTER): ((7, move),)})


def test_sizes_that_do_not_divide() -> None:
    gather = Move(RANKS, Shard(0), R, None, None, (5, 8), "output 0")
    with pytest.raises(PlacementError, match="dim 0 has a part of 2 elements and was planned with 5"):
        gather(torch.ones(2, 8))
    cut = Move(RANKS, R, Shard(0), None, None, (4, 8), "output 0")
    with pytest.raises(PlacementError, match="dim 0 has 5 elements and was planned with 4"):
        cut(Tensor(5, 8))
