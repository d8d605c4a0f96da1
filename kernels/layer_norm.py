"""layer_norm: each row with mean 0 and variance 1, then scaled and shifted by weight and bias.

    n = (x - mean(x)) rstd,  rstd = 1 / sqrt(var(x) + eps)             y = n weight + bias
    dx = (gw - mean(gw) - n mean(gw n)) rstd  with gw = g weight       dweight = sum g n,  dbias = sum g

(Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450.) Backward keeps the inputs alone and computes mean and
rstd again. The kernels here also serve what is done to a row just before: dropout, and the addition of a residual.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.kernels.dropout import noise_at
from slapo_py.kernels.launch import as_rows, block_of, ceil_div, column_offset, jit, launch, row_offset, tl
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Kernel, register_kernel
from slapo_py.patterns import wild

PROGRAMS = 256
"""Among how many programs backward divides the rows: each leaves its part of the gradients of weight and bias."""


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, widen: bool) -> Tensor:
    if widen:  # as autocast does
        x, weight, bias = x.float(), None if weight is None else weight.float(), None if bias is None else bias.float()
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@jit
def _load(ptr, row, columns, width, inner, outer_stride, inner_stride, column_stride):
    start = ptr + row_offset(row, inner, outer_stride, inner_stride)
    return tl.load(start + column_offset(columns, column_stride), mask=columns < width, other=0.0).to(tl.float32)


@jit
def _normalise(x, columns, width, eps):
    """(the row with mean 0 and variance 1, what it was multiplied by)."""
    x = tl.where(columns < width, x - tl.sum(x, 0) / width, 0.0)
    rest = tl.sum(x, 0) / width  # what rounding has left of a large mean
    rstd = tl.rsqrt(tl.sum(x * x, 0) / width - rest * rest + eps)
    return tl.where(columns < width, x - rest, 0.0) * rstd, rstd


@jit
def _forward_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, seed_ptr, y_ptr, s_ptr, p, eps, width, inner,
    x_outer, x_inner, x_column, r_outer, r_inner, r_column, w_column, b_column,
    SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SUM: the dtype to which the sum of x and the residual is rounded."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    place = tl.cast(row, tl.int64) * width + columns
    x = _load(x_ptr, row, columns, width, inner, x_outer, x_inner, x_column)
    if seed_ptr is not None:
        x = (x * noise_at(seed_ptr, place, p)).to(x_ptr.dtype.element_ty).to(tl.float32)
    if r_ptr is not None:
        x = (x + _load(r_ptr, row, columns, width, inner, r_outer, r_inner, r_column)).to(SUM).to(tl.float32)
    if s_ptr is not None:
        tl.store(s_ptr + place, x.to(SUM), mask=inside)
    y, _ = _normalise(x, columns, width, eps)
    if w_ptr is not None:
        y *= tl.load(w_ptr + column_offset(columns, w_column), mask=inside, other=0.0).to(tl.float32)
    if b_ptr is not None:
        y += tl.load(b_ptr + column_offset(columns, b_column), mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    g_ptr, h_ptr, x_ptr, r_ptr, w_ptr, seed_ptr, dx_ptr, dr_ptr, dw_ptr, db_ptr, p, eps, rows, width, inner,
    g_outer, g_inner, g_column, h_outer, h_inner, h_column, x_outer, x_inner, x_column, r_outer, r_inner, r_column,
    w_column, SUM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """g, h: the gradients of the result and of the sum. A program leaves its part of the sums over all rows."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight_total = tl.zeros([BLOCK], tl.float32)
    bias_total = tl.zeros([BLOCK], tl.float32)
    if w_ptr is not None:
        w = tl.load(w_ptr + column_offset(columns, w_column), mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0) * ROWS
    for row in range(first, tl.minimum(first + ROWS, rows)):
        place = tl.cast(row, tl.int64) * width + columns
        x = _load(x_ptr, row, columns, width, inner, x_outer, x_inner, x_column)
        if seed_ptr is not None:
            noise = noise_at(seed_ptr, place, p)
            x = (x * noise).to(x_ptr.dtype.element_ty).to(tl.float32)
        if r_ptr is not None:
            x = (x + _load(r_ptr, row, columns, width, inner, r_outer, r_inner, r_column)).to(SUM).to(tl.float32)
        x, rstd = _normalise(x, columns, width, eps)
        g = _load(g_ptr, row, columns, width, inner, g_outer, g_inner, g_column)
        if dw_ptr is not None:
            weight_total += g * x
        if db_ptr is not None:
            bias_total += g
        if w_ptr is not None:
            g *= w
        d = (g - tl.sum(g, 0) / width - x * (tl.sum(g * x, 0) / width)) * rstd
        if h_ptr is not None:
            d += _load(h_ptr, row, columns, width, inner, h_outer, h_inner, h_column)
        if dr_ptr is not None:
            tl.store(dr_ptr + place, d.to(dr_ptr.dtype.element_ty), mask=inside)
        if seed_ptr is not None:
            d *= noise
        if dx_ptr is not None:
            tl.store(dx_ptr + place, d.to(dx_ptr.dtype.element_ty), mask=inside)
    place = tl.program_id(0).to(tl.int64) * width + columns
    if dw_ptr is not None:
        tl.store(dw_ptr + place, weight_total, mask=inside)
    if db_ptr is not None:
        tl.store(db_ptr + place, bias_total, mask=inside)


