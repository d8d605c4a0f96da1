"""bias_gelu: values, gradients, and where fuse finds it."""

import pytest
import torch
import torch.nn.functional as F

from slapo_py.kernels.bias_gelu import bias_gelu
from tests.kernels.lab import Args, Draw, KernelTests


class TestBiasGelu(KernelTests):
    name = "bias_gelu"

    def inputs(self, draw: Draw) -> Args:
        shape = draw.shape()
        return draw.tensor(shape, 3.0), draw.tensor(shape[-1:]), draw.one_of("none", "tanh")

    def oracle(self, x: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        return F.gelu(x + bias, approximate=approximate)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="approximate must be .* found 'sigmoid'"):
        bias_gelu(torch.ones(2, 2), torch.ones(2), "sigmoid")
