"""The work of a search grows linearly with the graph: what it looks at is counted."""

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo_py.patterns import call
from slapo_py.patterns.pattern import pattern
from slapo_py.patterns.search import Search

SIZES = (128, 512, 2048)


def blocks(count: int) -> tuple[nn.Module, fx.Graph]:
    """Blocks of a dozen operations in a row; they share one mask and one child of each kind."""
    module = nn.Module()
    module.fc, module.drop, module.norm = nn.Linear(4, 4), nn.Dropout(0.1), nn.LayerNorm(4)
    module.side = nn.Bilinear(4, 4, 4)
    graph = fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    for _ in range(count):
        graph.call_module("side", (x, mask))
        up = graph.call_module("fc", (x,))
        act = graph.call_function(F.gelu, (graph.call_function(operator.add, (up, mask)),))
        shape = graph.call_function(getattr, (act, "shape"))
        view = graph.call_method("view", (act, graph.call_function(operator.getitem, (shape, 0)), -1))
        drop = graph.call_module("drop", (graph.call_function(operator.mul, (view, mask)),))
        x = graph.call_module("norm", (graph.call_function(operator.add, (drop, x)),))
    apart = graph.call_function(torch.exp, (mask,))
    graph.output((x, apart, graph.call_function(operator.sub, (apart, mask))))
    return module, graph


def first_of_many(x: Any, mask: Any) -> Any:
    return F.gelu(mask + x)


def wide(x: Any, mask: Any, residual: Any, w: Any, b: Any) -> Any:
    act = F.gelu(x + mask)
    return F.layer_norm(residual + nn.Dropout(0.1)(act.view(act.shape[0], -1) * mask), (4,), w, b)


def absent_at_the_end(x: Any, mask: Any) -> Any:
    act = F.gelu(x + mask)
    return torch.erfc(act.view(act.size(0), -1) * mask)


def never_connected(x: Any, mask: Any) -> Any:
    act = F.gelu(x + mask)
    return torch.exp(act.view(act.size(0), -1) * mask)


def never_connected_below(x: Any, mask: Any, w: Any, b: Any, r: Any) -> Any:
    return F.layer_norm(nn.Dropout(0.1)(torch.exp(x * mask)) + r, (4,), w, b)


def two_outputs(x: Any, mask: Any, r: Any) -> Any:
    act = F.gelu(x + mask)
    view = act.view(act.size(0), -1)
    return nn.Dropout(0.1)(view * mask) + r, call("fc", x)


def two_sharing_the_mask(x: Any, y: Any, mask: Any) -> Any:
    return x + mask, y * mask


def two_that_share_it(x: Any, y: Any, mask: Any) -> Any:
    return x + mask, call("side", y, mask)


def many_ways(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    return ((a + b) * (c + d)) * (e + f)


def is_linear(sizes: Sequence[int], work: Sequence[int]) -> bool:
    """Whether each further block costs the same: what the ends of a graph cost cancels out."""
    slopes = [(work[k + 1] - work[k]) / (sizes[k + 1] - sizes[k]) for k in range(len(sizes) - 1)]
    return slopes[-1] <= 1.01 * slopes[0] + 1e-9


PATTERNS: list[tuple[Callable[..., Any], int]] = [
    (first_of_many, 1), (wide, 1), (absent_at_the_end, 0), (never_connected, 0), (never_connected_below, 0),
    (two_outputs, 0), (two_sharing_the_mask, 0), (two_that_share_it, 1), (many_ways, 0),
]  # fmt: skip


@pytest.mark.parametrize(("what", "per_block"), PATTERNS, ids=[what.__name__ for what, _ in PATTERNS])
def test_visits_grow_linearly(what: Callable[..., Any], per_block: int) -> None:
    visits = []
    for count in SIZES:
        search = Search(*blocks(count), pattern(what))
        assert len(search.run()) == per_block * count
        visits.append(search.visits)
    assert is_linear(SIZES, visits)


def test_an_operation_that_is_absent_ends_the_search_before_it_begins() -> None:
    search = Search(*blocks(128), pattern(absent_at_the_end))
    search.run()
    assert search.matchers[0].visits == 0


def test_lines_of_code_that_run_grow_linearly_too() -> None:
    """What `visits` does not count, scans of lists for example, would show here."""

    def calls(count: int, what: Callable[..., Any]) -> int:
        module, graph = blocks(count)
        search = Search(module, graph, pattern(what))
        search.run()
        ran = 0

        def tick(*_: Any) -> Any:
            nonlocal ran
            ran += 1
            return tick

        search = Search(module, graph, pattern(what))
        before = sys.gettrace()
        sys.settrace(tick)
        try:
            search.run()
        finally:
            sys.settrace(before)
        return ran

    for what in (wide, never_connected_below, two_sharing_the_mask, two_that_share_it):
        sizes = (24, 48, 96)
        assert is_linear(sizes, [calls(count, what) for count in sizes])


def test_a_pattern_with_many_equal_ways_is_not_tried_in_each_of_them() -> None:
    """A sum of 32 terms has 2**31 orders; that all of them lead to the same match is seen."""
    names = [f"x{index}" for index in range(32)]

    def tree(values: list[Any]) -> Any:
        while len(values) > 1:
            values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
        return values[0]

    what = eval(f"lambda {', '.join(names)}: tree([{', '.join(names)}]).relu()", {"tree": tree})
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    total = tree([fx.Proxy(graph.placeholder(name), tracer) for name in names])
    graph.output((total.relu().node, graph.call_function(getattr, (total.node, "shape"))))
    search = Search(nn.Module(), graph, pattern(what))
    assert search.run() == []  # a value in between is read outside, whatever the order
    assert search.visits < 1000
