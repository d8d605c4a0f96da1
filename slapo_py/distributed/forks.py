"""What `fork_rng` records at a module: over which mesh axes its random operations differ, and how they then do."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from slapo_py.distributed.rng import forked
from slapo_py.scheduled import Forward, Layer, dress, layer_of


@dataclass(frozen=True)
class Forked(Layer):
    """Around a forward: in training the ranks of these axes draw differently. Without coordinates it only says so.

    In eval mode nothing is done: there a model draws nothing as a rule, and goes through `torch.compile` as one graph.
    axes: by name. coordinates: where this rank stands on each, once the schedule is built on a mesh; else ().
    """

    axes: tuple[str, ...]
    coordinates: tuple[int, ...] = ()
    rank: ClassVar[int] = 30

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        place = dict(zip(self.axes, self.coordinates))

        @functools.wraps(forward)
        def forward_forked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not place or not self.training:
                return forward(self, *args, **kwargs)
            with forked(place):
                return forward(self, *args, **kwargs)

        return forward_forked

    def describe(self) -> str:
        return ", ".join(f'fork_rng("{axis}")' for axis in self.axes)


def forks_of(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """The axes over which random operations differ at and below modules, by the path of the module from this one."""
    held = {path: layer_of(one, Forked) for path, one in module.named_modules()}
    return {path: layer.axes for path, layer in held.items() if layer is not None}


def fork(module: nn.Module, coordinates: Mapping[str, int]) -> None:
    """Put what is recorded at and below a module into effect. coordinates: of this rank, on the axes that the mesh has.

    For `build` on a mesh. Where masks are drawn by logical index (`slapo_py.distributed.masks`), it is left out.
    """
    for path, axes in forks_of(module).items():
        if any(axis in coordinates for axis in axes):
            dress(module.get_submodule(path), Forked(axes, tuple(coordinates.get(axis, 0) for axis in axes)))
