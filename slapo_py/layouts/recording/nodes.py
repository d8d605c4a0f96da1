"""Nodes of a flat recording as operations of the rules: tensors, sizes and what reads them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, fx

from slapo_py.layouts.recording.borders import border
from slapo_py.layouts.rules.lines import has_line
from slapo_py.layouts.rules.operation import Operation, TensorSpec
from slapo_py.layouts.rules.shapes import is_move
from slapo_py.layouts.rules.table import canonical

Value = TypeVar("Value")


def kept(question: Callable[[fx.Node], Value]) -> Callable[[fx.Node], Value]:
    """A question that is asked again and again of the nodes of a finished recording, which does not change."""
    key = f"kept {question.__name__}"

    @functools.wraps(question)
    def once(node: fx.Node) -> Value:
        if key not in node.meta:
            node.meta[key] = question(node)
        return node.meta[key]  # type: ignore[no-any-return]

    return once


def name_of(node: fx.Node) -> str:
    """The name of a node's function or method; a fused kernel's is no operation's of torch."""
    if node.op == "call_method":
        return str(node.target)
    name = str(getattr(node.target, "__name__", node.target))
    return f"kernel {name}" if has_line(node.target) else name


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The tensors that a node gives, on fake storage."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [value]
    return [one for one in value if isinstance(one, Tensor)] if isinstance(value, tuple | list) else []


def is_tensor(value: Any) -> bool:
    """Whether a value is a node that gives one tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)


def is_border(node: Any) -> bool:
    """Whether a node stands where a tensor enters or leaves a module."""
    return isinstance(node, fx.Node) and node.target is border


def is_record(node: fx.Node) -> bool:
    """Whether a node only packs values into a dataclass."""
    return isinstance(node.target, type)


def is_size(node: fx.Node) -> bool:
    """Whether a node gives a size, or the sizes, of a tensor."""
    if "int" in node.meta or name_of(node) in ("size", "numel"):
        return True
    return name_of(node) == "getattr" and node.args[1:] == ("shape",)


def picks_part(node: fx.Node) -> bool:
    """Whether a node picks one of several results."""
    base = node.args[0] if node.args else None
    several = isinstance(base, fx.Node) and isinstance(base.meta.get("val"), tuple | list)
    return name_of(node) == "getitem" and several


@kept
def readers(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that read a node's value, not only its size."""
    return tuple(
        one for one in node.users if not is_size(one) and "val" in one.meta or one.op == "output" or is_record(one)
    )


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The whole shape of a node's tensor."""
    return tuple(int(size) for size in node.meta["val"].shape)


@kept
def bytes_of(node: fx.Node) -> int:
    """The bytes of a node's tensors, whole."""
    return sum(one.numel() * one.element_size() for one in tensors_of(node))


def slots_of(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a node, in the order of `Operation.slots`."""
    found = []
    for value in [*node.args, *node.kwargs.values()]:
        for one in value if isinstance(value, tuple | list) else (value,):
            if is_tensor(one):
                found.append(one)
    return found


@kept
def operation_of(node: fx.Node) -> Operation:
    """What a node computes, at whole shapes, for the rules."""
    return Operation(
        name_of(node),
        tuple(_described(one) for one in node.args),
        {key: _described(one) for key, one in node.kwargs.items()},
        tuple(_spec(one) for one in tensors_of(node)),
    )


@kept
def carries(node: fx.Node) -> bool:
    """Whether a node's one result is its first input, moved."""
    return (
        node.op in ("call_function", "call_method")
        and is_tensor(node)
        and is_tensor(node.args[0] if node.args else None)
        and not picks_part(node)
        and is_move(operation_of(node))
        and canonical(name_of(node)) not in ("cat", "stack")
    )


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(int(size) for size in tensor.shape), tensor.is_floating_point())


def _described(value: Any) -> Any:
    if is_tensor(value):
        return _spec(value.meta["val"])
    if isinstance(value, fx.Node):
        return value.meta.get("int", value.meta.get("val"))
    if isinstance(value, slice):
        return slice(*map(_described, (value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):
        return tuple(map(_described, value))
    return value


def outputs_of(graph: fx.Graph) -> list[fx.Node]:
    """The tensors that a graph gives back, in order, through dataclasses."""
    found: list[fx.Node] = []

    def walk(node: fx.Node) -> fx.Node:
        if is_tensor(node):
            found.append(node)
        elif is_record(node):
            fx.map_arg((node.args, node.kwargs), walk)
        return node

    fx.map_arg(graph.output_node().args, walk)
    return found


def numbers_of(node: fx.Node) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """The same of all arguments of a node; a place begins with a position, or with a name."""
    yield from numbers(node.args)
    for name, value in node.kwargs.items():
        for place, found in numbers(value):
            yield (name, *place), found


def numbers(value: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The whole numbers in the arguments of a node, literal or computed, by where they stand."""
    if isinstance(value, tuple | list):
        for index, one in enumerate(value):
            for place, found in numbers(one):
                yield (index, *place), found
    elif isinstance(value, int) and not isinstance(value, bool):
        yield (), value
    elif isinstance(value, fx.Node) and "int" in value.meta:
        yield (), value
