"""The registered kernels on a GPU, forward and backward, beside their plain forms, torch.compile and Liger.

    python benchmarks/bench_kernels.py [names ...] [--plan] [--out FILE] [--dtypes bfloat16] [--rounds 20]
        [--seconds 300] [--no-compile]

A kernel is compared with its reference first, in float64: one that is wrong has no time. Then every contender runs in
turn, round after round, on inputs that no cache holds; times are medians of CUDA events, ratios are medians of the
ratios within a round. Bytes are those of the tensors that the launches are given, each once; "of copy" is their rate
over that of a device copy in the same rounds. --plan shows what would run, and needs no GPU. Returns 1 if a kernel is
wrong, 2 if there is no GPU.
"""

import argparse
import datetime
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slapo_py.kernels import Kernel, ahead, find_kernel, list_kernels
from slapo_py.report import tables
from slapo_py.report.measure import paired_ratio
from slapo_py.snapshot import nothing_collected

Function = Callable[..., Any]
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "": ((16384, 4096), (65536, 1024)),  # 134 MB a tensor in bfloat16: more than any cache holds
    "cross_entropy": ((4096, 128256), (8192, 32000)),
    "masked_softmax": ((16384, 4096), (8192, 2048)),
    "linear_cross_entropy": ((8192, 4096), (4096, 2048)),
}
"""(rows, width) of a kernel's examples, the important one first; "" for those without an entry."""

PLAIN: dict[str, Function] = {
    "cross_entropy": F.cross_entropy,
    "linear_cross_entropy": lambda x, weight, labels, *_: F.cross_entropy(F.linear(x, weight).float(), labels),
}
"""What a model writes, where it isn't the reference with the arguments that the operation gets."""

DROPPING: dict[str, Function] = {
    "bias_dropout_add": lambda x, bias, residual, p: F.dropout(x + bias, p) + residual,
    "dropout_add_layer_norm": lambda x, residual, weight, bias, p: _norm_of(F.dropout(x, p) + residual, weight, bias),
}
"""What a model writes, for the time alone: these draw another mask."""

MEASURED_IN_MEMORY = ("cross_entropy", "linear_cross_entropy")
PLANNED = {"linear_cross_entropy": (64, 256)}
"""(rows, width) for noting the launches of what multiplies matrices between them: --plan does so on the CPU."""

DEVICE = "cuda"
COPIED = 2**28
"""Bytes that are copied to know the device's rate, and read to empty its caches: more than any of them holds."""

CONTENDERS = ("slapo", "eager", "compile", "liger")


