"""Collectives where tensors enter and leave modules: the syncs of a schedule as layers of a built module."""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from slapo_py.build.rows import rows_noted, rows_planned
from slapo_py.distributed.collectives import Ranks
from slapo_py.errors import PlacementError
from slapo_py.layouts.inference.state import Conversion
from slapo_py.layouts.placement import Placement, Shard, is_even, local_size
from slapo_py.layouts.redistribute import over
from slapo_py.scheduled import Forward, Layer


@dataclass(frozen=True)
class Move:
    """A value, and its gradient on the way back, from one placement to another on one axis.

    example: the whole shape that it was planned for. where: what a message calls the value. rows: of the batch that it
    was planned for, where its blocks are as many as those; else 0.
    """

    ranks: Ranks
    source: Placement
    target: Placement
    grad_source: Placement | None
    grad_target: Placement | None
    example: tuple[int, ...]
    where: str = field(compare=False)  # like layers share one class: the first of them, which also runs first, is named
    rows: int = 0

    @staticmethod
    def of(one: Conversion, ranks: Ranks, where: str) -> "Move":
        """What a conversion of the plan is on this rank."""
        shape = tuple(int(size) for size in one.node.meta["val"].shape)
        rows = rows_planned(one)
        return Move(ranks, one.source, one.target, one.grad_source, one.grad_target, shape, where, rows)

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's part or term -> the other one. Raises `PlacementError`."""
        if x.dim() != len(self.example):
            raise PlacementError(
                f"{self.where}: it was planned for a tensor of {len(self.example)} dims, and here is one of {x.dim()}: "
                f"the module is called with other tensors than on the example inputs (a mask less, say). Give "
                f"create_schedule example_inputs of this kind."
            )
        whole = self._whole(x)
        source, target = self._now(self.source), self._now(self.target)
        grad_source = None if self.grad_source is None else self._now(self.grad_source)
        grad_target = None if self.grad_target is None else self._now(self.grad_target)
        return over(x, source, target, grad_source, grad_target, (self.ranks,), whole)

    def _now(self, placement: Placement) -> Placement:
        """A placement for the batch at hand."""
        return Shard(0, rows_noted(self.where)) if self.rows and placement == Shard(0, self.rows) else placement

    def _whole(self, x: Tensor) -> list[int]:
        """The whole shape. Sizes may be others than planned where they divide; so each rank knows those of all."""
        whole, ranks = list(x.shape), self.ranks.size
        source, target = self.source, self.target
        if isinstance(source, Shard):
            dim, planned = source.dim, self.example[source.dim]
            if is_even(self.example, source, ranks):
                whole[dim] = x.shape[dim] * ranks
            elif x.shape[dim] == local_size(planned, source, dim, ranks, self.ranks.rank):
                whole[dim] = planned
            else:
                raise self._uneven(dim, f"a part of {x.shape[dim]}")
        if isinstance(target, Shard):
            dim, planned = target.dim, self.example[target.dim]
            if whole[dim] != planned and not (
                is_even(self.example, target, ranks) and is_even(whole, self._now(target), ranks)
            ):
                raise self._uneven(dim, str(whole[dim]))
        return whole

    def _uneven(self, dim: int, found: str) -> PlacementError:
        return PlacementError(
            f"{self.where}: dim {dim} has {found} elements and was planned with {self.example[dim]}. Another size must "
            f"divide by {self.ranks.size}, as the planned one must. Pad the batch to a multiple of {self.ranks.size}."
        )


Moves = tuple[tuple[int, Move], ...]
"""What happens to the tensors at a border, by their number there."""


@dataclass(frozen=True)
class OutputSync(Layer):
    """Converts what a forward gives back."""

    moves: Moves
    rank: ClassVar[int] = 20

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        moves = by_number(self.moves)

        @functools.wraps(forward)
        def synced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return at_border(forward(self, *args, **kwargs), moves)

        return synced


@dataclass(frozen=True)
class InputSync(Layer):
    """Converts what a forward is given."""

    moves: Moves
    rank: ClassVar[int] = 40

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        moves = by_number(self.moves)

        @functools.wraps(forward)
        def synced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = at_border((args, kwargs), moves)
            return forward(self, *args, **kwargs)

        return synced


def by_number(moves: Moves) -> Mapping[int, tuple[Move, ...]]:
    """The moves of each tensor, in order."""
    found: dict[int, tuple[Move, ...]] = {}
    for number, move in moves:
        found[number] = (*found.get(number, ()), move)
    return found


def at_border(values: Any, moves: Mapping[int, tuple[Callable[[Tensor], Tensor], ...]]) -> Any:
    """Nested values, with the tensors of these numbers moved.

    They are numbered as a recording numbers them: in order, each object once, parameters left out.
    """
    seen: list[Tensor] = []
    made: list[Tensor] = []

    def moved(tensor: Tensor) -> Tensor:
        for number in range(len(seen)):
            if seen[number] is tensor:
                return made[number]
        result = tensor
        for move in moves.get(len(seen), ()):
            result = move(result)
        seen.append(tensor)
        made.append(result)
        return result

    return _mapped(values, moved)


def _mapped(value: Any, moved: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Tensor):
        return moved(value)
    if isinstance(value, tuple):
        items = [_mapped(one, moved) for one in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_mapped(one, moved) for one in value]
    if type(value) is dict:
        return {key: _mapped(one, moved) for key, one in value.items()}
    if isinstance(value, dict):  # transformers' outputs
        new = copy.copy(value)
        for key in value:
            new[key] = _mapped(value[key], moved)
        return new
    return value
