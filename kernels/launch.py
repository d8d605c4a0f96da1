"""What every Triton launch shares: whether there is one, rows of any strides, block sizes."""

import contextlib
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:  # the operations then run their plain form everywhere
    triton, tl = None, types.SimpleNamespace(constexpr=None)

    def jit(function: Callable[..., Any]) -> Callable[..., Any]:
        return function


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter stands for a GPU: then the kernels run on tensors of the CPU."""

WIDEST = 2**17
"""The longest last dim of a row that one program holds; beyond it the plain form runs."""


_recorded: "list[Launch] | None" = None
ANY_WIDTH = 65535 * 1024
"""The same where programs take blocks of 1024 columns: as many as a grid has in its second dim."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def runs_triton(x: Tensor, widest: int = WIDEST) -> bool:
    """Whether an operation on `x`, of rows of at most `widest`, runs its Triton kernels; else it runs its reference."""
    placed = triton is not None and (x.is_cuda or INTERPRETED or _recorded is not None)
    return placed and x.dtype in DTYPES and x.numel() > 0 and x.dim() > 0 and x.shape[-1] <= widest


@dataclass(frozen=True)
class Launch:
    """One launch as it would be made: `function[grid](*args, num_warps=..., **constants)`."""

    function: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Note the launches instead of making them: how kernels are compiled ahead of time, without a GPU."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def launch(function: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """Run a Triton kernel on the device of its first tensor; a float argument arrives as fp32, None as a constant."""
    if _recorded is not None:
        _recorded.append(Launch(function, grid, args, constants, num_warps))
        return
    first = next(one for one in args if isinstance(one, Tensor))
    fusion = {} if INTERPRETED else {"enable_fp_fusion": triton.knobs.language.default_fp_fusion}  # or 3.9 warns
    with torch.cuda.device_of(first) if first.is_cuda else contextlib.nullcontext():
        function[grid](*args, num_warps=num_warps, **fusion, **constants)


def as_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape (..., width) as (outer, inner, width) each, so that a row is found by two strides.

    They are views; where no (outer, inner) serves them all, those that need it are copied.
    """
    shape = tensors[0].shape
    lead, width = shape[:-1], shape[-1]
    for cut in range(max(len(lead), 1)):
        whole = (lead[:cut].numel(), lead[cut:].numel(), width)
        try:
            return [one.view(whole) for one in tensors]
        except RuntimeError:  # these strides have no such view
            continue
    return [one.reshape(1, lead.numel(), width) for one in tensors]


def block_of(width: int) -> tuple[int, int]:
    """(block, warps) of a program that holds a row of `width` elements at once."""
    block = 1 << max(width - 1, 0).bit_length()
    return block, min(max(block // 512, 1), 16) if block <= 2**14 else 32


def ceil_div(a: int, b: int) -> int:
    """How many blocks of `b` cover `a`."""
    return -(-a // b)


@jit
def row_offset(row, inner, stride_outer, stride_inner):
    """Where a row begins, in 64 bits, in a tensor that `as_rows` made."""
    row = tl.cast(row, tl.int64)
    return (row // inner) * stride_outer + (row % inner) * stride_inner


@jit
def column_offset(columns, stride):
    """Where columns lie from the beginning of their row; 64 bits only where they don't lie side by side."""
    if isinstance(stride, int):  # Triton makes a stride of 1 a constant
        return columns * stride
    else:  # noqa: RET505  (it compiles one of the two; in the interpreter every stride is an int)
        return columns.to(tl.int64) * stride
