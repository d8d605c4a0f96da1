"""A pattern that was cut out of a random graph is found there."""

import random
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from slapo_py.patterns import find
from slapo_py.patterns.matcher import Matcher
from slapo_py.patterns.pattern import as_pattern, body_of
from slapo_py.patterns.rewrite import Group, contract
from slapo_py.patterns.search import Search
from slapo_py.rewriting import Called
from tests.patterns.random_graphs import Cut, cut
from tests.running import equal


def replayed(found: Any, one: Cut) -> list[Any]:
    """What the pattern's function computes from the inputs of a match, beside what the graph has there."""
    values: dict[fx.Node, Any] = {}
    placeholders = iter(one.inputs)
    for node in one.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(placeholders)
        elif node.op != "output":
            args, kwargs = (fx.map_arg(given, values.__getitem__) for given in (node.args, node.kwargs))
            target = getattr(args[0], node.target) if node.op == "call_method" else node.target  # type: ignore[index,arg-type]
            args = args[1:] if node.op == "call_method" else args  # type: ignore[index]
            values[node] = target(*args, **kwargs)  # type: ignore[operator]
    result = one.pattern(*(values[value] for value in found.inputs.values()))
    results = result if isinstance(result, tuple) else (result,)
    return [(a, values[node]) for a, node in zip(results, found.outputs, strict=True)]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(3, 24))
def test_what_was_cut_out_is_found(seed: int, size: int) -> None:
    one = cut(random.Random(seed), size)
    assume(one is not None)
    assert one is not None
    found = find(one.module, one.graph, one.pattern)
    assert found
    taken: set[fx.Node] = set()
    for match in found:
        assert not taken & set(match.nodes)
        taken |= set(match.nodes)
        assert not any(value in match.nodes for value in match.inputs.values())
        for computed, there in replayed(match, one):
            torch.testing.assert_close(computed, there, rtol=1e-9, atol=1e-9, equal_nan=True)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(3, 24))
def test_replaced_by_itself_it_computes_the_same_bits(seed: int, size: int) -> None:
    """Without swapped operands: those may have other strides, by which kernels round."""
    one = cut(random.Random(seed), size, swap=False)
    assume(one is not None)
    assert one is not None
    found = find(one.module, one.graph, one.pattern)
    assert found

    def make(graph: fx.Graph, index: int, node_of: Any) -> fx.Node:
        return graph.call_function(Called(one.pattern), tuple(map(node_of, found[index].inputs.values())))

    graph, calls = contract(one.module, one.graph, [Group(match.nodes, match.outputs) for match in found], make)
    graph.lint()
    assert len(calls) == len(found)
    gone = {node.name for match in found for node in match.nodes}
    assert not gone & {node.name for node in graph.nodes}
    before, after = (computed(which, one.inputs) for which in (one.graph, graph))
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        assert equal(a, b)


def computed(graph: fx.Graph, inputs: Any) -> list[Any]:
    return [one for one in tree_leaves(fx.GraphModule(nn.Module(), graph)(*inputs)) if isinstance(one, torch.Tensor)]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(3, 24))
def test_the_very_part_that_was_cut_out_is_among_the_ways(seed: int, size: int) -> None:
    """`find` may take another part that looks the same; among all ways there is this one."""
    one = cut(random.Random(seed), size)
    assume(one is not None)
    assert one is not None
    search = Search(one.module, one.graph, as_pattern(one.pattern))
    matcher = Matcher(body_of(one.pattern), search.terms, {})
    ways = set()
    for anchor in matcher.anchors():
        for _ in matcher.solutions(anchor):
            ways.add(frozenset(node for node in matcher.image if not search.terms.is_book(node)))
    assert frozenset(node for node in one.nodes if not search.terms.is_book(node)) in ways
