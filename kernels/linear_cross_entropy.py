"""linear_cross_entropy: the loss of a language model from its last hidden states, without ever holding all logits.

    x = hidden weight^T + bias, rounded to their dtype, soft-capped if asked: x := c tanh(x / c)
    loss = cross_entropy(float32(x), labels)

The rows are taken in chunks. While a chunk's logits exist, their gradient d for a loss of gradient 1 is made, and gives
d weight for these rows of hidden, and d^T hidden and the sum of d, added up in float32, for weight and bias. (With a
soft cap, d is first multiplied by 1 - tanh(x / c)^2.) Backward multiplies by the incoming gradient, since the loss is
linear in the rows' losses; for reduction="none" it goes over the chunks itself. (Related: Wijmans et al., "Cut Your
Losses in Large-Vocabulary Language Models", arXiv 2411.09009; Hsu et al., "Liger Kernel", arXiv 2410.10989.)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.kernels.cross_entropy import check_options, row_losses, slice_gradient, slice_parts
from slapo_py.kernels.cross_entropy import reference as loss_of_logits
from slapo_py.kernels.launch import ceil_div
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Form, Kernel, register_kernel
from slapo_py.patterns import wild


def reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    logits, _ = _logits(hidden.reshape(-1, hidden.shape[-1]), weight, bias, softcap)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = loss_of_logits(wide, labels.reshape(-1), ignore_index, reduction, label_smoothing, z_loss)
    return loss.reshape(labels.shape) if reduction == "none" else loss


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """(the logits, tanh(x / c) if they are capped)."""
    logits = F.linear(rows, weight, bias)
    if softcap is None:
        return logits, None
    t = torch.tanh(logits / softcap)
    return t * softcap, t


def _reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int, reduction: str,
    label_smoothing: float, z_loss: float, softcap: float | None, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, and places for the gradients that are wanted of hidden, weight and bias, for a loss of gradient 1."""
    loss = reference(hidden, weight, labels, bias, ignore_index, reduction, label_smoothing, z_loss, softcap)
    places = [
        hidden.new_zeros(one.shape if want and one is not None else (0,), dtype=_kept(hidden.dtype))
        for one, want in zip((hidden, weight, bias), wanted)
    ]
    return loss, places[0], places[1], places[2]


def _kept(dtype: torch.dtype) -> torch.dtype:
    """In what gradients are kept that are not scaled yet: float16 would overflow."""
    return torch.float32 if dtype == torch.float16 else dtype


def chunk_bytes(weight: Tensor) -> int:
    """How much the logits of a chunk may take in float32.

    Each chunk reads and writes the gradient of weight once, so a chunk should not be small beside it.
    """
    return max(2**27, weight.numel() * 2)


def _chunks(rows: int, weight: Tensor) -> list[slice]:
    """Chunks of rows, all but the last of one size."""
    count = max(ceil_div(rows * len(weight) * 4, chunk_bytes(weight)), 1)
    size = max(ceil_div(rows, count), 1)
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def _over_chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, wanted: list[bool], grad: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """(the rows' losses, the gradients that are wanted); grad: that of each row's loss, or of all."""
    rows, targets, classes = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), len(weight)
    wanted = [*wanted[:2], wanted[2] and bias is not None]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    losses = rows.new_empty(len(rows), dtype=wide)
    d_hidden, d_weight, d_bias = (
        torch.zeros(one.shape if want and one is not None else 0, dtype=dtype, device=rows.device)
        for one, want, dtype in (
            (rows, wanted[0], _kept(rows.dtype)),
            (weight, wanted[1], wide),
            (bias, wanted[2], wide),
        )
    )
    if rows.device.type == "cpu":
        _check_range(targets, classes, ignore_index)
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    for part in _chunks(len(rows), weight):
        (logits, t), target = _logits(rows[part], weight, bias, softcap), targets[part]
        top, *parts = slice_parts(logits, target, 0, **options)
        losses[part] = row_losses(top, torch.stack(parts), target, classes, **options, z_loss=z_loss)
        if not any(wanted):
            continue
        g = grad[part] if grad.dim() else grad
        d = slice_gradient(g, logits, target, top, parts[0], 0, classes, **options, z_loss=z_loss)
        if t is not None:
            d = (d.to(wide) * (1 - t.to(wide).square())).to(d.dtype)
        if wanted[0]:
            torch.mm(d, weight, out=d_hidden[part]) if d_hidden.dtype == d.dtype else d_hidden[part].copy_(d @ weight)
        if wanted[1]:
            d_weight.addmm_(d.t(), rows[part]) if d.dtype == wide else d_weight.add_(d.t() @ rows[part])
        if wanted[2]:
            d_bias += d.sum(0, dtype=wide)
        del logits, t, d
    kept = _kept(rows.dtype)
    return losses, (d_hidden.view(hidden.shape) if wanted[0] else d_hidden, d_weight.to(kept), d_bias.to(kept))


