"""Every tensor and random generator that a module holds, also those in plain attributes and containers."""

from collections.abc import Iterator

import torch
from torch import nn

from slapo_py.clone import _is_hooks, _walk


def held_by(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | torch.Generator]]:
    """The tensors and generators of a module tree, each object once, with the path of what holds it."""
    seen: set[int] = set()
    # parameters and buffers first: an error should call them by their names, not by a private list that also has them
    for table in (module.named_parameters(), module.named_buffers()):
        for path, tensor in table:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield path, tensor
    modules = list(module.named_modules())
    seen.update(id(child) for _, child in modules)
    for path, child in modules:
        for name, value in vars(child).items():
            if not _is_hooks(name, value):
                for one in _walk(value, seen):
                    if isinstance(one, torch.Tensor | torch.Generator):
                        yield f"{path}.{name}" if path else name, one


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes [low, high) of its storage that a strided tensor covers."""
    size = tensor.element_size()
    low = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return low, low
    reach = sum((int(length) - 1) * int(stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (reach + 1) * size


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but a strided window onto one storage."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not hasattr(type(tensor), "__tensor_flatten__")  # a wrapper subclass holds its data in other tensors
    )
