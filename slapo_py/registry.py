"""Registering primitives: a class with `check` and `apply` becomes a method of every schedule."""

import inspect
import keyword
from collections.abc import Callable
from typing import Any, TypeVar

from slapo_py import codec
from slapo_py.errors import RegistryError
from slapo_py.history import Step
from slapo_py.places import check_called, shared_kept
from slapo_py.primitive import TABLE, Primitive, bind, normalized, parameters_of
from slapo_py.schedule import Schedule
from slapo_py.selection import Selection

P = TypeVar("P", bound=type[Primitive])


def register(name: str) -> Callable[[P], P]:
    """Make a `Primitive` subclass the method `sch.<name>(...)` of every schedule and selection.

        @slapo.register("freeze")
        class Freeze(Primitive):
            "One line for help(sch.freeze)."
            def check(self, place, deep=True): ...
            def apply(self, place, deep=True): ...

    Requires: a new name, a docstring, `check` and `apply` with the same arguments. Raises `RegistryError`.
    """

    if isinstance(name, type):
        raise RegistryError(f'register: needs a name. Write @slapo.register("{name.__name__.lower()}").')

    def decorate(cls: P) -> P:
        _check_name(name)
        _check_class(name, cls)
        cls.name = name
        primitive = cls()
        TABLE[name] = primitive
        setattr(Schedule, name, _method(primitive, Schedule))
        setattr(Selection, name, _method(primitive, Selection))
        return cls

    return decorate


def unregister(name: str) -> None:
    """Take a primitive away again, e.g. to register a corrected one under its name in a notebook."""
    if name not in TABLE:
        raise RegistryError(f"unregister({name!r}): no such primitive. Registered: {', '.join(list_primitives())}.")
    del TABLE[name]
    delattr(Schedule, name)
    delattr(Selection, name)


def list_primitives() -> list[str]:
    """The names of all registered primitives, in order."""
    return sorted(TABLE)


def run(primitive: Primitive, place: Schedule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Schedule:
    """One step: bind, check, apply, record. Whatever raises leaves the schedule as it was."""
    root = place.root
    place.module  # noqa: B018  a cursor whose place is gone says so before anything else
    bound = bind(primitive, f'"{place.path}"' if place.path else "the whole model", args, kwargs)
    given = codec.recorded(normalized(primitive, bound), place)
    step = Step(primitive.name, place.path, *given)
    before = root.names_below(place.path)
    with root.step(place.path):
        if not primitive.reaches_flattened:
            check_called(place, primitive.name)
        primitive.check(place, *given[0], **given[1])
        with shared_kept(place, primitive.name):
            primitive.apply(place, *given[0], **given[1])
    root.record(step, before)
    return place


def _method(primitive: Primitive, owner: type) -> Any:
    if owner is Schedule:

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return run(primitive, self, args, kwargs)
    else:

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.each(primitive.name, args, kwargs)

    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    own = parameters_of(primitive)
    parameters = list(own.parameters.values())
    method.__name__ = primitive.name
    method.__qualname__ = f"{owner.__name__}.{primitive.name}"
    method.__module__ = type(primitive).__module__
    method.__doc__ = inspect.getdoc(type(primitive))
    method.__signature__ = own.replace(parameters=[this, *parameters], return_annotation=owner)  # type: ignore[attr-defined]
    return method


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise RegistryError(f'register({name!r}): needs a plain Python name, such as register("freeze").')
    if name in TABLE:
        raise RegistryError(
            f"register({name!r}): {type(TABLE[name]).__qualname__} has this name already. Choose another name, or "
            f'take that one away first: slapo_py.unregister("{name}").'
        )
    for owner in (Schedule, Selection):
        if hasattr(owner, name):
            raise RegistryError(f"register({name!r}): would hide {owner.__name__}.{name}. Choose another name.")


def _check_class(name: str, cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, Primitive):
        raise RegistryError(f"register({name!r}): needs a subclass of slapo_py.Primitive, found {cls!r}.")
    missing = [part for part in ("check", "apply") if not inspect.isfunction(getattr(cls, part, None))]
    if missing:
        raise RegistryError(
            f"register({name!r}): {cls.__qualname__} lacks {' and '.join(missing)}. "
            f"Write def {missing[0]}(self, place, ...)."
        )
    if not (cls.__dict__.get("__doc__") or "").strip():
        raise RegistryError(f"register({name!r}): {cls.__qualname__} needs a docstring: help(sch.{name}) shows it.")
    check, apply = inspect.signature(cls.check), inspect.signature(cls.apply)
    for part, signature in (("check", check), ("apply", apply)):
        if list(signature.parameters)[:2] != ["self", "place"]:
            raise RegistryError(
                f"register({name!r}): {cls.__qualname__}.{part}{signature} must begin with (self, place, ...)."
            )
    if _shape(check) != _shape(apply):
        raise RegistryError(
            f"register({name!r}): check{check} and apply{apply} of {cls.__qualname__} must take the same arguments."
        )


def _shape(signature: inspect.Signature) -> list[Any]:
    return [(one.name, one.kind, repr(one.default)) for one in signature.parameters.values()]
