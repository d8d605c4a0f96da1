"""Steps on the graph of a traced place: matches become calls of a function or of a submodule."""

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from slapo_py.errors import ArgumentError, StepError
from slapo_py.grouped import extract
from slapo_py.layouts.recording.kept import check_syncs_kept
from slapo_py.matches import occurrences
from slapo_py.params import is_source, named_in
from slapo_py.patterns import Attribute, Occurrence
from slapo_py.patterns.rewrite import Group, Make, NodeOf, contract
from slapo_py.scheduled import dress
from slapo_py.tracing.reads import dotted
from slapo_py.tracing.trace import Trace, trace_of

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule

Put = tuple[Callable[..., Any], Mapping[str, Any]]


def with_function(
    place: "Schedule", found: Sequence[Occurrence], function: Callable[..., Any], primitive: str
) -> Trace:
    """The place's trace with a call of `function` for each match: its inputs by position, named wilds by keyword.

    Raises: ArgumentError, if the function can't be called so or would lose parameters; StepError, if the calls can't
    stand anywhere.
    """
    return with_functions(place, found, [(function, {})] * len(found), primitive)


def with_functions(
    place: "Schedule", found: Sequence[Occurrence], puts: Sequence[Put], primitive: str, label: str = ""
) -> Trace:
    """The same with a function of its own for each match, and plain values that it is given by keyword as well.

    `label`: what the trace's list of steps says was put in; the first function's name if left out.
    """
    where, name = f'{primitive} at "{place.path}"', name_of(puts[0][0])
    for one, (function, keywords) in zip(found, puts, strict=True):
        _check_takes(where, function, one, keywords)
        _check_mode(place, where, name_of(function), one)

    def make(graph: fx.Graph, index: int, node_of: NodeOf) -> fx.Node:
        one, (function, keywords) = found[index], puts[index]
        target = function if _printable(function) else Called(function)
        args = tuple(_given(graph, value, node_of) for value in one.inputs.values())
        wilds = {n: _given(graph, v, node_of) for n, v in one.wilds.items()}
        return graph.call_function(target, args, {**wilds, **keywords})

    trace = _rewritten(place, found, make, primitive, structural=False, name=name, label=label)
    lost = parameters_of(place.module, trace_of(place.module)) - parameters_of(place.module, trace)
    if lost:
        raise ArgumentError(
            f"{where}: {name} would stand for operations that use {few(lost)}, and is not given them, so they would "
            f"never be trained again. Take them as inputs of the pattern, as in lambda x, w, b: F.linear(x, w, b), or "
            f"put a module there and say where its parameters come from: replace(module, pattern, params={{...}})."
        )
    return trace


def with_submodules(
    place: "Schedule", found: Sequence[Occurrence], names: Sequence[str], primitive: str, params: Any = None
) -> Trace:
    """The place's trace with a call of the submodule `names[i]` (registered later) for match i.

    What `params` takes for the submodule's own parameters is not given to it as well.
    """
    taken = {name for source in (params or {}).values() if is_source(source) for name in named_in(source)}

    def make(graph: fx.Graph, index: int, node_of: NodeOf) -> fx.Node:
        one = found[index]
        given = (value for value in one.inputs.values() if _attribute(value) not in taken)
        args = tuple(_given(graph, value, node_of) for value in given)
        return graph.call_module(names[index], args, {n: _given(graph, v, node_of) for n, v in one.wilds.items()})

    trace = _rewritten(place, found, make, primitive, structural=False, name=names[0])
    for node in list(trace.graph.nodes):
        if node.op == "get_attr" and node.target in taken and not node.users:
            trace.graph.erase_node(node)
    return trace


def with_groups(
    place: "Schedule", found: Sequence[Occurrence], names: Sequence[str], primitive: str
) -> tuple[Trace, list[nn.Module]]:
    """The place's trace with each match as a call of a submodule made of its operations, and those submodules."""
    checks = place._trace().checks
    extracted = [extract(_group(one), checks) for one in found]

    def make(graph: fx.Graph, index: int, node_of: NodeOf) -> fx.Node:
        _, values, children = extracted[index]
        modules = tuple(graph.create_node("get_attr", child) for child in children)
        return graph.call_module(names[index], (*map(node_of, values), *modules))

    trace = _rewritten(place, found, make, primitive, structural=True, name=names[0])
    return trace, [module for module, _, _ in extracted]


