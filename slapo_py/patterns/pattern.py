"""How a pattern is said: plain functions over torch operations, and the words `call` and `wild` in them."""

import inspect
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError as FxTraceError
from torch.nn.modules.module import register_module_forward_pre_hook

from slapo_py import codec
from slapo_py.errors import PatternError, ScheduleError
from slapo_py.patterns.binding import parts
from slapo_py.patterns.terms import Terms
from slapo_py.patterns.words import MODE, Child, Wild

Function = Callable[..., Any]


@codec.value("pattern")
@dataclass(frozen=True)
class Pattern(codec.Value):
    """One or several functions over torch operations; where the first does not match, the next may. See `pattern`."""

    functions: tuple[Function, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.functions, tuple) or not self.functions:
            raise PatternError("slapo.pattern(): needs at least one function, as in slapo.pattern(lambda x, y: x + y).")
        first = None
        for function in self.functions:
            names = _inputs_of(function)
            if first is None:
                first = names
            elif names != first:
                raise PatternError(
                    f"{said(function)} has the inputs ({', '.join(names)}), and {said(self.functions[0])}, to which it "
                    f"is an alternative, ({', '.join(first)}). Give both the same, in the same order."
                )

    @property
    def bodies(self) -> "tuple[Body, ...]":
        """Each function as a graph. Raises `PatternError` if one can't be a graph."""
        bodies = tuple(body_of(function) for function in self.functions)
        for function, body in zip(self.functions[1:], bodies[1:], strict=True):
            if len(body.outputs) != len(bodies[0].outputs):
                raise PatternError(
                    f"{said(function)} gives {len(body.outputs)} values, and {said(self.functions[0])}, to which it is "
                    f"an alternative, {len(bodies[0].outputs)}. Return as many."
                )
        return bodies

    def __or__(self, other: Any) -> "Pattern":
        return pattern(self, other)

    def __ror__(self, other: Any) -> "Pattern":
        return pattern(other, self)

    def written(self, write: Callable[[Any], str]) -> str:
        return f"slapo.pattern({', '.join(map(write, self.functions))})"


def pattern(f: Any, *alternatives: Any) -> Pattern:
    """A function over torch operations -> a pattern: `sch[path].find(slapo.pattern(lambda x, b: F.gelu(x + b)))`.

    The required parameters of the function are the inputs of the pattern: each stands for any value of the graph, and
    one that is used twice for the same value both times. Parameters with defaults are plain literals. What it returns
    are the outputs. `slapo.call("q_proj|k_proj", x)` stands for the call of a submodule whose path matches this
    regular expression, `slapo.wild()` for a literal of any value.

    Operations are found along the data, however they are written: `nn.GELU()`, `F.gelu` and methods are the same;
    operands of `+` and the like may be swapped; an omitted default is the default, so that `F.dropout(x, p)` is one
    that always drops. One that follows the mode: `nn.Dropout(p)(x)`, or `F.dropout(x, p, training)` with the mode as an
    input, which a function that takes its place then gets.

    Alternatives are looked for in their order, each in what the ones before have left. Plain functions are patterns
    wherever one is wanted; `slapo.pattern` is also a decorator, and `A | B` is a pattern of both.

    Requires: functions of the same inputs and number of outputs. Raises `PatternError`.
    """
    functions: list[Function] = []
    for one in (f, *alternatives):
        functions += one.functions if isinstance(one, Pattern) else [one]
    return Pattern(tuple(functions))


def as_pattern(given: Any) -> Pattern:
    """A pattern, or a function as a pattern. Raises `PatternError` for anything else."""
    return given if isinstance(given, Pattern) else pattern(given)


def wild(name: str | None = None) -> Any:
    """In a pattern: a literal of any value, such as the p of a dropout, or a flag, size or tensor that is computed.

    What a wild with a name stands for is kept under it (`match.values[name]`), and handed to a replacement by keyword;
    the same name twice stands for equal values. Raises `PatternError`.
    """
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise PatternError(f'slapo.wild({name!r}): the name must be a Python identifier, as in slapo.wild("scale").')
    return Wild(name)


