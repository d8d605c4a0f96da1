"""One file a target. A target is a row of this table; its file is imported when it is first named."""

import importlib
from typing import TYPE_CHECKING

from slapo_py.errors import BuildError

if TYPE_CHECKING:
    from slapo_py.backends.base import Engine

TARGETS = {"torch": "slapo_py.backends.torch_target:TorchEngine"}


def find_engine(target: str) -> "type[Engine]":
    """The engine class of a target. Raises: BuildError for a name that is not in the table."""
    if target not in TARGETS:
        known = ", ".join(f"target={name!r}" for name in TARGETS)
        raise BuildError(f"build: there is no target {target!r}. Write one of: {known}.")
    module, name = TARGETS[target].split(":")
    found: type[Engine] = getattr(importlib.import_module(module), name)
    return found


__all__ = ["TARGETS", "find_engine"]
