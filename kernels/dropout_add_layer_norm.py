"""dropout_add_layer_norm: s = dropout(x) + residual, rounded as the plain form does, and layer_norm(s); both come out.

With m the noise of the dropout, 0 or 1 / (1 - p), h the gradient of the sum and d that of the norm's input (see
layer_norm):  dresidual = d + h,  dx = (d + h) m. Backward draws m again.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.kernels.add_layer_norm import Shape, _add_layer_norm
from slapo_py.kernels.add_layer_norm import reference as add_reference
from slapo_py.kernels.dropout import apply_noise, draw_noise
from slapo_py.kernels.layer_norm import merged, norm_backward, norm_forward, normalised_dims, over_one_dim, widens
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Form, Kernel, register_kernel
from slapo_py.patterns import wild


def reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, p: float, eps: float, widen: bool,
    alone: bool, noise: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return add_reference(apply_noise(x, noise, p), residual, weight, bias, eps, widen, alone)


def _forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, p: float, eps: float, widen: bool,
    alone: bool, noise: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return norm_forward(x, residual, weight, bias, noise, p, eps, widen, alone)


def _backward(
    grads: tuple[Tensor, Tensor], outputs: tuple[()], needs: list[bool], x: Tensor, residual: Tensor,
    weight: Tensor | None, bias: Tensor | None, p: float, eps: float, widen: bool, alone: bool, noise: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return *norm_backward(grads, needs[:4], x, residual, weight, bias, noise, p, eps), None, None, None, None, None


_dropout_add_layer_norm = fused_op("dropout_add_layer_norm", reference, _forward, _backward)


def _run(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, p: float, eps: float, training: bool,
    normalized_shape: Shape, view: Shape, alone: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not 0 <= p <= 1:
        raise ValueError(f"dropout_add_layer_norm: p must be between 0 and 1, found {p}.")
    noise = draw_noise(x, p, training)
    if x.shape != residual.shape:
        if noise is not None:
            x, noise = apply_noise(x, noise, p), None
        x, residual = torch.broadcast_tensors(x, residual)
    if view is not None:
        x, residual = x.reshape(view), residual.reshape(view)
    dims = normalised_dims("dropout_add_layer_norm", x, weight, bias, normalized_shape)
    flat = merged(dims, x, residual, weight, bias)
    if noise is None:
        normed, total = _add_layer_norm(*flat, eps, widens(x), alone)
    else:
        noise = noise if noise.dtype == torch.int64 else merged(dims, noise.reshape(x.shape))[0]
        normed, total = _dropout_add_layer_norm(*flat, p, eps, widens(x), alone, noise)
    return normed.reshape(x.shape), total if alone else total.reshape(x.shape)


def dropout_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, p: float = 0.5,
    eps: float = 1e-5, training: bool = True, *, normalized_shape: Shape = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(F.layer_norm(s), s) with s = F.dropout(x, p, training) + residual; the rest is as in add_layer_norm.

    Raises ValueError for shapes that don't go together and for a p that is no probability.
    """
    return _run(x, residual, weight, bias, p, eps, training, normalized_shape, None, alone=False)


def dropout_add_layer_norm_alone(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, p: float = 0.5,
    eps: float = 1e-5, training: bool = True, *, normalized_shape: Shape = None,
) -> Tensor:  # fmt: skip
    """The first of the two values of dropout_add_layer_norm; the sum is not written."""
    return _run(x, residual, weight, bias, p, eps, training, normalized_shape, None, alone=True)[0]


def dropout_add_layer_norm_viewed(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, p: float = 0.5,
    eps: float = 1e-5, training: bool = True, *, shape: int | Sequence[int], normalized_shape: Shape = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dropout_add_layer_norm of the sum's view(shape)."""
    return _run(x, residual, weight, bias, p, eps, training, normalized_shape, shape, alone=False)


def dropout_add_layer_norm_flat(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, p: float = 0.5,
    eps: float = 1e-5, training: bool = True, *, rows: int, normalized_shape: Shape = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dropout_add_layer_norm of the sum's reshape(rows, H), and the sum as it was before."""
    whole = torch.broadcast_shapes(x.shape, residual.shape)
    view = (rows, whole[-1])
    normed, total = _run(x, residual, weight, bias, p, eps, training, normalized_shape, view, alone=False)
    return normed, total, total.view(whole)


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    return F.dropout(x, wild("p"), wild("training")) + residual


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, wild("normalized_shape"), wild("weight"), wild("bias"), wild("eps"))


def _alone(x: Tensor, residual: Tensor) -> Tensor:
    """BERT, and other models with the norm after the sum."""
    return _norm(_sum(x, residual))


def _with_sum(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """GPT-2, and other models with the norm at the beginning of a branch."""
    total = _sum(x, residual)
    return _norm(total), total


def _viewed(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """OPT, from one layer to the next."""
    total = _sum(x, residual).view(wild("shape"))
    return _norm(total), total


def _flat(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """OPT, inside a layer, where the shape of the sum is used later."""
    total = _sum(x, residual)
    flat = total.reshape(wild("rows"), total.size(-1))
    return _norm(flat), flat, total


def _splits(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *plain: float,
    normalized_shape: Shape = None, **keywords: int | Sequence[int],
) -> bool:  # fmt: skip
    return over_one_dim(weight, bias, normalized_shape)


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor | float, ...]:
    made = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width), torch.randn(width)
    return *(one.to(device, dtype).requires_grad_() for one in made), 0.1


register_kernel(
    Kernel(
        name="dropout_add_layer_norm",
        op=dropout_add_layer_norm,
        reference=reference,
        patterns=(
            Form(_alone, op=dropout_add_layer_norm_alone, placement="...H, ...H, H, H -> ...H"),
            _with_sum,
            Form(_viewed, op=dropout_add_layer_norm_viewed, placement=""),
            Form(_flat, op=dropout_add_layer_norm_flat, placement=""),
        ),
        returns="as x + residual, both",
        placement="...H, ...H, H, H -> ...H, ...H",
        splits=_splits,
        features=("dropout", "gives the sum, too", "without weight or bias"),
        example=_example,
    )
)
