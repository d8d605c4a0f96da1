"""Where tensors enter and leave modules: a node of its own in a flat recording."""

from typing import Any

from torch import Tensor, nn

from slapo_py.tracing.values import map_tensors

ENTER, EXIT = "input", "output"
Border = tuple[str, str, int]
"""Side, path of the module, and which tensor."""


def border(x: Tensor, side: str, path: str, index: int) -> Tensor:
    """A tensor that enters or leaves the module at `path`: its input or output number `index`."""
    return x


def tensors_at(values: Any) -> list[Tensor]:
    """The tensors at one side of a module in the order of their numbers: each once, parameters left out."""
    found: dict[int, Tensor] = {}
    map_tensors(values, lambda tensor: found.setdefault(id(tensor), tensor))
    return [one for one in found.values() if not isinstance(one, nn.Parameter)]