def check_groups(place: "Schedule", what: Any, names: Sequence[str] | str, primitive: str) -> None:
    """Refuse to make submodules of matches, or accept it. `names`: one for each match, or the stem of such names."""
    place._trace()
    found = occurrences(place, what, primitive)
    names = fresh_names(place, names, len(found)) if isinstance(names, str) else names
    for name in names:
        check_name(place, name, primitive)
    with_groups(place, found, names, primitive)


def make_groups(place: "Schedule", what: Any, names: Sequence[str] | str, primitive: str) -> dict[str, nn.Module]:
    """Make a submodule of each match. Returns them by their path. Only after `check_groups`."""
    found = occurrences(place, what, primitive)
    names = fresh_names(place, names, len(found)) if isinstance(names, str) else names
    trace, modules = with_groups(place, found, names, primitive)
    paths = [f"{place.path}.{name}" if place.path else name for name in names]
    for name, path, module in zip(names, paths, modules, strict=True):
        module.train(place.module.training)
        place.module.add_module(name, module)
        place.root.tracer.forget_below(path)
    dress(place.module, trace)
    return dict(zip(paths, modules, strict=True))


def check_name(place: "Schedule", name: Any, primitive: str) -> None:
    """Refuse a name that no new submodule of a traced place can have."""
    where = f'{primitive} at "{place.path}"'
    if not isinstance(name, str) or not name.isidentifier() or name == "self":
        raise ArgumentError(f"{where}: the name of the new submodule must be a Python identifier, found {name!r}.")
    if hasattr(place.module, name):
        raise ArgumentError(
            f"{where}: {type(place.module).__name__} already has an attribute {name!r}. Choose another name."
        )
    trace = trace_of(place.module)
    if trace is not None and ("self", "_modules") in trace.reads:
        raise StepError(
            f"{where}: the forward of this {type(place.module).__name__} goes through all its submodules, so one more "
            f"would be called, too. Do this at the module around it, traced with flatten=True."
        )


def fresh_names(place: "Schedule", stem: str, count: int) -> list[str]:
    """Names for new submodules: `fused_0`, `fused_1` ..., those that are taken left out."""
    names: list[str] = []
    number = 0
    while len(names) < count:
        if not hasattr(place.module, f"{stem}_{number}"):
            names.append(f"{stem}_{number}")
        number += 1
    return names


