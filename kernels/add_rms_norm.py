"""add_rms_norm: a sum of two, as on the way past a layer, and its rms_norm; both are given back.

    s = x + residual, rounded as the plain form does      y = rms_norm(s)      ds = (that by y, see rms_norm) + gs

where gs is the gradient of s as it is used elsewhere. x and residual have the same gradient, ds. (Zhang and Sennrich,
arXiv 1910.07467.) Backward keeps x, residual and weight, and adds again.
"""

from typing import Any

import torch
from torch import Tensor

from slapo_py.kernels.op import fused_op
from slapo_py.kernels.rms_norm import (
    DTYPES,
    backward_rows,
    check,
    forward_rows,
    functional_rms_norm,
    gemma_form,
    llama_form,
    t5_form,
    t5_wide_form,
    torch_form,
)
from slapo_py.kernels.rms_norm import reference as norm
from slapo_py.kernels.spec import Form, Kernel, register_kernel


def reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, casting: str, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return norm(total, weight, eps, offset, casting, dtype), total


def _fits(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, casting: str, dtype: torch.dtype | None
) -> bool:
    known = {residual.dtype, weight.dtype, dtype or x.dtype} <= set(DTYPES)
    return known and x.shape == residual.shape


def _forward(x: Tensor, residual: Tensor, weight: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return forward_rows(x, residual, weight, *how)  # type: ignore[return-value]


def _backward(
    grads: tuple[Tensor, Tensor], outputs: tuple[()], needs: list[bool],
    x: Tensor, residual: Tensor, weight: Tensor, *how: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    found = backward_rows(*grads, (needs[0], needs[1], needs[2]), x, residual, weight, *how)
    return (*found, *(None for _ in how))


_add_rms_norm = fused_op("add_rms_norm", reference, _forward, _backward, fits=_fits, twin="x, residual")


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "early",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual, weight, ...), x + residual): x and residual (..., H), weight (H,) to two of (..., H).

    The other arguments are those of rms_norm. Raises ValueError as it does.
    """
    row = torch.broadcast_shapes(x.shape, residual.shape)[-1:]
    check("add_rms_norm", row, weight, casting, dtype)
    return _add_rms_norm(x, residual, weight, eps, offset, casting, dtype)  # type: ignore[no-any-return]


def functional_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """(F.rms_norm(x + residual), x + residual), by add_rms_norm where that is the same."""
    if weight.dim() != 1 or (x.is_cuda and torch.is_autocast_enabled("cuda")):
        total = x + residual
        return functional_rms_norm(total, weight, eps), total
    return add_rms_norm(x, residual, weight, torch.finfo(torch.float32).eps if eps is None else eps, casting="late")


def _torch(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch_form(total, weight), total


def _llama(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return llama_form(total, weight), total


def _t5(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return t5_form(total, weight), total


def _t5_wide(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return t5_wide_form(total, weight), total


def _gemma(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return gemma_form(total, weight), total


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    x, residual = (torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    return x, residual, torch.randn(width, dtype=dtype, device=device, requires_grad=True)


register_kernel(
    Kernel(
        name="add_rms_norm",
        op=add_rms_norm,
        reference=reference,
        patterns=(
            Form(_torch, op=functional_add_rms_norm),
            _llama,
            _t5,
            Form(_t5_wide, keywords={"dtype": torch.float32}),
            Form(_gemma, keywords={"casting": "late"}),
        ),
        returns="as rms_norm of the sum, and as the sum",
        placement="...H, ...H, H -> ...H, ...H",
        features=("gives back the sum", "early and late casts", "offset of the weight"),
        example=_example,
    )
)