def call(regex: str, *args: Any, **kwargs: Any) -> Any:
    """In a pattern: the call of a submodule whose path, seen from the traced module, fully matches `regex`.

    Arguments are compared by the parameters of the submodule's forward: one that is left out means its default.
    Raises `PatternError`.
    """
    tracer = getattr(_running, "tracer", None)
    if tracer is None:
        raise PatternError(
            f"slapo.call({regex!r}, ...): this word only has a meaning inside a pattern, as in "
            f'sch[path].find(lambda x: slapo.call("fc", x)).'
        )
    try:
        re.compile(regex)
    except (re.error, TypeError) as error:
        raise PatternError(f"slapo.call({regex!r}, ...): needs a regular expression for paths: {error}.") from None
    return tracer.create_proxy("call_function", Child(regex), args, kwargs)


# From functions to graphs

_running = threading.local()


@dataclass(frozen=True, eq=False)
class Body:
    """A function of a pattern as a graph."""

    said: str  # not the function itself: it is the weak key under which this is kept
    terms: Terms
    inputs: dict[str, fx.Node]
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    """The operations that the outputs need, in order."""


class _Tracer(fx.Tracer):
    """Records what is done with the inputs of a pattern."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.graph = fx.Graph()

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            raise _refusal(
                self.function,
                f"uses a tensor of its own, of shape {tuple(a.shape)}, which no graph holds. Take it as a parameter of "
                f"the pattern, as in lambda x, weight, bias: F.linear(x, weight, bias)",
            )
        if a is MODE or isinstance(a, Wild):
            return a
        try:
            return super().create_arg(a)
        except NotImplementedError:
            # fx's own way to say that it knows no such kind of argument: a graph that runs could not hold a user's
            # object, but this one is only matched, so that it is a literal here, compared with what the other graph has
            return a

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise _refusal(
            self.function,
            f"branches on {obj.node.name!r}, a value that only exists when the model runs. Write one function for each "
            f"way, and make them alternatives: slapo.pattern(f, g)",
        )

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        try:
            return super().iter(obj)
        except FxTraceError:
            raise _refusal(
                self.function,
                f"iterates over {obj.node.name!r}, whose length only is known when the model runs. Unpack it "
                f"(a, b = ...) or take its items by index",
            ) from None

    def keys(self, obj: fx.Proxy) -> Any:
        raise _refusal(self.function, f"uses {obj.node.name!r} as a mapping. Take its items by key")


_BODIES: "weakref.WeakKeyDictionary[Function, Body]" = weakref.WeakKeyDictionary()


def body_of(function: Function) -> Body:
    """A function of a pattern as a graph; made once for each function. Raises `PatternError`."""
    body = _BODIES.get(function)
    if body is None:
        body = _BODIES[function] = _traced(function)
    return body


def _traced(function: Function) -> Body:
    names = _inputs_of(function)
    tracer = _Tracer(function)
    proxies = {name: tracer.create_proxy("placeholder", name, (), {}) for name in names}
    by_name = {
        one.name for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY
    } & set(names)
    given = [proxy for name, proxy in proxies.items() if name not in by_name]
    with _recording(tracer):
        try:
            returned = function(*given, **{name: proxies[name] for name in by_name})
        except ScheduleError:
            raise
        except Exception as error:
            raise _refusal(
                function, f"can't be run over placeholders: {type(error).__name__}: {error}. Use torch operations"
            ) from error
    terms = Terms(None, tracer.graph)
    outputs = _outputs_of(function, returned)
    inputs = {name: proxy.node for name, proxy in proxies.items()}
    needed = _needed(outputs, terms)
    for name, node in inputs.items():
        if node not in needed:
            raise _refusal(function, f"does not use its input {name!r}. Take it out, or give it a default")
    nodes = tuple(node for node in tracer.graph.nodes if node in needed and node.op != "placeholder")
    body = Body(said(function), terms, inputs, outputs, nodes)
    _check_in_place(function, body)
    _check_connected(function, body)
    return body


@contextmanager
def _recording(tracer: _Tracer) -> Iterator[None]:
    """Modules that the function calls run their own forward; their `training` means the mode of the graph's module."""
    changed: list[tuple[nn.Module, Any]] = []

    def enter(module: nn.Module, args: Any) -> None:
        if not any(isinstance(one, fx.Proxy) and one.tracer is tracer for one in parts(list(args))):
            return
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            raise _refusal(
                tracer.function,
                f"calls a {type(module).__name__}, whose {name!r} is no value of the graph. Take it as a parameter of "
                f"the pattern, as in lambda x, weight, bias: F.linear(x, weight, bias), or say which submodule is "
                f'called: slapo.call("path", x)',
            )
        for one in module.modules():
            mode: Any = one.training
            if mode is not MODE:
                changed.append((one, mode))
                one.training = MODE  # type: ignore[assignment]

    before = getattr(_running, "tracer", None)
    _running.tracer = tracer
    handle = register_module_forward_pre_hook(enter)
    try:
        yield
    finally:
        handle.remove()
        _running.tracer = before
        for module, training in changed:
            module.training = training


