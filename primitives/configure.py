"""`sch[path].configure(eps=1e-6)`: other values for plain attributes of a module."""

import difflib
import inspect
from typing import Any

import torch
from torch import nn

from slapo_py.codec import PerRank
from slapo_py.errors import ArgumentError
from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.schedule import Schedule


@register("configure")
class Configure(Primitive):
    """Set plain attributes of this module of the scheduled copy: before `m.eps == 1e-5`, after `m.eps == 1e-6`.

    The original keeps its values. `slapo.per_rank("tp")` leaves the attribute as it is and lets `build` divide it by
    the size of that mesh axis. A module that is traced is traced anew. The last value wins.

    Requires: attributes that the module has and that are no parameter, buffer, child, method, property, `training`
    or private name; values that are no tensor or module. Raises `ArgumentError`.
    """

    reaches_flattened = True  # the trace above is made anew where it read the attribute
    outlives = True

    def check(self, place: Schedule, **attributes: Any) -> None:
        where = f'configure at "{place.path}"'
        if not attributes:
            raise ArgumentError(f"{where}: needs at least one attribute, as in configure(eps=1e-6).")
        for name, value in attributes.items():
            _check_name(place.module, name, where)
            if isinstance(value, torch.Tensor | nn.Module):
                raise ArgumentError(
                    f"{where}: {name}={type(value).__name__} would put a tensor or a module into the model and change "
                    f"its names. Only plain values can be configured."
                )
            current = getattr(place.module, name)
            if isinstance(value, PerRank) and (isinstance(current, bool) or not isinstance(current, int)):
                raise ArgumentError(
                    f"{where}: {name}={value!r} needs an int to divide over the ranks, but {name} is {current!r}."
                )

    def apply(self, place: Schedule, **attributes: Any) -> None:
        module, divided = place.module, place.root.divided.setdefault(place.path, {})
        for name, value in attributes.items():
            divided.pop(name, None)
            if isinstance(value, PerRank):
                divided[name] = value.axis
            else:
                setattr(module, name, value)
        if place.root.has_tracer:
            place.root.tracer.refresh(place.path)


def _check_name(module: nn.Module, name: str, where: str) -> None:
    kind = _kind(module, name)
    if kind == "plain":
        return
    plain = sorted(one for one in vars(module) if _kind(module, one) == "plain")
    if kind != "unknown":
        remedy = (
            "Use sch.module.train() or .eval()." if name == "training" else f"Plain attributes here: {_few(plain)}."
        )
        raise ArgumentError(f"{where}: {name!r} is {kind} of {type(module).__name__} and can't be configured. {remedy}")
    close = difflib.get_close_matches(name, plain, n=3)
    hint = (
        f"Did you mean {' or '.join(f'{one}=' for one in close)}?"
        if close
        else f"Plain attributes here: {_few(plain)}."
    )
    raise ArgumentError(f"{where}: {type(module).__name__} has no attribute {name!r}. {hint}")


def _kind(module: nn.Module, name: str) -> str:
    for kind in ("parameter", "buffer", "module"):
        if name in getattr(module, f"_{kind}s"):
            return f"a {kind}"
    if name.startswith("_"):
        return "a private attribute"
    if name == "training":
        return "the training flag"
    held = vars(module).get(name, inspect.getattr_static(type(module), name, _MISSING))
    if held is _MISSING:
        return "unknown"
    if isinstance(held, torch.Tensor):
        return "a tensor"
    if isinstance(held, nn.Module):
        return "a module"
    if name not in vars(module) and (callable(held) or hasattr(held, "__get__")):
        return "a method or property"
    return "plain"


_MISSING = object()


def _few(names: list[str]) -> str:
    return ", ".join(names[:10]) or "none"
