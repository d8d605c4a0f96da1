"""add_layer_norm: s = x + residual, rounded as the plain form does, and layer_norm(s); both come out.

With h the gradient of the sum and d that of the norm's input (see layer_norm):  dx = dresidual = d + h.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.kernels.layer_norm import merged, norm_backward, norm_forward, normalised_dims, over_one_dim, widens
from slapo_py.kernels.layer_norm import reference as norm_reference
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Form, Kernel, register_kernel
from slapo_py.patterns import wild

Shape = int | Sequence[int] | None


def reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, widen: bool, alone: bool
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return norm_reference(total, weight, bias, eps, widen), total.new_empty(0) if alone else total


def _forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, widen: bool, alone: bool
) -> tuple[Tensor, Tensor]:
    return norm_forward(x, residual, weight, bias, None, 0.0, eps, widen, alone)


def _backward(
    grads: tuple[Tensor, Tensor], outputs: tuple[()], needs: list[bool], x: Tensor, residual: Tensor,
    weight: Tensor | None, bias: Tensor | None, eps: float, widen: bool, alone: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return *norm_backward(grads, needs[:4], x, residual, weight, bias, None, 0.0, eps), None, None, None


_add_layer_norm = fused_op("add_layer_norm", reference, _forward, _backward, twin="x, residual")


def _run(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, shape: Shape, alone: bool
) -> tuple[Tensor, Tensor]:
    if x.shape != residual.shape:
        x, residual = torch.broadcast_tensors(x, residual)
    dims = normalised_dims("add_layer_norm", x, weight, bias, shape)
    normed, total = _add_layer_norm(*merged(dims, x, residual, weight, bias), eps, widens(x), alone)
    return normed.reshape(x.shape), total if alone else total.reshape(x.shape)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    normalized_shape: Shape = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(F.layer_norm(x + residual), x + residual): x, residual (..., H), weight, bias (H,) or None.

    The dtypes are those of the plain form: that of x + residual; on CUDA under autocast that of the norm is float32.
    x and residual broadcast. normalized_shape: as in layer_norm. Raises ValueError for shapes that don't go together.
    """
    return _run(x, residual, weight, bias, eps, normalized_shape, alone=False)


def add_layer_norm_alone(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    normalized_shape: Shape = None,
) -> Tensor:  # fmt: skip
    """The first of the two values of add_layer_norm; the sum is not written."""
    return _run(x, residual, weight, bias, eps, normalized_shape, alone=True)[0]


def add_layer_norm_viewed(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    shape: int | Sequence[int], normalized_shape: Shape = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """add_layer_norm of (x + residual).view(shape)."""
    x, residual = (one.reshape(shape) for one in torch.broadcast_tensors(x, residual))
    return _run(x, residual, weight, bias, eps, normalized_shape, alone=False)


def add_layer_norm_flat(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    rows: int, normalized_shape: Shape = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """add_layer_norm of (x + residual).reshape(rows, H), and the sum as it was before."""
    x, residual = torch.broadcast_tensors(x, residual)
    shape = (rows, x.shape[-1])
    normed, total = _run(x.reshape(shape), residual.reshape(shape), weight, bias, eps, normalized_shape, alone=False)
    return normed, total, total.view(x.shape)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, wild("normalized_shape"), wild("weight"), wild("bias"), wild("eps"))


def _alone(x: Tensor, residual: Tensor) -> Tensor:
    """BERT, and other models with the norm after the sum."""
    return _norm(x + residual)


def _with_sum(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """GPT-2, and other models with the norm at the beginning of a branch."""
    total = x + residual
    return _norm(total), total


def _viewed(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """OPT, from one layer to the next."""
    total = (x + residual).view(wild("shape"))
    return _norm(total), total


def _flat(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """OPT, inside a layer, where the shape of the sum is used later."""
    total = x + residual
    flat = total.reshape(wild("rows"), total.size(-1))
    return _norm(flat), flat, total


def _splits(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *plain: float,
    normalized_shape: Shape = None, **keywords: int | Sequence[int],
) -> bool:  # fmt: skip
    return over_one_dim(weight, bias, normalized_shape)


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    made = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width), torch.randn(width)
    return tuple(one.to(device, dtype).requires_grad_() for one in made)


register_kernel(
    Kernel(
        name="add_layer_norm",
        op=add_layer_norm,
        reference=reference,
        patterns=(
            Form(_alone, op=add_layer_norm_alone, placement="...H, ...H, H, H -> ...H"),
            _with_sum,
            Form(_viewed, op=add_layer_norm_viewed, placement=""),
            Form(_flat, op=add_layer_norm_flat, placement=""),
        ),
        returns="as x + residual, both",
        placement="...H, ...H, H, H -> ...H, ...H",
        splits=_splits,
        features=("gives the sum, too", "without weight or bias", "over several dims"),
        example=_example,
    )
)