def _inputs_of(function: Any) -> list[str]:
    """The names of the required parameters."""
    if not isinstance(function, types.FunctionType):
        raise PatternError(
            f"a pattern is a function over torch operations, found {function!r}. Write, for example, "
            f"slapo.pattern(lambda x, y: x + y)."
        )
    names = []
    for one in inspect.signature(function).parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise _refusal(function, f"takes any number of arguments (*{one.name}). Name each input")
        if one.default is one.empty:
            names.append(one.name)
    if not names:
        raise _refusal(function, "has no input. Take the values that it computes with as parameters without a default")
    return names


def _outputs_of(function: Function, returned: Any) -> tuple[fx.Node, ...]:
    values = list(returned) if isinstance(returned, tuple | list) else [returned]
    nodes = [one.node for one in values if isinstance(one, fx.Proxy)]
    if len(nodes) != len(values) or not nodes:
        raise _refusal(function, "must return a value of the graph or a tuple of such. Return what it computes")
    for node in nodes:
        if node.op == "placeholder":
            raise _refusal(function, f"returns its input {node.name!r}, which is no operation. Return what it computes")
    if len(set(nodes)) != len(nodes):
        raise _refusal(function, "returns the same value twice. Return it once")
    return tuple(nodes)


def _needed(outputs: tuple[fx.Node, ...], terms: Terms) -> set[fx.Node]:
    """The nodes that the outputs are computed from, themselves included."""
    needed: set[fx.Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += operands(node, terms)
    return needed


def operands(node: fx.Node, terms: Terms) -> list[fx.Node]:
    """The nodes that a pattern's node is computed from; a size from its tensor, past the shape in between."""
    if node.op == "placeholder":
        return []
    if isinstance(node.target, Child):
        return list(node.all_input_nodes)
    return terms.term(node).nodes


def _check_in_place(function: Function, body: Body) -> None:
    for node in body.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        written = name.endswith("_") and not name.endswith("__")
        if written or node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None:
            raise _refusal(
                function,
                f"writes in place ({node.name!r}), and operations that do so never match. Use the form that gives back "
                f"a new tensor",
            )


def _check_connected(function: Function, body: Body) -> None:
    """Several outputs hang together by an operation or an input that they share."""
    group: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while group.setdefault(node, node) is not node:
            node = group[node]
        return node

    for node in body.nodes:
        for other in operands(node, body.terms):
            group[find(node)] = find(other)
    first = find(body.outputs[0])
    for node in body.outputs[1:]:
        if find(node) is not first:
            raise _refusal(
                function,
                f"computes {node.name!r} from other values than {body.outputs[0].name!r}: they share neither an "
                f"operation nor an input. Make two patterns of them",
            )


def _refusal(function: Function, what: str) -> PatternError:
    return PatternError(f"{said(function)} {what}.")


def said(function: Function) -> str:
    """How messages name a function of a pattern."""
    where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    return (
        f"the pattern at {where}" if function.__name__ == "<lambda>" else f"the pattern {function.__name__} ({where})"
    )
