"""The noise floor: how far the original's own arithmetic is from exact arithmetic.

The reference is the original in float64. The floor is the largest error among several runs of the original in its own
dtype, in which parameters, inputs and the results of all operations are moved by up to half a unit in the last place:
what another, equally right order of the same sums could give. One run alone is a poor estimate where a tensor is small,
or where a gradient is zero in exact arithmetic.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from slapo_py.layouts.recording.random_calls import draws

_LOW = (torch.float32, torch.bfloat16, torch.float16)


def doubled(tensor: Tensor) -> Tensor:
    """A floating tensor in float64."""
    return tensor.double() if tensor.is_floating_point() and tensor.dtype in _LOW else tensor


class Exact(TorchDispatchMode):
    """Casts to lower dtypes that the model writes down become casts to float64; random draws are made in `own`.

    So the reference is exact throughout, and its dropout masks are those of the run that it is held against.
    """

    def __init__(self, own: torch.dtype) -> None:
        super().__init__()
        self._own = own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if draws(func, args, kwargs):
            return self._drawn(func, args, kwargs)
        if kwargs.get("dtype") in _LOW:
            kwargs["dtype"] = torch.float64
        args = tuple(torch.float64 if one in _LOW else one for one in args) if _dtypes(args) else args
        return tree_map(_raised, func(*args, **kwargs)) if not _writes(func) else func(*args, **kwargs)

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        first = args[0] if args and isinstance(args[0], Tensor) else None

        def lowered(value: Any) -> Any:
            return value.to(self._own) if isinstance(value, Tensor) and value.dtype == torch.float64 else value

        if _writes(func) and first is not None:
            own = lowered(first)
            func(own, *tree_map(lowered, args[1:]), **kwargs)
            if own is not first:
                first.copy_(own)
            return first
        return tree_map(_raised, func(*tree_map(lowered, args), **tree_map(lowered, kwargs)))


def _dtypes(args: Any) -> bool:
    return any(isinstance(one, torch.dtype) for one in args)


def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _raised(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.dtype in _LOW else value


class Noisy(TorchDispatchMode):
    """Each floating result of an operation is moved by up to half a unit in the last place.

    Autocast decides for each operation whether it runs in the lower dtype, and another way of saying the same may be
    other operations: there, `unit` is the lower dtype, and every result is as uncertain as one of it.
    """

    def __init__(self, seed: int, unit: torch.dtype | None = None) -> None:
        super().__init__()
        self._unit = unit
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.is_mutable or any(one.alias_info is not None for one in schema.returns):
            return out
        if draws(func, args, kwargs or {}):
            return out
        return tree_map(self.moved, out)

    def moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return value
        return value.copy_(perturbed(value, self._generator, self._unit))


def perturbed(tensor: Tensor, generator: torch.Generator, unit: torch.dtype | None = None) -> Tensor:
    """Every element moved by up to half a unit in the last place; zeros, infinities and the largest values stay.

    So does a tensor of small whole numbers (a mask, a count, positions): in whichever order they are computed, they
    are exact, and a model may take them for indexes.
    """
    if not tensor.is_floating_point():
        return tensor
    info = torch.finfo(tensor.dtype)
    by = torch.rand(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.device) - 0.5
    eps = max(info.eps, torch.finfo(unit).eps) if unit is not None else info.eps
    wide = tensor.double()
    if bool(((wide == wide.round()) & (wide.abs() * eps <= 1)).all()):
        return tensor
    moved = (wide + wide * by.double() * eps).to(tensor.dtype)
    return torch.where(tensor.abs() < info.max / 2, moved, tensor)


def perturb_parameters(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.copy_(perturbed(parameter, generator))


def perturb_input(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed + 1)
    return lambda tensor: perturbed(tensor.detach(), generator).requires_grad_(tensor.requires_grad)


def double_module(module: nn.Module) -> None:
    """Parameters and buffers in float64, in place. The module is a private copy."""
    module.double()
