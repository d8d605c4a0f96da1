"""How a batch reaches the model, and how it is cut into micro-batches."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from slapo_py.errors import EngineError


def arguments(batch: Any, inputs: Callable[[Any], Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The (args, kwargs) of the model for a batch.

    A mapping -> keyword arguments; a tuple or list -> positional ones; a tensor -> one positional argument.
    `inputs(batch)` may return any of these, or a pair (args, kwargs).
    Raises: EngineError.
    """
    value = batch if inputs is None else inputs(batch)
    if inputs is not None and isinstance(value, tuple) and len(value) == 2:
        args, kwargs = value
        if isinstance(args, tuple | list) and isinstance(kwargs, Mapping):
            return tuple(args), dict(kwargs)
    if isinstance(value, Mapping):
        return (), dict(value)
    if isinstance(value, tuple | list):
        return tuple(value), {}
    if isinstance(value, torch.Tensor):
        return (value,), {}
    source = "the batch" if inputs is None else "inputs(batch)"
    raise EngineError(
        f"engine: {source} is a {type(value).__name__}; the model takes a dict (keyword arguments) or a tuple "
        "(positional ones). Say how to call it: build(..., inputs=lambda batch: {...})."
    )


def split(batch: Any, parts: int, *, at_most: bool = False) -> list[Any]:
    """Cut a batch into micro-batches along dim 0; sizes differ by one at the most.

    One part is the batch itself. Otherwise every tensor whose dim 0 is the number of rows is cut; scalars, tensors
    with another dim 0 and whatever is not a tensor go whole into each part. `at_most` allows fewer parts.
    Requires: the number of rows is plain: all tensors agree on it (a dim 0 of 1 apart), or most do, the first included.
    Raises: EngineError.
    """
    if parts == 1:
        return [batch]
    rows = _rows(batch)
    if rows < parts:
        if not at_most:
            raise EngineError(
                f"engine: the batch has {rows} row{'s' if rows != 1 else ''} and micro_batches={parts}: each "
                f"micro-batch needs at least one. Give larger batches, or build(..., micro_batches={max(rows, 1)})."
            )
        parts = max(rows, 1)
    return [_part(batch, rows, parts, index) for index in range(parts)]


def _rows(batch: Any) -> int:
    sizes = {name: tensor.shape[0] for name, tensor in _tensors("batch", batch) if tensor.dim()}
    if not sizes:
        raise EngineError(
            "engine: the batch holds no tensor with rows, so it can't be split. Write build(..., micro_batches=1)."
        )
    wide = {name: size for name, size in sizes.items() if size != 1} or sizes
    first = next(iter(wide.values()))
    votes = Counter(wide.values())
    if 2 * votes[first] <= len(wide):
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise EngineError(
            f"engine: it isn't clear which dim 0 is the batch's ({listed}), so micro_batches can't split it. Keep "
            "tensors without rows out of the batch and add them in build(..., inputs=...), or write micro_batches=1."
        )
    return first


def _tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{path}[{key!r}]", item)
    elif isinstance(value, tuple) or (isinstance(value, list) and path == "batch"):
        for index, item in enumerate(value):
            yield from _tensors(f"{path}[{index}]", item)
    elif isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
        # one tensor per row (images of many sizes)? or a list of whole tensors? cutting the wrong one is silent
        raise EngineError(
            f"engine: {path} is a list of tensors, and micro_batches can't tell rows from whole tensors in a list. "
            "Make it a tensor or a tuple, or write build(..., micro_batches=1)."
        )


def _part(value: Any, rows: int, parts: int, index: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tensor_split(parts)[index] if value.dim() and value.shape[0] == rows else value
    if isinstance(value, Mapping):
        return {key: _part(item, rows, parts, index) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [_part(item, rows, parts, index) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_part(item, rows, parts, index) for item in value]
    return value
