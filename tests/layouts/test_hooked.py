"""Hooks that would see a part of a value, or of a gradient, are named; those that see whole ones are let be."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(x))))


def schedule(hook: Callable[[Mlp], Any]) -> slapo.Schedule:
    torch.manual_seed(0)
    model = Mlp()
    hook(model)
    sch = slapo.create_schedule(model, (torch.randn(4, 8),))
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")
    return sch.auto_sync("tp")


def nothing(*given: Any) -> None: ...


def scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output / output.abs().max()


SEE_PARTS: list[tuple[Callable[[Mlp], Any], str]] = [
    (
        lambda model: model.act.register_forward_hook(scaled),
        r'the module "act" has a hook.* input 0 of "act" \(S\(1\)\)',
    ),
    (lambda model: model.act.register_forward_pre_hook(nothing), 'the module "act" has a hook'),
    (lambda model: model.down.register_forward_hook(scaled), 'the module "down" has a hook'),
    (lambda model: model.act.register_full_backward_hook(nothing), 'the module "act" has a hook'),
    (lambda model: model.up.register_full_backward_pre_hook(nothing), 'the module "up" has a hook'),
    (
        lambda model: model.up.weight.register_hook(nothing),
        r'parameter "up.weight" has a hook.* its gradient \(S\(0\)\)',
    ),
    (lambda model: model.up.bias.register_post_accumulate_grad_hook(nothing), 'parameter "up.bias" has a hook'),
]


@pytest.mark.parametrize(("hook", "text"), SEE_PARTS)
def test_hooks_that_would_see_parts(hook: Callable[[Mlp], Any], text: str) -> None:
    sch = schedule(hook)
    (fault,) = sch.check()
    assert fault.kind == "hooked"
    assert re.search(text, fault.message), fault.message
    assert "Take the hook off, or write what it does into a forward" in fault.message


SEE_WHOLE: list[Callable[[Mlp], Any]] = [
    lambda model: model.norm.register_forward_hook(nothing),
    lambda model: model.register_forward_hook(nothing),
    lambda model: model.register_full_backward_hook(nothing),
    lambda model: model.norm.weight.register_hook(nothing),
    lambda model: model.down.bias.register_hook(nothing),
    lambda model: model.act.register_state_dict_pre_hook(nothing),
]


@pytest.mark.parametrize("hook", SEE_WHOLE)
def test_hooks_that_see_whole_values(hook: Callable[[Mlp], Any]) -> None:
    assert schedule(hook).check() == []
