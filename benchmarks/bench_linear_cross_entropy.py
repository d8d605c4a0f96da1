"""The bytes and the time of linear_cross_entropy beside F.cross_entropy(F.linear(hidden, weight), labels).

    python benchmarks/bench_linear_cross_entropy.py [--quick] [--rounds N]

Bytes are the most that torch's allocator held at once beyond the inputs, forward and backward, as torch.profiler saw
it: also what is allocated inside operations. Times are medians of alternating runs in one process; only their ratio
means anything.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from slapo_py.kernels.linear_cross_entropy import linear_cross_entropy

Step = Callable[[], tuple[Tensor, ...]]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def step(loss: Callable[..., Tensor], hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(hidden, weight, labels), (hidden, weight))


def peak_bytes(run: Step, device: str) -> int:
    """The most bytes held at once, from the allocations and releases that the profiler has noted."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = run()
    del kept
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def seconds(run: Step, device: str) -> float:
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small size")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
    sizes = [(1024, 8000, 256)] if options.quick else [(2048, 32000, 512), (8192, 32000, 512)]
    table = Table("tokens", "classes", "hidden", "dtype", "MB plain", "MB fused", "of plain", "time, fused / plain")
    for rows, classes, width in sizes:
        for dtype in dtypes:
            torch.manual_seed(0)
            hidden = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
            weight = (torch.randn(classes, width, device=device, dtype=dtype) / width**0.5).requires_grad_()
            labels = torch.randint(classes, (rows,), device=device)
            runs = [functools.partial(step, loss, hidden, weight, labels) for loss in (plain, linear_cross_entropy)]
            bytes_of = [peak_bytes(run, device) for run in runs]
            pairs = [[seconds(run, device) for run in runs] for _ in range(options.rounds + 1)][1:]
            ratio = statistics.median(fused / usual for usual, fused in pairs)
            megabytes = [f"{one / 1e6:.0f}" for one in bytes_of]
            share = f"{bytes_of[1] / bytes_of[0]:.1%}"
            table.add_row(*map(str, (rows, classes, width)), str(dtype)[6:], *megabytes, share, f"{ratio:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
