"""Dropout inside a kernel: torch's own draw off the GPU, a counter-based generator on it.

The `noise` that goes into an operation is None where nothing is dropped. Off the GPU it is what `F.dropout` multiplies
by, drawn by `F.dropout` itself. On the GPU it is one 64-bit seed, drawn from torch's generator of that device, so that
recomputation under a checkpoint, which restores the generator, draws the same mask. Element i in row-major order then
survives if the Philox 4x32-10 generator's uniform number number i of that seed is at least p.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.kernels.launch import ceil_div, jit, launch, runs_triton, tl


def draw_noise(x: Tensor, p: float, training: bool, dtype: torch.dtype | None = None) -> Tensor | None:
    """The noise for the dropout of a tensor of the shape and strides of `x`, of dtype `dtype` (that of x)."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p must be between 0 and 1, found {p}.")
    if not training or p == 0:
        return None
    if runs_triton(x):
        return torch.randint(2**62, (1,), dtype=torch.int64, device=x.device)
    return F.dropout(torch.ones_like(x, dtype=dtype, requires_grad=False), p)


def apply_noise(x: Tensor, noise: Tensor | None, p: float) -> Tensor:
    """What the reference does with the noise; a seed becomes the mask that the kernels would have drawn."""
    if noise is None:
        return x
    return x * (_mask(noise, x.detach(), p) if noise.dtype == torch.int64 else noise)


@jit
def noise_at(seed_ptr, index, p):
    """What dropout multiplies the elements of a row-major 64-bit index by: 0, or 1 / (1 - p)."""
    kept = tl.rand(tl.load(seed_ptr), index) >= p
    return tl.where(kept, 1.0 / tl.maximum(1.0 - p, 1e-30), 0.0)


@jit
def _mask_kernel(seed_ptr, out_ptr, count, p, BLOCK: tl.constexpr):
    index = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + index, noise_at(seed_ptr, index, p).to(out_ptr.dtype.element_ty), mask=index < count)


@torch.library.custom_op("slapo::dropout_mask", mutates_args=())
def _mask(seed: Tensor, x: Tensor, p: float) -> Tensor:
    """What the kernels multiply a tensor of the shape of x by."""
    mask = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(_mask_kernel, (ceil_div(x.numel(), 1024),), seed, mask, x.numel(), p, BLOCK=1024)
    return mask


@_mask.register_fake
def _(seed: Tensor, x: Tensor, p: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
