"""bias_gelu: gelu(x + bias), the activation between the two linear layers of an MLP.

With h = x + bias, rounded to the dtype of the sum as the plain form does:

    exact   y = h Phi(h),  Phi(h) = (1 + erf(h / sqrt(2))) / 2        dy/dh = Phi(h) + h phi(h)
    tanh    y = h s,  s = (1 + tanh(u)) / 2,  u = sqrt(2 / pi) (h + 0.044715 h^3)

(Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415.) Backward keeps x and bias alone.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.kernels.launch import ANY_WIDTH, as_rows, block_of, ceil_div, column_offset, jit, launch, row_offset, tl
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Form, Kernel, register_kernel
from slapo_py.patterns import wild


def reference(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


@jit
def gelu_parts(h, TANH: tl.constexpr):
    """(gelu(h) / h, its derivative by h)."""
    if TANH:
        u = 1.5957691216057308 * (h + 0.044715 * h * h * h)  # 2 sqrt(2 / pi)
        small = tl.exp(-tl.abs(u)) / (1 + tl.exp(-tl.abs(u)))  # the smaller of s and 1 - s, without cancellation
        s = tl.where(u < 0, small, 1 - small)
        slope = 1.5957691216057308 * (1 + 0.134145 * h * h)
        return s, s + h * small * (1 - small) * slope
    else:  # noqa: RET505
        s = 0.5 * (1 + tl.erf(h * 0.7071067811865476))
        return s, s + h * 0.3989422804014327 * tl.exp(-0.5 * h * h)


@jit
def _sum(x_ptr, b_ptr, row, columns, width, inner, x_outer, x_inner, x_column, b_column, ROUND: tl.constexpr):
    inside = columns < width
    x_row = x_ptr + row_offset(row, inner, x_outer, x_inner)
    x = tl.load(x_row + column_offset(columns, x_column), mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + column_offset(columns, b_column), mask=inside, other=0.0).to(tl.float32)
    return (x + b).to(ROUND).to(tl.float32)


@jit
def _forward_kernel(
    x_ptr, b_ptr, y_ptr, width, inner, x_outer, x_inner, x_column, b_column,
    TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ROUND: tl.constexpr = y_ptr.dtype.element_ty
    h = _sum(x_ptr, b_ptr, row, columns, width, inner, x_outer, x_inner, x_column, b_column, ROUND)
    s, _ = gelu_parts(h, TANH)
    tl.store(y_ptr + tl.cast(row, tl.int64) * width + columns, (h * s).to(ROUND), mask=columns < width)


@jit
def _backward_kernel(
    g_ptr, x_ptr, b_ptr, dx_ptr, db_ptr, rows, width, inner,
    g_outer, g_inner, g_column, x_outer, x_inner, x_column, b_column,
    TANH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS rows of a block of columns; it leaves their sum, so that bias is summed in a fixed order."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    ROUND: tl.constexpr = g_ptr.dtype.element_ty  # the dtype of x + bias
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) * ROWS
    for row in range(first, tl.minimum(first + ROWS, rows)):
        h = _sum(x_ptr, b_ptr, row, columns, width, inner, x_outer, x_inner, x_column, b_column, ROUND)
        g_row = g_ptr + row_offset(row, inner, g_outer, g_inner)
        g = tl.load(g_row + column_offset(columns, g_column), mask=inside, other=0.0).to(tl.float32)
        _, slope = gelu_parts(h, TANH)
        dh = (g * slope).to(ROUND).to(tl.float32)
        if dx_ptr is not None:
            tl.store(dx_ptr + tl.cast(row, tl.int64) * width + columns, dh.to(dx_ptr.dtype.element_ty), mask=inside)
        total += dh
    if db_ptr is not None:
        tl.store(db_ptr + tl.program_id(0).to(tl.int64) * width + columns, total, mask=inside)


def _shape(x: Tensor) -> tuple[int, int, int]:
    """(rows, width, columns of a block)."""
    width = x.shape[-1]
    return x.numel() // width, width, min(block_of(width)[0], 1024)


def _fits(x: Tensor, bias: Tensor, approximate: str) -> bool:
    return bias.shape == x.shape[-1:]


def _forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    rows, width, block = _shape(x)
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, bias.dtype))
    (xs,) = as_rows(x)
    launch(
        _forward_kernel, (rows, ceil_div(width, block)),
        xs, bias, y, width, xs.shape[1], *xs.stride(), bias.stride(0), TANH=approximate == "tanh", BLOCK=block,
    )  # fmt: skip
    return y


def _backward(
    grads: tuple[Tensor], outputs: tuple[()], needs: list[bool], x: Tensor, bias: Tensor, approximate: str
) -> tuple[Tensor | None, Tensor | None, None]:
    rows, width, block = _shape(x)
    each = ceil_div(rows, 256)
    programs = ceil_div(rows, each)
    dx = x.new_empty(x.shape) if needs[0] else None
    sums = x.new_empty((programs, width), dtype=torch.float32) if needs[1] else None
    g, xs = as_rows(grads[0], x)
    launch(
        _backward_kernel, (programs, ceil_div(width, block)),
        g, xs, bias, dx, sums, rows, width, g.shape[1], *g.stride(), *xs.stride(), bias.stride(0),
        TANH=approximate == "tanh", ROWS=each, BLOCK=block,
    )  # fmt: skip
    return dx, None if sums is None else sums.sum(0).to(bias.dtype), None


_bias_gelu = fused_op("bias_gelu", reference, _forward, _backward, fits=_fits, widest=ANY_WIDTH)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """gelu(x + bias): x (..., H), bias (H,) to (..., H) in the dtype that x + bias has.

    approximate: "none" for the exact form with erf, "tanh" for the one with tanh. The two differ by up to 5e-4.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'bias_gelu: approximate must be "none" or "tanh", found {approximate!r}.')
    return _bias_gelu(x, bias, approximate)  # type: ignore[no-any-return]


def _functional(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate=wild("approximate"))


def _gelu_new(x: Tensor, bias: Tensor) -> Tensor:
    """transformers' "gelu_new": GPT-2's."""
    h = x + bias
    return 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))


def _gelu_python_tanh(x: Tensor, bias: Tensor) -> Tensor:
    """transformers' "gelu_python_tanh"."""
    h = x + bias
    return h * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))


def _gelu_fast(x: Tensor, bias: Tensor) -> Tensor:
    """transformers' "gelu_fast"."""
    h = x + bias
    return 0.5 * h * (1.0 + torch.tanh(h * 0.7978845608 * (1.0 + 0.044715 * h * h)))


def _gelu_python(x: Tensor, bias: Tensor) -> Tensor:
    """transformers' "gelu_python"."""
    h = x + bias
    return h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)
    return x, torch.randn(width, dtype=dtype, device=device, requires_grad=True)


register_kernel(
    Kernel(
        name="bias_gelu",
        op=bias_gelu,
        reference=reference,
        patterns=(
            _functional,
            Form(_gelu_new, keywords={"approximate": "tanh"}),
            Form(_gelu_python_tanh, keywords={"approximate": "tanh"}),
            Form(_gelu_fast, keywords={"approximate": "tanh"}),
            Form(_gelu_python, keywords={"approximate": "none"}),
        ),
        returns="as x + bias",
        placement="...h, h -> ...h",
        features=("exact form", "tanh form"),
        example=_example,
    )
)
