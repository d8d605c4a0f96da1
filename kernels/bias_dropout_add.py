"""bias_dropout_add: residual + dropout(x + bias), what stands between a linear layer and the next norm.

With m the noise of the dropout, 0 or 1 / (1 - p), and each step rounded as the plain form does:

    y = (x + bias) m + residual        dx = g m,  dbias = sum g m,  dresidual = g

(Srivastava et al., "Dropout", JMLR 15, 2014.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.kernels.dropout import apply_noise, draw_noise, noise_at
from slapo_py.kernels.launch import ANY_WIDTH, as_rows, block_of, ceil_div, column_offset, jit, launch, row_offset, tl
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Kernel, register_kernel
from slapo_py.patterns import wild

PROGRAMS = 256
"""Among how many programs backward divides the rows: each leaves its part of the gradients of weight and bias."""


def reference(x: Tensor, bias: Tensor, residual: Tensor, p: float, noise: Tensor | None) -> Tensor:
    return apply_noise(x + bias, noise, p) + residual


@jit
def _forward_kernel(
    x_ptr, b_ptr, r_ptr, seed_ptr, y_ptr, p, width, inner,
    x_outer, x_inner, x_column, b_column, r_outer, r_inner, r_column,
    SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SUM: the dtype of x + bias."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    place = tl.cast(row, tl.int64) * width + columns
    x_row = x_ptr + row_offset(row, inner, x_outer, x_inner)
    x = tl.load(x_row + column_offset(columns, x_column), mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + column_offset(columns, b_column), mask=inside, other=0.0).to(tl.float32)
    r_row = r_ptr + row_offset(row, inner, r_outer, r_inner)
    r = tl.load(r_row + column_offset(columns, r_column), mask=inside, other=0.0).to(tl.float32)
    h = (x + b).to(SUM).to(tl.float32)
    if seed_ptr is not None:
        h = (h * noise_at(seed_ptr, place, p)).to(SUM).to(tl.float32)
    tl.store(y_ptr + place, (h + r).to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    g_ptr, seed_ptr, dx_ptr, db_ptr, dr_ptr, p, rows, width, inner, g_outer, g_inner, g_column,
    SUM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS rows of a block of columns; it leaves their sum, so that bias is summed in a fixed order."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) * ROWS
    for row in range(first, tl.minimum(first + ROWS, rows)):
        place = tl.cast(row, tl.int64) * width + columns
        g_row = g_ptr + row_offset(row, inner, g_outer, g_inner)
        g = tl.load(g_row + column_offset(columns, g_column), mask=inside, other=0.0)
        if dr_ptr is not None:
            tl.store(dr_ptr + place, g.to(dr_ptr.dtype.element_ty), mask=inside)
        g = g.to(SUM).to(tl.float32)
        if seed_ptr is not None:
            g = (g * noise_at(seed_ptr, place, p)).to(SUM).to(tl.float32)
        if dx_ptr is not None:
            tl.store(dx_ptr + place, g.to(dx_ptr.dtype.element_ty), mask=inside)
        total += g
    if db_ptr is not None:
        tl.store(db_ptr + tl.program_id(0).to(tl.int64) * width + columns, total, mask=inside)


def _shape(x: Tensor) -> tuple[int, int, int]:
    """(rows, width, columns of a block)."""
    width = x.shape[-1]
    return x.numel() // width, width, min(block_of(width)[0], 1024)


def _triton_dtype(dtype: torch.dtype) -> object:
    return getattr(tl, str(dtype).removeprefix("torch."))


def _forward(x: Tensor, bias: Tensor, residual: Tensor, p: float, noise: Tensor | None) -> Tensor:
    rows, width, block = _shape(x)
    dtype = torch.promote_types(x.dtype, bias.dtype)
    y = x.new_empty(x.shape, dtype=torch.promote_types(dtype, residual.dtype))
    xs, rs = as_rows(x, residual)
    launch(
        _forward_kernel, (rows, ceil_div(width, block)),
        xs, bias, rs, noise, y, p, width, xs.shape[1], *xs.stride(), bias.stride(0), *rs.stride(),
        SUM=_triton_dtype(dtype), BLOCK=block,
    )  # fmt: skip
    return y


def _backward(
    grads: tuple[Tensor], outputs: tuple[()], needs: list[bool], x: Tensor, bias: Tensor, residual: Tensor, p: float,
    noise: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:  # fmt: skip
    rows, width, block = _shape(x)
    each = ceil_div(rows, PROGRAMS)
    programs = ceil_div(rows, each)
    dx, dr = (
        one.new_empty(one.shape) if need else None
        for one, need in zip((x, residual), (needs[0], needs[2]), strict=True)
    )
    sums = x.new_empty((programs, width), dtype=torch.float32) if needs[1] else None
    (g,) = as_rows(grads[0])
    launch(
        _backward_kernel, (programs, ceil_div(width, block)),
        g, noise, dx, sums, dr, p, rows, width, g.shape[1], *g.stride(),
        SUM=_triton_dtype(torch.promote_types(x.dtype, bias.dtype)), ROWS=each, BLOCK=block,
    )  # fmt: skip
    return dx, None if sums is None else sums.sum(0).to(bias.dtype), dr, None, None


_bias_dropout_add = fused_op(
    "bias_dropout_add", reference, _forward, _backward, unread="x, bias, residual", widest=ANY_WIDTH
)


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """residual + F.dropout(x + bias, p, training): x and residual (..., H), bias (H,), in the dtype that this has.

    Other shapes that broadcast run in the plain form. Raises ValueError for a p that is no probability.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"bias_dropout_add: p must be between 0 and 1, found {p}.")
    if bias.shape != x.shape[-1:] or residual.shape != x.shape:
        return F.dropout(x + bias, p, training) + residual
    noise = draw_noise(x, p, training, torch.promote_types(x.dtype, bias.dtype))
    return _bias_dropout_add(x, bias, residual, p, noise)  # type: ignore[no-any-return]


def _functional(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.dropout(x + bias, wild("p"), wild("training")) + residual


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, float]:
    x, bias, residual = torch.randn(rows, width), torch.randn(width), torch.randn(rows, width)
    made = (one.to(device, dtype).requires_grad_() for one in (x, bias, residual))
    return (*made, 0.1)  # type: ignore[return-value]


register_kernel(
    Kernel(
        name="bias_dropout_add",
        op=bias_dropout_add,
        reference=reference,
        patterns=(_functional,),
        returns="as x + bias + residual",
        placement="...h, h, ...h -> ...h",
        features=("dropout",),
        example=_example,
    )
)
