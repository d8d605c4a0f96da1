"""A module whose graph a step has rewritten, as a part of a flat recording: what runs is that graph.

A registered kernel in it is one operation, any other function is looked into. Submodules that are part of the graph
have no call any more, and so no border of their own; where their tensors enter and leave, and from which attributes
sizes come, is found by capturing the forward once more: its operations have the same names as in the graph.
"""

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn
from torch.amp import autocast_mode

from slapo_py.errors import TraceError
from slapo_py.layouts.recording.borders import ENTER, EXIT, Border, tensors_at
from slapo_py.layouts.recording.owned import Owned, owned
from slapo_py.layouts.rules.lines import has_line, rule_for
from slapo_py.scheduled import bare
from slapo_py.tracing.capture import Capture
from slapo_py.tracing.recorder import Call
from slapo_py.tracing.sandbox import Fakes
from slapo_py.tracing.trace import Trace

if TYPE_CHECKING:
    from slapo_py.layouts.recording.record import Recording

Place = tuple[Any, ...]


@dataclass
class Marks:
    """borders: by the name of the node whose value it is, in the order in which the value passes them; paths are seen
    from the traced module. owners: by node and place among its arguments, the attribute that a whole number is."""

    borders: dict[str, list[Border]] = field(default_factory=dict)
    owners: dict[str, dict[Place, tuple[str, str]]] = field(default_factory=dict)


