"""The rewriter: groups of nodes become calls, and whatever has effects keeps its order."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from slapo_py.errors import StepError
from slapo_py.patterns.effects import draws, is_barrier
from slapo_py.patterns.rewrite import Group, contract


def traced(function: Callable[..., Any]) -> tuple[nn.Module, fx.Graph, dict[str, fx.Node]]:
    module = fx.symbolic_trace(function)
    return module, module.graph, {node.name: node for node in module.graph.nodes}


def rewritten(
    function: Callable[..., Any], groups: Sequence[tuple[list[str], list[str]]], new: Callable[..., Any], *given: str
) -> fx.GraphModule:
    """A function whose nodes of these names are calls of `new` with the nodes `given`."""
    module, graph, names = traced(function)
    made = [Group(tuple(names[n] for n in nodes), tuple(names[n] for n in outputs)) for nodes, outputs in groups]
    inputs = [one.split(",") for one in given]

    def make(graph: fx.Graph, index: int, node_of: Callable[[fx.Node], fx.Node]) -> fx.Node:
        return graph.call_function(new, tuple(node_of(names[one]) for one in inputs[index]))

    found, calls = contract(module, graph, made, make)
    found.lint()
    assert [call.target for call in calls] == [new] * len(groups)
    assert list(names.values()) == list(graph.nodes)  # the old graph is as it was
    return fx.GraphModule(module, found)


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + y, x * y


def test_several_outputs_are_items_of_one_call_and_readers_between_them_move_behind_it() -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        add = x + y
        reader = torch.tanh(add)
        mul = x * y
        return reader - mul

    new = rewritten(forward, [(["add", "mul"], ["add", "mul"])], both, "x,y")
    x, y = torch.randn(2, 3)
    assert torch.equal(new(x, y), forward(x, y))
    assert [node.name for node in new.graph.nodes] == [
        "x",
        "y",
        "both",
        "getitem",
        "getitem_1",
        "tanh",
        "sub",
        "output",
    ]


def test_a_later_group_may_take_the_output_of_an_earlier_one() -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(torch.relu(x + y) + y)

    def added(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    groups = [(["add", "relu"], ["relu"]), (["add_1", "tanh"], ["tanh"])]
    new = rewritten(forward, groups, added, "x,y", "relu,y")
    x, y = torch.randn(2, 3)
    assert torch.equal(new(x, y), x + y + y)


def test_a_match_that_needs_its_own_result_is_refused() -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(torch.sin(torch.relu(x)))

    with pytest.raises(StepError, match="'tanh' needs a value that is computed from the match itself"):
        rewritten(forward, [(["relu", "tanh"], ["relu", "tanh"])], both, "x,x")


def in_place(x: Tensor, y: Tensor) -> Tensor:
    a = torch.relu(x)
    y.add_(1)
    return torch.tanh(a) * y


def test_nothing_moves_past_a_write() -> None:
    with pytest.raises(StepError, match="'add_' .* writes in place or switches a mode, so they can't become one call"):
        rewritten(in_place, [(["relu", "tanh"], ["tanh"])], torch.sin, "x")


def test_nothing_moves_past_a_switch_of_a_mode() -> None:
    module, graph, names = traced(lambda x: torch.tanh(torch.relu(x)))
    with graph.inserting_before(names["tanh"]):
        graph.call_function(torch._C._set_grad_enabled, (False,))
    group = Group((names["relu"], names["tanh"]), (names["tanh"],))
    with pytest.raises(StepError, match="'_set_grad_enabled' .* writes in place or switches a mode"):
        contract(module, graph, [group], lambda graph, index, node_of: graph.call_function(torch.sin))


def drawn_between(x: Tensor) -> Tensor:
    first = F.dropout(x, 0.5)
    other = F.dropout(x, 0.5)
    second = F.dropout(first, 0.5)
    return second + other


def drawn_before_and_moved(x: Tensor) -> Tensor:
    relu = torch.relu(x)
    other = F.dropout(relu, 0.5)
    second = F.dropout(x, 0.5)
    return second + other + relu


@pytest.mark.parametrize(
    ("function", "nodes", "outputs"),
    [
        (drawn_between, ["dropout", "dropout_2"], ["dropout_2"]),
        (drawn_before_and_moved, ["relu", "dropout_1"], ["relu", "dropout_1"]),
    ],
)
def test_draws_keep_their_order(function: Callable[..., Any], nodes: list[str], outputs: list[str]) -> None:
    with pytest.raises(StepError, match="may draw random numbers between those that"):
        rewritten(function, [(nodes, outputs)], both, "x,x")


def test_two_moved_draws_keep_theirs() -> None:
    def forward(x: Tensor) -> Tensor:
        relu = torch.relu(x)
        first = F.dropout(relu, 0.5)
        second = F.dropout(x, 0.5)
        return torch.tanh(x) + relu + first + second

    with pytest.raises(StepError, match="'dropout_1' .* may draw"):
        rewritten(forward, [(["relu", "tanh"], ["relu", "tanh"])], both, "x,x")


def test_a_draw_that_does_not_change_its_order_moves() -> None:
    def forward(x: Tensor) -> Tensor:
        relu = torch.relu(x)
        first = F.dropout(relu, 0.5)
        second = F.dropout(relu, 0.5)
        return torch.tanh(x) + first + second

    def same(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x), torch.tanh(y)

    new = rewritten(forward, [(["relu", "tanh"], ["relu", "tanh"])], same, "x,x")
    x = torch.randn(50)
    torch.manual_seed(0)
    expected = forward(x)
    torch.manual_seed(0)
    assert torch.equal(new(x), expected)


class Children(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.act = nn.Linear(2, 2), nn.Dropout(0.1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(self.fc(x)))


def test_effects_of_nodes() -> None:
    module = Children()
    graph = fx.Tracer().trace(module)
    by = {node.name: node for node in graph.nodes}
    assert [draws(by[name], module) for name in ("fc", "drop", "x")] == [False, True, False]
    assert [is_barrier(by[name], module) for name in ("fc", "drop", "act", "x")] == [False, False, True, False]


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "drawing", "barrier"),
    [
        (operator.add, (1,), {}, False, False),
        (operator.iadd, (1,), {}, False, True),
        (torch.rand_like, (), {}, True, False),
        (F.dropout, (), {}, True, False),
        (F.relu, (), {"inplace": True}, False, True),
        (F.scaled_dot_product_attention, (0, 0), {}, False, False),
        (F.scaled_dot_product_attention, (0, 0), {"dropout_p": 0.1}, True, False),
        (torch.add, (1,), {"out": 1}, False, True),
        (torch.nn.functional.normalize, (), {"out": None}, False, False),
        (both, (1,), {}, True, False),
        ("bernoulli", (), {}, True, False),
        ("add_", (1,), {}, False, True),
        ("view", (1,), {}, False, False),
        (torch._C._set_grad_enabled, (), {}, True, True),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_effects_of_calls(target: Any, args: Any, kwargs: Any, drawing: bool, barrier: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    kind = "call_method" if isinstance(target, str) else "call_function"
    node = graph.create_node(kind, target, (x, *args), kwargs)
    assert (draws(node, nn.Module()), is_barrier(node, nn.Module())) == (drawing, barrier)


def test_the_name_of_a_node_that_is_gone_is_not_given_again() -> None:
    """What is checked of a node is known by its name: it must not be asked of another one."""

    def add(x: Tensor) -> Tensor:
        return x + 1

    new = rewritten(lambda x: torch.tanh(x + 1), [(["add"], ["add"])], add, "x")
    assert [node.name for node in new.graph.nodes if node.target is add] == ["add_1"]
    again = contract(new, new.graph, [Group((_named(new, "add_1"),), (_named(new, "add_1"),))], _calls(add))[0]
    assert [node.name for node in again.nodes if node.target is add] == ["add_2"]


def _named(module: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in module.graph.nodes if node.name == name)


def _calls(function: Callable[..., Any]) -> Any:
    return lambda graph, index, node_of: graph.call_function(function, (next(iter(graph.nodes)),))
