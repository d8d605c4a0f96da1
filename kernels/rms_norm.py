"""rms_norm: each row over its root mean square, times a weight; also the kernels of add_rms_norm, which add first.

With r = 1 / sqrt(mean(x^2) + eps) and n = x r in float32, rounded before the weight or after, and g the gradient of y:

    y = (offset + weight) n        dweight = sum over rows of g n        dn = g (offset + weight)
    dx = r (dn - n mean(dn n))                            mean(n^2) = 1 - eps r^2

(Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.) Backward keeps x and weight alone and
computes r again: x is read anyway.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.kernels.launch import DTYPES, as_rows, block_of, ceil_div, column_offset, jit, launch, row_offset, tl
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Form, Kernel, register_kernel
from slapo_py.patterns import wild

PROGRAMS = 256
"""At most so many take part in the sum over rows that is the gradient of the weight."""


def reference(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, dtype: torch.dtype | None) -> Tensor:
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "late":
        return (normed * (offset + weight.float() if offset else weight.float())).to(dtype or x.dtype)
    return (offset + weight if offset else weight) * normed.to(dtype or x.dtype)


@jit
def _load(ptr, rows, columns, inside, inner, outer_stride, inner_stride, column_stride):
    """A tile of rows, in float32."""
    start = ptr + row_offset(rows, inner, outer_stride, inner_stride)[:, None]
    return tl.load(start + column_offset(columns, column_stride)[None, :], mask=inside, other=0.0).to(tl.float32)


@jit
def _normed(x, here, width, eps):
    """(n, r) of a tile of rows; past the last of them, where not `here`, n is 0 even if eps is."""
    r = tl.rsqrt(tl.where(here, tl.sum(x * x, axis=1) / width + eps, 1.0))[:, None]
    return x * r, r


@jit
def _weight(w_ptr, columns, width, w_column, offset, OFFSET: tl.constexpr):
    """offset + weight, as one row; OFFSET: "" for none, "float32", or "rounded" to the weight's dtype."""
    w = tl.load(w_ptr + column_offset(columns, w_column), mask=columns < width, other=0.0).to(tl.float32)
    if OFFSET != "":
        w += offset
    if OFFSET == "rounded":
        w = w.to(w_ptr.dtype.element_ty).to(tl.float32)
    return w[None, :]


