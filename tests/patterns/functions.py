"""Patterns and replacements as a user's package would define them: importable."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import slapo_py as slapo


def residual(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def my_add(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, y)


def gelu_bias(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def new_gelu_bias(x: Tensor, bias: Tensor) -> Tensor:
    """transformers' NewGELUActivation of a sum."""
    y = x + bias
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))


def fused_new_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def fused_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return x + y * slapo.wild("scale")


def scaled_add(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return torch.add(x, y * scale)


def block_mlp(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def block_mlp_parts(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def up_and_gelu(x: Tensor) -> Tensor:
    return F.gelu(slapo.call("up", x))


def wrong_add(x: Tensor, y: Tensor) -> Tensor:
    return x + 1.01 * y


def gives_a_pair(x: Tensor, y: Tensor) -> Any:
    return x + y, y
