"""masked_softmax: the attention weights softmax(scale scores + bias + mask) over the last dim.

With z what goes into the softmax, rounded wherever the plain form rounds, and g the gradient of p:

    p = exp(z - max z) / sum exp(z - max z)        dz = p (g - sum g p)        dscores = scale dz

The gradients of mask and bias are dz, summed over the dims along which they are broadcast. Backward keeps the inputs
and computes p again, in float32. Where nothing is attended, a row is NaN for masks of -inf, as in torch.
"""

from typing import Any

import torch
from torch import Tensor

from slapo_py.kernels.launch import DTYPES, block_of, column_offset, jit, launch, tl
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Kernel, register_kernel
from slapo_py.patterns import wild

LONGEST = 2**13
"""The most columns that a program holds at once."""


def reference(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, causal: bool, dtype: torch.dtype | None
) -> Tensor:
    z = scores * scale if scale != 1 else scores
    if bias is not None:
        z = z + bias
    if mask is not None:
        z = z.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else z + mask
    if causal:
        shape = z.shape[-2:]
        seen = torch.ones(shape, dtype=torch.bool, device=z.device).tril(shape[1] - shape[0])
        z = z.masked_fill(~seen, float("-inf"))
    return z.softmax(-1) if dtype is None else z.softmax(-1, dtype=torch.float32).to(dtype)


