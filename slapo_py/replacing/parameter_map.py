"""A parameter map: a bijection between the elements of old tensors and those of new ones.

Every expression of `slapo_py.params` is a set of boxes of old tensors, each somewhere in the new one. So the same map
takes weights, gradients and an optimizer's moments there and back, and what would be lost or used twice is found from
the shapes alone.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slapo_py.errors import ArgumentError
from slapo_py.params import Cat, Expression, Part

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """A box of an old tensor, and where in the new tensor it lies.

    `order[d]` is the old dim that becomes the new dim `d`; `start` counts along the old dims, `at` and `size` along the
    new ones.
    """

    name: str
    start: Shape
    size: Shape
    order: Shape
    at: Shape

    def of_old(self, tensor: torch.Tensor) -> torch.Tensor:
        """The window onto the old tensor, with its dims in the order of the new one."""
        for dim, old in enumerate(self.order):
            tensor = tensor.narrow(old, self.start[old], self.size[dim])
        return tensor.permute(self.order)

    def of_new(self, tensor: torch.Tensor) -> torch.Tensor:
        """The window onto the new tensor."""
        for dim, size in enumerate(self.size):
            tensor = tensor.narrow(dim, self.at[dim], size)
        return tensor

    def back(self, tensor: torch.Tensor) -> torch.Tensor:
        """The window onto the new tensor, with its dims in the order of the old one."""
        return self.of_new(tensor).permute(self.inverse_order)

    @property
    def inverse_order(self) -> Shape:
        return tuple(self.order.index(dim) for dim in range(len(self.order)))

    @property
    def old_size(self) -> Shape:
        return tuple(self.size[dim] for dim in self.inverse_order)


def _blocks(source: Any, shapes: Mapping[str, Shape]) -> tuple[Shape, list[Block]]:
    """The shape of an expression, and the boxes that it consists of."""
    if isinstance(source, str):
        if source not in shapes:
            known = ", ".join(repr(name) for name in list(shapes)[:12])
            raise ArgumentError(f"there is no parameter {source!r}. Those here: {known}")
        shape = shapes[source]
        origin = (0,) * len(shape)
        return shape, [Block(source, origin, shape, tuple(range(len(shape))), origin)]
    if isinstance(source, Cat):
        return _cat(source, [_blocks(part, shapes) for part in source.parts])
    shape, blocks = _blocks(source.source, shapes)
    if isinstance(source, Part):
        return _part(source, shape, blocks)
    one, other = _dim(source, source.dim0, shape), _dim(source, source.dim1, shape)

    def swap(values: Shape) -> Shape:
        new = list(values)
        new[one], new[other] = new[other], new[one]
        return tuple(new)

    return swap(shape), [Block(b.name, b.start, swap(b.size), swap(b.order), swap(b.at)) for b in blocks]


def _cat(source: Cat, parts: list[tuple[Shape, list[Block]]]) -> tuple[Shape, list[Block]]:
    first = parts[0][0]
    dim = _dim(source, source.dim, first)
    length, result = 0, []
    for part, (shape, blocks) in zip(source.parts, parts, strict=True):
        if len(shape) != len(first) or any(a != b for d, (a, b) in enumerate(zip(shape, first)) if d != dim):
            raise ArgumentError(
                f"{source!r}: {part!r} has shape {shape} and {source.parts[0]!r} has {first}; they must agree in all "
                f"dims but {dim}"
            )
        for b in blocks:
            at = b.at[:dim] + (b.at[dim] + length,) + b.at[dim + 1 :]
            result.append(Block(b.name, b.start, b.size, b.order, at))
        length += shape[dim]
    return first[:dim] + (length,) + first[dim + 1 :], result


def _part(source: Part, shape: Shape, blocks: list[Block]) -> tuple[Shape, list[Block]]:
    dim = _dim(source, source.dim, shape)
    if isinstance(source.parts, int):
        if shape[dim] % source.parts:
            raise ArgumentError(
                f"{source!r}: {shape[dim]} does not divide into {source.parts} equal parts. Give a list of sizes"
            )
        sizes: Shape = (shape[dim] // source.parts,) * source.parts
    else:
        sizes = source.parts
        if sum(sizes) != shape[dim]:
            raise ArgumentError(f"{source!r}: the sizes add up to {sum(sizes)}, and dim {dim} has {shape[dim]}")
    low = sum(sizes[: source.index])
    high = low + sizes[source.index]
    result = []
    for b in blocks:
        begin, end = max(b.at[dim], low), min(b.at[dim] + b.size[dim], high)
        if begin >= end and b.size[dim]:
            continue
        start = list(b.start)
        start[b.order[dim]] += begin - b.at[dim]
        size = b.size[:dim] + (end - begin,) + b.size[dim + 1 :]
        result.append(Block(b.name, tuple(start), size, b.order, b.at[:dim] + (begin - low,) + b.at[dim + 1 :]))
    return shape[:dim] + (high - low,) + shape[dim + 1 :], result


def _dim(source: Any, dim: int, shape: Shape) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ArgumentError(f"{source!r}: there is no dim {dim} in a tensor of shape {shape}")
    return dim % len(shape)


# The map


class ParameterMap:
    """A bijection between the elements of some old tensors and those of some new ones.

    Args:
        sources: for each new name, the expression of old names that it is.
        shapes: the shapes of the old tensors; each of those must be used up.

    Raises: ArgumentError, naming the parameter whose elements are left out or used twice.
    """

    def __init__(self, sources: Mapping[str, str | Expression], shapes: Mapping[str, Shape]) -> None:
        shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.new_shapes: dict[str, Shape] = {}
        self._blocks: dict[str, tuple[Block, ...]] = {}
        for name, source in sources.items():
            self.new_shapes[name], blocks = _blocks(source, shapes)
            self._blocks[name] = tuple(blocks)
        self.old_shapes = shapes
        self._readers: dict[str, list[tuple[str, Block]]] = {name: [] for name in shapes}
        for name, found in self._blocks.items():
            for block in found:
                self._readers[block.name].append((name, block))
        for name, readers in self._readers.items():
            _check_once(name, shapes[name], readers)

    def sources(self, new: str) -> tuple[str, ...]:
        """The old names that a new tensor draws from."""
        return tuple(dict.fromkeys(block.name for block in self._blocks[new]))

    def targets(self, old: str) -> tuple[str, ...]:
        """The new names that an old tensor went to."""
        return tuple(dict.fromkeys(name for name, _ in self._readers[old]))

    def renames(self, new: str) -> str | None:
        """The old name, if a new tensor is a whole old one as it is."""
        blocks = self._blocks[new]
        whole = len(blocks) == 1 and blocks[0].size == self.old_shapes[blocks[0].name]
        return blocks[0].name if whole and blocks[0].order == tuple(range(len(blocks[0].order))) else None

    def forward(self, old: Mapping[str, Any]) -> dict[str, Any]:
        """Old names -> new names. A renamed tensor is the same object; others are fresh and contiguous.

        A new tensor none of whose sources is given is left out. Numbers, and tensors of one element that are no
        parameter's (a step count), pass through; where several meet, they must be equal. Raises: ArgumentError.
        """
        new = {}
        for name, blocks in self._blocks.items():
            values = _given(old, self.sources(name), self.old_shapes, name)
            if values is None:
                continue
            if not values:
                new[name] = _agreed(old, self.sources(name), name)
                continue
            renamed = self.renames(name)
            if renamed is not None:
                new[name] = values[renamed]
                continue
            new[name] = _filled(values, self.new_shapes[name])
            for block in blocks:
                block.of_new(new[name]).copy_(block.of_old(values[block.name]))
        return new

    def inverse(self, new: Mapping[str, Any], known: dict[Any, Any] | None = None) -> dict[str, Any]:
        """New names -> old names, as `forward` the other way round.

        An old tensor that lies within one new tensor is a window onto it, so that it stays live. `known`: results that
        were made of the same objects, to be used again: what was tied stays tied.
        """
        known = {} if known is None else known
        old = {}
        for name, readers in self._readers.items():
            values = _given(new, self.targets(name), self.new_shapes, name)
            if values is None:
                continue
            if not values:
                old[name] = _agreed(new, self.targets(name), name)
                continue
            if self.renames(readers[0][0]) == name:
                old[name] = values[readers[0][0]]
                continue
            key = tuple(
                (id(values[target]), block.at, block.size, block.order, block.start) for target, block in readers
            )
            if key not in known:
                known[key] = self._assembled(name, readers, values), values
            old[name] = known[key][0]
        return old

    def _assembled(self, name: str, readers: list[tuple[str, Block]], values: dict[str, torch.Tensor]) -> torch.Tensor:
        if len(readers) == 1:
            return readers[0][1].back(values[readers[0][0]])
        made = _filled(values, self.old_shapes[name])
        for target, block in readers:
            block.of_old(made).copy_(block.of_new(values[target]))
        return made


def _check_once(name: str, shape: Shape, readers: list[tuple[str, Block]]) -> None:
    if not readers:
        raise ArgumentError(f"no new parameter takes {name!r}, so it would be lost")
    for (one, a), (other, b) in itertools.combinations(readers, 2):
        overlap = [
            max(p, q) < min(p + m, q + n) for p, m, q, n in zip(a.start, a.old_size, b.start, b.old_size, strict=True)
        ]
        if all(overlap):
            where = f"{one!r} twice" if one == other else f"{one!r} and by {other!r}"
            raise ArgumentError(f"elements of {name!r} are used by {where}; each may be used once")
    used = sum(math.prod(block.size) for _, block in readers)
    if used != math.prod(shape):
        raise ArgumentError(
            f"{math.prod(shape) - used} of the {math.prod(shape)} elements of {name!r} {shape} are in no new "
            f"parameter, so they would be lost"
        )


def _given(
    values: Mapping[str, Any], names: Iterable[str], shapes: Mapping[str, Shape], wanted: str
) -> dict[str, torch.Tensor] | None:
    """The tensors of these names; empty if they are scalars; None if none is given."""
    names = list(names)
    missing = [name for name in names if name not in values]
    if len(missing) == len(names):
        return None
    if missing:
        raise ArgumentError(f"{wanted!r} needs {_list(names)}, and {_list(missing)} is missing")
    scalars = [name for name in names if _is_scalar(values[name], shapes[name])]
    if len(scalars) == len(names):
        return {}
    for name in names:
        shape = tuple(values[name].shape) if isinstance(values[name], torch.Tensor) else None
        if shape != shapes[name]:
            found = f"shape {shape}" if shape is not None else f"the value {values[name]!r}"
            raise ArgumentError(f"{name!r} has {found}, and the map needs a tensor of shape {shapes[name]}")
    return {name: values[name] for name in names}


def _is_scalar(value: Any, shape: Shape) -> bool:
    return not isinstance(value, torch.Tensor) or (value.numel() == 1 and tuple(value.shape) != shape)


def _agreed(values: Mapping[str, Any], names: Iterable[str], wanted: str) -> Any:
    names = list(names)
    first = values[names[0]]
    for name in names[1:]:
        one = values[name]
        both = isinstance(one, torch.Tensor) and isinstance(first, torch.Tensor)
        if not (torch.equal(one, first) if both else type(one) is type(first) and one == first):
            raise ArgumentError(
                f"{wanted!r} is made of {_list(names)}, and they disagree: {names[0]!r} has {first!r} and {name!r} has "
                f"{one!r}"
            )
    return first


def _filled(values: Mapping[str, torch.Tensor], shape: Shape) -> torch.Tensor:
    """A fresh tensor of the dtype that holds all of these."""
    tensors = list(values.values())
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.empty(shape, dtype=dtype, device=tensors[0].device)


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
