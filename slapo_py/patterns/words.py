"""What stands in operand positions besides nodes and plain literals."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Attribute:
    """A value that a submodule holds and reads when it is called: `Attribute("fc.weight")`, `Attribute("training")`."""

    target: str

    def __str__(self) -> str:
        return self.target


class Dim(int):
    """A dim of a tensor whose rank is known: it may be counted from the end as well."""

    ndim: int

    def __new__(cls, value: int, ndim: int) -> "Dim":
        dim = int.__new__(cls, value)
        dim.ndim = ndim
        return dim


@dataclass(frozen=True)
class Wild:
    """A literal of any value."""

    name: str | None = None

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return NotImplemented  # torch's argument parser lets it pass, and the operation goes on to the inputs

    def __str__(self) -> str:
        return f"wild({self.name!r})" if self.name else "wild()"


@dataclass(frozen=True)
class Child:
    """The target of `slapo.call(regex, ...)` in a pattern's graph."""

    regex: str

    @property
    def __name__(self) -> str:
        return "call"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a call in a pattern stands for a submodule; it can't be run")

    def names(self, target: str) -> bool:
        """Whether this is how a submodule of that path may be called."""
        return re.fullmatch(self.regex, target) is not None


class _Mode:
    """`training` of a module that a pattern calls: the mode of the graph's module."""

    def __repr__(self) -> str:
        return "the mode of the module"


MODE = _Mode()
