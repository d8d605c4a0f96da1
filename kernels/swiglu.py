"""swiglu: silu(gate) * up, the activation of the gated MLP of Llama and many others.

    y = a up,  a = silu(gate) = gate s,  s = sigmoid(gate) = 1 / (1 + exp(-gate)), rounded to gate's dtype as written
    dy/dgate = up s (1 + gate sigmoid(-gate)),  dy/dup = a

(Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.) Backward keeps gate and up alone. The kernels take the
activation as a function, so that other gated ones (geglu) share them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.kernels.launch import (
    ANY_WIDTH,
    as_rows,
    block_of,
    ceil_div,
    column_offset,
    jit,
    launch,
    row_offset,
    runs_triton,
    tl,
)
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Kernel, register_kernel


def reference(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@jit
def _silu(h):
    """(silu(h) / h, its derivative by h)."""
    e = tl.exp(-tl.abs(h))
    larger = 1 / (1 + e)  # of s and 1 - s, each without overflow or cancellation
    s, rest = tl.where(h < 0, e * larger, larger), tl.where(h < 0, larger, e * larger)
    return s, s * (1 + h * rest)


@jit
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr, width, inner,
    gate_outer, gate_inner, gate_column, up_outer, up_inner, up_column,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate_row = gate_ptr + row_offset(row, inner, gate_outer, gate_inner)
    h = tl.load(gate_row + column_offset(columns, gate_column), mask=inside, other=0.0).to(tl.float32)
    up_row = up_ptr + row_offset(row, inner, up_outer, up_inner)
    up = tl.load(up_row + column_offset(columns, up_column), mask=inside, other=0.0).to(tl.float32)
    s, _ = ACTIVATION(h)
    y = (h * s).to(gate_ptr.dtype.element_ty).to(tl.float32) * up
    tl.store(y_ptr + tl.cast(row, tl.int64) * width + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    g_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, width, inner,
    g_outer, g_inner, g_column, gate_outer, gate_inner, gate_column, up_outer, up_inner, up_column,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    GATE: tl.constexpr = gate_ptr.dtype.element_ty
    made = tl.cast(row, tl.int64) * width + columns
    g_row = g_ptr + row_offset(row, inner, g_outer, g_inner)
    g = tl.load(g_row + column_offset(columns, g_column), mask=inside, other=0.0).to(tl.float32)
    gate_row = gate_ptr + row_offset(row, inner, gate_outer, gate_inner)
    h = tl.load(gate_row + column_offset(columns, gate_column), mask=inside, other=0.0).to(tl.float32)
    s, slope = ACTIVATION(h)
    if dup_ptr is not None:
        dup = g * (h * s).to(GATE).to(tl.float32)
        tl.store(dup_ptr + made, dup.to(dup_ptr.dtype.element_ty), mask=inside)
    if dgate_ptr is not None:
        up_row = up_ptr + row_offset(row, inner, up_outer, up_inner)
        up = tl.load(up_row + column_offset(columns, up_column), mask=inside, other=0.0).to(tl.float32)
        da = (g * up).to(GATE).to(tl.float32)
        tl.store(dgate_ptr + made, (da * slope).to(GATE), mask=inside)


def fits_gated(gate: Tensor, up: Tensor) -> bool:
    """Whether the kernels cover these: tensors of one shape, both of a dtype that the kernels take."""
    return gate.shape == up.shape and gate.device == up.device and runs_triton(up)


def forward_gated(activation: Any, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up by Triton; `activation(h)` is a device function, giving (a(h) / h, da/dh)."""
    width = gate.shape[-1]
    block = min(block_of(width)[0], 1024)
    y = gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    gates, ups = as_rows(gate, up)
    launch(
        _forward_kernel, (gate.numel() // width, ceil_div(width, block)),
        gates, ups, y, width, gates.shape[1], *gates.stride(), *ups.stride(), ACTIVATION=activation, BLOCK=block,
    )  # fmt: skip
    return y


def backward_gated(
    activation: Any, g: Tensor, needs: list[bool], gate: Tensor, up: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of gate and up, those that are needed."""
    width = gate.shape[-1]
    block = min(block_of(width)[0], 1024)
    dgate, dup = (one.new_empty(one.shape) if need else None for one, need in zip((gate, up), needs))
    gs, gates, ups = as_rows(g, gate, up)
    launch(
        _backward_kernel, (gate.numel() // width, ceil_div(width, block)),
        gs, gates, ups, dgate, dup, width, gs.shape[1], *gs.stride(), *gates.stride(), *ups.stride(),
        ACTIVATION=activation, BLOCK=block,
    )  # fmt: skip
    return dgate, dup


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    return forward_gated(_silu, gate, up)


def _backward(
    grads: tuple[Tensor], outputs: tuple[()], needs: list[bool], gate: Tensor, up: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    return backward_gated(_silu, grads[0], needs, gate, up)


_swiglu: Callable[..., Tensor] = fused_op("swiglu", reference, _forward, _backward, fits=fits_gated, widest=ANY_WIDTH)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: gate (..., H), up (..., H) to (..., H) in the dtype that the product of the two has.

    Floating-point tensors of any strides. Shapes and dtypes that differ are broadcast and promoted as `*` does.
    """
    check_gated("swiglu", gate, up)
    return _swiglu(gate, up)


def check_gated(name: str, gate: Tensor, up: Tensor) -> None:
    """Refuse what has no such activation: integers, shapes that don't broadcast."""
    for which, one in (("gate", gate), ("up", up)):
        if not one.is_floating_point():
            raise ValueError(f"{name}: {which} must be a floating-point tensor, found dtype {one.dtype}.")
    try:
        torch.broadcast_shapes(gate.shape, up.shape)
    except RuntimeError:
        raise ValueError(
            f"{name}: gate and up must have one shape, found {tuple(gate.shape)} and {tuple(up.shape)}."
        ) from None


def _silu_times_up(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    gate = torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)
    return gate, torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)


register_kernel(
    Kernel(
        name="swiglu",
        op=swiglu,
        reference=reference,
        patterns=(_silu_times_up,),
        returns="as gate * up",
        placement="...h, ...h -> ...h",
        example=_example,
    )
)
