"""What a kernel needs on an architecture, without having one: registers, spilled bytes, shared memory.

    python -m slapo_py.kernels.ahead [names ...] [--widths 1024 4096] [--dtypes bfloat16] [--targets sm_90]

An operation runs on its example, forward and backward, with its launches noted instead of made; each is compiled for
each target as a launch there would compile it. The figures are read from the machine code. None of them is a time.
"""

import argparse
import functools
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from slapo_py.kernels.launch import INTERPRETED, Launch, recording, triton
from slapo_py.kernels.spec import FLOATS, Kernel, find_kernel, list_kernels
from slapo_py.report import tables

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""Architectures by name, as Triton calls them: back-end, architecture, threads of a warp."""

_POINTERS = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8",
    torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip

FEW_ROWS = {"linear_cross_entropy": 8}
"""Rows at most, of kernels that multiply matrices between their launches: here they do so on the CPU."""


@dataclass(frozen=True)
class Use:
    """What one thread of a compiled launch holds, and what its program shares.

    registers: of a thread; on AMD vector registers, accumulation registers among them.
    spilled: bytes a thread that lacks registers moves to local memory and back, counted once per instruction; on AMD 4
        for each vector register that has no place.
    shared: bytes of shared memory of a program; on AMD of LDS.
    """

    registers: int
    spilled: int
    shared: int


@dataclass(frozen=True)
class Need:
    """One launch of a kernel on one target. `direction` is "forward" or "backward", `programs` the size of its grid."""

    kernel: str
    direction: str
    function: str
    dtype: str
    width: int
    target: str
    programs: int
    warps: int
    use: Use


def launches(
    kernel: Kernel, rows: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> list[tuple[str, Launch]]:
    """The launches of a kernel on its example, each with its direction. None is made, so outputs are not filled."""
    if kernel.example is None:
        raise ValueError(f"{kernel.name}: has no example, so there is nothing to compile. Give Kernel(example=...).")
    args = kernel.example(rows, width, dtype, device)
    with recording() as forward:
        made = kernel.op(*args)
    outputs = [one for one in (made if isinstance(made, tuple) else (made,)) if one.requires_grad]
    inputs = [one for one in args if isinstance(one, Tensor) and one.requires_grad]
    backward: list[Launch] = []
    if outputs and inputs:
        with recording() as backward:
            torch.autograd.grad(outputs, inputs, [torch.empty_like(one) for one in outputs], allow_unused=True)
    return [("forward", one) for one in forward] + [("backward", one) for one in backward]


def compiled(launch: Launch, target: str) -> Any:
    """Triton's compiled kernel for a launch on a target. Raises what Triton raises if it can't be compiled."""
    if triton is None:
        raise RuntimeError("compiling ahead of time needs Triton: pip install triton.")
    if INTERPRETED:
        raise RuntimeError("Triton's interpreter compiles nothing: compile ahead of time without TRITON_INTERPRET=1.")
    if target not in TARGETS:
        raise ValueError(f"there is no target {target!r}. Targets: {', '.join(TARGETS)}.")
    from triton.backends.compiler import GPUTarget

    gpu = GPUTarget(*TARGETS[target])
    # Said outright, because Triton 3.9 warns where it is left to the default, whose value is to change.
    options = {"num_warps": launch.num_warps, "enable_fp_fusion": triton.knobs.language.default_fp_fusion}
    return triton.compile(_source(launch, gpu), target=gpu, options=options)


def use_of(launch: Launch, target: str) -> Use:
    """What a launch needs on a target."""
    kernel = compiled(launch, target)
    read = _use_on_amd if TARGETS[target][0] == "hip" else _use_on_nvidia
    return Use(*read(kernel), shared=kernel.metadata.shared)


def needs(
    names: Sequence[str] = (),
    widths: Sequence[int] = (1024, 4096),
    dtypes: Sequence[str] = ("bfloat16",),
    targets: Sequence[str] = tuple(TARGETS),
    rows: int = 1024,
) -> list[Need]:
    """What kernels need, all registered ones if no names are given: examples of `rows` rows of each of the widths."""
    found = []
    for name in names or list_kernels():
        for dtype in dtypes:
            for width in widths:
                few = min(rows, FEW_ROWS.get(name, rows))
                noted = launches(find_kernel(name), few, width, getattr(torch, dtype))
                found += [
                    Need(
                        name, direction, one.function.__name__, dtype, width, target,
                        math.prod(one.grid), one.num_warps, use_of(one, target),
                    )
                    for target in targets
                    for direction, one in noted
                ]  # fmt: skip
    return found


def table(found: Sequence[Need]) -> Table:
    """One row a launch and target."""
    columns = "kernel direction function dtype width target programs warps registers spilled shared".split()
    result = tables.table(
        "what kernels need, compiled without a GPU",
        columns,
        [
            (*(getattr(one, name) for name in columns[:-3]), one.use.registers, one.use.spilled, one.use.shared)
            for one in found
        ],
    )
    for column in result.columns[:6]:
        column.justify = "right" if column.header == "width" else "left"
    result.caption = "registers of a thread; bytes spilled by a thread; bytes of shared memory of a program"
    return result


def _source(launch: Launch, gpu: Any) -> Any:
    """The launch as Triton specializes it: 1 and None are constants, and what is divisible by 16 says so."""
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    backend = make_backend(gpu)
    types, constants, facts = {}, dict(launch.constants), {}
    for place, (name, value) in enumerate(zip(launch.function.arg_names, launch.args)):
        parameter = launch.function.params[place]
        if isinstance(value, Tensor):
            types[name] = _POINTERS[value.dtype]
            fact = backend.get_tensor_specialization(value, align=True)
        elif value is None or parameter.is_constexpr or (type(value) is int and value == 1):
            constants[name], fact = value, ""
        elif isinstance(value, bool):
            types[name], fact = "u1", ""
        elif isinstance(value, int):
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            fact = backend.get_int_specialization(value, align=True)
        elif isinstance(value, float):
            types[name], fact = "fp32", ""
        else:
            raise TypeError(f"{launch.function.__name__}: {name} is {value!r}, which no kernel takes.")
        if fact and not parameter.do_not_specialize:
            facts[(place,)] = backend.parse_attr(fact)
    signature = {name: types.get(name, "constexpr") for name in launch.function.arg_names}
    return ASTSource(launch.function, signature, constants, facts)


def _use_on_nvidia(kernel: Any) -> tuple[int, int]:
    """(registers, spilled bytes). Only what has a stack frame can have spilled: its instructions are then read."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(kernel.asm["cubin"])
        found = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump("-res-usage", str(file)))
        if found is None:
            raise RuntimeError(f"cuobjdump names no registers of {kernel.name}.")
        code = _cuobjdump("-sass", str(file)) if int(found[2]) else ""
    moves = re.findall(r"\b(?:STL|LDL)((?:\.\w+)*)", code)
    return int(found[1]), sum(_bytes_moved(one) for one in moves)


