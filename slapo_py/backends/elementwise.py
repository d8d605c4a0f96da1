"""Does an optimizer treat each element for itself? Only then can ranks step the parts of a parameter alone."""

import contextlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slapo_py.errors import BuildError

_SHAPES: dict[int, tuple[int, ...]] = {0: (64,), 1: (64,), 2: (8, 8)}
"""Of stand-ins, by the number of dims; with more it is (8, 8, 2, 2, ...)."""
_STEPS = 3


def check_elementwise(
    optimizer: torch.optim.Optimizer, split: Mapping[str, tuple[nn.Parameter, Iterable[int]]]
) -> None:
    """Try the optimizer on whole stand-ins and on halves of them; raise `BuildError` where the halves step otherwise.

    split: what a rank has a part of, by name: the parameter, and the dims that are cut. An optimizer that can't be
    tried is let through. Nothing is drawn from the process's random state.
    """
    names = {id(parameter): (name, dims) for name, (parameter, dims) in split.items()}
    for group in optimizer.param_groups:
        cuts: dict[tuple[int, int], tuple[str, nn.Parameter]] = {}
        for parameter in group["params"]:
            name, dims = names.get(id(parameter), ("", ()))
            for dim in dims:
                cuts.setdefault((parameter.dim(), min(dim, 2)), (name, parameter))
        for (count, dim), (name, parameter) in cuts.items():
            if not _steps_alike(optimizer, group, count, dim, parameter.device):
                raise BuildError(
                    f"build: the optimizer {type(optimizer).__name__} looks at whole tensors, and a rank has only its "
                    f"part of {name!r}: its steps would be others than in one process. Take one that works element by "
                    f'element, such as torch.optim.AdamW, or leave these parameters whole (data_parallel="ddp").'
                )


def _steps_alike(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], count: int, dim: int, device: torch.device
) -> bool:
    """Whether two halves along a dim become what the whole becomes; True if that can't be tried."""
    shape = _SHAPES.get(count) or (8, 8, *[2] * (count - 2))
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(_STEPS + 1)]
    # the halves differ in size, so that a statistic of one is never that of the other
    scale = torch.linspace(0.5, 2, shape[dim], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - dim - 1))
    values = [(one * scale).to(device) for one in drawn]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            whole = _stepped(optimizer, group, values)
            halves = [
                _stepped(optimizer, group, [one.chunk(2, dim)[half].clone() for one in values]) for half in range(2)
            ]
    except Exception:  # an optimizer of any kind: what it needs is unknown
        return True
    # against how far the steps went, and not against the values: a learning rate may be small
    apart, moved = (torch.cat(halves, dim) - whole).abs().max(), (whole - values[0]).abs().max()
    return bool(apart <= 1e-6 * moved + 1e-14)


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], values: list[Tensor]) -> Tensor:
    """A parameter of the first value after a step with each of the others as its gradient."""
    parameter = nn.Parameter(values[0].clone())
    made = _like(optimizer, group, parameter)
    for gradient in values[1:]:
        parameter.grad = gradient.clone()
        made.step()
    return parameter.detach()


def _like(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> torch.optim.Optimizer:
    """An optimizer of the same kind and options, for one parameter."""
    kind: Any = type(optimizer)
    options = {key: one for key, one in group.items() if key not in ("params", "param_names")}
    known = inspect.signature(kind.__init__).parameters
    needed = {key: one for key, one in optimizer.defaults.items() if key in known}
    # beside it, where one is needed: a parameter without a gradient, for optimizers that sort theirs by dims
    beside = nn.Parameter(parameter.detach().flatten() if parameter.dim() > 1 else parameter.detach().diag())
    made: torch.optim.Optimizer | None = None
    for params in ([{**options, "params": [parameter]}], [parameter]):
        if made is None:
            with contextlib.suppress(Exception):
                made = kind(params, **needed)
    return kind([parameter, beside], **needed) if made is None else made
