"""softcap: cap * tanh(x / cap), which holds attention scores and logits within (-cap, cap).

    y = cap t,  t = tanh(u),  u = x / cap        dy/dx = 1 - t^2 = 4 e / (1 + e)^2,  e = exp(-2 |u|)

(Bello et al., "Neural Combinatorial Optimization with Reinforcement Learning", arXiv 1611.09940, for scores;
Gemma Team, "Gemma 2", arXiv 2408.00118, section 2, for scores and logits.) Only the result is rounded to x's dtype,
where the plain form rounds three times. Backward keeps x alone.
"""

import math

import torch
from torch import Tensor

from slapo_py.kernels.launch import as_rows, block_of, ceil_div, column_offset, jit, launch, row_offset, tl
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Kernel, register_kernel
from slapo_py.patterns import wild

_BLOCK = 1024
_WIDEST = 65535 * _BLOCK  # blocks are counted in the second dim of the grid; a vocabulary is longer than usual rows


def reference(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


@jit
def _tanh(u):
    """tanh within 1.5 units in the last place, if exp and / are exact to the last place."""
    near = tl.abs(u) < 0.7
    v = tl.where(near, u, 0.0)
    z = v * v  # (tanh(v) / v - 1) / z by least relative error on |v| < 0.7: it is 7e-10
    p = -0.0078833103 + 0.0018956673 * z
    p = -0.053920955 + z * (0.021571061 + z * p)
    p = -0.33333325 + z * (0.13332983 + z * p)
    e = tl.exp(-2 * tl.abs(u))
    far = 1 - 2 * e / (1 + e)  # 0.6 or more: nothing cancels
    return tl.where(near, v + v * (z * p), tl.where(u < 0, -far, far))


@jit
def _forward_kernel(x_ptr, y_ptr, cap, width, inner, x_outer, x_inner, x_column, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x_row = x_ptr + row_offset(row, inner, x_outer, x_inner)
    x = tl.load(x_row + column_offset(columns, x_column), mask=inside, other=0.0).to(tl.float32)
    y = cap * _tanh(x / cap)
    tl.store(y_ptr + tl.cast(row, tl.int64) * width + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    g_ptr, x_ptr, dx_ptr, cap, width, inner,
    g_outer, g_inner, g_column, x_outer, x_inner, x_column, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    g_row = g_ptr + row_offset(row, inner, g_outer, g_inner)
    g = tl.load(g_row + column_offset(columns, g_column), mask=inside, other=0.0).to(tl.float32)
    x_row = x_ptr + row_offset(row, inner, x_outer, x_inner)
    x = tl.load(x_row + column_offset(columns, x_column), mask=inside, other=0.0).to(tl.float32)
    e = tl.exp(-2 * tl.abs(x / cap))
    dx = g * (4 * e / ((1 + e) * (1 + e)))  # 1 - t^2 would cancel where t is near 1
    tl.store(dx_ptr + tl.cast(row, tl.int64) * width + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def _fits(x: Tensor, cap: float) -> bool:
    return 2.0**-100 < abs(cap) < 2.0**100  # far within fp32


def _grid(x: Tensor) -> tuple[tuple[int, int], int]:
    """(grid, columns of a block)."""
    width = x.shape[-1]
    block = min(block_of(width)[0], _BLOCK)
    return (x.numel() // width, ceil_div(width, block)), block


def _forward(x: Tensor, cap: float) -> Tensor:
    grid, block = _grid(x)
    y = x.new_empty(x.shape)
    (xs,) = as_rows(x)
    launch(_forward_kernel, grid, xs, y, cap, x.shape[-1], xs.shape[1], *xs.stride(), BLOCK=block)
    return y


def _backward(
    grads: tuple[Tensor], outputs: tuple[()], needs: list[bool], x: Tensor, cap: float
) -> tuple[Tensor | None, None]:
    if not needs[0]:
        return None, None
    grid, block = _grid(x)
    dx = x.new_empty(x.shape)
    g, xs = as_rows(grads[0], x)
    launch(
        _backward_kernel, grid, g, xs, dx, cap, x.shape[-1], xs.shape[1], *g.stride(), *xs.stride(), BLOCK=block
    )  # fmt: skip
    return dx, None


_softcap = fused_op("softcap", reference, _forward, _backward, fits=_fits, widest=_WIDEST)


def softcap(x: Tensor, cap: float | Tensor) -> Tensor:
    """cap * tanh(x / cap): x (..., H) to (..., H) in the dtype that x / cap has.

    cap: a number, finite and not 0. With a tensor, a learned cap, the plain form runs, and the cap gets its gradient.
    """
    if isinstance(cap, Tensor):  # fuse finds these too: slapo.wild stands for any value of the graph
        return torch.tanh(x / cap) * cap
    if not 0 < abs(cap) < math.inf:
        raise ValueError(f"softcap: cap must be a number, finite and not 0, found {cap!r}.")
    return _softcap(x, float(cap))  # type: ignore[no-any-return]


def _divided_and_multiplied(x: Tensor) -> Tensor:
    """Gemma2's."""
    return torch.tanh(x / wild("cap")) * wild("cap")


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, float]:
    x = torch.randn(rows, width, dtype=dtype, device=device)
    return (30 * x).requires_grad_(), 30.0


register_kernel(
    Kernel(
        name="softcap",
        op=softcap,
        reference=reference,
        patterns=(_divided_and_multiplied,),
        returns="as x / cap",
        placement="...h -> ...h",
        splits=lambda x, cap: not isinstance(cap, Tensor),
        example=_example,
    )
)
