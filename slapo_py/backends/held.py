"""What a rank holds of a built module's tensors, by name: the exact values of parameters, and what lies as they do.

In one process these are the live tensors. On a mesh they are parts of whole ones; those that a step has made of
others, with replace(params=...), are put together first, since only whole tensors can be said in the original's names.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from slapo_py.backends.parts import Part, gathered, part_of
from slapo_py.backends.precision import Weights
from slapo_py.build.facts import facts_of
from slapo_py.distributed.mesh import Mesh
from slapo_py.errors import CheckpointError
from slapo_py.replacing.mapped_state import stages


class Held:
    """The parameters of an engine's module. Made anew for each save or load."""

    def __init__(self, module: nn.Module, weights: Weights, mesh: Mesh | None) -> None:
        for one in module.modules():
            if isinstance(one, FSDPModule):
                one.reshard()  # after a forward alone, the outermost has its parameters whole
        self.module, self.mesh = module, mesh
        self.facts = facts_of(module) if mesh is not None else {}
        self.first = _first_names(dict(module.named_parameters(remove_duplicate=False)))
        """Every name of a parameter -> its first one."""
        self.exact = {name: weights.of(one) for name, one in module.named_parameters()}
        """The tensors that hold the values, by first name."""
        made = _mapped(module) if mesh is not None else set()
        self.mapped = {first for name, first in self.first.items() if name in made}
        """The first names of those that maps have made of others; on a mesh."""
        self._parts = {
            name: part_of(self.exact[name], fact, mesh)
            for name, fact in self.facts.items()
            if mesh is not None and name in self.exact
        }
        self._buffers = _first_names(dict(module.named_buffers(remove_duplicate=False)))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole parameters, by first name; on a mesh."""
        return {name: fact.shape for name, fact in self.facts.items()}

    def values(self, whole: bool = False) -> dict[str, Any]:
        """Every name -> the parameter's exact value: live, or a `Part`, or put together. whole: all of them.

        On a mesh a collective call.
        """
        found = {name: self.lying(name, one, whole) for name, one in self.exact.items()}
        return {name: found[first] for name, first in self.first.items()}

    def buffers(self, whole: bool = False) -> dict[str, Any]:
        """Every name of a buffer that is split -> its `Part`, or the whole of it, put together.

        On a mesh a collective call.
        """
        live, found = dict(self.module.named_buffers()), dict[str, Any]()
        for first in dict.fromkeys(self._buffers.values()):
            if self.mesh is not None and first in self.facts:
                fact = self.facts[first]
                found[first] = (gathered if whole else part_of)(live[first], fact, self.mesh)
        return {name: found[first] for name, first in self._buffers.items() if first in found}

    def lying(self, name: str, value: Any, whole: bool = False, what: str = "") -> Any:
        """What is held for a parameter: as `values` has it where it lies as the parameter does, else as it is.

        On a mesh a collective call. what: for the message. Raises: CheckpointError.
        """
        if not isinstance(value, Tensor):
            return value
        if self.mesh is None:
            return value.detach().as_subclass(Tensor)
        part, fact = self._parts[name], self.facts[name]
        local = (value.to_local() if isinstance(value, DTensor) else value).detach()
        if local.shape != part.tensor.shape:
            if local.numel() > 1 and part.tensor.shape != fact.shape:
                raise CheckpointError(
                    f"save: {what} has shape {tuple(local.shape)} for {name!r}, of which this rank holds "
                    f"{tuple(part.tensor.shape)}: how it lies on the ranks is not known. What an optimizer keeps for "
                    f"a parameter that is split must be a number or have its shape, as that of AdamW does."
                )
            return local
        if whole or name in self.mapped:
            return gathered(self.placed(name, local), fact, self.mesh)
        return part.like(local)

    def placed(self, name: str, value: Any) -> Any:
        """The reverse of `lying`: what this rank holds of it, spread as the parameter is."""
        if self.mesh is None or not isinstance(value, Part | Tensor):
            return value
        part = self._parts[name]
        if isinstance(value, Part):
            value = value.tensor
        elif value.shape == torch.Size(part.shape) and value.shape != part.tensor.shape:
            value = part.cut(value)
        exact = self.exact[name]
        if isinstance(exact, DTensor) and value.shape == part.tensor.shape:
            return DTensor.from_local(
                value.to(part.tensor.device),
                exact.device_mesh,
                exact.placements,
                run_check=False,
                shape=exact.shape,
                stride=exact.stride(),
            )
        return value

    def take(self, name: str, value: Tensor) -> None:
        """Put a whole value where the parameter's exact value lies."""
        exact = self.exact[self.first[name]].detach()
        if self.mesh is None:
            exact.copy_(value)
        else:
            part = self._parts[self.first[name]]
            part.tensor.copy_(part.cut(value))


def _mapped(module: nn.Module) -> set[str]:
    """The names that parameter maps have given, in the module or between two maps."""
    return {prefix + name for prefix, state in stages(module) for name in state.map.new_shapes}


def _first_names(named: Mapping[str, Any]) -> dict[str, str]:
    """name -> the first name of the same object."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(one), name) for name, one in named.items()}