@jit
def _start(ptr, row, heads, queries, batch_stride, head_stride, query_stride):
    """Where a row begins, in 64 bits; the stride of a dim along which a mask is broadcast is 0."""
    if ptr is None:
        return None
    else:  # noqa: RET505  (Triton compiles one of the two)
        row = tl.cast(row, tl.int64)
        query, head = row % queries, (row // queries) % heads
        return ptr + (row // queries // heads) * batch_stride + head * head_stride + query * query_stride


@jit
def _logits(
    s_row, m_row, b_row, columns, limit, s_column, m_column, b_column, scale,
    BIASED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """z of columns, -inf from `limit` on, and where a boolean mask and the limit let the gradient pass."""
    seen = columns < limit
    z = tl.load(s_row + column_offset(columns, s_column), mask=seen, other=0.0)
    z = (z.to(tl.float32) * scale).to(z.dtype).to(tl.float32)
    if b_row is not None:
        z += tl.load(b_row + column_offset(columns, b_column), mask=seen, other=0.0).to(tl.float32)
        z = z.to(BIASED).to(tl.float32)
    if m_row is not None:
        m = tl.load(m_row + column_offset(columns, m_column), mask=seen, other=0)
        if m_row.dtype.element_ty == tl.uint8:
            seen = seen & (m != 0)
        else:
            z = (z + m.to(tl.float32)).to(MASKED).to(tl.float32)
    return tl.where(seen, z, float("-inf")), seen


@jit
def _merge(z, top, total):
    """The largest z so far, and the sum of exponentials as seen from it, with one more block."""
    new = tl.maximum(top, tl.max(z, axis=0))
    base = _base(new)
    return new, total * tl.exp(top - base) + tl.sum(tl.exp(z - base), axis=0)


@jit
def _base(top):
    return tl.where(top == float("-inf"), 0.0, top)  # where nothing was seen yet


@jit
def _weights(z, top, total):
    return tl.exp(z - _base(top)) / tl.where(total == 0, float("nan"), total)


@jit
def _forward_kernel(
    s_ptr, m_ptr, b_ptr, p_ptr, width, heads, queries, scale,
    s_batch, s_head, s_query, s_column, m_batch, m_head, m_query, m_column, b_batch, b_head, b_query, b_column,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes a row; one that is LONGer than a block is read twice."""
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    limit = width - queries + row % queries + 1 if CAUSAL else width
    s_row = _start(s_ptr, row, heads, queries, s_batch, s_head, s_query)
    m_row = _start(m_ptr, row, heads, queries, m_batch, m_head, m_query)
    b_row = _start(b_ptr, row, heads, queries, b_batch, b_head, b_query)
    p_row = p_ptr + tl.cast(row, tl.int64) * width
    z, _ = _logits(s_row, m_row, b_row, columns, limit, s_column, m_column, b_column, scale, BIASED, MASKED)
    top, total = _merge(z, float("-inf"), 0.0)
    if LONG:
        for start in range(BLOCK, limit, BLOCK):
            at = start + columns
            z, _ = _logits(s_row, m_row, b_row, at, limit, s_column, m_column, b_column, scale, BIASED, MASKED)
            top, total = _merge(z, top, total)
        for start in range(0, width, BLOCK):
            at = start + columns
            z, _ = _logits(s_row, m_row, b_row, at, limit, s_column, m_column, b_column, scale, BIASED, MASKED)
            p = _weights(z, top, total)
            tl.store(p_row + at, p.to(p_ptr.dtype.element_ty), mask=at < width)
    else:
        p = _weights(z, top, total)
        tl.store(p_row + columns, p.to(p_ptr.dtype.element_ty), mask=columns < width)


@jit
def _store_gradients(ds_ptr, dz_ptr, offset, dz, seen, scale, inside):
    dz = tl.where(seen, dz, 0.0)  # also in a row that is NaN
    if dz_ptr is not None:
        tl.store(dz_ptr + offset, dz.to(dz_ptr.dtype.element_ty), mask=inside)
    if ds_ptr is not None:
        tl.store(ds_ptr + offset, (dz * scale).to(ds_ptr.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    g_ptr, s_ptr, m_ptr, b_ptr, ds_ptr, dz_ptr, width, heads, queries, scale,
    g_batch, g_head, g_query, g_column, s_batch, s_head, s_query, s_column,
    m_batch, m_head, m_query, m_column, b_batch, b_head, b_query, b_column,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sum g p is subtracted twice: the second time it is the rounding error of the first, which may weigh most."""
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    limit = width - queries + row % queries + 1 if CAUSAL else width
    s_row = _start(s_ptr, row, heads, queries, s_batch, s_head, s_query)
    m_row = _start(m_ptr, row, heads, queries, m_batch, m_head, m_query)
    b_row = _start(b_ptr, row, heads, queries, b_batch, b_head, b_query)
    g_row = _start(g_ptr, row, heads, queries, g_batch, g_head, g_query)
    z, seen = _logits(s_row, m_row, b_row, columns, limit, s_column, m_column, b_column, scale, BIASED, MASKED)
    top, total = _merge(z, float("-inf"), 0.0)
    if LONG:
        for start in range(BLOCK, limit, BLOCK):
            at = start + columns
            z, _ = _logits(s_row, m_row, b_row, at, limit, s_column, m_column, b_column, scale, BIASED, MASKED)
            top, total = _merge(z, top, total)
        mean = 0.0
        for turn in tl.static_range(2):  # noqa: B007
            more = 0.0
            for start in range(0, limit, BLOCK):
                at = start + columns
                z, _ = _logits(s_row, m_row, b_row, at, limit, s_column, m_column, b_column, scale, BIASED, MASKED)
                g = tl.load(g_row + column_offset(at, g_column), mask=at < limit, other=0.0).to(tl.float32)
                more += tl.sum(_weights(z, top, total) * (g - mean), axis=0)
            mean += more
        for start in range(0, width, BLOCK):
            at = start + columns
            z, seen = _logits(s_row, m_row, b_row, at, limit, s_column, m_column, b_column, scale, BIASED, MASKED)
            g = tl.load(g_row + column_offset(at, g_column), mask=at < limit, other=0.0).to(tl.float32)
            dz = _weights(z, top, total) * (g - mean)
            _store_gradients(ds_ptr, dz_ptr, tl.cast(row, tl.int64) * width + at, dz, seen, scale, at < width)
    else:
        g = tl.load(g_row + column_offset(columns, g_column), mask=columns < limit, other=0.0).to(tl.float32)
        p = _weights(z, top, total)
        g -= tl.sum(g * p, axis=0)
        dz = p * (g - tl.sum(g * p, axis=0))
        _store_gradients(ds_ptr, dz_ptr, tl.cast(row, tl.int64) * width + columns, dz, seen, scale, columns < width)


def _dtypes(scores: Any, mask: Tensor | None, bias: Tensor | None) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of scores + bias and of scores + bias + mask."""
    biased = scores.dtype if bias is None else torch.promote_types(scores.dtype, bias.dtype)
    adds = mask is not None and mask.dtype != torch.bool
    return biased, torch.promote_types(biased, mask.dtype) if adds else biased  # type: ignore[union-attr]


def _wide(one: Tensor | None, shape: torch.Size) -> tuple[Tensor | None, tuple[int, ...]]:
    """What is read, and its four strides, 0 along dims that it lacks."""
    if one is None:
        return None, (0, 0, 0, 0)
    one = one.view(torch.uint8) if one.dtype == torch.bool else one
    return one, (0,) * (4 - len(shape)) + one.expand(shape).stride()


def _launch(
    function: Any, read: tuple[Tensor | None, ...], made: tuple[Tensor | None, ...], scale: float, causal: bool
) -> None:
    """read: the gradient, if there is one, scores, mask and bias."""
    scores, mask, bias = read[-3:]
    shape = scores.shape  # type: ignore[union-attr]
    biased, masked = (getattr(tl, str(one).removeprefix("torch.")) for one in _dtypes(scores, mask, bias))
    given = [_wide(one, shape) for one in read]
    block, warps = block_of(min(shape[-1], LONGEST))
    launch(
        function, (shape[:-1].numel(),),
        *(one for one, _ in given), *made, shape[-1], *(1, 1, *shape)[-3:-1], float(scale),
        *(stride for _, strides in given for stride in strides), num_warps=warps,
        CAUSAL=causal, BIASED=biased, MASKED=masked, LONG=shape[-1] > block, BLOCK=block,
    )  # fmt: skip


def _forward(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, causal: bool, dtype: torch.dtype | None
) -> Tensor:
    p = scores.new_empty(scores.shape, dtype=dtype or _dtypes(scores, mask, bias)[1])
    _launch(_forward_kernel, (scores, mask, bias), (p,), scale, causal)
    return p


def _backward(
    grads: tuple[Tensor], outputs: tuple[()], needs: list[bool],
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, causal: bool, dtype: torch.dtype | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    total = _dtypes(scores, mask, bias)[1]
    ds = scores.new_empty(scores.shape) if needs[0] else None
    same = ds is not None and scale == 1 and total == scores.dtype
    dz = scores.new_empty(scores.shape, dtype=total) if (needs[1] or needs[2]) and not same else None
    _launch(_backward_kernel, (*grads, scores, mask, bias), (ds, dz), scale, causal)
    dz = ds if same else dz
    summed = [
        dz.sum_to_size(one.shape).to(one.dtype) if need and one is not None and dz is not None else None
        for one, need in zip((mask, bias), needs[1:])
    ]
    return ds, *summed, None, None, None


def _fits(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, causal: bool, dtype: torch.dtype | None
) -> bool:
    given = [one for one in (mask, bias) if one is not None]
    return (
        scores.dim() <= 4
        and all(one.dim() > 0 and torch.broadcast_shapes(one.shape, scores.shape) == scores.shape for one in given)
        and all(one.dtype in DTYPES or one is mask and one.dtype == torch.bool for one in given)
        and (dtype is None or dtype in DTYPES)
    )


_masked_softmax = fused_op("masked_softmax", reference, _forward, _backward, fits=_fits)


def masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | Tensor = 1.0,
    causal: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """softmax(scale scores + bias + mask) over the last dim: scores (..., Q, K), mask and bias broadcast to it.

    mask: what is added to the scores, or boolean: True where a key is seen. bias: added before the mask. causal: query
    q of Q sees keys up to q + K - Q, so that the last one sees all. dtype: None for a softmax in the dtype of the sum,
    as softmax(dim=-1) gives; a dtype for what softmax(dim=-1, dtype=torch.float32).to(dtype) gives. Inside, it is
    float32 either way. A row of which nothing is seen is NaN, as in torch.

    Raises ValueError for a mask or bias of another kind, and for causal scores without queries.
    """
    if mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(f"masked_softmax: mask must be boolean or floating, found {mask.dtype}.")
    if bias is not None and not bias.is_floating_point():
        raise ValueError(f"masked_softmax: bias must be floating, found {bias.dtype}.")
    if causal and scores.dim() < 2:
        raise ValueError(f"masked_softmax: causal needs scores of (..., Q, K), found {tuple(scores.shape)}.")
    if isinstance(scale, Tensor):
        scores, scale = scores * scale, 1.0
    if dtype is None and scores.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.float32  # as softmax there
    return _masked_softmax(scores, mask, bias, scale, causal, dtype)  # type: ignore[no-any-return]


def _biased(scores: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    return (scores * wild("scale") + bias + mask).softmax(-1)


def _scaled(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores * wild("scale") + mask).softmax(-1)


def _scaled_wide(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores * wild("scale") + mask).softmax(-1, dtype=torch.float32).to(wild("dtype"))


def _added(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores + mask).softmax(-1)


def _added_wide(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores + mask).softmax(-1, dtype=torch.float32).to(wild("dtype"))


def _unmasked(scores: Tensor) -> Tensor:
    return (scores * wild("scale")).softmax(-1)


def _unmasked_wide(scores: Tensor) -> Tensor:
    return (scores * wild("scale")).softmax(-1, dtype=torch.float32).to(wild("dtype"))


def _rows_are_alike(
    scores: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, scale: float | Tensor = 1.0,
    causal: bool = False, dtype: torch.dtype | None = None,
) -> bool:  # fmt: skip
    """Whether a row needs nothing but itself: under a causal mask it needs its number among the rows, too."""
    return not causal and not isinstance(scale, Tensor)


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, None, float]:
    queries = max(rows // 4, 1)
    scores = torch.randn(2, 2, queries, width, dtype=dtype, device=device, requires_grad=True)
    hidden = torch.ones(2, 1, queries, width, dtype=torch.bool, device=device).tril(width - queries).logical_not()
    return scores, hidden.to(dtype) * torch.finfo(dtype).min, None, 0.125


register_kernel(
    Kernel(
        name="masked_softmax",
        op=masked_softmax,
        reference=reference,
        patterns=(_biased, _scaled, _scaled_wide, _added, _added_wide, _unmasked, _unmasked_wide),
        returns="as the sum, or dtype",
        placement="...K, ...K, ...K -> ...K",
        splits=_rows_are_alike,
        features=("additive mask", "boolean mask", "causal", "learned bias", "result in another dtype"),
        example=_example,
    )
)
