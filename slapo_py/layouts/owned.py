"""Whole numbers that remember from which attribute of a module a forward has read them."""

from typing import Any

_NO_SIZES = {"layer_idx", "layer_id"}


class Owned(int):
    """A whole number that a forward has read: the attribute `owner[1]` of the module at `owner[0]`."""

    owner: tuple[str, str]

    def __new__(cls, value: int, owner: tuple[str, str]) -> "Owned":
        made = int.__new__(cls, value)
        made.owner = owner
        return made

    def __reduce__(self) -> Any:
        return (int, (int(self),))


def owned(path: str, name: str, value: Any) -> Any:
    """The value of an attribute; a whole number that may be a size remembers it."""
    plain = type(value) is int and not name.startswith("_") and name not in _NO_SIZES
    return Owned(value, (path, name)) if plain else value
