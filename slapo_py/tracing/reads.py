"""Attributes that a forward has read, and how python reaches them."""

from typing import Any, NamedTuple


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"

    __reduce__ = __repr__  # type: ignore[assignment]  # pickled by its name: there is one such object


ABSENT = _Absent()
Reads = dict[tuple[str, str], Any]
"""{(expression of the owner, attribute): the value read}; ABSENT where there was no such attribute."""


class At(NamedTuple):
    """A module of the tree, by the expression that reaches it."""

    expr: str


def dotted(path: str) -> str:
    """`a.0.b` -> `.a[0].b`-like access that reads past nn.Module.__getattr__ (which costs a microsecond a step)."""
    return "".join(f"._modules[{atom!r}]" for atom in path.split(".")) if path else ""
