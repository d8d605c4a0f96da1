"""Whole numbers that remember from which attribute of a module a forward has read them."""

from collections.abc import Callable
from typing import Any

_NO_SIZES = {"layer_idx", "layer_id"}
Owner = tuple[str, str]
"""A module by its path, and the name of its attribute."""


class Owned(int):
    """A whole number that a forward has read: the attribute `owner[1]` of the module at `owner[0]`.

    computed: the owners with whose numbers the forward has computed; what comes out remembers nothing.
    """

    owner: Owner
    computed: set[Owner]

    def __new__(cls, value: int, owner: Owner, computed: set[Owner] | None = None) -> "Owned":
        made = int.__new__(cls, value)
        made.owner = owner
        made.computed = set() if computed is None else computed
        return made

    def __reduce__(self) -> Any:
        return (int, (int.__int__(self),))


def _noting(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def computing(self: Owned, *others: Any) -> Any:
        for one in (self, *others):
            if isinstance(one, Owned):
                one.computed.add(one.owner)
        return plain(self, *others)

    computing.__name__ = computing.__qualname__ = name
    return computing


_BINARY = "add sub mul truediv floordiv mod pow divmod".split()
for _name in [f"__{one}__" for one in (*_BINARY, *(f"r{one}" for one in _BINARY), "neg", "float")]:
    setattr(Owned, _name, _noting(_name))


def owned(path: str, name: str, value: Any, computed: set[Owner] | None = None) -> Any:
    """The value of an attribute; a whole number that may be a size remembers it."""
    plain = type(value) is int and not name.startswith("_") and name not in _NO_SIZES
    return Owned(value, (path, name), computed) if plain else value
