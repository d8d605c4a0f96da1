"""What the ranks of a mesh hold, put together: parts of parameters, rows of a batch, terms of sums."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slapo_py.build.facts import Fact
from slapo_py.build.slicing import local_shard
from slapo_py.layouts.placement import Placement, R, Shard, join, local_shape
from slapo_py.layouts.simulating.simulate import whole

Place = dict[str, int]
"""Where a rank stands on each axis."""


@dataclass(frozen=True)
class Grid:
    """The ranks of a mesh by their places. sizes: by axis, the outer one first, in which ranks are counted."""

    sizes: Mapping[str, int]

    @property
    def places(self) -> list[Place]:
        """Of each rank."""
        every = itertools.product(*(range(size) for size in self.sizes.values()))
        return [dict(zip(self.sizes, one)) for one in every]

    def rank(self, place: Place) -> int:
        """Which rank stands at a place."""
        return self.places.index(place)

    def along(self, axis: str, place: Place) -> list[int]:
        """The ranks of an axis that has a place on it, in order."""
        if axis not in self.sizes:
            return [self.rank(place)]
        return [self.rank({**place, axis: one}) for one in range(self.sizes[axis])]

    def parameter(self, parts: Sequence[Tensor], fact: Fact, rank: int) -> Tensor:
        """The whole of a parameter, or of what lies as it does, as a rank sees it. parts: of all ranks."""
        axes = list(fact.placements)

        def joined(depth: int, place: Place, shape: tuple[int, ...]) -> Tensor:
            if depth == len(axes):
                return parts[self.rank(place)]
            axis, size = axes[depth], self.sizes[axes[depth]]
            left = torch.empty(shape, device="meta")
            shard = local_shard(fact.placements[axis], torch.empty(fact.shape, device="meta"), left)
            pieces = [
                joined(depth + 1, {**place, axis: one}, local_shape(shape, shard, size, one)) for one in range(size)
            ]
            return join(pieces, shard, shape[shard.dim])

        return joined(0, self.places[rank], fact.shape)

    def value(self, parts: Sequence[Tensor], placements: Mapping[str, Placement], rank: int) -> Tensor:
        """A whole value as a rank's part shows it. Parts that don't fit together are shown as they are."""
        try:
            for axis, placement in reversed(list(placements.items())):
                if placement != R:
                    parts = [whole([parts[one] for one in self.along(axis, place)], placement) for place in self.places]
        except Exception:  # of other shapes than they should have
            pass
        return parts[rank].clone()

    def rows(self, axis: str, parts: Sequence[Tensor], shape: Sequence[int], rank: int) -> Tensor:
        """A value of a whole shape of which each rank of an axis has the rows of its part of the batch, if it has."""
        count, own = self.sizes.get(axis, 1), parts[rank]
        ranks = self.along(axis, self.places[rank])
        there = {tuple(parts[one].shape) for one in ranks}
        if count == 1 or own.shape == torch.Size(shape) or len(there) > 1 or not own.dim():
            return own
        return join([parts[one] for one in ranks], Shard(0)) if own.shape[0] * count == shape[0] else own

    def total(self, axis: str, parts: "Sequence[Tensor | None]", rank: int) -> Tensor | None:
        """The sum of the terms of the ranks of an axis; None where none has one."""
        terms = [parts[one] for one in self.along(axis, self.places[rank])]
        there = [one for one in terms if one is not None]
        return torch.stack(there).sum(0) if len(there) > 1 else there[0] if there else None
