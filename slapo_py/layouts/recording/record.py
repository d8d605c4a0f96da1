"""A flat recording: all that a module computes, down to torch, with module borders as identity nodes.

It is a capture of the tracer in which every submodule is opened. Three things are added: `meta["val"]` has the value
of each node on fake tensors; where a tensor enters or leaves a submodule there is a node `border`, so that
"at a module border" is a property of a node, and a size that is read inside a module is read below its border; whole
numbers that a forward reads from modules remember where they come from, so that a size literal leads to the attribute
that has to change.

`meta["call"]` numbers what was called, in the order of the run, so that another run of the same forward, at a rank's
sizes (`on_a_rank.py`), finds the node that stands for the same call. `meta["draws"]` is there where random numbers are
drawn.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from slapo_py.layouts.recording.borders import ENTER, EXIT, border, tensors_at
from slapo_py.layouts.recording.modes import note_modes
from slapo_py.layouts.recording.owned import Owner, owned
from slapo_py.layouts.recording.random_calls import RandomCalls
from slapo_py.layouts.recording.rewritten import Rewritten, marks_of
from slapo_py.tracing import trace_of
from slapo_py.tracing.capture import Capture
from slapo_py.tracing.recorder import Call
from slapo_py.tracing.sandbox import Fakes
from slapo_py.tracing.values import map_tensors

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule
    from slapo_py.tracing import Tracer


@dataclass(frozen=True)
class Taken:
    """A node as it was logged: its arguments, with names for nodes."""

    node: fx.Node
    args: Any
    kwargs: Any


def taken(graph: fx.Graph) -> list[Taken]:
    """All nodes of a graph as they are now."""

    def name(one: fx.Node) -> str:
        return f"%{one.name}"

    return [Taken(one, fx.map_arg(one.args, name), fx.map_arg(one.kwargs, name)) for one in graph.nodes]


class Recording(Capture):
    """The flat graph of one run of a module."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root, lambda path, module: False)
        self.rewritten: dict[str, Rewritten] = {}
        """What runs in place of the forward of a module, by its path."""
        self.computed: set[Owner] = set()
        """The attributes with whose numbers a forward has computed."""
        self.calls = 0
        """How many calls of torch, and crossings of borders, there have been."""
        self.random = RandomCalls()
        self.drawn = 0
        """How many random operations there had been before the last call."""
        self.given: tuple[Call, Fakes, bool] | None = None
        """What it was run with: the call, the fakes, and whether in training."""
        self.evaluation: tuple[Recording | None] | None = None
        """The same in evaluation mode, if it has been asked for; None in it where that is no other."""
        self.taken: list[Taken] = []
        """All that was logged, before anything was left out."""

    def calling(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.calls += 1
        self.drawn = self.random.count
        return args, kwargs

    def called(self, node: fx.Node, out: Any) -> Any:
        node.meta["call"] = self.calls
        if self.random.count > self.drawn:
            node.meta["draws"] = True
        return out

    def bind(self, value: Any, node: Any) -> Any:
        if isinstance(node, fx.Node) and isinstance(value, Tensor | tuple | list):
            node.meta.setdefault("val", value)
        return super().bind(value, node)

    def entered(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._at_border((args, kwargs), ENTER)  # type: ignore[no-any-return]

    def left(self, out: Any) -> Any:
        return self._at_border(out, EXIT)

    def attribute(self, path: str, name: str, value: Any) -> Any:
        return owned(path, name, value, self.computed)

    def instead(self, path: str) -> Any:
        return self.rewritten.get(path)

    def cross(self, tensor: Tensor, side: str, path: str, index: int) -> Tensor:
        """The tensor behind a border."""
        self.calls += 1
        node = self.graph.call_function(border, (self.arg(tensor), side, path, index))
        node.meta.update(within=path, call=self.calls)
        return self.bind(self.quiet(tensor.view_as, tensor), node)  # type: ignore[no-any-return]

    def _forward(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def bordered(root: nn.Module, *given: Any, **named: Any) -> Any:  # the whole has borders, too
            given, named = self.entered(given, named)
            instead = self.instead("")
            with self.random:
                return self.left(instead(*given, **named) if instead else forward(root, *given, **named))

        return super()._forward(bordered, args, kwargs)

    def _at_border(self, values: Any, side: str) -> Any:
        passed = {
            id(tensor): self.cross(tensor, side, self.within, index) for index, tensor in enumerate(tensors_at(values))
        }
        return map_tensors(values, lambda tensor: passed.get(id(tensor), tensor))


def record(place: "Schedule", training: bool = True, tracer: "Tracer | None" = None) -> Recording:
    """The flat recording of a place of a schedule, on its example inputs, or on those of another tracer of its copy.

    Raises `TraceError`, `NoExampleInputs`.
    """
    tracer = tracer or place.root.tracer
    made, call = Recording(place.module), tracer.call(place.path)
    for path, module in place.module.named_modules():
        trace = trace_of(module)
        if trace is not None and trace.steps:
            full = ".".join(filter(None, (place.path, path)))
            marks = marks_of(module, tracer.call(full), tracer.recording.fakes, trace)
            made.rewritten[path] = Rewritten(made, path, module, trace, marks)
    made.given = (call, tracer.recording.fakes, training)
    made.run(*made.given)
    made.taken = taken(made.graph)
    _complete(made.graph)
    _spread(made.graph)
    note_modes(made.graph)
    made.graph.eliminate_dead_code(lambda node: _has_effect(node))
    return made


def _has_effect(node: fx.Node) -> bool:
    in_place = node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__")
    return in_place or node.op in ("placeholder", "output") or getattr(node.target, "__name__", "") == "setitem"


def _spread(graph: fx.Graph) -> None:
    """What takes several results as one (`torch.stack(x.unbind())`) takes each of them: placements are of tensors."""
    for node in list(graph.nodes):
        if node.target is operator.getitem:
            continue

        def each(one: fx.Node, before: fx.Node = node) -> Any:
            several = one.meta.get("val")
            if not isinstance(several, tuple | list) or not any(isinstance(value, Tensor) for value in several):
                return one
            with graph.inserting_before(before):
                parts = [graph.call_function(operator.getitem, (one, index)) for index in range(len(several))]
            for part, value in zip(parts, several):
                part.meta.update(val=value, within=before.meta.get("within", ""))
            return type(several)(parts) if type(several) in (tuple, list) else tuple(parts)

        node.args, node.kwargs = _mapped(node.args, each), _mapped(node.kwargs, each)


def _mapped(value: Any, each: Callable[[fx.Node], Any]) -> Any:
    if isinstance(value, fx.Node):
        return each(value)
    if isinstance(value, tuple | list):
        items = [_mapped(one, each) for one in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _mapped(one, each) for key, one in value.items()}
    return value


def _complete(graph: fx.Graph) -> None:
    """The values of the parts that are picked from a result of several."""
    for node in graph.nodes:
        if "val" in node.meta or node.op != "call_function" or getattr(node.target, "__name__", "") != "getitem":
            continue
        base = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
        if isinstance(base, tuple | list) and isinstance(node.args[1], int):
            node.meta["val"] = base[node.args[1]]


def is_tensor(value: Any) -> bool:
    """Whether a node computes a tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
