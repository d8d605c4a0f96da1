"""A Linear, Conv1D or convolution in its parts: the product, and the addition of the bias."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from slapo_py.scheduled import Forward, Layer, bare


def autocast_argument(tensor: Tensor) -> Tensor:
    """A tensor as autocast hands it to a product: in the dtype of the region, if there is one.

    Autocast would cast the bias of `F.linear`, but leaves an addition in float32: the output would have another dtype.
    The dtype comes from the region, not from the product, so that in a graph the product has one reader only.
    """
    if has_torch_function_unary(tensor):  # a capture logs this call as one node
        return handle_torch_function(autocast_argument, (tensor,), tensor)  # type: ignore[no-any-return]
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _linear(self: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, self.weight) + autocast_argument(self.bias)


def _conv1d_of_transformers(self: Any, x: Tensor) -> Tensor:
    return x @ self.weight + autocast_argument(self.bias)  # type: ignore[no-any-return]


def _convolution(dims: int) -> Callable[..., Tensor]:
    shape = (-1, *[1] * dims)  # counted from the end: inputs with and without a batch alike

    def convolution(self: Any, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight, None) + autocast_argument(self.bias).view(shape)  # type: ignore[no-any-return]

    return convolution


_TORCH: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution(1),
    nn.Conv2d: _convolution(2),
    nn.Conv3d: _convolution(3),
}
KINDS = "nn.Linear, transformers' Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d"


@dataclass(frozen=True)
class Decomposed(Layer):
    """The forward in its parts. Its rank is negative: it is the module's own forward, which a trace reads."""

    rank: ClassVar[int] = -10

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        parts = parts_of(base)
        if parts is None:
            raise TypeError(f"{base.__name__} has no parts")
        return functools.wraps(base.forward)(parts)

    def describe(self) -> str:
        return "decompose"


def has_parts(module: nn.Module) -> bool:
    """Whether `decompose` accepts a module, as far as its class and its bias go."""
    return parts_of(bare(module)) is not None and module.bias is not None


def parts_of(base: type[nn.Module]) -> Callable[..., Tensor] | None:
    """The forward in its parts, if the class computes what one of those that are known does."""
    known = dict(_TORCH)
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None:
        known[transformers.Conv1D] = _conv1d_of_transformers
    for cls, parts in known.items():
        same = all(getattr(base, name, None) is getattr(cls, name, None) for name in ("forward", "_conv_forward"))
        if issubclass(base, cls) and same:
            return parts
    return None
