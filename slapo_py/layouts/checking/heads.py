"""Heads that do not divide over the ranks: a split dim that the code cuts into fewer, or odd, pieces."""

import math
from collections.abc import Collection, Iterator, Mapping

from torch import fx

from slapo_py.layouts.checking.resplit import word_of
from slapo_py.layouts.inference.state import Fault, Typing
from slapo_py.layouts.placement import Shard
from slapo_py.layouts.recording.nodes import is_tensor, name_of, operation_of, shape_of, slots_of
from slapo_py.layouts.rules.shapes import carry
from slapo_py.layouts.rules.table import IDENTITY, RESHAPE, canonical


def uneven_heads(
    typing: Typing,
    there: Collection[fx.Node],
    axis: str,
    outer: Mapping[fx.Node, int] | None = None,
    single: bool = False,
) -> Fault | None:
    """The first split parameter whose result is cut into heads that do not divide, with the sizes that are legal.

    there: borders with a sync of the schedule: what it converts is not looked at. outer: over how many ranks of other
    axes a parameter's dim, and so its heads, are split before. single: whether a dim of size 1 may be one head, whose
    inside is split: it may also be just a dim, so that this is asked only where something does not fit.
    """
    counts, first, places = [], None, dict[str, None]()
    for view, source, shard in _cut(typing, there):
        heads, parameter = heads_of(view, shard), _parameter(typing, source)
        if heads is None or parameter is None or (heads == 1 and not single):
            continue
        before = (outer or {}).get(parameter, 1)
        heads //= before
        counts.append(heads)
        if heads % typing.ranks and (before > 1 or heads == 1 or not carry(operation_of(view), shard, typing.ranks)):
            places[str(parameter.target).rpartition(".")[0]] = None
            first = first or (view, parameter, heads)
    if first is None:
        return None
    view, parameter, heads = first
    path, _, name = str(parameter.target).rpartition(".")
    common = math.gcd(*counts)
    legal = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
    more = f" The same at {len(places) - 1} more: {', '.join(list(places)[1:4])}." if len(places) > 1 else ""
    placed = typing.params[parameter]
    assert isinstance(placed, Shard)
    text = (
        f'shard("{name}", dim={word_of(parameter, placed.dim)}) at "{path}": {heads} heads do not divide over axis '
        f'"{axis}" of size {typing.ranks}. Legal sizes: {legal}.{more}'
    )
    return Fault("heads", view, text)


def heads_of(view: fx.Node, shard: Shard) -> int | None:
    """Into how many heads a view cuts each block of a split dim; None if it does not cut it."""
    before, after = shape_of(view.args[0]), shape_of(view)  # type: ignore[arg-type]
    if not isinstance(shard.blocks, int):
        return None
    outer, size = math.prod(before[: shard.dim]) * shard.blocks, before[shard.dim] // shard.blocks
    for dim, heads in enumerate(after):
        if math.prod(after[:dim]) == outer and heads < size and size % heads == 0:
            return heads if heads > 1 or after[dim + 1 : dim + 2] == (size,) else None
    return None


def _cut(typing: Typing, there: Collection[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node, Shard]]:
    """Each view, with the node that its input comes from and how that is split, whatever is gathered in between."""
    for view in typing.graph.nodes:
        if view.op not in ("call_method", "call_function") or canonical(name_of(view)) not in RESHAPE:
            continue
        node = view.args[0]
        while is_tensor(node) and node not in there:
            placed = typing.produced[node][0]
            if not slots_of(node) or canonical(name_of(node)) not in IDENTITY:
                if isinstance(placed, Shard):
                    yield view, node, placed
                break
            node = node.args[0]


def _parameter(typing: Typing, node: fx.Node) -> fx.Node | None:
    """The split parameter of the product that a value comes from."""
    while node.op != "get_attr":
        split = [one for one in slots_of(node) if one in typing.params]
        if split:
            return next((one for one in split if len(shape_of(one)) > 1), split[0])
        if canonical(name_of(node)) not in RESHAPE | IDENTITY | {"getitem", "split", "chunk"} or not node.args:
            return None
        if not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    return None