class _Marking(Capture):
    """The capture that a trace was made of, with marks."""

    def __init__(self, module: nn.Module, inlined: frozenset[str]) -> None:
        super().__init__(module, lambda path, _: path not in inlined)
        self.passed: list[tuple[int, Border]] = []

    def entered(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._pass((args, kwargs), ENTER)
        return args, kwargs

    def left(self, out: Any) -> Any:
        self._pass(out, EXIT)
        return out

    def attribute(self, path: str, name: str, value: Any) -> Any:
        return owned(path, name, value)

    def _pass(self, values: Any, side: str) -> None:
        if not self.active:  # inside a submodule that stays a call
            return
        for index, tensor in enumerate(tensors_at(values)):
            self.passed.append((id(tensor), (side, self.within, index)))  # whatever is bound is kept: ids stay unique

    def marks(self) -> Marks:
        found = Marks()
        for key, border in self.passed:
            node = self._nodes.get(key)
            if isinstance(node, fx.Node):
                found.borders.setdefault(node.name, []).append(border)
        for node in self.graph.nodes:
            mine = {place: one.owner for place, one in _leaves(node.args) if isinstance(one, Owned)}
            if mine:
                found.owners[node.name] = mine
        return found


_KNOWN: "weakref.WeakKeyDictionary[Trace, Marks]" = weakref.WeakKeyDictionary()


def marks_of(module: nn.Module, call: Call, fakes: Fakes, trace: Trace) -> Marks:
    """The marks of a trace as it was before any step; modules that share it share them."""
    while trace.parent is not None:
        trace = trace.parent
    if trace not in _KNOWN:
        for training in (True, False):
            marking = _Marking(module, trace.inlined)
            try:
                marking.run(call, fakes, training)
            except TraceError:
                continue
            _KNOWN[trace] = marking.marks()
            break
        else:
            _KNOWN[trace] = Marks()
    return _KNOWN[trace]


def borders_between(marks: Marks, node: fx.Node, reader: fx.Node) -> list[Border]:
    """The borders that the value of a node passes on its way to a reader, in order."""
    within = f"{reader.meta.get('within', '')}."
    every = marks.borders.get(node.meta.get("stands_for", node.name), ())
    return [one for one in every if within.startswith(f"{one[1]}.") == (one[0] == ENTER)]


class Rewritten:
    """Stands for the forward of a rewritten module at `path` while a recording runs."""

    def __init__(self, recording: "Recording", path: str, module: nn.Module, trace: Trace, marks: Marks) -> None:
        self.recording, self.path, self.module, self.trace, self.marks = recording, path, module, trace, marks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(bare(self.module).forward).bind(self.module, *args, **kwargs)
        bound.apply_defaults()
        scope = {**bound.arguments, "self": self.module}
        given = {name: eval(expr, scope) for name, expr in self.trace.inputs}
        self.values: dict[fx.Node, Any] = {}
        self.crossed: dict[tuple[fx.Node, tuple[Border, ...]], Tensor] = {}
        *nodes, output = self.trace.graph.nodes
        for node in nodes:
            if node.op == "placeholder":
                self.values[node] = given.get(str(node.target))
                continue
            recording, around = self.recording, self.recording.within
            recording.within = _joined(self.path, node.meta.get("within", ""))
            try:
                self.values[node] = self._value(node)
            finally:
                recording.within = around
        return self._filled(output, output.args)[0]

    def _value(self, node: fx.Node) -> Any:
        target: Any = node.target
        if node.op == "get_attr":
            if target in self.trace.constants:
                return self.trace.constants[target]
            found: Any = self.module
            for atom in target.split("."):
                found = getattr(found, atom)
            return found
        args, kwargs = self._filled(node, node.args), self._filled(node, dict(node.kwargs))
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if node.op == "call_module":
            return self.module.get_submodule(target)(*args, **kwargs)
        return self._called(getattr(target, "function", target), args, kwargs)

    def _called(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        recording = self.recording
        if has_line(function):
            bound = inspect.signature(function).bind(*args, **kwargs)  # a line labels arguments by position
            args, kwargs = bound.args, bound.kwargs

            def make(a: Any, k: Any) -> fx.Node:
                node = recording.graph.call_function(function, a, k)
                node.meta["rule"] = rule_for(function, args, kwargs)
                return node

            return recording.call_opaque(make, function, args, kwargs)
        out = function(*args, **kwargs)
        if function is autocast_mode._enter_autocast:
            recording.bind(out, recording.graph.call_function(function, tuple(args)))
        elif function is autocast_mode._exit_autocast:
            recording.graph.call_function(function, (recording.node_of(args[0]),))
        return out

    def _filled(self, reader: fx.Node, given: Any, place: Place = ()) -> Any:
        """Arguments with values for nodes, as the reader gets them, and attributes for the whole numbers that are."""
        if isinstance(given, fx.Node):
            return self._read(given, reader)
        if isinstance(given, (tuple, list)):
            items = [self._filled(reader, one, (*place, index)) for index, one in enumerate(given)]
            kind: Any = list if isinstance(given, list) else type(given)
            return kind(*items) if hasattr(given, "_fields") else kind(items)
        if isinstance(given, dict):
            return {key: self._filled(reader, one, (*place, key)) for key, one in given.items()}
        if isinstance(given, slice):
            return slice(*(self._filled(reader, one, place) for one in (given.start, given.stop, given.step)))
        owner = self.marks.owners.get(reader.name, {}).get(place)
        if owner is not None and type(given) is int:
            return self.recording.attribute(_joined(self.path, owner[0]), owner[1], given)
        return given

    def _read(self, node: fx.Node, reader: fx.Node) -> Any:
        """The value of a node, past the borders that lie between it and a reader."""
        value = self.values[node]
        passed: tuple[Border, ...] = ()
        for border in borders_between(self.marks, node, reader) if isinstance(value, Tensor) else ():
            side, path, index = border
            passed = (*passed, border)
            if (node, passed) not in self.crossed:
                crossed = self.recording.cross(value, side, _joined(self.path, path), index)
                self.crossed[node, passed] = crossed
            value = self.crossed[node, passed]
        return value


def _joined(path: str, below: str) -> str:
    return ".".join(filter(None, (path, below)))


def _leaves(value: Any, place: Place = ()) -> list[tuple[Place, Any]]:
    if isinstance(value, (tuple, list)):
        return [found for index, one in enumerate(value) for found in _leaves(one, (*place, index))]
    return [(place, value)]