def _bytes_moved(suffixes: str) -> int:
    """By the suffixes of an instruction: none is 4 bytes, .64 is 8, .128 is 16, .U8 is 1."""
    bits = [int(one) for one in re.findall(r"\.[US]?(8|16|64|128)\b", suffixes)]
    return bits[0] // 8 if bits else 4


def _cuobjdump(*arguments: str) -> str:
    try:
        done = subprocess.run([_cuobjdump_path(), *arguments], capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"cuobjdump {' '.join(arguments)} failed: {error.stderr.strip()}") from error
    return done.stdout


@functools.cache
def _cuobjdump_path() -> str:
    try:
        return str(triton.knobs.nvidia.cuobjdump.path)
    except RuntimeError as error:
        raise RuntimeError(
            "registers are read by cuobjdump, which comes with Triton but is not there. "
            "Set TRITON_CUOBJDUMP_PATH to one of a CUDA toolkit."
        ) from error


def _use_on_amd(kernel: Any) -> tuple[int, int]:
    """(vector registers, spilled bytes), from the notes at the end of the assembler text."""
    registers, spills = (
        re.search(rf"^\s*\.{name}:\s*(\d+)\s*$", kernel.asm["amdgcn"], re.MULTILINE)
        for name in ("vgpr_count", "vgpr_spill_count")
    )
    if registers is None or spills is None:
        raise RuntimeError(f"the assembler text names no registers of {kernel.name}.")
    return int(registers[1]), 4 * int(spills[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns 0, also where something spills."""
    parser = argparse.ArgumentParser(
        prog="python -m slapo_py.kernels.ahead", description="What kernels need on an architecture, without having one."
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"kernels: {', '.join(list_kernels())}; all if none")
    parser.add_argument("--widths", nargs="+", type=int, default=[1024, 4096], help="the length of a row")
    parser.add_argument("--dtypes", nargs="+", choices=FLOATS, default=["bfloat16"])
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--rows", type=int, default=1024, help="how many rows an example has")
    options = parser.parse_args(arguments)
    found = needs(options.names, options.widths, options.dtypes, options.targets, options.rows)
    Console(width=None if sys.stdout.isatty() else 130).print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