def _norm_of(total: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return F.layer_norm(total, total.shape[-1:], weight, bias), total


def liger_forms() -> dict[str, Function]:
    """Liger's functions with the arguments of the examples; none if it isn't installed."""
    try:
        from liger_kernel.transformers import functional as theirs
    except ImportError:
        return {}
    return {
        "swiglu": lambda gate, up: theirs.liger_swiglu(gate, up),
        "geglu": lambda gate, up, *_: theirs.liger_geglu(gate, up),
        "layer_norm": lambda x, weight, bias: theirs.liger_layer_norm(x, weight, bias, 1e-5),
        "rms_norm": lambda x, weight: theirs.liger_rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda x, residual, weight: theirs.liger_fused_add_rms_norm(x, residual, weight, 1e-6),
        "rope": lambda q, k, cos, sin: theirs.liger_rope(q, k, cos, sin),
        "cross_entropy": lambda logits, labels: theirs.liger_cross_entropy(logits, labels),
        "linear_cross_entropy": lambda x, weight, labels, *_: theirs.liger_fused_linear_cross_entropy(
            x, weight, labels
        ),
    }


@dataclass(frozen=True)
class Case:
    """One kernel at one shape and dtype."""

    kernel: Kernel
    rows: int
    width: int
    dtype: str

    def arguments(self, device: str, rows: int = 0) -> tuple[Any, ...]:
        assert self.kernel.example is not None
        with torch.device(device):  # an example may draw on the default device first
            return self.kernel.example(rows or self.rows, self.width, getattr(torch, self.dtype), device)

    @property
    def shape(self) -> str:
        return f"{self.rows} x {self.width}"


def cases_of(names: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
    """The cases, all kernels at their important shape before the others: a time limit cuts the latter."""
    kernels = [find_kernel(name) for name in names or list_kernels()]
    each = [(kernel, shape) for kernel in kernels for shape in enumerate(SHAPES.get(kernel.name, SHAPES[""]))]
    each.sort(key=lambda pair: pair[1][0])
    return [Case(kernel, *shape, dtype) for dtype in dtypes for kernel, (_, shape) in each if dtype in kernel.takes]


# What is read and written


def outputs_of(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, tuple) else [made]


def inputs_of(args: Sequence[Any]) -> list[Tensor]:
    return [one for one in args if isinstance(one, Tensor) and one.requires_grad]


class _Unfilled(TorchFunctionMode):
    """Tensors are not filled with random numbers: where their values don't matter, their memory is never touched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.empty if func in (torch.randn, torch.rand) else func)(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Work:
    """What the launches of forward and backward are, and the bytes of the tensors they are given, each tensor once."""

    launches: list[str]
    forward: int
    backward: int


def work_of(case: Case, device: str) -> Work:
    """The launches are noted, not made, so this runs without a GPU, too."""
    shape = PLANNED.get(case.kernel.name, (case.rows, case.width))
    with _Unfilled():
        noted = ahead.launches(case.kernel, *shape, getattr(torch, case.dtype), device)
    lines = [
        f"{direction} {one.function.__name__}[{', '.join(map(str, one.grid))}] {one.num_warps}w"
        for direction, one in noted
    ]
    if case.kernel.name in PLANNED:
        return Work([f"of {shape[0]} x {shape[1]}:", *dict.fromkeys(lines)], *_bytes_in_and_out(case))
    sizes: dict[str, dict[int, int]] = {"forward": {}, "backward": {}}
    for direction, launch in noted:
        for one in launch.args:
            if isinstance(one, Tensor):
                sizes[direction][one.untyped_storage().data_ptr()] = _size(one)
    return Work(lines, *(sum(one.values()) for one in sizes.values()))


def _bytes_in_and_out(case: Case) -> tuple[int, int]:
    """Of a kernel that does more than launch: inputs and outputs; their gradients, and the inputs again."""
    args = case.arguments("meta")
    given = sum(map(_size, (one for one in args if isinstance(one, Tensor))))
    made = sum(map(_size, outputs_of(case.kernel.op(*args))))
    return given + made, made + given + sum(map(_size, inputs_of(args)))


def _size(tensor: Tensor) -> int:
    """In memory: an expanded tensor is as large as what it shows."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class _Given(TorchFunctionMode):
    """The arguments that our operations get inside a public function."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "slapo":
            self.seen.setdefault(func._opname, (func, args))
        return func(*args, **(kwargs or {}))


def given_to(kernel: Kernel, args: tuple[Any, ...]) -> tuple[Function, tuple[Any, ...]]:
    """The operation behind a kernel's public function, and what it is called with there."""
    with _Given() as calls, torch.no_grad():
        kernel.op(*args)
    if kernel.name not in calls.seen:
        raise SystemExit(f"{kernel.name} calls no operation slapo::{kernel.name}: give its plain form in PLAIN.")
    function, given = calls.seen[kernel.name]
    # Leaves: what was made without a graph may be a view, whose gradient is nobody's.
    return function, tuple(_leaf(one) if isinstance(one, Tensor) else one for one in given)


def _leaf(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return tensor.detach().to(dtype or tensor.dtype).requires_grad_(tensor.requires_grad)


def plain_form(kernel: Kernel, args: tuple[Any, ...], timed: bool) -> tuple[Function, tuple[Any, ...]]:
    """What a model writes, and its arguments; if it isn't timed, with the mask that the kernel draws."""
    if kernel.name in PLAIN:
        return PLAIN[kernel.name], args
    if timed and kernel.name in DROPPING:
        return DROPPING[kernel.name], args
    return kernel.reference, given_to(kernel, args)[1]


# Right or wrong


def wrongness(case: Case) -> str:
    """ "" if outputs and gradients of 1024 rows are as near to float64 as twice the plain form's, else what isn't."""
    torch.manual_seed(0)
    args = case.arguments(DEVICE, min(case.rows, 1024))
    operation, given = given_to(case.kernel, args)
    if case.kernel.name in PLAIN:
        operation, given = case.kernel.op, args
        plain: Function = PLAIN[case.kernel.name]
    else:
        plain = case.kernel.reference
    made = outputs_of(operation(*given))
    grads = [torch.randn_like(one) for one in made]
    found = [*made, *gradients(made, given, grads)]
    usual = _values(plain, given, grads, None)
    exact = _values(plain, given, grads, torch.float64)
    for place, (mine, theirs, truth) in enumerate(zip(found, usual, exact, strict=True)):
        kind = f"output {place}" if place < len(made) else f"gradient {place - len(made)}"
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return f"{kind}: {mine.dtype} {tuple(mine.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
        # The reference's own float32 sums are not exact where the kernel is measured in float32.
        unit = truth.abs().max() * torch.finfo(mine.dtype).eps * (4 if mine.dtype == torch.float32 else 1)
        for measure in (lambda e: e.abs().max(), lambda e: e.square().mean().sqrt()):
            error, allowed = measure(mine - truth), 2 * measure(theirs - truth) + unit
            if not error <= allowed:
                return f"{kind}: error {error:.3g}, allowed {allowed:.3g}"
    return ""


def _values(function: Function, args: tuple[Any, ...], grads: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    def to(one: Any) -> Any:
        if not isinstance(one, Tensor) or not one.is_floating_point():
            return one
        return _leaf(one, dtype)

    own = tuple(map(to, args))
    made = outputs_of(function(*own))
    return [*made, *gradients(made, own, [one.to(each.dtype) for one, each in zip(grads, made)])]


def gradients(made: list[Tensor], args: Sequence[Any], grads: list[Tensor]) -> list[Tensor]:
    pairs = [(one, grad) for one, grad in zip(made, grads) if one.requires_grad]
    outputs, given = zip(*pairs)
    return list(torch.autograd.grad(outputs, inputs_of(args), given, allow_unused=True, materialize_grads=True))


# Times


@dataclass
class Contender:
    """A function with its own arguments, and the milliseconds that each round took."""

    function: Function
    args: tuple[Any, ...]
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    peak: int = 0
    failure: str = ""


def contenders_of(case: Case, args: tuple[Any, ...], compiles: bool) -> dict[str, Contender]:
    function, given = plain_form(case.kernel, args, timed=True)
    found = {"slapo": Contender(case.kernel.op, args), "eager": Contender(function, given)}
    if compiles:
        torch._dynamo.reset()
        found["compile"] = Contender(torch.compile(function, dynamic=False), given)
    theirs = liger_forms().get(case.kernel.name)
    if theirs is not None:  # with copies, because some of its functions write into their arguments
        copies = (
            one.detach().clone().requires_grad_(one.requires_grad) if isinstance(one, Tensor) else one for one in args
        )
        found["liger"] = Contender(theirs, tuple(copies))
    return found


class Clock:
    """Times on the device, of work that begins with cold caches and with its launches already queued."""

    def __init__(self) -> None:
        self.read = torch.zeros(COPIED, dtype=torch.uint8, device=DEVICE)
        self.source, self.target = self.read.clone(), self.read.clone()
        self.copies: list[float] = []

    def time(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """The result, and what gives the milliseconds once the device is done."""
        self.read.view(torch.int64).amax()  # reading leaves nothing behind that must be written; launches catch up
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        result = work()
        after.record()
        return result, lambda: before.elapsed_time(after)

    def round(self, contenders: dict[str, Contender], first: int) -> None:
        """Each contender once, forward and backward, and a copy."""
        names = [name for name, one in contenders.items() if not one.failure]
        waiting: list[tuple[list[float], Callable[[], float]]] = []
        _, copied = self.time(lambda: self.target.copy_(self.source))
        waiting.append((self.copies, copied))
        for name in names[first % len(names) :] + names[: first % len(names)]:
            one = contenders[name]
            made, forward = self.time(lambda one=one: outputs_of(one.function(*one.args)))
            grads = [torch.ones_like(each) for each in made]
            _, backward = self.time(lambda one=one, made=made, grads=grads: gradients(made, one.args, grads))
            waiting += [(one.forward, forward), (one.backward, backward)]
            del made, grads, _
        torch.cuda.synchronize()
        for times, read in waiting:
            times.append(read())

    @property
    def rates(self) -> list[float]:
        """Bytes a millisecond of each copy, read and written."""
        return [2 * self.source.numel() / one for one in self.copies]


def warm_up(one: Contender) -> None:
    """Compile, and note the peak memory of a step beyond its inputs, or why there is none."""
    try:
        for _ in range(2):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            made = outputs_of(one.function(*one.args))
            gradients(made, one.args, [torch.ones_like(each) for each in made])
            del made
            one.peak = torch.cuda.max_memory_allocated() - before
    except Exception as error:  # theirs, or of a compiler: the others still have their times
        one.failure = f"{type(error).__name__}: {error}".splitlines()[0]


def measured(case: Case, rounds: int, compiles: bool) -> tuple[list[list[str]], dict[str, Contender]]:
    """The rows of a case, forward and backward, and its contenders."""
    work, contenders = work_of(case, DEVICE), contenders_of(case, case.arguments(DEVICE), compiles)
    for one in contenders.values():
        warm_up(one)
    if contenders["slapo"].failure:
        raise RuntimeError(contenders["slapo"].failure)
    clock = Clock()
    for index in range(rounds + 2):
        clock.round(contenders, index)
    rows = []
    for direction, moved in zip(("forward", "backward"), (work.forward, work.backward)):
        times = {name: getattr(one, direction)[2:] for name, one in contenders.items()}  # two rounds warm up
        mine, copies = times["slapo"], clock.rates[2:]
        share = statistics.median(moved / one / copy for one, copy in zip(mine, copies))
        ratios = [
            ""
            if name not in times
            else "failed"
            if contenders[name].failure
            else f"{paired_ratio(times[name], mine):.2f}x"
            for name in CONTENDERS[1:]
        ]
        median = statistics.median(mine)
        rows.append([f"{1e3 * median:.1f}", f"{moved / median / 1e6:.0f}", f"{share:.0%}", *ratios])
    return rows, contenders


# Tables

HEAD = ("kernel", "rows x width", "dtype", "direction", "us", "GB/s", "of copy", "eager", "compile", "liger")
MEMORY_HEAD = ("kernel", "rows x width", "dtype", *CONTENDERS)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * 4 + ["---:"] * (len(head) - 4), *rows]
    return "\n".join("| " + " | ".join(str(one).replace("|", "/") for one in line) + " |" for line in lines) + "\n"


def versions() -> str:
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for name in ("triton", "liger_kernel"):
        try:
            found.append(f"{name} {__import__('importlib.metadata').metadata.version(name)}")
        except ImportError:
            found.append(f"no {name}")
    return ", ".join(found)


def report(options: argparse.Namespace, rows: list[list[str]], memory: list[list[str]], notes: list[str]) -> str:
    name = torch.cuda.get_device_name()
    command = " ".join(["python benchmarks/bench_kernels.py", *sys.argv[1:]])
    text = [
        f"# Kernels on {name}, {datetime.date.today()}\n",
        f"`{command}` on {name}; {versions()}.",
        f"Medians of {options.rounds} rounds in turn; ratios are paired, above 1x where slapo_py is quicker.",
        "GB/s count each tensor in and out once; `of copy` is over a device copy in the same rounds.\n",
        markdown(HEAD, rows),
        "Peak memory of forward and backward beyond the inputs:\n" if memory else "",
        markdown(MEMORY_HEAD, memory) if memory else "",
        *(f"- {one}" for one in notes),
    ]
    return "\n".join(one for one in text if one) + "\n"


@nothing_collected()
def measure(options: argparse.Namespace, console: Console) -> int:
    """Run the cases that fit into the time; print and write the tables."""
    if not torch.cuda.is_available():
        console.print("There is no GPU here: nothing was measured. --plan shows what would run.")
        return 2
    start, rows, memory, notes, wrong = time.monotonic(), [], [], [], 0
    for case in cases_of(options.names, options.dtypes):
        place = [case.kernel.name, case.shape, case.dtype]
        if time.monotonic() - start + estimate(case, options, len(CONTENDERS)) > options.seconds:
            notes.append(f"left out for time: {' '.join(place)}")
            continue
        try:
            fault = wrongness(case)
            results, contenders = ([], {}) if fault else measured(case, options.rounds, options.compile)
        except Exception as error:  # the other kernels still have their times
            fault = f"{type(error).__name__}: {error}".splitlines()[0]
        if fault:
            wrong += 1
            rows.append([*place, "", "WRONG", "", "", "", "", ""])
            notes.append(f"WRONG, so without a time: {' '.join(place)}: {fault}")
        else:
            rows += [[*place, kind, *result] for kind, result in zip(("forward", "backward"), results)]
            notes += [
                f"{name} failed: {' '.join(place)}: {one.failure}" for name, one in contenders.items() if one.failure
            ]
            if case.kernel.name in MEASURED_IN_MEMORY:
                peaks = {name: tables.megabytes(one.peak) for name, one in contenders.items() if not one.failure}
                memory.append([*place, *(peaks.get(name, "") for name in CONTENDERS)])
        print(" ".join(rows[-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    console.print(tables.table("kernels", HEAD, rows))
    if memory:
        console.print(tables.table("peak memory of forward and backward beyond the inputs", MEMORY_HEAD, memory))
    for one in notes:
        console.print(one, markup=False)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(report(options, rows, memory, notes), encoding="utf-8")
        console.print(f"written to {options.out}", markup=False)
    return 1 if wrong else 0


# Without a GPU


def estimate(case: Case, options: argparse.Namespace, contenders: int) -> float:
    """Seconds of a case on a GPU that moves 2 TB/s: compilers, the check, rounds of about eight tensors each way."""
    moved = 16 * case.rows * case.width * getattr(torch, case.dtype).itemsize
    return 4 + 8 * options.compile + (options.rounds + 4) * contenders * (2e-3 + moved / 2e12)


def plan(options: argparse.Namespace, console: Console) -> int:
    """Print what would run."""
    contenders = 2 + options.compile + bool(liger_forms())
    rows, total = [], 0.0
    for case in cases_of(options.names, options.dtypes):
        seconds = estimate(case, options, contenders)
        total += seconds
        work = work_of(case, "cpu")
        moved = map(tables.megabytes, (work.forward, work.backward))
        rows.append([case.kernel.name, case.shape, case.dtype, *moved, "\n".join(work.launches), f"{seconds:.0f}"])
    head = ("kernel", "rows x width", "dtype", "forward moves", "backward moves", "launches", "about s")
    shown = tables.table("what would run", head, rows)
    shown.columns[5].justify = "left"
    console.print(shown)
    others = [name for name in CONTENDERS[1:] if name != "compile" or options.compile]
    console.print(f"Beside each: {', '.join(others)} (Liger: {'installed' if liger_forms() else 'not installed'}).")
    console.print(
        f"About {total:.0f} s on a GPU that moves 2 TB/s; what goes beyond {options.seconds:.0f} s is left out."
    )
    console.print("This is a plan: no kernel ran, and nothing was measured.")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="kernels; all if none")
    parser.add_argument("--plan", action="store_true", help="show what would run; needs no GPU")
    parser.add_argument("--out", type=Path, help="write a markdown table")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16", "float16"), default=["bfloat16"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300, help="begin no case that would go beyond")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    return (plan if options.plan else measure)(options, console)


if __name__ == "__main__":
    sys.exit(main())
