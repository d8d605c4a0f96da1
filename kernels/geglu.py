"""geglu: gelu(gate) * up, the activation of the gated MLP of T5 v1.1 and Gemma.

    y = a up,  a = gelu(gate), exact or with tanh as in bias_gelu, rounded to gate's dtype as written
    dy/dgate = up gelu'(gate),  dy/dup = a

(Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.) Backward keeps gate and up alone.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.kernels.bias_gelu import gelu_parts
from slapo_py.kernels.launch import ANY_WIDTH, jit, tl
from slapo_py.kernels.op import fused_op
from slapo_py.kernels.spec import Form, Kernel, register_kernel
from slapo_py.kernels.swiglu import backward_gated, check_gated, fits_gated, forward_gated
from slapo_py.patterns import wild


def reference(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


@jit
def _exact(h):
    return gelu_parts(h, tl.constexpr(False))


@jit
def _tanh(h):
    return gelu_parts(h, tl.constexpr(True))


_DEVICE = {"none": _exact, "tanh": _tanh}


def _fits(gate: Tensor, up: Tensor, approximate: str) -> bool:
    return fits_gated(gate, up)


def _forward(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return forward_gated(_DEVICE[approximate], gate, up)


def _backward(
    grads: tuple[Tensor], outputs: tuple[()], needs: list[bool], gate: Tensor, up: Tensor, approximate: str
) -> tuple[Tensor | None, Tensor | None, None]:
    return *backward_gated(_DEVICE[approximate], grads[0], needs, gate, up), None


_geglu: Callable[..., Tensor] = fused_op("geglu", reference, _forward, _backward, fits=_fits, widest=ANY_WIDTH)


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) * up: gate (..., H), up (..., H) to (..., H) in the dtype that the product of the two has.

    Floating-point tensors of any strides. Shapes and dtypes that differ are broadcast and promoted as `*` does.
    approximate: "none" for the exact form with erf, "tanh" for the one with tanh. The two differ by up to 5e-4.
    """
    check_gated("geglu", gate, up)
    if approximate not in _DEVICE:
        raise ValueError(f'geglu: approximate must be "none" or "tanh", found {approximate!r}.')
    return _geglu(gate, up, approximate)


def _gelu_times_up(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate=wild("approximate")) * up


def _gelu_new_times_up(gate: Tensor, up: Tensor) -> Tensor:
    """With transformers' "gelu_new": T5's."""
    a = 0.5 * gate * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0))))
    return a * up


def _example(rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, str]:
    gate = torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)
    return gate, torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True), "tanh"


register_kernel(
    Kernel(
        name="geglu",
        op=geglu,
        reference=reference,
        patterns=(_gelu_times_up, Form(_gelu_new_times_up, keywords={"approximate": "tanh"})),
        returns="as gate * up",
        placement="...h, ...h -> ...h",
        features=("exact form", "tanh form"),
        example=_example,
    )
)
