"""Functions and modules in the place of matches of a pattern, in the graph of a traced place."""

import inspect
import re
from typing import Any

from torch import nn

from slapo_py import codec
from slapo_py.errors import ArgumentError
from slapo_py.matches import Match, occurrences
from slapo_py.patterns import Occurrence
from slapo_py.replacing.installing import install
from slapo_py.rewriting import check_name, few, fresh_names, name_of, parameters_of, with_function, with_submodules
from slapo_py.schedule import Schedule
from slapo_py.scheduled import dress
from slapo_py.tracing.trace import trace_of


def check_replacement(place: Schedule, new: Any, what: Any, params: Any) -> None:
    """Refuse a replacement of matches, or accept it; nothing changes."""
    where = f'replace at "{place.path}"'
    place._trace()
    found = occurrences(place, what, "replace")
    if not isinstance(new, nn.Module) and not callable(new):
        raise ArgumentError(
            f"{where}: needs a function, a module or a factory of one, found {new!r}. Write "
            f"replace(my_function, pattern)."
        )
    if not _is_factory(new, params):
        with_function(place, found, new, "replace")
        return
    if isinstance(new, nn.Module) and len(found) > 1 and any(True for _ in new.parameters()):
        raise ArgumentError(
            f"{where}: one module would stand for {len(found)} matches, and they would share its parameters. Give "
            f"a factory, a class or a function of the match that returns a module, or one match."
        )
    if params and len(found) > 1:
        raise ArgumentError(
            f"{where}: params says where the parameters of one module come from, and there are {len(found)} matches. "
            f'Give one of them: m = sch["{place.path}"].find(pattern); replace(..., m[0], params={{...}}).'
        )
    names = fresh_names(place, _stem(new), len(found))
    for name in names:
        check_name(place, name, "replace")
    with_submodules(place, found, names, "replace", params)


def replace_matches(place: Schedule, new: Any, what: Any, params: Any) -> None:
    """Put a function, or a module for each, in the place of matches. Only after `check_replacement`."""
    found = occurrences(place, what, "replace")
    if not _is_factory(new, params):
        dress(place.module, with_function(place, found, new, "replace"))
        return
    module, before = place.module, trace_of(place.module)
    names = fresh_names(place, _stem(new), len(found))
    trace = with_submodules(place, found, names, "replace", params)
    made = [_module_for(place, new, what, one) for one in found]  # all of them first: a factory looks at the children
    paths = {path for path, _ in module.named_modules()}
    for name, one in zip(names, made, strict=True):
        install(place, name, one, params, trace.graph)
    trace = trace.without(paths - {path for path, _ in module.named_modules()})
    lost = parameters_of(module, before) - parameters_of(module, trace)
    if lost:
        raise ArgumentError(
            f'replace at "{place.path}": {name_of(new)} would stand for operations that use {few(lost)}, and takes '
            f"nothing of them, so they would never be trained again. Say which of its parameters does: "
            f"params={{{codec.Source().write(sorted(lost)[0].rpartition('.')[2])}: ...}}."
        )
    dress(module, trace)


def _module_for(place: Schedule, new: Any, what: Any, one: Occurrence) -> nn.Module:
    """What a module, class or factory gives for a match; it is given the match if it needs an argument."""
    if isinstance(new, nn.Module):
        return new
    try:
        inspect.signature(new).bind()
        arguments: tuple[Match, ...] = ()
    except TypeError:
        arguments = (Match(place, what, one, frozenset()),)
    made = new(*arguments)
    if not isinstance(made, nn.Module):
        raise ArgumentError(
            f'replace at "{place.path}": with params=, {name_of(new)} makes a module for each match, and it returned '
            f"{type(made).__name__}. To put the function itself there, leave params out."
        )
    return made


def _is_factory(new: Any, params: Any) -> bool:
    """A module or what makes one: a class, or (because only modules have parameters) a function with `params`."""
    return isinstance(new, nn.Module | type) or params is not None


def _stem(new: Any) -> str:
    kind = new if isinstance(new, type) else type(new) if isinstance(new, nn.Module) else new
    name = re.sub(r"\W", "_", getattr(kind, "__name__", "module")).strip("_") or "module"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
