"""Small modules made from a forward, and a traced copy of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.tracing import trace_of
from tests import running


def module(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    """A module with this forward; tensors become buffers, everything else plain attributes or children."""
    cls = type("Made", (nn.Module,), {"forward": forward})
    made: nn.Module = cls()
    for name, value in attributes.items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            made.register_buffer(name, value)
        else:
            setattr(made, name, value)
    return made


def traced(model: nn.Module, *inputs: Any, **options: Any) -> slapo.Schedule:
    """A schedule of the model whose root is traced."""
    sch = slapo.create_schedule(model, example_inputs=list(inputs))
    sch.trace(**options)
    return sch


def misses(model: nn.Module) -> int:
    trace = trace_of(model)
    return trace.misses(model) if trace is not None else -1


class Positional(nn.Module):
    """Calls a module with the keyword arguments `x0`, `x1`, ... in their order."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(*inputs.values())


def result(model: nn.Module, inputs: Sequence[Any], train: bool) -> dict[str, Tensor]:
    """Outputs, gradients, buffers and random state of one call with positional arguments."""
    return running.record(Positional(model), {f"x{i}": value for i, value in enumerate(inputs)}, train)


def assert_same(model: nn.Module, copy: nn.Module, *inputs: Sequence[Any]) -> None:
    """Bit-equal over train, eval, train, for each of the inputs."""
    for train in (True, False, True):
        for given in inputs:
            found = running.differences(result(model, given, train), result(copy, given, train))
            assert not found, f"train={train}, inputs {[getattr(t, 'shape', t) for t in given]}: {found}"


def linear(width: int = 8) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, width)
