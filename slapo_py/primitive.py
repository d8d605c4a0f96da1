"""What a primitive is, and the table of those that are registered."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from slapo_py.errors import ArgumentError


class Primitive:
    """One rewriting step. A subclass defines `check` and `apply` with one signature; `place` is the cursor.

    `check(self, place, ...)` refuses by raising a `ScheduleError`, or accepts; it changes nothing.
    `apply(self, place, ...)` carries the step out and may rely on the check. If it raises, all is put back.
    """

    name: ClassVar[str] = ""
    """Set by `register`."""
    structural: ClassVar[bool] = False
    """True: results are bit-equal to those without the step."""
    reaches_flattened: ClassVar[bool] = False
    """True: the step also works on a module that is part of a flattened graph, and so is not called any more, because
    it concerns parameters or attributes only."""

    outlives: ClassVar[bool] = False
    """True: the step may stay in the history when the module that it was done at is replaced by another."""

    check: Callable[..., Any]
    apply: Callable[..., Any]


TABLE: dict[str, Primitive] = {}


def parameters_of(primitive: Primitive) -> inspect.Signature:
    """The arguments that a user writes: those after `place`."""
    signature = inspect.signature(primitive.apply)  # bound: self is gone
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def bind(primitive: Primitive, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Arguments as they are written -> by name, or `ArgumentError` in the words of the user's call."""
    signature = parameters_of(primitive)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in signature.parameters]
        close = [match for name in unknown for match in difflib.get_close_matches(name, signature.parameters)]
        hint = f" Did you mean {' or '.join(f'{name}=' for name in close)}?" if close else ""
        raise ArgumentError(
            f"{primitive.name} at {where}: {error}.{hint} It is called as {primitive.name}{signature}."
        ) from None


def normalized(primitive: Primitive, bound: inspect.BoundArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One way of writing each call: required arguments by position, others by name, defaults left out.

    So two calls that mean the same are recorded as the same step, whichever way they were written.
    """
    parameters = bound.signature.parameters.values()
    variadic = any(one.kind is one.VAR_POSITIONAL and bound.arguments.get(one.name) for one in parameters)
    if variadic:
        bound.apply_defaults()
        return bound.args, {name: value for name, value in bound.kwargs.items() if not _default(bound, name, value)}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for one in parameters:
        if one.name not in bound.arguments:
            continue
        value = bound.arguments[one.name]
        if one.kind is one.VAR_KEYWORD:
            kwargs.update(value)
        elif one.kind is one.VAR_POSITIONAL:
            continue
        elif one.kind is one.POSITIONAL_ONLY or (one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty):
            args.append(value)
        elif not _default(bound, one.name, value):
            kwargs[one.name] = value
    return tuple(args), kwargs


def _default(bound: inspect.BoundArguments, name: str, value: Any) -> bool:
    parameter = bound.signature.parameters.get(name)
    if parameter is None or parameter.default is parameter.empty:
        return False
    default = parameter.default
    return value is default or (
        type(value) is type(default) and isinstance(value, int | str | tuple) and value == default
    )