class Called:
    """A function that has no importable name, in a form that a graph can print."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        name = name_of(function)
        self.__name__ = self.__qualname__ = name if name.isidentifier() else "function"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Called) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)


def _rewritten(
    place: "Schedule",
    found: Sequence[Occurrence],
    make: Make,
    primitive: str,
    *,
    structural: bool,
    name: str,
    label: str = "",
) -> Trace:
    module, trace = place.module, place._trace()
    try:
        graph, calls = contract(module, trace.graph, [_group(one) for one in found], make)
    except StepError as error:
        raise StepError(f'{primitive} at "{place.path}": {error}.') from None
    if place.root.syncs:
        check_syncs_kept(place, trace, graph, f'{primitive} at "{place.path}"')
    checks: dict[str, tuple[str, str]] = {}
    for one, call in zip(found, calls, strict=True):
        checks.update(_checks(trace, one, call, f'{primitive} at "{place.path}": {name}'))
    reads = {(f"self{dotted(path)}", key): value for one in found for (path, key), value in one.reads.items()}
    kinds = {path: kind for one in found for path, kind in one.kinds.items()}
    guards, reads = trace.relying_on(module, {} if structural else reads, {} if structural else kinds)
    consumed = frozenset(frozenset(node.name for node in one.nodes) for one in found)
    return trace.rewritten(graph, structural, (primitive, label or name), consumed, checks, guards, reads)


def _group(one: Occurrence) -> Group:
    return Group(tuple(node for node in one.nodes if node.op != "get_attr"), one.outputs)


def _attribute(value: Any) -> str | None:
    """The name of the attribute that an input of a match is, seen from the traced module."""
    is_read = isinstance(value, Attribute) or (isinstance(value, fx.Node) and value.op == "get_attr")
    return str(value.target) if is_read else None


def _given(graph: fx.Graph, value: Any, node_of: NodeOf) -> Any:
    if isinstance(value, Attribute):
        return graph.create_node("get_attr", value.target)
    return fx.map_arg(value, node_of)


def _checks(trace: Trace, one: Occurrence, call: fx.Node, who: str) -> dict[str, tuple[str, str]]:
    """What the call must give back for what reads it: as many values as the match, of the same kind."""
    said = f"{who} gives back something else than what it stands for: "
    values = [call] if len(one.outputs) == 1 else [_item(call, index) for index in range(len(one.outputs))]
    checks = {}
    if len(one.outputs) > 1:
        count = len(one.outputs)
        condition = f"isinstance({call.name}, (tuple, list)) and len({call.name}) == {count}"
        checks[call.name] = (condition, f"{said}a tuple of {count} values is needed")
    for value, output in zip(values, one.outputs, strict=True):
        known = trace.checks.get(output.name)
        if known is not None:
            checks[value.name] = (_renamed(known[0], output.name, value.name), f"{said}{known[1]}")
        else:
            checks[value.name] = (f"isinstance({value.name}, Tensor)", f"{said}a tensor is needed")
    return checks


def _item(call: fx.Node, index: int) -> fx.Node:
    return next(user for user in call.users if user.args[1:] == (index,))


def _renamed(condition: str, old: str, new: str) -> str:
    return re.sub(rf"(?<![\w.']){re.escape(old)}(?![\w'])", new, condition)


def parameters_of(module: nn.Module, trace: Trace | None) -> set[str]:
    """Names of the parameters that a graph uses, itself or in a submodule that it calls."""
    found: set[str] = set()
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for node in trace.graph.nodes if trace is not None else ():
        target = str(node.target)
        if node.op == "get_attr" or node.op == "call_module":
            found |= {name for name in own if name == target or name.startswith(target + ".")}
    return found


def _check_takes(where: str, function: Callable[..., Any], one: Occurrence, keywords: Mapping[str, Any]) -> None:
    """Refuse a function that can't be called with the inputs and named wilds of a match."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin does not tell
    try:
        signature.bind(*one.inputs, **{**dict.fromkeys(one.wilds), **keywords})
    except TypeError as error:
        given = [*one.inputs, *(f"{name}=..." for name in (*one.wilds, *keywords))]
        raise ArgumentError(
            f"{where}: {name_of(function)}{signature} can't be called with what the pattern has, "
            f"({', '.join(given)}): {error}. The inputs of the pattern go to it in their order, values of "
            f"slapo.wild(name) by that name."
        ) from None


def _check_mode(place: "Schedule", where: str, name: str, one: Occurrence) -> None:
    """Refuse a function that stands for a dropout and isn't told whether to drop: it would do so in eval mode, too."""
    given = [getattr(value, "target", "") for value in (*one.inputs.values(), *one.wilds.values())]
    if any(map(_is_mode, given)):
        return
    for node in one.nodes:
        child = place.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        flags = [arg for arg in node.all_input_nodes if arg.op == "get_attr" and _is_mode(arg.target)]
        if flags or isinstance(child, nn.modules.dropout._DropoutNd):
            raise ArgumentError(
                f"{where}: {node.name!r} drops in train mode only, and {name} isn't told the mode. Make it an input of "
                f"the pattern, which goes to {name} like the others: lambda x, training: F.dropout(x, 0.1, training)."
            )


def _is_mode(target: Any) -> bool:
    return str(target).rpartition(".")[2] == "training"


def name_of(function: Any) -> str:
    """What a message calls a function or a class."""
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def _printable(function: Any) -> bool:
    """Whether fx can write a call of it: a function or builtin with a plain name."""
    kinds = (types.FunctionType, types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    return isinstance(function, kinds) and str(getattr(function, "__name__", "")).replace(".", "_").isidentifier()


def few(names: set[str]) -> str:
    """The first of some names, for a message."""
    shown = ", ".join(repr(name) for name in sorted(names)[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