@jit
def _forward_kernel(
    x_ptr, a_ptr, w_ptr, y_ptr, s_ptr, count, width, inner, eps, offset, w_column,
    x_outer, x_inner, x_column, a_outer, a_inner, a_column,
    ROUND: tl.constexpr, CAST: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    x = _load(x_ptr, rows, columns, inside, inner, x_outer, x_inner, x_column)
    if a_ptr is not None:
        x += _load(a_ptr, rows, columns, inside, inner, a_outer, a_inner, a_column)
        x = x.to(ROUND).to(tl.float32)
    place = tl.cast(rows, tl.int64)[:, None] * width + columns[None, :]
    if s_ptr is not None:
        tl.store(s_ptr + place, x.to(ROUND), mask=inside)
    n, _ = _normed(x, rows < count, width, eps)
    if CAST is not None:
        n = n.to(CAST).to(tl.float32)
    y = n * _weight(w_ptr, columns, width, w_column, offset, OFFSET)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    g_ptr, h_ptr, x_ptr, a_ptr, w_ptr, dx_ptr, da_ptr, dw_ptr, count, each, width, inner, eps, offset, w_column,
    g_outer, g_inner, g_column, h_outer, h_inner, h_column,
    x_outer, x_inner, x_column, a_outer, a_inner, a_column,
    ROUND: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes `each` tiles of rows and leaves their part of dweight, so that it is summed in a fixed order.

    h: the gradient of the sum x + a."""
    columns = tl.arange(0, BLOCK)
    w = _weight(w_ptr, columns, width, w_column, offset, OFFSET)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    first = tl.program_id(0) * each
    for tile in range(first, tl.minimum(first + each, tl.cdiv(count, ROWS))):
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = (rows < count)[:, None] & (columns < width)[None, :]
        x = _load(x_ptr, rows, columns, inside, inner, x_outer, x_inner, x_column)
        if a_ptr is not None:
            x += _load(a_ptr, rows, columns, inside, inner, a_outer, a_inner, a_column)
            x = x.to(ROUND).to(tl.float32)
        g = _load(g_ptr, rows, columns, inside, inner, g_outer, g_inner, g_column)
        n, r = _normed(x, rows < count, width, eps)
        total += g * n
        if dx_ptr is not None or da_ptr is not None:
            dn = g * w
            c = (tl.sum(dn * n, axis=1) / width)[:, None]
            dn -= n * c
            # Once more: where g or x has a large mean, the rounding of that sum is as large as what is left.
            dn -= n * ((tl.sum(dn * n, axis=1) / width)[:, None] - c * eps * r * r)
            dx = r * dn
            if h_ptr is not None:
                dx += _load(h_ptr, rows, columns, inside, inner, h_outer, h_inner, h_column)
            place = tl.cast(rows, tl.int64)[:, None] * width + columns[None, :]
            if dx_ptr is not None:
                tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
            if da_ptr is not None:
                tl.store(da_ptr + place, dx.to(da_ptr.dtype.element_ty), mask=inside)
    if dw_ptr is not None:
        dw = dw_ptr + tl.cast(tl.program_id(0), tl.int64) * width + columns
        tl.store(dw, tl.sum(total, axis=0), mask=columns < width)


def _tile(width: int) -> tuple[int, int, int]:
    """(rows, block, warps): narrow rows, as those of a head, share a program."""
    block, warps = block_of(width)
    return max(1024 // block, 1), block, max(warps, 4)


def _constants(x: Tensor, added: Tensor | None, offset: float, casting: str) -> dict[str, Any]:
    """ROUND is the dtype of the sum x + added."""
    rows, block, warps = _tile(x.shape[-1])
    return {
        "ROUND": _named(_sum_dtype(x, added)),
        "OFFSET": "" if not offset else "float32" if casting == "late" else "rounded",
        "ROWS": rows,
        "BLOCK": block,
        "num_warps": warps,
    }


def _named(dtype: torch.dtype) -> Any:
    """Triton's dtype of the same name."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def _sum_dtype(x: Tensor, added: Tensor | None) -> torch.dtype:
    return x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if tensor is None else tensor.stride()


def forward_rows(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, offset: float, casting: str,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(rms_norm of x + added, that sum); the sum is None without added."""
    count, width = x.numel() // x.shape[-1], x.shape[-1]
    cast = dtype or _sum_dtype(x, added)
    y = x.new_empty(x.shape, dtype=cast if casting == "late" else torch.promote_types(weight.dtype, cast))
    total = None if added is None else x.new_empty(x.shape, dtype=_sum_dtype(x, added))
    xs, a = _rows(x, added)
    launch(
        _forward_kernel, (ceil_div(count, _tile(width)[0]),),
        xs, a, weight, y, total, count, width, xs.shape[1], float(eps), float(offset), weight.stride(0),
        *_strides(xs), *_strides(a), CAST=_named(cast) if casting == "early" else None,
        **_constants(x, added, offset, casting),
    )  # fmt: skip
    return y, total


def backward_rows(
    grad: Tensor, grad_sum: Tensor | None, needs: tuple[bool, bool, bool],
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, offset: float, casting: str,
    dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x, added and weight, as needed."""
    count, width = x.numel() // x.shape[-1], x.shape[-1]
    tiles = ceil_div(count, _tile(width)[0])
    each = ceil_div(tiles, PROGRAMS)
    programs = ceil_div(tiles, each)
    dx = x.new_empty(x.shape) if needs[0] else None
    da = x.new_empty(x.shape, dtype=added.dtype) if needs[1] and added is not None else None
    sums = x.new_empty((programs, width), dtype=torch.float32) if needs[2] else None
    g, h, xs, a = _rows(grad, grad_sum, x, added)
    launch(
        _backward_kernel, (programs,),
        g, h, xs, a, weight, dx, da, sums, count, each, width, xs.shape[1], float(eps), float(offset), weight.stride(0),
        *_strides(g), *_strides(h), *_strides(xs), *_strides(a),
        **_constants(x, added, offset, casting),
    )  # fmt: skip
    return dx, da, None if sums is None else sums.sum(0).to(weight.dtype)


def _rows(*tensors: Tensor | None) -> list[Any]:
    given = iter(as_rows(*(one for one in tensors if one is not None)))
    return [None if one is None else next(given) for one in tensors]


def _forward(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, dtype: torch.dtype | None) -> Tensor:
    return forward_rows(x, None, weight, eps, offset, casting, dtype)[0]


def _backward(
    grads: tuple[Tensor], outputs: tuple[()], needs: list[bool],
    x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, dtype: torch.dtype | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    needed = (needs[0], False, needs[1])
    dx, _, dw = backward_rows(grads[0], None, needed, x, None, weight, eps, offset, casting, dtype)
    return dx, dw, None, None, None, None


def _fits(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, dtype: torch.dtype | None) -> bool:
    return weight.dtype in DTYPES and (dtype is None or dtype in DTYPES)


_rms_norm = fused_op("rms_norm", reference, _forward, _backward, fits=_fits)


def check(kernel: str, row: torch.Size, weight: Tensor, casting: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError for what no kernel of this file takes."""
    if weight.shape != row:
        raise ValueError(f"{kernel}: weight must have the shape of a row, {tuple(row)}, found {tuple(weight.shape)}.")
    if casting not in ("early", "late"):
        raise ValueError(f'{kernel}: casting must be "early" or "late", found {casting!r}.')
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{kernel}: dtype must be a floating dtype or None, found {dtype!r}.")


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "early",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dim, times offset + weight: x (..., H), weight (H,) to (..., H).

    The values are float32 until they are cast to `dtype`, which is x's if it is None. casting says when that is:
        "early": before they meet the weight, as in Llama, Qwen3 and T5, where dtype is the weight's; the result has
            the dtype of that product;
        "late": after, as in Gemma and F.rms_norm; offset + weight is float32 then.
    offset is 1.0 in Gemma. Raises ValueError for a weight of another shape, another casting, a dtype that is no float.
    """
    check("rms_norm", x.shape[-1:], weight, casting, dtype)
    return _rms_norm(x, weight, eps, offset, casting, dtype)  # type: ignore[no-any-return]


def functional_rms_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """F.rms_norm(x, weight.shape, weight, eps); under autocast on CUDA in float32, as there."""
    if weight.shape != x.shape[-1:]:
        return F.rms_norm(x, weight.shape, weight, eps)
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x, weight = x.float(), weight.float()
    return rms_norm(x, weight, torch.finfo(torch.float32).eps if eps is None else eps, casting="late")


def torch_form(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, wild(), weight, wild("eps"))  # torch demands that this is the weight's shape


def llama_form(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + wild("eps"))).to(wild("dtype"))


def t5_form(x: Tensor, weight: Tensor) -> Tensor:
    """In bfloat16 and float16."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + wild("eps"))).to(wild("dtype"))


def t5_wide_form(x: Tensor, weight: Tensor) -> Tensor:
    """With a weight in float32: T5 then leaves the cast out."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + wild("eps")))


def gemma_form(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + wild("eps"))
    return (normed * (wild("offset") + weight.float())).type_as(x)


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)
    return x, torch.randn(width, dtype=dtype, device=device, requires_grad=True)


register_kernel(
    Kernel(
        name="rms_norm",
        op=rms_norm,
        reference=reference,
        patterns=(
            Form(torch_form, op=functional_rms_norm),
            llama_form,
            t5_form,
            Form(t5_wide_form, keywords={"dtype": torch.float32}),
            Form(gemma_form, keywords={"casting": "late"}),
        ),
        returns="early: as dtype times weight; late: dtype",
        placement="...H, H -> ...H",
        features=("early and late casts", "offset of the weight"),
        example=_example,
    )
)
