"""How long it takes to find a pattern, beside torch.fx's own matcher.

    python benchmarks/bench_find.py [--quick]

Times are medians of alternating runs in one process; only their ratios mean anything.
"""

import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher
from torch.fx.subgraph_rewriter import replace_pattern

from slapo_py.patterns import find
from slapo_py.patterns.rewrite import Group, NodeOf, contract

SIZES = (128, 512, 2048)


class Block(nn.Module):
    """A bias and gelu, dropout, and a norm of a sum."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc, self.bias = nn.Linear(width, width, bias=False), nn.Parameter(nn.init.zeros_(nn.Linear(1, width).bias))
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(F.gelu(self.fc(x) + self.bias, approximate="none")) + x)


def graph_of(count: int) -> fx.GraphModule:
    """Blocks in a row, as one graph of their operations and children."""

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return not isinstance(m, Block | nn.Sequential)

    module = nn.Sequential(*(Block() for _ in range(count)))
    return fx.GraphModule(module, Tracer().trace(module))


def bias_gelu(x: Any, bias: Any) -> Any:
    """What both matchers look for: written out, since that of torch.fx compares arguments as they are written."""
    return F.gelu(x + bias, approximate="none")


def fused(x: Any, bias: Any) -> Any:
    """What comes in its place."""
    return F.gelu(x + bias)


def replaced(module: fx.GraphModule) -> int:
    """One graph with a call in the place of each match: what `replace(fused, bias_gelu)` does to a traced module."""
    found = find(module, module.graph, bias_gelu)
    groups = [Group(one.nodes, one.outputs) for one in found]

    def make(graph: fx.Graph, index: int, node_of: NodeOf) -> fx.Node:
        inputs = found[index].inputs.values()
        values = [node_of(v) if isinstance(v, fx.Node) else graph.create_node("get_attr", v.target) for v in inputs]
        return graph.call_function(fused, tuple(values))

    return len(contract(module, module.graph, groups, make)[1])


def medians(runs: int, count: int, *functions: Callable[[], int]) -> list[float]:
    """The median seconds of each function, run in turn; each must find `count` matches."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(runs + 1):
        for function, taken in zip(functions, seconds, strict=True):
            gc.collect()
            begin = time.perf_counter()
            matches = function()
            taken.append(time.perf_counter() - begin)
            assert matches == count
    return [statistics.median(one[1:]) for one in seconds]  # the first of each warms up


def measured(count: int, runs: int) -> list[float]:
    """Seconds of `find`, SubgraphMatcher, `replace`, replace_pattern; the last on copies that were made before."""
    module = graph_of(count)
    theirs = fx.symbolic_trace(bias_gelu).graph
    copies = [copy.deepcopy(module) for _ in range(runs + 1)]
    return medians(
        runs, count,
        lambda: len(find(module, module.graph, bias_gelu)),
        lambda: len(SubgraphMatcher(theirs).match(module.graph)),
        lambda: replaced(module),
        lambda: len(replace_pattern(copies.pop(), bias_gelu, fused)),
    )  # fmt: skip


def table(quick: bool = False) -> Table:
    """Both pairs at several sizes."""
    found = Table(
        title="gelu(x + bias) in each block: found, and replaced",
        caption="milliseconds, medians of runs in turn; SubgraphMatcher and replace_pattern are those of torch.fx",
    )
    for name in ("blocks", "nodes", "find", "SubgraphMatcher", "ratio", "replace", "replace_pattern", "ratio"):
        found.add_column(name, justify="right")
    for count in SIZES[:1] if quick else SIZES:
        ours, theirs, mine, fxs = measured(count, 1 if quick else max(3, SIZES[-1] // count))
        found.add_row(
            str(count), str(len(graph_of(count).graph.nodes)),
            f"{1e3 * ours:.1f}", f"{1e3 * theirs:.1f}", f"{theirs / ours:.1f}x",
            f"{1e3 * mine:.1f}", f"{1e3 * fxs:.1f}", f"{fxs / mine:.1f}x",
        )  # fmt: skip
    return found


if __name__ == "__main__":
    Console(width=110).print(table("--quick" in sys.argv))
