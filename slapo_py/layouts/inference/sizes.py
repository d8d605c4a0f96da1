"""Sizes in the arguments of operations: what a rank would pass, and what is right for its parts."""

import math
from typing import Any

from torch import fx

from slapo_py.layouts.inference.state import Resize, Typing
from slapo_py.layouts.placement import Shard, balanced, local_shape
from slapo_py.layouts.recording.nodes import name_of, numbers_of, operation_of, shape_of, tensors_of
from slapo_py.layouts.recording.owned import Owned
from slapo_py.layouts.rules.shapes import is_move
from slapo_py.layouts.rules.signatures import Signature
from slapo_py.layouts.rules.table import canonical

_SIZED = {"view", "reshape", "unflatten", "expand", "broadcast_to"}  # `flatten` and `squeeze` are given dims

_NAMES = {"size", "shape", "sizes", "split_size", "split_size_or_sections"}

Place = tuple[int | str, ...]
"""Where a number stands in the arguments of a node: a position or a name, and positions within lists."""


def sizes_of(node: fx.Node, made: bool = False) -> list[tuple[Place, Any]]:
    """The numbers in a node's arguments that are sizes of its results. made: it fills a constant."""
    name = canonical(name_of(node))
    given = [one for one in numbers_of(node) if isinstance(one[0][0], int) or one[0][0] in _NAMES]
    if name == "unflatten":
        return [one for one in given if one[0][0] in (2, "sizes")]
    if name in _SIZED or made:
        wanted = len(shape_of(node)) if given else 0
        return given[-wanted:] if given and len(given) >= wanted else []
    return [one for one in given if one[0][0] != 2] if name == "split" else []


def local_size_read(typing: Typing, node: fx.Node) -> Any:
    """What a rank sees of a size."""
    name = name_of(node)
    if name in ("getattr", "size", "numel"):
        base = node.args[0]
        local = local_shape(shape_of(base), typing.after[base][0], typing.ranks, 0)  # type: ignore[arg-type,index]
        if name == "numel":
            return math.prod(local)
        return local if name == "getattr" or len(node.args) < 2 else local[node.args[1]]  # type: ignore[index]
    return node.target(*fx.node.map_aggregate(node.args, lambda one: local_number(typing, one)))  # type: ignore[operator]


def local_number(typing: Typing, value: Any) -> Any:
    """A number as a rank has it: computed from sizes, read from an attribute, or the same for all."""
    if isinstance(value, fx.Node):
        return typing.local.get(value, value.meta.get("int"))
    if not isinstance(value, Owned):
        return value
    return balanced(int(value), typing.ranks)[0] if value.owner in typing.divided else int(value)


def wrong_sizes(typing: Typing, node: fx.Node, one: Signature) -> dict[Place, Resize]:
    """The sizes in a node's arguments that would be wrong on a rank."""
    name, found, ranks = canonical(name_of(node)), dict[Place, Resize](), typing.ranks
    given = list(numbers_of(node))
    if not given:
        return {}

    def passes(value: Any) -> int:
        return int(typing.local[value] if isinstance(value, fx.Node) else value)

    def note(place: Place, value: Any, needs: int) -> None:
        if passes(value) not in (-1, needs):
            kind = "computed" if isinstance(value, fx.Node) else "literal"
            found[place] = Resize(passes(value), needs, kind, getattr(value, "owner", None))

    if name in _SIZED or one.kind == "made":
        wanted = local_shape(shape_of(node), one.outputs[0], ranks, 0)
        if name == "unflatten":
            first = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
            wanted = wanted[first % len(shape_of(node.args[0])) :]  # type: ignore[arg-type,operator]
        for (place, value), needs in zip(sizes_of(node, one.kind == "made"), wanted):
            note(place, value, needs)
    elif name == "split" and isinstance(one.outputs[0], Shard):
        dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        if dim % len(shape_of(node.args[0])) == one.outputs[0].dim:  # type: ignore[arg-type,operator]
            for (place, value), part in zip(sizes_of(node), tensors_of(node)):
                note(place, value, local_shape(part.shape, one.outputs[0], ranks, 0)[one.outputs[0].dim])
    elif not is_move(operation_of(node)):
        for place, value in given:
            if isinstance(value, fx.Node) and passes(value) != value.meta["int"]:
                found[place] = Resize(passes(value), value.meta["int"], "built")
    return found
