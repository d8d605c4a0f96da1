"""Facts of inner values that are read outside a match: its device moves to an input, a size is computed twice."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo


class Device(nn.Module):
    """Like the losses of transformers: labels go to where the logits are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x).to(x.dtype)
        return F.cross_entropy(logits, labels.to(logits.device))


def loss(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias).to(dtype), labels)


def loss_pattern(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias).to(slapo.wild("dtype")), labels)


class Size(nn.Module):
    """Like OPT: the shape of the sum is read by the match and after it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        shape = total.shape
        flat = total.reshape(-1, total.size(-1))
        return (torch.tanh(flat) * 2 + flat).view(shape)


def flat(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = x + y
    rows = total.reshape(-1, total.size(-1))
    return torch.tanh(rows), rows, total


CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...], Callable[..., object], Callable[..., object]]] = {
    "device": (Device(), (torch.randn(3, 4), torch.tensor([0, 4, 2])), loss, loss_pattern),
    "size": (Size(), (torch.randn(2, 3, 4), torch.randn(2, 3, 4)), flat, flat),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_found_and_replaced(name: str) -> None:
    module, inputs, new, pattern = CASES[name]
    sch = slapo.create_schedule(module, inputs).trace()
    assert len(sch.find(pattern)) == 1, sch.why_not(pattern)
    sch.replace(new, pattern)
    assert sch.verify().grade == "equal"
    sch.graph.lint()
