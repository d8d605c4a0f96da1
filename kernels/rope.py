"""rope: rotary position embedding of queries and keys, in one launch.

A pair (a, b) of the last dim, at angles that its position gives, becomes

    a' = a cos_a - b sin_a,  b' = b cos_b + a sin_b

with each product and their sum rounded as written. Half-rotated, as in Llama, column i is paired with column i + R / 2;
interleaved, as in GPT-J, column 2 i with column 2 i + 1. Columns from R on, the width of cos and sin, pass through.
The gradient is the rotation back: da = da' cos_a + db' sin_b, db = db' cos_b - da' sin_a, so that one kernel does both.
(Su et al., "RoFormer", arXiv 2104.09864.) Backward keeps the inputs alone, and of those it reads cos and sin.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slapo_py.kernels.launch import column_offset, jit, launch, runs_triton, tl
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Form, Kernel, register_kernel

_WIDEST = 2048
"""The largest head that one program holds."""


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return _turned(q, cos, sin, interleaved), _turned(k, cos, sin, interleaved)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = cos.shape[-1]
    part = x[..., :width]
    if interleaved:
        swapped = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
    else:
        swapped = torch.cat((-part[..., width // 2 :], part[..., : width // 2]), dim=-1)
    made = part * cos + swapped * sin
    return made if width == x.shape[-1] else torch.cat((made, x[..., width:]), dim=-1)


@jit
def _turn(
    x_ptr, y_ptr, heads, pairs, width, x_head, x_column, y_head, a_columns, b_columns, cos_a, cos_b, sin_a, sin_b,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    """All heads at one position, from x_ptr to y_ptr."""
    Y: tl.constexpr = y_ptr.dtype.element_ty
    for first in range(0, heads, HEADS):
        head = (first + tl.arange(0, HEADS))[:, None]
        inside = (head < heads) & (tl.arange(0, PAIRS) < pairs)[None, :]
        x_row, y_row = x_ptr + head.to(tl.int64) * x_head, y_ptr + head.to(tl.int64) * y_head
        a = tl.load(x_row + column_offset(a_columns, x_column)[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_row + column_offset(b_columns, x_column)[None, :], mask=inside, other=0.0).to(tl.float32)
        a_cos, a_sin = (a * cos_a).to(Y).to(tl.float32), (a * sin_b).to(Y).to(tl.float32)
        b_cos, b_sin = (b * cos_b).to(Y).to(tl.float32), (b * sin_a).to(Y).to(tl.float32)
        tl.store(y_row + a_columns[None, :], (a_cos - b_sin).to(Y), mask=inside)
        tl.store(y_row + b_columns[None, :], (b_cos + a_sin).to(Y), mask=inside)
        if PASSED:
            columns = 2 * pairs + tl.arange(0, PASSED)
            inside = (head < heads) & (columns < width)[None, :]
            passed = tl.load(x_row + column_offset(columns, x_column)[None, :], mask=inside)
            tl.store(y_row + columns[None, :], passed.to(Y), mask=inside)


@jit
def _kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, q_heads, k_heads, length, width, pairs,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    cos_batch, cos_row, cos_column, sin_batch, sin_row, sin_column,
    BACK: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    """A program takes a position of a batch: cos and sin are read once for all heads. BACK: gradients go in."""
    batch = tl.cast(tl.program_id(0), tl.int64) // length
    row = tl.cast(tl.program_id(0), tl.int64) % length
    pair = tl.arange(0, PAIRS)
    inside = pair < pairs
    if INTERLEAVED:
        a_columns, b_columns = 2 * pair, 2 * pair + 1
    else:
        a_columns, b_columns = pair, pair + pairs
    cos_at = cos_ptr + batch * cos_batch + row * cos_row
    sin_at = sin_ptr + batch * sin_batch + row * sin_row
    cos_a = tl.load(cos_at + column_offset(a_columns, cos_column), mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos_at + column_offset(b_columns, cos_column), mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin_at + column_offset(a_columns, sin_column), mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin_at + column_offset(b_columns, sin_column), mask=inside, other=0.0).to(tl.float32)[None, :]
    if BACK:
        sin_a, sin_b = -sin_b, -sin_a
    made = row * width  # outputs are contiguous: (batch, head, row, column)
    head = tl.cast(length, tl.int64) * width
    if q_out_ptr is not None:
        _turn(
            q_ptr + batch * q_batch + row * q_row, q_out_ptr + batch * q_heads * head + made, q_heads, pairs, width,
            q_head, q_column, head, a_columns, b_columns, cos_a, cos_b, sin_a, sin_b, HEADS, PAIRS, PASSED,
        )  # fmt: skip
    if k_out_ptr is not None:
        _turn(
            k_ptr + batch * k_batch + row * k_row, k_out_ptr + batch * k_heads * head + made, k_heads, pairs, width,
            k_head, k_column, head, a_columns, b_columns, cos_a, cos_b, sin_a, sin_b, HEADS, PAIRS, PASSED,
        )  # fmt: skip


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> bool:
    if not (q.dim() == k.dim() == cos.dim() == 4 and cos.shape == sin.shape and cos.dtype == sin.dtype):
        return False
    batch, _, length, width = q.shape
    shapes = k.shape == (batch, k.shape[1], length, width) and cos.shape[:3] in ((batch, 1, length), (1, 1, length))
    fixed = not (cos.requires_grad or sin.requires_grad)  # their gradients are the reference's
    return shapes and fixed and width <= _WIDEST and all(runs_triton(one) for one in (k, cos, sin))


def _launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, outputs: tuple[Tensor | None, ...], back: bool
) -> None:
    batch, heads, length, width = q.shape
    pairs = cos.shape[-1] // 2
    block, passed = (1 << max(one - 1, 0).bit_length() if one else 0 for one in (pairs, width - 2 * pairs))
    most = 1 << (max(heads, k.shape[1]) - 1).bit_length()
    cos, sin = (one.expand(batch, -1, -1, -1)[:, 0] for one in (cos, sin))
    launch(
        _kernel, (batch * length,),
        q, k, cos, sin, *outputs, heads, k.shape[1], length, width, pairs,
        *q.stride(), *k.stride(), *cos.stride(), *sin.stride(),
        BACK=back, INTERLEAVED=interleaved, HEADS=min(most, max(1024 // max(block, passed), 1)), PAIRS=block,
        PASSED=passed,
    )  # fmt: skip


def _forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    made = tuple(one.new_empty(one.shape, dtype=torch.promote_types(one.dtype, cos.dtype)) for one in (q, k))
    _launch(q, k, cos, sin, interleaved, made, back=False)
    return made  # type: ignore[return-value]


def _backward(
    grads: tuple[Tensor, Tensor], outputs: tuple[()], needs: list[bool],
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool,
) -> tuple[Tensor | None, Tensor | None, None, None, None]:  # fmt: skip
    made = tuple(one.new_empty(one.shape) if need else None for one, need in zip((q, k), needs))
    _launch(*grads, cos, sin, interleaved, made, back=True)
    return made[0], made[1], None, None, None


_rope: Callable[..., tuple[Tensor, Tensor]] = fused_op("rope", reference, _forward, _backward, fits=_fits)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys: q (B, H, S, D) and k (B, G, S, D), G heads as few as one, to two of the same shapes.

    cos, sin: (B or 1, S, R) or (B or 1, 1, S, R), R even and at most D; the last D - R columns pass through. Results
        have the dtype that q * cos has. That cos or sin require a gradient works, and is slower.
    interleaved: False if column i is rotated with column i + R / 2 (Llama), True if column 2 i is with column 2 i + 1
        (GPT-J, Cohere). cos and sin have R columns both times, each its own column's.
    """
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    _check(q, k, cos, sin)
    return _rope(q, k, cos, sin, interleaved)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, one in (("q", q), ("k", k)):
        if one.dim() != 4:
            raise ValueError(f"rope: {name} must have the dims (batch, heads, length, width), found {one.dim()} dims.")
    batch, _, length, width = q.shape
    if k.shape[0] != batch or k.shape[2:] != q.shape[2:]:
        raise ValueError(
            f"rope: k must have the shape of q but for the number of heads, found {tuple(k.shape)} and "
            f"{tuple(q.shape)}."
        )
    if cos.shape != sin.shape:
        raise ValueError(f"rope: cos and sin must have one shape, found {tuple(cos.shape)} and {tuple(sin.shape)}.")
    known = (batch, 1), (1,), (length, 1)
    if cos.dim() != 4 or any(size not in sizes for size, sizes in zip(cos.shape, known)):
        raise ValueError(
            f"rope: cos must have the shape ({batch} or 1, {length}, R), or that with a 1 in the second place, for q "
            f"of the shape {tuple(q.shape)}; found, with that 1, {tuple(cos.shape)}."
        )
    if cos.shape[-1] % 2 or cos.shape[-1] > width:
        raise ValueError(
            f"rope: cos must have an even number of columns, at most the {width} that q has, found {cos.shape[-1]}."
        )