def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, noise: Tensor | None, p: float,
    eps: float, widen: bool, alone: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(the norm of dropout(x) + residual, that sum); alone: an empty tensor in the place of the sum."""
    width = x.shape[-1]
    block, warps = block_of(width)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = x.new_empty(x.shape, dtype=torch.float32 if widen else dtype)
    total = x.new_empty(0 if alone else x.shape, dtype=dtype)
    xs, *others = as_rows(*_given(x, residual))
    rs = others[0] if others else None
    launch(
        _forward_kernel, (x.numel() // width,),
        xs, rs, weight, bias, noise, y, None if alone else total, p, eps, width, xs.shape[1],
        *xs.stride(), *_strides(rs, 3), *_strides(weight, 1), *_strides(bias, 1),
        num_warps=warps, SUM=_NAMES[dtype], BLOCK=block,
    )  # fmt: skip
    return y, total


def norm_backward(
    grads: Sequence[Tensor], needs: Sequence[bool], x: Tensor, residual: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, noise: Tensor | None, p: float, eps: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x, residual, weight and bias, those that `needs` says; an empty gradient is none."""
    width = x.shape[-1]
    block, warps = block_of(width)
    rows = x.numel() // width
    each = ceil_div(rows, PROGRAMS)
    programs = ceil_div(rows, each)
    dx, dr = (torch.empty_like(one, memory_format=torch.contiguous_format) if one is not None and need else None
              for one, need in zip((x, residual), needs))  # fmt: skip
    dw, db = (x.new_empty((programs, width), dtype=torch.float32) if need else None for need in needs[2:])
    grads = [one for one in grads if one.numel()]
    by_rows = iter(as_rows(*_given(*grads, x, residual)))
    g, h = next(by_rows), next(by_rows) if len(grads) > 1 else None
    xs, rs = next(by_rows), next(by_rows, None)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    launch(
        _backward_kernel, (programs,),
        g, h, xs, rs, weight, noise, dx, dr, dw, db, p, eps, rows, width, g.shape[1],
        *g.stride(), *_strides(h, 3), *xs.stride(), *_strides(rs, 3), *_strides(weight, 1),
        num_warps=warps, SUM=_NAMES[dtype], ROWS=each, BLOCK=block,
    )  # fmt: skip
    return (
        dx, dr,
        None if dw is None or weight is None else dw.sum(0).to(weight.dtype),
        None if db is None or bias is None else db.sum(0).to(bias.dtype),
    )  # fmt: skip


_NAMES = {
    torch.float32: getattr(tl, "float32", None),
    torch.bfloat16: getattr(tl, "bfloat16", None),
    torch.float16: getattr(tl, "float16", None),
}


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [one for one in tensors if one is not None]


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()


def normalised_dims(
    kernel: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: int | Sequence[int] | None
) -> int:
    """How many of the last dims of x are normalised over. Raises ValueError for shapes that don't go together."""
    first = weight if weight is not None else bias
    if shape is None:
        shape = x.shape[-1:] if first is None else first.shape
    wanted = (shape,) if isinstance(shape, int) else tuple(shape)
    if not wanted or tuple(x.shape[-len(wanted) :]) != wanted:
        raise ValueError(
            f"{kernel}: the last dims of x must be {wanted}, which is normalised over, found {tuple(x.shape)}."
        )
    for name, one in (("weight", weight), ("bias", bias)):
        if one is not None and tuple(one.shape) != wanted:
            raise ValueError(f"{kernel}: {name} must have the shape {wanted} of a row of x, found {tuple(one.shape)}.")
    return len(wanted)


def merged(dims: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Tensors with their last dims made one."""
    return tuple(one if one is None or dims == 1 else one.flatten(-dims) for one in tensors)


def widens(x: Tensor) -> bool:
    """Whether autocast would have the norm of x computed and given back in float32."""
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, widen: bool) -> Tensor:
    return norm_forward(x, None, weight, bias, None, 0.0, eps, widen, True)[0]


def _backward(
    grads: tuple[Tensor], outputs: tuple[()], needs: list[bool], x: Tensor, weight: Tensor | None, bias: Tensor | None,
    eps: float, widen: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dx, _, dw, db = norm_backward(grads, [needs[0], False, *needs[1:3]], x, None, weight, bias, None, 0.0, eps)
    return dx, dw, db, None, None


_layer_norm = fused_op("layer_norm", reference, _forward, _backward)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    normalized_shape: int | Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """F.layer_norm over the last dim of x (..., H), with weight (H,) and bias (H,) or without; the dtype is that of x.

    normalized_shape: (H,), or more of the last dims of x, that then are the shape of weight and bias too.
    On CUDA under autocast the result is float32. Raises ValueError for shapes that don't go together.
    """
    dims = normalised_dims("layer_norm", x, weight, bias, normalized_shape)
    return _layer_norm(*merged(dims, x, weight, bias), eps, widens(x)).reshape(x.shape)  # type: ignore[no-any-return]


def _functional(x: Tensor) -> Tensor:
    return F.layer_norm(x, wild("normalized_shape"), wild("weight"), wild("bias"), wild("eps"))


def over_one_dim(weight: Tensor | None, bias: Tensor | None, shape: int | Sequence[int] | None) -> bool:
    """Whether only the last dim is normalised, as the lines of labels say."""
    learned = weight if weight is not None else bias
    if learned is not None:
        return learned.dim() == 1
    return not isinstance(shape, Sequence) or len(shape) == 1


def _splits(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    normalized_shape: int | Sequence[int] | None = None,
) -> bool:  # fmt: skip
    return over_one_dim(weight, bias, normalized_shape)


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    made = torch.randn(rows, width), torch.randn(width), torch.randn(width)
    return tuple(one.to(device, dtype).requires_grad_() for one in made)


register_kernel(
    Kernel(
        name="layer_norm",
        op=layer_norm,
        reference=reference,
        patterns=(_functional,),
        returns="that of x",
        placement="...H, H, H -> ...H",
        splits=_splits,
        features=("without weight or bias", "over several dims"),
        example=_example,
    )
)
