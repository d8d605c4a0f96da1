"""A flat recording: all that a module computes, down to torch, with module borders as identity nodes.

It is a capture of the tracer in which every submodule is opened. Three things are added: `meta["val"]` has the value
of each node on fake tensors; where a tensor enters or leaves a submodule there is a node `border`, so that
"at a module border" is a property of a node, and a size that is read inside a module is read below its border; whole
numbers that a forward reads from modules remember where they come from, so that a size literal leads to the attribute
that has to change.
"""

from typing import Any

import torch
from torch import Tensor, fx, nn

from slapo_py.tracing.capture import Capture
from slapo_py.tracing.values import map_tensors

ENTER, EXIT = "input", "output"
_NO_SIZES = {"layer_idx", "layer_id"}


def border(x: Tensor, side: str, path: str, index: int) -> Tensor:
    """A tensor that enters or leaves the module at `path`: its input or output number `index`."""
    return x


class Owned(int):
    """A whole number that a forward has read: the attribute `owner[1]` of the module at `owner[0]`."""

    owner: tuple[str, str]

    def __new__(cls, value: int, owner: tuple[str, str]) -> "Owned":
        made = int.__new__(cls, value)
        made.owner = owner
        return made

    def __reduce__(self) -> Any:
        return (int, (int(self),))


class Recording(Capture):
    """The flat graph of one run of a module."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root, lambda path, module: False)

    def bind(self, value: Any, node: Any) -> Any:
        if isinstance(node, fx.Node) and isinstance(value, Tensor | tuple | list):
            node.meta.setdefault("val", value)
        return super().bind(value, node)

    def entered(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._at_border((args, kwargs), ENTER)  # type: ignore[no-any-return]

    def left(self, out: Any) -> Any:
        return self._at_border(out, EXIT)

    def attribute(self, path: str, name: str, value: Any) -> Any:
        plain = type(value) is int and not name.startswith("_") and name not in _NO_SIZES
        return Owned(value, (path, name)) if plain else value

    def _forward(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def bordered(*given: Any, **named: Any) -> Any:  # the whole has borders, too
            given, named = self.entered(given, named)
            return self.left(forward(*given, **named))

        return super()._forward(bordered, args, kwargs)

    def _at_border(self, values: Any, side: str) -> Any:
        seen: dict[int, Tensor] = {}

        def passed(tensor: Tensor) -> Tensor:
            if isinstance(tensor, nn.Parameter):
                return tensor
            if id(tensor) not in seen:
                node = self.graph.call_function(border, (self.arg(tensor), side, self.within, len(seen)))
                node.meta["within"] = self.within
                seen[id(tensor)] = self.bind(self.quiet(tensor.view_as, tensor), node)
            return seen[id(tensor)]

        return map_tensors(values, passed)


def record(place: Any, training: bool = True) -> Recording:
    """The flat recording of a place of a schedule, on its example inputs. Raises `TraceError`, `NoExampleInputs`."""
    recording = place.root.tracer.recording
    made = Recording(place.module)
    made.run(recording.calls[place.path], recording.fakes, training)
    _complete(made.graph)
    made.graph.eliminate_dead_code(lambda node: _has_effect(node))
    return made


def _has_effect(node: fx.Node) -> bool:
    in_place = node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__")
    return in_place or node.op in ("placeholder", "output") or getattr(node.target, "__name__", "") == "setitem"


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
