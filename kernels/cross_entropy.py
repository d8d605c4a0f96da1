"""cross_entropy: the loss of a classifier over any number of classes, also over a slice of them.

For a row x of V logits with label t, top = max x, total = sum_j exp(x_j - top), lse = top + log(total), smoothing e:

    loss = lse - (1 - e) x_t - (e / V) sum_j x_j + z lse^2
         = log(total) + (1 - e) (top - x_t) + (e / V) sum_j (top - x_j) + z lse^2      (where no two terms cancel)
    dloss/dx_j = (1 + 2 z lse) p_j - (1 - e) [j = t] - e / V,  p_j = exp(x_j - top) / total

Total is summed while top is still looked for: it is scaled anew where top rises (Milakov and Gimelshein, "Online
normalizer calculation for softmax", arXiv 1805.02867). Backward keeps the logits, and top and total of each row. The
z term is that of PaLM (Chowdhery et al., arXiv 2204.02311, section 5).

Where the classes are split over devices, each calls `slice_parts` on its own; `top` is the largest of theirs, the other
parts, put at this top by `at_top`, are added up; then `row_losses` is the loss and `slice_gradient` its gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.kernels.launch import as_rows, block_of, ceil_div, column_offset, jit, launch, row_offset, runs_triton, tl
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Classes, Kernel, register_kernel
from slapo_py.patterns import wild

_WIDEST = 2**30  # a program goes over its row in blocks


def reference(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    loss = F.cross_entropy(
        logits, labels, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if z_loss == 0:
        return loss
    counted = labels != ignore_index
    lse = _wide(logits).logsumexp(min(logits.dim() - 1, 1)).masked_fill(~counted, 0.0)
    return (loss + _reduced(z_loss * lse.square(), counted, reduction)).to(loss.dtype)


def _reference(
    logits: Tensor, labels: Tensor, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The loss, and the place of what Triton's forward keeps for its backward: top and total of each row."""
    loss = reference(logits, labels, ignore_index, reduction, label_smoothing, z_loss)
    return loss, logits.new_zeros((2, *labels.shape), dtype=torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _reduced(rows: Tensor, counted: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return rows
    return rows.sum() / counted.sum() if reduction == "mean" else rows.sum()


@jit
def _forward_kernel(
    x_ptr, label_ptr, kept_ptr, out_ptr, rows, width, inner, x_outer, x_inner, x_column,
    start, ignored, smoothing, z, WHOLE: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes a row, block by block. kept: top, total; out: the loss if it is WHOLE, else x_t and below."""
    row = tl.cast(tl.program_id(0), tl.int64)
    x_row = x_ptr + row_offset(row, inner, x_outer, x_inner)
    label = tl.load(label_ptr + row)
    counted = label != ignored
    top = tl.full([], float("-inf"), tl.float32)
    base, total, below = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for first in range(0, tl.where(counted, width, 0), BLOCK):  # a row that does not count is not read
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(x_row + column_offset(columns, x_column), mask=inside, other=float("-inf")).to(tl.float32)
        risen = tl.maximum(top, tl.max(x, 0))
        higher = tl.where(risen == float("-inf"), 0.0, risen)  # -inf - -inf would be nan
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        if SMOOTH:
            below += first * (higher - base) + tl.sum(tl.where(inside, higher - x, 0.0), 0)
        top, base = risen, higher
    top = tl.where(counted, top, 0.0)
    here = counted & (label >= start) & (label < start + width)
    picked = tl.load(x_row + column_offset(label - start, x_column), mask=here, other=0.0).to(tl.float32)
    tl.store(kept_ptr + row, top)
    tl.store(kept_ptr + rows + row, total)
    if WHOLE:
        log_total = tl.log(tl.where(counted, total, 1.0))
        loss = log_total + (1.0 - smoothing) * (top - picked)
        if SMOOTH:
            loss += smoothing / width * below
        loss += z * (top + log_total) * (top + log_total)
        loss = tl.where(here, loss, float("nan"))  # a label that no class has
        tl.store(out_ptr + row, tl.where(counted, loss, 0.0))
    else:
        tl.store(out_ptr + row, picked)
        tl.store(out_ptr + rows + row, below)


@jit
def _backward_kernel(
    g_ptr, x_ptr, label_ptr, top_ptr, total_ptr, dx_ptr, g_stride, width, inner, x_outer, x_inner, x_column,
    start, ignored, smoothing, z, classes, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.cast(tl.program_id(0), tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(label_ptr + row)
    counted = label != ignored
    inside = columns < width
    top, total = tl.load(top_ptr + row), tl.where(counted, tl.load(total_ptr + row), 1.0)
    x_row = x_ptr + row_offset(row, inner, x_outer, x_inner)
    read = columns < tl.where(counted, width, 0)
    x = tl.load(x_row + column_offset(columns, x_column), mask=read, other=0.0).to(tl.float32)
    p = tl.exp(x - top) / total
    target = tl.where(columns == label - start, 1.0 - smoothing, 0.0) + smoothing / classes
    g = tl.load(g_ptr + row * g_stride, mask=counted, other=0.0).to(tl.float32)
    tl.store(
        dx_ptr + row * width + columns,
        (g * (p - target + 2.0 * z * (top + tl.log(total)) * p)).to(dx_ptr.dtype.element_ty),
        mask=inside,
    )


def _run_forward(
    logits: Tensor, labels: Tensor, start: int, ignored: int, smoothing: float, z: float, whole: bool
) -> tuple[Tensor, Tensor]:
    width = logits.shape[-1]
    block, warps = block_of(min(width, 4096))
    kept = logits.new_empty((2, *labels.shape), dtype=torch.float32)
    out = torch.empty_like(kept[0] if whole else kept)
    (x,) = as_rows(logits)
    launch(
        _forward_kernel, (labels.numel(),),
        x, labels.long().contiguous(), kept, out, labels.numel(), width, x.shape[1], *x.stride(),
        start, ignored, smoothing, z, WHOLE=whole, SMOOTH=smoothing != 0, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return kept, out


def _run_backward(
    grad: Tensor, logits: Tensor, labels: Tensor, top: Tensor, total: Tensor,
    start: int, ignored: int, smoothing: float, z: float, classes: int,
) -> Tensor:  # fmt: skip
    width = logits.shape[-1]
    block, warps = block_of(min(width, 4096))
    dx = logits.new_empty(logits.shape)
    (x,) = as_rows(logits)
    g = grad.reshape(1).expand(labels.numel()) if grad.dim() == 0 else grad.reshape(-1)
    launch(
        _backward_kernel, (labels.numel(), ceil_div(width, block)),
        g, x, labels.long().contiguous(), top.contiguous(), total.contiguous(), dx, g.stride(0), width,
        x.shape[1], *x.stride(), start, ignored, smoothing, z, classes, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return dx


def slice_parts(
    logits: Tensor, labels: Tensor, start: int = 0, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """What the loss needs of the classes start, ..., start + W - 1: logits (..., W), labels (...) to (4, ...), fp32.

    The parts of a row: the largest logit, `top`; the sum of exp(x_j - top); the label's logit, 0 where its class lies
    outside; with label smoothing the sum of top - x_j, else 0. Those of an ignored row are 0. No gradient flows.
    """
    logits = logits.detach()
    if runs_triton(logits, _WIDEST):
        kept, out = _run_forward(logits, labels, start, ignore_index, label_smoothing, 0.0, whole=False)
        return torch.cat((kept, out))
    x, counted, width = _wide(logits), labels != ignore_index, logits.shape[-1]
    top = x.amax(-1) if width else x.new_full(labels.shape, -torch.inf)
    base = top.masked_fill(top == -torch.inf, 0.0).unsqueeze(-1)  # -inf - -inf would be nan
    here = counted & (labels >= start) & (labels < start + width)
    place = (labels - start).masked_fill(~here, 0).unsqueeze(-1)
    picked = x.gather(-1, place).squeeze(-1).masked_fill(~here, 0.0) if width else torch.zeros_like(top)
    below = (base - x).sum(-1) if label_smoothing else torch.zeros_like(top)
    return torch.stack((top, (x - base).exp_().sum(-1), picked, below)).masked_fill(~counted, 0.0)


def at_top(parts: Tensor, top: Tensor, width: int) -> Tensor:
    """The last three parts of a slice of `width` classes, as they are where `top` is the largest logit: (3, ...)."""
    own, total, picked, below = parts
    lower = own == -torch.inf  # this slice has no class; its total is 0
    below = below + torch.where(lower, 0.0, width * (top - own))
    return torch.stack((torch.where(lower, total, total * (own - top).exp()), picked, below))


def row_losses(
    top: Tensor, parts: Tensor, labels: Tensor, classes: int,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """The loss of each row of `classes` classes, from the sum of all slices' `at_top`; nan for a label out of range."""
    total, picked, below = parts
    losses = total.log() + (1 - label_smoothing) * (top - picked)
    if label_smoothing:
        losses = losses + label_smoothing / classes * below
    if z_loss:
        losses = losses + z_loss * (top + total.log()).square()
    losses = losses.masked_fill((labels < 0) | (labels >= classes), torch.nan)
    return losses.masked_fill(labels == ignore_index, 0.0)


def slice_gradient(
    grad: Tensor, logits: Tensor, labels: Tensor, top: Tensor, total: Tensor, start: int, classes: int,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """The gradient of a slice's logits (..., W), new and in their dtype; grad: that of each row's loss, or of all.

    top and total: the largest logit and the sum of exponentials over all `classes` classes, as for `row_losses`.
    """
    logits = logits.detach()
    if runs_triton(logits, _WIDEST):
        return _run_backward(grad, logits, labels, top, total, start, ignore_index, label_smoothing, z_loss, classes)
    counted, width = labels != ignore_index, logits.shape[-1]
    grad = grad.to(top.dtype).expand(labels.shape).masked_fill(~counted, 0.0)
    top, total = top.masked_fill(~counted, torch.inf), total.masked_fill(~counted, 1.0)  # so that these rows give 0
    share = grad.double() / total.double()  # a number a row: its error would be that of the whole row
    if z_loss:
        share = share * (1 + 2 * z_loss * (top.masked_fill(~counted, 0.0).double() + total.double().log()))
    dx = (_wide(logits) - top.unsqueeze(-1)).exp_().mul_(share.to(top.dtype).unsqueeze(-1))
    if label_smoothing:
        dx.sub_((label_smoothing / classes * grad).unsqueeze(-1))
    here = counted & (labels >= start) & (labels < start + width)
    if width:
        place = (labels - start).masked_fill(~here, 0).unsqueeze(-1)
        dx.scatter_add_(-1, place, ((label_smoothing - 1) * grad * here).unsqueeze(-1))
    return dx.to(logits.dtype)


def _classes_last(logits: Tensor) -> Tensor:
    return logits.movedim(1, -1) if logits.dim() > 2 else logits


def _fits(
    logits: Tensor, labels: Tensor, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float
) -> bool:
    return labels.shape == _classes_last(logits).shape[:-1] and logits.shape[min(logits.dim() - 1, 1)] > 0


def _forward(
    logits: Tensor, labels: Tensor, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    kept, rows = _run_forward(_classes_last(logits), labels, 0, ignore_index, label_smoothing, z_loss, whole=True)
    return _reduced(rows, labels != ignore_index, reduction).to(logits.dtype), kept


def _backward(
    grads: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor], needs: list[bool], logits: Tensor, labels: Tensor,
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    grad, x = grads[0].float(), _classes_last(logits)
    if reduction == "mean":
        grad = grad / (labels != ignore_index).sum()
    classes = x.shape[-1]
    top, total = outputs[1]
    dx = _run_backward(grad, x, labels, top, total, 0, ignore_index, label_smoothing, z_loss, classes)
    return dx.movedim(-1, 1) if logits.dim() > 2 else dx, None, None, None, None, None


_cross_entropy = fused_op("cross_entropy", _reference, _forward, _backward, fits=_fits, keep=True, widest=_WIDEST)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    *,
    weight: None = None,
) -> Tensor:
    """F.cross_entropy, with z_loss * logsumexp**2 added for every row that counts.

    logits: (V,), (N, V) or (N, V, ...), float; labels: the classes, (), (N,) or (N, ...), int64. The result has the
    dtype of the logits (float32 under autocast), and the shape of the labels for reduction="none". Where all labels are
    ignored, the mean is nan. A label out of range raises on the CPU; on a GPU its loss is nan.

    Raises ValueError for class weights, for probabilities instead of labels, and for unknown or misplaced options.
    """
    check_options("cross_entropy", labels, ignore_index, reduction, label_smoothing, z_loss)
    if weight is not None:
        raise ValueError("cross_entropy: weight: class weights are not supported; F.cross_entropy takes them.")
    kind = logits.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and logits.dtype != torch.float64:
        logits = logits.float()
    return _cross_entropy(logits, labels, ignore_index, reduction, float(label_smoothing), float(z_loss))[0]  # type: ignore[no-any-return]


def check_options(
    name: str, labels: Tensor, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float
) -> None:
    """Raise ValueError for what no cross entropy here takes."""
    if labels.is_floating_point():
        raise ValueError(
            f"{name}: labels must be classes (int64), found {labels.dtype}; probabilities are not supported."
        )
    if not isinstance(ignore_index, int):
        found = type(ignore_index).__name__
        raise ValueError(f"{name}: ignore_index must be an int, found {found}; class weights are not supported.")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'{name}: reduction must be "mean", "sum" or "none", found {reduction!r}.')
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing must be between 0 and 1, found {label_smoothing}.")
    if not z_loss >= 0:
        raise ValueError(f"{name}: z_loss must not be negative, found {z_loss}.")


def _functional(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits,
        labels,
        ignore_index=wild("ignore_index"),
        reduction=wild("reduction"),
        label_smoothing=wild("label_smoothing"),
    )


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    logits = torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)
    return logits, torch.randint(width, (rows,), device=device)


def _splits(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    z_loss: float = 0.0, *, weight: None = None,
) -> bool:  # fmt: skip
    return logits.dim() <= 2 and not label_smoothing and not z_loss


register_kernel(
    Kernel(
        name="cross_entropy",
        op=cross_entropy,
        reference=reference,
        patterns=(_functional,),
        returns="as logits",
        placement="***v, *** -> ***",
        splits=_splits,
        classes=Classes("v", slice_parts, slice_gradient),
        features=("ignored labels", "label smoothing", "z loss", "parts over a slice of the classes"),
        example=_example,
    )
)
