"""What the toolkit itself costs: tracing a very large model, calling traced modules, finding and replacing patterns.

    python benchmarks/bench_toolkit.py [--quick]

Times are medians of paired, alternating runs in one process on one thread; only their ratios mean anything.
"""

import argparse
import resource
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import bench_find
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import slapo_py as slapo
from slapo_py.snapshot import nothing_collected
from slapo_py.tracing import trace_of

GLOBS = ("model.layers.*", "model.layers.*.self_attn", "model.layers.*.mlp", "model.layers.*.*_layernorm")


def large_llama(layers: int) -> nn.Module:
    """Llama of 405.9 B parameters at 126 layers, on `meta`."""
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=layers,
                num_attention_heads=128, num_key_value_heads=8,
            )
        )  # fmt: skip


def trace_all(model: nn.Module) -> tuple[float, int, int]:
    """(seconds, modules traced, captures) of: create a schedule, record, trace every layer and its parts."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    start = time.perf_counter()
    sch = slapo.create_schedule(model, example_inputs={"input_ids": ids, "use_cache": False})
    for glob in GLOBS:
        sch.select(glob).trace()
    return time.perf_counter() - start, len(sch.history), sch.root.tracer.captures


def size_table(console: Console) -> None:
    table = Table(
        "layers", "parameters", "modules", "captures", "seconds", "peak RSS", title="create, record and trace on meta"
    )
    trace_all(large_llama(2))  # imports and first use
    seconds = {}
    for layers in (32, 126):
        model = large_llama(layers)
        seconds[layers], modules, captures = trace_all(model)
        count = sum(p.numel() for p in model.parameters())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        table.add_row(
            str(layers),
            f"{count / 1e9:.1f} B",
            str(modules),
            str(captures),
            f"{seconds[layers]:.1f}",
            f"{peak:.2f} GiB",
        )
    console.print(table)
    console.print(f"126 against 32 layers: {seconds[126] / seconds[32]:.2f} times (126/32 = 3.94)\n")


def paired(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> float:
    """The median ratio of second to first, alternating, each over enough calls for about 20 ms."""
    number = max(1, int(0.02 / max(timeit.timeit(first, number=3) / 3, 1e-7)))
    ratios = []
    for _ in range(rounds):
        a = timeit.timeit(first, number=number)
        b = timeit.timeit(second, number=number)
        ratios.append(b / a)
    return statistics.median(ratios)


def call_table(console: Console, rounds: int) -> None:
    """A traced module that nothing was done to, against the original: forward and backward in train mode."""
    table = Table("hidden", "module", "guards", "guard cost", "traced / original", title="a call, forward and backward")
    for hidden in (64, 512):
        config = transformers.LlamaConfig(
            vocab_size=128, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).train()
        ids = torch.randint(0, 128, (2, 64))
        for name in ("self_attn", "mlp", "input_layernorm", ""):
            path = f"model.layers.0.{name}".rstrip(".")
            sch = slapo.create_schedule(model, example_inputs={"input_ids": ids, "use_cache": False})
            sch[path].trace()
            args, kwargs = recorded(model, path, {"input_ids": ids, "use_cache": False})
            original, traced = model.get_submodule(path), sch[path].module

            def step(module: nn.Module, args: Any = args, kwargs: Any = kwargs) -> None:
                out = module(*args, **kwargs)
                (out[0] if isinstance(out, tuple) else out).sum().backward()

            ratio = paired(lambda m=original: step(m), lambda m=traced: step(m), rounds)
            table.add_row(
                str(hidden),
                name or "layer",
                str(len(sch[path].guards)),
                f"{guard_cost(traced, args, kwargs):.2f} us",
                f"{ratio:.3f}",
            )
            if sch[path].misses:
                raise SystemExit(f"{path} was not traced")
    console.print(table)


def recorded(model: nn.Module, path: str, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """What the module at `path` is called with."""
    seen: list[tuple[Any, Any]] = []
    module = model.get_submodule(path)
    handle = module.register_forward_pre_hook(lambda _, a, k: seen.append((a, k)), with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return seen[0]


def guard_cost(module: nn.Module, args: Any, kwargs: Any) -> float:
    """Microseconds that the guards of one call take: the same forward with its graph cut off."""
    trace = trace_of(module)
    assert trace is not None
    base = type(module)._slapo_base  # type: ignore[attr-defined]
    text, environment = trace.source(base)
    guarded = text[: text.index("        return _MISS")] + "        return _MISS\n    return None\n"
    bare = text[: text.index("\n")] + "\n    return None\n"
    cost = []
    for source in (guarded, bare):
        scope = {**environment, "_MISS": None}
        exec(source, scope)
        function = scope["_traced"]
        runs = timeit.repeat(lambda f=function: f(module, *args, **kwargs), number=2000, repeat=9)
        cost.append(statistics.median(runs) / 2000 * 1e6)
    return cost[0] - cost[1]


def find_table(console: Console, quick: bool) -> None:
    """find and replace against torch's SubgraphMatcher and replace_pattern, on the same graphs in the same run."""
    console.print(bench_find.table(quick))


@nothing_collected()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    size_table(console)
    call_table(console, 9 if options.quick else 41)
    find_table(console, options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