def _check_range(labels: Tensor, classes: int, ignore_index: int) -> None:
    """Raise IndexError as F.cross_entropy does, and look at no value in Python, so that fake tensors go through."""
    try:
        F.embedding(labels.masked_fill(labels == ignore_index, 0), torch.empty(max(classes, 1), 1))
    except IndexError:
        raise IndexError(f"linear_cross_entropy: a label is out of bounds: classes are 0 to {classes - 1}.") from None


def _forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int, reduction: str,
    label_smoothing: float, z_loss: float, softcap: float | None, wanted: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    counted = labels != ignore_index
    options = (ignore_index, label_smoothing, z_loss, softcap, wanted)
    losses, gradients = _over_chunks(hidden, weight, labels, bias, *options, _early(hidden, counted, reduction))
    if reduction == "none":
        return losses.reshape(labels.shape), *gradients
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum(), *gradients


def _early(hidden: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """The gradient of each row's loss in the forward pass: for a mean, 1 / count times a power of two, in [1, 2).

    So float16 does not lose the gradients of a mean over many rows, and what backward multiplies by rounds nothing.
    """
    one = torch.ones((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    if reduction != "mean":
        return one
    count = one * counted.sum().clamp_(min=1)
    return count.log2().ceil_().exp2_() / count


def _backward(
    grads: tuple[Tensor, ...], outputs: tuple[Tensor, ...], needs: list[bool],
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int, reduction: str,
    label_smoothing: float, z_loss: float, softcap: float | None, wanted: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    needed, grad, counted = [needs[0], needs[1], needs[3]], grads[0], labels != ignore_index
    if reduction == "mean":
        grad = grad / counted.sum().clamp_(min=1)  # where none counts the gradients are 0
    if all(has or not need for has, need in zip(wanted, needed)):
        factor = grad / _early(hidden, counted, reduction)
        found = [kept * factor for kept, need in zip(outputs[1:], needed) if need]
    else:  # for reduction="none", or where nobody knew yet that gradients would be needed
        grad = grad.reshape(-1) if reduction == "none" else grad
        options = (ignore_index, label_smoothing, z_loss, softcap)
        _, gradients = _over_chunks(hidden, weight, labels, bias, *options, needed, grad)
        found = [one for one, need in zip(gradients, needed) if need]
    made = iter(found)
    d_hidden, d_weight, d_bias = (
        next(made).to(one.dtype) if need and one is not None else None
        for one, need in zip((hidden, weight, bias), needed)
    )
    return d_hidden, d_weight, None, d_bias, None, None, None, None, None, None


_linear_cross_entropy = fused_op("linear_cross_entropy", _reference, _forward, _backward, keep=True, everywhere=True)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The cross entropy of F.linear(hidden, weight, bias).float(), by chunks of rows that are never held together.

    hidden: (..., H); weight: (V, H); bias: (V,), all of one dtype; labels: int64, one for each row of hidden, whose
    shape the losses have for reduction="none". The loss is float32. softcap: the c of c * tanh(logits / c).

    Gradients of a mean or sum are made in the forward pass, if grad mode is on and a tensor needs one; for "none" the
    logits are made again in backward. A label out of range raises IndexError on the CPU; on a GPU its loss is nan.
    The second derivative is that of the plain form, with all logits.

    Raises ValueError for shapes and dtypes that do not go together and for unknown options.
    """
    name = "linear_cross_entropy"
    check_options(name, labels, ignore_index, reduction, label_smoothing, z_loss)
    kind = hidden.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"{name}: hidden (..., H) and weight (V, H), found {_shape(hidden)} and {_shape(weight)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: bias must be ({len(weight)},), one for each class, found {_shape(bias)}.")
    if labels.numel() != hidden.shape[:-1].numel():
        raise ValueError(f"{name}: labels must be one for each row of hidden {_shape(hidden)}, found {_shape(labels)}.")
    if not all(one.dtype == hidden.dtype for one in (weight, bias) if one is not None):
        raise ValueError(f"{name}: weight and bias must have the dtype of hidden, {hidden.dtype}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{name}: softcap must be positive, found {softcap}.")
    now = torch.is_grad_enabled() and reduction != "none"
    wanted = [now and one is not None and one.requires_grad for one in (hidden, weight, bias)]
    options = (ignore_index, reduction, float(label_smoothing), float(z_loss), softcap and float(softcap), wanted)
    return _linear_cross_entropy(hidden, weight, labels, bias, *options)[0]  # type: ignore[no-any-return]


def _shape(one: Tensor) -> tuple[int, ...]:
    return tuple(one.shape)


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    hidden = torch.randn(rows, width, dtype=dtype, device=device).requires_grad_()
    weight = (torch.randn(4 * width + 1, width, dtype=dtype, device=device) * width**-0.5).requires_grad_()
    return hidden, weight, torch.randint(4 * width + 1, (rows,), device=device)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits,
        labels,
        ignore_index=wild("ignore_index"),
        reduction=wild("reduction"),
        label_smoothing=wild("label_smoothing"),
    )


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _loss(F.linear(hidden, weight), labels)


def _plain_bias(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
    return _loss(F.linear(hidden, weight, bias), labels)


def _flat(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _loss(F.linear(hidden, weight).view(-1, wild("classes")), labels)


def _sized(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """T5: the number of classes is read of the logits."""
    logits = F.linear(hidden, weight)
    return _loss(logits.view(-1, logits.size(-1)), labels)


def _flat_bias(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
    return _loss(F.linear(hidden, weight, bias).view(-1, wild("classes")), labels)


def _float(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _loss(F.linear(hidden, weight).float(), labels)


def _float_flat(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _loss(F.linear(hidden, weight).float().view(-1, wild("classes")), labels)


def _float_flat_bias(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
    return _loss(F.linear(hidden, weight, bias).float().view(-1, wild("classes")), labels)


def _contiguous_float_flat(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _loss(F.linear(hidden, weight).contiguous().float().view(-1, wild("classes")), labels)


def _capped_float_flat(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = torch.tanh(F.linear(hidden, weight) / wild("softcap")) * wild("softcap")
    return _loss(logits.float().view(-1, wild("classes")), labels)


def linear_cross_entropy_float32(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, classes: int = -1, **options: Any
) -> Tensor:
    """For the forms with .float()."""
    strange = classes not in (-1, len(weight))  # a view that cuts rows
    if strange or isinstance(options.get("softcap"), Tensor):  # not what this operation does
        logits = _logits(hidden, weight, bias, options.pop("softcap", None))[0].float().view(-1, classes)
        return F.cross_entropy(logits, labels, **options)
    return linear_cross_entropy(hidden, weight, labels, bias, **options)


def linear_cross_entropy_as_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """For the forms without: the loss has the dtype of the logits, which autocast made float32."""
    loss = linear_cross_entropy_float32(hidden, weight, labels, bias, **options)
    return loss if torch.is_autocast_enabled(hidden.device.type) else loss.to(hidden.dtype)


register_kernel(
    Kernel(
        name="linear_cross_entropy",
        op=linear_cross_entropy,
        reference=reference,
        patterns=(
            *(Form(one, op=linear_cross_entropy_as_logits) for one in (_plain, _plain_bias, _sized, _flat, _flat_bias)),
            *(Form(one, op=linear_cross_entropy_float32) for one in (_float, _float_flat, _float_flat_bias)),
            *(Form(one, op=linear_cross_entropy_float32) for one in (_contiguous_float_flat, _capped_float_flat)),
        ),
        returns="float32",
        features=("bias", "soft cap", "ignored labels", "label smoothing", "z loss"),
        example=_example,
    )
)
