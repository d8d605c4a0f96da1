"""A user's own primitives and policies, importable, for the tests of the laws."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import slapo_py as slapo
from slapo_py import Primitive, Schedule, kernels
from slapo_py.errors import ArgumentError
from tests.patterns.functions import fused_gelu, gelu_bias


def keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def same_linear(old: nn.Module) -> nn.Module:
    """A module like the old one, whose parameters it is given."""
    if isinstance(old, nn.Linear):
        return nn.Linear(old.in_features, old.out_features, bias=old.bias is not None)
    return type(old)(old.nf, old.nx)  # transformers' Conv1D


class Mark(Primitive):
    """Write something on the module."""

    structural = True

    def check(self, place: Schedule, text: str, *more: str, times: int = 1) -> None:
        if getattr(place.module, "marked", None) is not None:
            raise ArgumentError(f"mark at {place.path!r}: this module is marked already.")

    def apply(self, place: Schedule, text: str, *more: str, times: int = 1) -> None:
        place.module.marked = [text, *more] * times


class Recompute(Primitive):
    """A step made of steps: mark and checkpoint."""

    structural = True

    def check(self, place: Schedule) -> None:
        pass

    def apply(self, place: Schedule) -> None:
        place.mark("recomputed").checkpoint()


class Wreck(Primitive):
    """Change whatever a step can reach at this place and below, and some of what is above; then raise."""

    def check(self, place: Schedule, fail: BaseException | None = None) -> None:
        pass

    def apply(self, place: Schedule, fail: BaseException | None = None) -> None:
        root, module = place.root, place.module
        name = next(name for name, _ in module.named_parameters())
        place.annotate(name, "wrecked", True)
        place.compile(backend="eager")
        for hooked in {root.copy, module}:
            hooked.register_forward_hook(lambda *args: None)
            hooked.register_full_backward_pre_hook(lambda *args: None)
            hooked.wrecked = True
            hooked.register_buffer("wrecked_buffer", torch.zeros(1))
        for below in list(module.modules()):
            below.training = not below.training
            for value in list(vars(below).values()):
                _wreck(value)
            for parameter in below.parameters(recurse=False):
                parameter.requires_grad_(not parameter.requires_grad)
                parameter.grad = torch.ones_like(parameter)
        module.added = nn.Linear(2, 2)
        for child in list(module._modules):
            del module._modules[child]
        module.__class__ = nn.Identity
        root.history = slapo.History()
        if fail is not None:
            raise fail


def _wreck(value: Any) -> None:
    """Plain containers and configs that hang on a module."""
    if type(value) is list:
        value.append("wrecked")
    elif type(value) is dict and all(isinstance(key, str) for key in value):
        value["wrecked"] = None
    elif type(value).__name__.endswith("Config"):
        for name in ("hidden_size", "width", "names"):
            if hasattr(value, name):
                setattr(value, name, -1)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    for name, primitive in (("mark", Mark), ("recompute", Recompute)):
        slapo.register(name)(primitive)
    kernels.register_kernel(kernels.Kernel("law_bias_gelu", fused_gelu, gelu_bias, (gelu_bias,)))
    try:
        yield
    finally:
        kernels.unregister_kernel("law_bias_gelu")
        slapo.unregister("mark")
        slapo.unregister("recompute")


@contextlib.contextmanager
def registered_wreck() -> Iterator[None]:
    slapo.register("wreck")(Wreck)
    try:
        yield
    finally:
        slapo.unregister("wreck")
