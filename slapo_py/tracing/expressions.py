"""Python expressions over the arguments and `self`, and the graph nodes that stand for the same values."""

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from slapo_py.tracing.capture import Capture
from slapo_py.tracing.reads import dotted
from slapo_py.tracing.values import Tensor, tensors


def input_tensors(capture: Capture) -> list[tuple[str, Tensor]]:
    """[(expression, tensor)] of every tensor among the arguments."""
    return [(expr, value) for one in capture.inputs for expr, value in _tensors_at(one.expr, one.value)]


def _tensors_at(expr: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield expr, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors_at(f"{expr}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_at(f"{expr}[{key!r}]", item)


def owned_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The first parameter (or buffer) of the module itself and of each child: casts come module by module."""
    for path, one in [("", module), *module.named_children()]:
        prefix = "self" + dotted(path)
        for inner, below in one.named_modules():
            first = next(_held(below), None)
            if first is not None:
                yield f"{prefix}{dotted(inner)}.{first[0]}", first[1]
                break


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for store in ("_parameters", "_buffers"):
        for name, tensor in getattr(module, store).items():
            if tensor is not None:
                yield f"{store}[{name!r}]", tensor


def owned_floats(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen = set()
    for expr, tensor in owned_tensors(module):
        if tensor.is_floating_point() and expr not in seen:
            seen.add(expr)
            yield expr, tensor


def place(capture: Capture, node: fx.Node | None) -> str | None:
    """The expression of a node that is (part of) an argument or an attribute."""
    if node is None:
        return None
    for one in capture.inputs:
        if one.node is node:
            return one.expr
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return f"self{dotted(owner)}.{name}"
    if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[1], (int, str)):
        base = place(capture, node.args[0])  # type: ignore[arg-type]
        return base and f"{base}[{node.args[1]!r}]"
    return None


def attribute_path(expr: str) -> str:
    """`self._modules['a']._modules['0']` -> `a.0.`"""
    return "".join(f"{atom}." for atom in expr.replace("self", "", 1).replace("']", "").split("._modules['") if atom)


def node_at(graph: fx.Graph, capture: Capture, expr: str) -> fx.Node:
    """The node of the tensor that an expression of `input_tensors` or `owned_tensors` names."""
    for one in capture.inputs:
        for at, value in _tensors_at(one.expr, one.value):
            if at == expr:
                node = one.node
                for key in _keys(one.value, value):
                    node = graph.call_function(operator.getitem, (node, key))
                return node
    path = expr
    for store in ("_parameters", "_buffers"):
        path = path.replace(f".{store}['", "._modules['")
    return graph.create_node("get_attr", attribute_path(path)[:-1])


def _keys(container: Any, tensor: Tensor) -> list[Any]:
    """The keys that lead to a tensor inside nested containers."""
    if container is tensor:
        return []
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, item in items:
        if any(found is tensor for found in tensors(item)):
            return [key, *_keys(item, tensor)]
    raise LookupError("the tensor is not in the container")
