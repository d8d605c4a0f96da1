"""Label lines of functions that a recording keeps as one operation, though torch has no such one: fused kernels.

Whoever makes such a function gives its line; nothing here knows kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Function = Callable[..., Any]
_LINES: dict[int, tuple[Function, str, Function | None]] = {}
"""By the function's id, which stays its own while it is here."""


def give_line(function: Function, line: str, holds: Function | None = None) -> None:
    """Make a function one operation with this line of labels, as in `table.py`.

    holds: whether the line is right for these arguments. "", or a line that is not, takes only whole values.
    """
    _LINES[id(function)] = function, line, holds


def take_line(function: Function) -> None:
    """Look into calls of a function again."""
    _LINES.pop(id(function), None)


def has_line(function: object) -> bool:
    """Whether a function is one operation."""
    return id(function) in _LINES


def line_for(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The line of a call of a function that is one operation."""
    _, line, holds = _LINES[id(function)]
    return line if holds is None or holds(*args, **kwargs) else ""
