"""Families of which only some parameters are trained."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class LowRank(nn.Module):
    """A frozen linear layer and a trained update of low rank beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def train_only(model: nn.Module, which: Callable[[str], bool]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(which(name))
    return model


def with_low_rank(model: nn.Module, *names: str) -> nn.Module:
    """Updates beside the linear layers whose last name is one of these; nothing else is trained."""
    model.requires_grad_(False)
    torch.manual_seed(1)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] in names:
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, LowRank(module))
    return model
