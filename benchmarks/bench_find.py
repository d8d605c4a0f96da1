"""How long it takes to find a pattern, beside torch.fx's own matcher: `python -m benchmarks.bench_find`."""

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

from slapo_py.patterns import find

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


def measured(count: int, runs: int) -> tuple[float, float]:
    """The median seconds of `find` and of SubgraphMatcher, run in turn on one graph."""
    module = graph_of(count)
    theirs = fx.symbolic_trace(bias_gelu).graph

    def ours() -> int:
        return len(find(module, module.graph, bias_gelu))

    def fxs() -> int:
        return len(SubgraphMatcher(theirs).match(module.graph))

    seconds: dict[Callable[[], int], list[float]] = {ours: [], fxs: []}
    for _ in range(runs + 1):
        for function, found in seconds.items():
            gc.collect()
            begin = time.perf_counter()
            matches = function()
            found.append(time.perf_counter() - begin)
            assert matches == count
    return statistics.median(seconds[ours][1:]), statistics.median(seconds[fxs][1:])


def table(quick: bool = False) -> Table:
    """Both matchers at several sizes."""
    found = Table(
        title="find: gelu(x + bias) in each block", caption="medians of runs in turn; SubgraphMatcher: torch.fx"
    )
    for name in ("blocks", "nodes", "find, ms", "SubgraphMatcher, ms", "ratio"):
        found.add_column(name, justify="right")
    for count in SIZES[:1] if quick else SIZES:
        ours, theirs = measured(count, 1 if quick else 5)
        row = (f"{1e3 * ours:.1f}", f"{1e3 * theirs:.1f}", f"{theirs / ours:.1f}x")
        found.add_row(str(count), str(len(graph_of(count).graph.nodes)), *row)
    return found


if __name__ == "__main__":
    Console().print(table("--quick" in sys.argv))
