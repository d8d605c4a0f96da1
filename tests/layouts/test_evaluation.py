"""What a forward does in evaluation mode alone is looked at too; so are outputs, constants and options by size."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from tests.fingerprint import changes, fingerprint

WIDE, NARROW = torch.tensor(2.0), torch.tensor(3.0)


class Mlp(nn.Module):
    """Two Linears with something between them."""

    def __init__(self, between: Callable[["Mlp", Tensor], Any]) -> None:
        super().__init__()
        self.up, self.drop, self.down, self.between = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8), between
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Any:
        y = self.between(self, self.up(x))
        if isinstance(y, tuple):
            return {"x": self.down(y[0]), "n": y[1]}
        return self.down(y)


def faults(between: Callable[[Mlp, Tensor], Any], trace: bool = False) -> list[Any]:
    sch = slapo.create_schedule(Mlp(between), (torch.randn(4, 6, 8),))
    sch["up"].shard("weight", "bias", dim="out").sync("input", None, grad="all_reduce")
    sch["down"].shard("weight", dim="in").sync("output", "all_reduce")
    if trace:
        sch.trace()
    return sch.check()


@pytest.mark.parametrize("trace", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize(
    "between",
    [
        lambda model, y: y if model.training else y.softmax(-1),
        lambda model, y: y if model.training else y + y.sum(-1, keepdim=True),
        lambda model, y: y if model.training else y / math.sqrt(y.size(-1)),
    ],
    ids=["softmax", "sum", "size"],
)
def test_what_is_wrong_in_evaluation_alone(between: Callable[[Mlp, Tensor], Tensor], trace: bool) -> None:
    found = faults(between, trace)
    assert found and all(fault.message.startswith("in evaluation mode: ") for fault in found)


def test_what_a_rank_would_do_otherwise_in_one_mode() -> None:
    (fault,) = faults(lambda model, y: y if model.training else y * model.scale)
    assert fault.kind == "other in evaluation" and "another exchange in evaluation" in fault.message


def test_nothing_is_left_behind() -> None:
    model = Mlp(lambda model, y: y if model.training else y.tanh())
    model.drop.eval()
    sch = slapo.create_schedule(model, (torch.randn(4, 6, 8),))
    sch["up"].shard("weight", "bias", dim="out")
    before = fingerprint(model)
    modes, state = [one.training for one in sch.module.modules()], torch.get_rng_state()
    sch.check()
    assert changes(before, fingerprint(model)) == []
    assert [one.training for one in sch.module.modules()] == modes and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "between",
    [
        lambda model, y: y,
        lambda model, y: y.relu() if model.training else y.tanh(),
        lambda model, y: y * torch.rand([]) if model.training else y,
        lambda model, y: model.drop(y),
    ],
    ids=["same", "element by element", "drawn in training", "dropped"],
)
def test_what_is_right_in_both_modes(between: Callable[[Mlp, Tensor], Tensor]) -> None:
    assert [fault for fault in faults(between) if fault.kind != "drawn alike"] == []


@pytest.mark.parametrize(
    "between",
    [
        lambda model, y: (y, y.size(-1)),
        lambda model, y: y * (WIDE if y.shape[-1] > 8 else NARROW),
        lambda model, y: y.clamp(min=None if y.shape[-1] > 8 else 0.0, max=9.0),
        lambda model, y: y.to(torch.float64 if y.shape[-1] > 8 else torch.float16).to(y.dtype),
    ],
    ids=["output", "constant", "none", "dtype"],
)
def test_sizes_that_choose(between: Callable[[Mlp, Tensor], Any]) -> None:
    (fault,) = faults(between)
    assert fault.kind == "size" and "on a rank" in fault.message


def test_constants_that_are_the_same() -> None:
    assert faults(lambda model, y: y * WIDE + NARROW) == []