def _halves_swapped(x: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def _apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers' models after Llama write it."""
    return _with_heads(q, k, cos.unsqueeze(1), sin.unsqueeze(1))


def _with_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + _halves_swapped(q) * sin, k * cos + _halves_swapped(k) * sin


def rope_by_broadcast(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` of cos and sin that broadcast to q and k as `*` does it."""
    return _rope(q, k, cos, sin, False)


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    head = 128 if width % 512 == 0 else max(width // 8 * 2, 2)
    heads = max(width // head, 1)
    q, k = (
        torch.randn(1, rows, count, head, dtype=dtype, device=device).transpose(1, 2).requires_grad_()
        for count in (heads, max(heads // 2, 1))
    )
    angle = torch.arange(rows, device=device)[:, None] * 1e4 ** (-torch.arange(head // 2, device=device) / (head // 2))
    angle = torch.cat((angle, angle), dim=-1)[None]
    return q, k, angle.cos().to(dtype), angle.sin().to(dtype)


register_kernel(
    Kernel(
        name="rope",
        op=rope,
        reference=reference,
        patterns=(
            _apply_rotary_pos_emb,
            Form(_with_heads, op=rope_by_broadcast, placement="bhsD, bgsD, bNsR, bNsR -> bhsD, bgsD"),
        ),
        returns="as q * cos and k * cos",
        placement="bhsD, bgsD, bsR, bsR -> bhsD, bgsD",
        features=("half-rotated form", "interleaved form", "fewer heads of keys", "narrower than a head"),
        example=_example,
    )
)
