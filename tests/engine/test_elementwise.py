"""An optimizer that looks at whole tensors can't step a part of one: it is tried on halves."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slapo_py.backends.elementwise import check_elementwise
from slapo_py.errors import BuildError


class Trusting(torch.optim.Optimizer):
    """As LAMB does, scales a step by the norm of what it steps. Its rate has no default."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one -= group["lr"] * one.grad * one.norm() / one.grad.norm()


class Both(torch.optim.Optimizer):
    """Two optimizers in one, which takes no groups, and parameters of both kinds only."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {})
        made: list[tuple[type[torch.optim.Optimizer], list[Tensor]]] = [
            (torch.optim.Muon, [one for one in params if one.dim() == 2]),
            (torch.optim.SGD, [one for one in params if one.dim() != 2]),
        ]
        self.inner = [kind(found) for kind, found in made]

    def step(self, closure: Any = None) -> None:
        for one in self.inner:
            one.step()


class Rows(torch.optim.SGD):
    """Normalises each row of a gradient."""

    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            one.grad /= one.grad.norm(dim=-1, keepdim=True)
        super().step()


class Asking(torch.optim.SGD):
    """Can't be made for other parameters."""

    def __init__(self, params: Any, run: str) -> None:
        super().__init__(params)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


Case = tuple[Callable[[Any], torch.optim.Optimizer], tuple[int, ...], int]
OF = torch.optim
WHOLE: list[Case] = [
    (OF.Adafactor, (4, 4), 0), (OF.Adafactor, (4, 4), 1), (OF.Adafactor, (4,), 0), (OF.Adafactor, (4, 4, 2), 2),
    (partial(OF.Adafactor, lr=1e-9), (4, 4), 0), (OF.Muon, (4, 4), 0), (OF.Muon, (4, 4), 1),
    (partial(Trusting, lr=0.1), (4,), 0), (Both, (4, 4), 0), (Rows, (4, 4), 1),
]  # fmt: skip
SINGLE: list[Case] = [
    (OF.AdamW, (4, 4), 0), (OF.AdamW, (4, 4), 1), (OF.AdamW, (4,), 0), (OF.AdamW, (4, 4, 2, 2), 3),
    (partial(OF.AdamW, fused=True), (4, 4), 0), (partial(OF.AdamW, foreach=True), (4, 4), 0),
    (partial(OF.Adam, amsgrad=True), (4, 4), 0), (partial(OF.SGD, lr=0.1, momentum=0.9, nesterov=True), (4, 4), 0),
    (OF.Adadelta, (4, 4), 1), (OF.Adagrad, (4, 4), 1), (OF.Adamax, (4, 4), 1), (OF.ASGD, (4, 4), 1),
    (OF.NAdam, (4, 4), 1), (OF.RAdam, (4, 4), 1), (OF.RMSprop, (4, 4), 1), (OF.Rprop, (4, 4), 1), (Both, (4,), 0),
    (Rows, (4, 4), 0), (partial(Asking, run="a"), (4, 4), 0), (OF.SparseAdam, (4, 4), 0),
]  # fmt: skip


@pytest.mark.parametrize(("make", "shape", "dim"), WHOLE)
def test_what_looks_at_whole_tensors(make: Any, shape: tuple[int, ...], dim: int) -> None:
    one = parameter(*shape)
    made = make([one, parameter(4)] if make is Both else [one])
    match = f"the optimizer {type(made).__name__} looks at whole tensors, and a rank has only its part of 'x.weight'"
    with pytest.raises(BuildError, match=match):
        check_elementwise(made, {"x.weight": (one, [dim])})


@pytest.mark.parametrize(("make", "shape", "dim"), SINGLE)
def test_what_is_let_through(make: Any, shape: tuple[int, ...], dim: int) -> None:
    one = parameter(*shape)
    made = make([one, parameter(4, 4)] if make is Both else [one])
    check_elementwise(made, {"x.weight": (one, [dim])})


def test_only_what_is_split_counts() -> None:
    one, other = parameter(4, 4), parameter(4, 4)
    check_elementwise(torch.optim.Adafactor([one, other]), {})
    made = torch.optim.Adafactor([{"params": [one]}, {"params": [other]}])
    with pytest.raises(BuildError, match="its part of 'other'"):
        check_elementwise(made, {"other": (other, [0])})


def test_nothing_is_touched() -> None:
    one = parameter(4, 4)
    made = torch.optim.AdamW([("x.weight", one)], lr=torch.tensor(0.1))
    before, options = torch.get_rng_state(), made.state_dict()
    check_elementwise(made, {"x.weight": (one, [0])})
    assert torch.equal(torch.get_rng_state(), before) and made.state_dict() == options
    assert torch.equal(one, torch.ones(4, 4)) and one.grad is None
