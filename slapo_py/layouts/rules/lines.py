"""Label lines of functions that a recording keeps as one operation, though torch has no such one: fused kernels.

Whoever makes such a function gives its line; nothing here knows kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slapo_py.layouts.rules.table import Rule

Function = Callable[..., Any]


@dataclass(frozen=True)
class Classes:
    """Of a loss that is `F.cross_entropy` where its line holds: how its classes may be split over ranks.

    The function takes logits and labels first, and options of `F.cross_entropy` under their names there; what else it
    takes has no effect where the line holds. label: the classes, in the line. parts, gradient: what a rank computes of
    its own classes, as in `slapo_py.distributed.cross_entropy.Slice`.
    """

    label: str
    parts: Function
    gradient: Function


@dataclass(frozen=True)
class _Given:
    function: Function  # kept, so that its id stays its own
    rule: Rule
    holds: Function | None
    classes: Classes | None


_LINES: dict[int, _Given] = {}
"""By the function's id."""


def give_line(function: Function, line: str, holds: Function | None = None, classes: Classes | None = None) -> None:
    """Make a function one operation with this line of labels, as in `table.py`.

    holds: whether the line is right for these arguments. "", or a line that is not, takes only whole values.
    """
    rule = Rule(line)
    if classes is not None:
        rule = Rule(line, local={classes.label: "cross_entropy"}, whole=classes.label)
    _LINES[id(function)] = _Given(function, rule, holds, classes)


def take_line(function: Function) -> None:
    """Look into calls of a function again."""
    _LINES.pop(id(function), None)


def has_line(function: object) -> bool:
    """Whether a function is one operation."""
    return id(function) in _LINES


def rule_for(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule:
    """The rule of a call of a function that is one operation."""
    given = _LINES[id(function)]
    return given.rule if given.holds is None or given.holds(*args, **kwargs) else Rule("")


def classes_of(function: object) -> Classes | None:
    """How the classes of a function that is one operation, and a loss, may be split."""
    given = _LINES.get(id(function))
    return None if given is None else given.classes
