"""What a built module knows of its parameters and split buffers: how they lie on the mesh, what gradients need.

The facts are neutral: each target translates them into tags of its own. They are kept by name and not on the parameter,
because FSDP2 puts new parameter objects in place of the old.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from slapo_py.layouts.placement import Shard, local_shape

_KEY = "_slapo_facts"


@dataclass(frozen=True)
class Fact:
    """Of one parameter, or of one buffer that is split.

    names: all its names, its first in front. shape: of the whole. placements: how it is split, by mesh axis, the outer
    axis first. summed: the axes over which its gradient has to be summed.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    placements: Mapping[str, Shard] = field(default_factory=dict)
    summed: tuple[str, ...] = ()

    def part(self, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of a rank's part."""
        shape = self.shape
        for axis, placement in self.placements.items():
            shape = local_shape(shape, placement, sizes.get(axis, 1), coordinates.get(axis, 0))
        return shape


Facts = dict[str, Fact]
"""By first name: of every parameter, and of the buffers that are split."""


def set_facts(module: nn.Module, facts: Facts) -> None:
    """Keep them on a built module."""
    module.__dict__[_KEY] = facts


def facts_of(module: nn.Module) -> Facts:
    """Those of a built module; empty if it was built for one device."""
    found: Facts = module.__dict__.get(_KEY, {})
    return found
