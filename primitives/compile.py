"""`sch[path].compile()`: torch.compile of one module."""

import difflib
import functools
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from slapo_py.errors import ArgumentError, StepError
from slapo_py.places import check_forward
from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.schedule import Schedule
from slapo_py.scheduled import Forward, Layer, dress, layer_of

# "model" is what is compiled; "name" labels one compiled region, and identical modules share theirs.
OPTIONS = tuple(name for name in inspect.signature(torch.compile).parameters if name not in ("model", "name"))


@dataclass(frozen=True)
class Compiled(Layer):
    """Equal options give an equal layer, hence one class and one compiled code for all identical modules."""

    options: tuple[tuple[str, Any], ...]
    rank: ClassVar[int] = 10

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        options: dict[str, Any] = {k: dict(v) if k == "options" else v for k, v in self.options}
        compiled: Forward = torch.compile(forward, **options)

        @functools.wraps(forward)
        def compile_once(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Within a larger module that is compiled, this one is a part of it: dynamo can't guard the defaults of a
            # forward behind its own wrapper.
            run = forward if torch.compiler.is_compiling() else compiled
            return run(self, *args, **kwargs)

        return compile_once

    def describe(self) -> str:
        inner = ", ".join(f"{name}={getattr(value, '__name__', None) or value!r}" for name, value in self.options)
        return f"compile({inner})" if inner else "compile"


@register("compile")
class Compile(Primitive):
    """Run this module's forward through torch.compile, called with these options (`backend=`, `mode=`, ...).

    Before: the forward runs op by op; after: it is compiled at its first call. Identical modules with the same options
    compile once. Hooks, names and the module object stay. The arithmetic may differ in rounding.

    Requires: a module with a forward that is not compiled yet; options of `torch.compile`. Raises `ArgumentError`,
    `StepError`.
    """

    def check(self, place: Schedule, **options: Any) -> None:
        where = f'compile at "{place.path}"'
        check_forward(place, "compile")
        held = layer_of(place.module, Compiled)
        if held is not None:
            raise StepError(
                f"{where}: this module is compiled already ({held.describe()}). To compile it with other options, take "
                f"that step back with sch.undo() and write the new call."
            )
        for name in options:
            if name not in OPTIONS:
                close = difflib.get_close_matches(name, OPTIONS)
                hint = f" Did you mean {close[0]}=?" if close else ""
                raise ArgumentError(
                    f"{where}: torch.compile has no option {name!r}.{hint} Options: {', '.join(OPTIONS)}."
                )
        check_choice(where, "backend", options.get("backend"), torch._dynamo.list_backends(None))
        if options.get("mode") is not None and options.get("options") is not None:
            raise ArgumentError(f"{where}: torch.compile takes either mode= or options=, not both. Leave one out.")
        if options.get("mode") is not None:
            check_choice(where, "mode", options["mode"], ["default", *torch._inductor.list_mode_options()])
        if options.get("options") is not None and not isinstance(options["options"], dict):
            raise ArgumentError(
                f'{where}: options={options["options"]!r} must be a dict, as in options={{"trace.enabled": True}}.'
            )

    def apply(self, place: Schedule, **options: Any) -> None:
        dress(place.module, Compiled(tuple(sorted((name, _hashable(name, value)) for name, value in options.items()))))


def check_choice(where: str, name: str, value: Any, known: list[str]) -> None:
    """Refuse a name that torch.compile does not know, with names like it."""
    if value is None or callable(value) or value in known:
        return
    close = difflib.get_close_matches(str(value), known)
    hint = f"Did you mean {name}={close[0]!r}?" if close else f"Known: {', '.join(known)}."
    raise ArgumentError(f"{where}: torch.compile knows no {name} {value!r}. {hint}")


def _hashable(name: str, value: Any) -> Any:
    return tuple(sorted(value.items())) if name == "options" and isinstance(value, dict) else value
