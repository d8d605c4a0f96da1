"""What an optimizer holds for each parameter, under the original's names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slapo_py.errors import ArgumentError, CheckpointError
from slapo_py.replacing.mapped_state import from_original, is_mapped, to_original


class OriginalNames:
    """Takes values by the names of a built module's parameters to the original's and back.

    On both sides, a tied parameter goes by its first name. shapes: of the whole parameters, where the module has parts.
    """

    def __init__(self, module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.module = module
        self.mapped = is_mapped(module)
        every = dict(module.named_parameters(remove_duplicate=False))
        self._built = _first_names(every)
        # without data: only names, shapes and ties are looked at
        empty = {
            first: torch.empty(shapes.get(first, tuple(every[first].shape)), dtype=every[first].dtype, device="meta")
            for first in dict.fromkeys(self._built.values())
        }
        self.stand_ins = {name: empty[first] for name, first in self._built.items()}
        with torch.no_grad():
            self._original = _first_names(to_original(module, self.stand_ins))

    def forth(self, held: dict[str, Any], what: str) -> dict[str, Any]:
        """Names of the built module -> the original's. Raises: CheckpointError."""
        if not self.mapped:
            return held
        found = self._through(to_original, self._built, held, what)
        return {name: value for name, value in found.items() if self._original.get(name) == name}

    def back(self, held: dict[str, Any], what: str) -> dict[str, Any]:
        """The original's names -> those of the built module. Raises: CheckpointError."""
        if not self.mapped:
            return held
        found = self._through(from_original, self._original, held, what)
        return {name: value for name, value in found.items() if self._built.get(name) == name}

    def of(self, names: list[str]) -> list[str]:
        """The original's names of some parameters, in the original's order."""
        if not self.mapped:
            return names
        return list(self.forth({name: self.stand_ins[name] for name in names}, "save: a group of the optimizer"))

    def _through(self, change: Any, first: dict[str, str], held: dict[str, Any], what: str) -> dict[str, Any]:
        every = {name: held[one] for name, one in first.items() if one in held}
        try:
            found: dict[str, Any] = change(self.module, every)
        except ArgumentError as error:
            raise CheckpointError(
                f"{what} can't be taken through the params of replace: {error}. What is kept for a parameter "
                f"must be numbers or have its shape, and parts of one parameter must be trained alike."
            ) from error
        return found


def _first_names(named: dict[str, Any]) -> dict[str, str]:
    """name -> the first name of the same object."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(one), name) for name, one in named.items()}
