"""Weights that are split so that something is gathered, and which another split would spare that.

Fused weights without `parts`, whose result the code cuts; and a product whose input is split, and is not summed over.
"""

import math
from dataclasses import dataclass, replace

from torch import fx

from slapo_py.layouts.checking.faults import Look, has_remedy
from slapo_py.layouts.checking.heads import uneven_heads
from slapo_py.layouts.checking.resplit import otherwise
from slapo_py.layouts.inference.cost import sent
from slapo_py.layouts.inference.recorded import Asked
from slapo_py.layouts.inference.state import Fault, Typing
from slapo_py.layouts.placement import Shard
from slapo_py.layouts.recording.nodes import carries, name_of, operation_of, readers, shape_of, slots_of, tensors_of
from slapo_py.layouts.rules.shapes import Blocks, carry, divides
from slapo_py.layouts.rules.table import RESHAPE, canonical


@dataclass(frozen=True)
class Cheaper:
    """What is asked for with weights split otherwise, and what a look at it finds. told: one fault for each weight."""

    told: list[Fault]
    asked: Asked
    typing: Typing
    found: list[Fault]


def with_parts(look: Look, asked: Asked, typing: Typing, found: list[Fault], most: int | None = None) -> Cheaper:
    """Weights whose split result is cut by the code: in as many parts. most: after how many faults to stop."""
    return _cheaper(look, Cheaper([], asked, typing, found), _cut(typing), most)


def with_other_dims(look: Look, asked: Asked, typing: Typing, found: list[Fault]) -> Cheaper:
    """Weights whose input is split, and gathered for them: along the dim that it is summed over."""
    return _cheaper(look, Cheaper([], asked, typing, found), _gathered_for(typing), None)


def _cheaper(look: Look, now: Cheaper, ways: list[tuple[fx.Node, Shard]], most: int | None) -> Cheaper:
    """Each way to split a weight is taken if less is sent then, and no more is wrong."""
    for weight, shard in ways:
        if len(now.told) == most:
            break
        if divides(shape_of(weight)[shard.dim], shard.blocks, look.ranks):
            params, fault = otherwise(look, now.asked, weight, shard)
            changed = replace(now.asked, params=params)
            after, left = look.at(changed)
            if sent(after) < sent(now.typing) and _lacking(left) <= _lacking(now.found):
                if not _more_heads(now, after, changed, look.axis):
                    now = Cheaper([*now.told, fault], changed, after, left)
    return now


def _lacking(found: list[Fault]) -> int:
    return sum(not has_remedy(one) for one in found)


def _more_heads(now: Cheaper, after: Typing, changed: Asked, axis: str) -> bool:
    """Whether heads do not divide that did, or still don't."""
    left = uneven_heads(after, changed.syncs.keys(), axis)
    before = uneven_heads(now.typing, now.asked.syncs.keys(), axis) if left else None
    return left is not None and (before is None or left.node is before.node)


def _split_weights(typing: Typing) -> list[tuple[fx.Node, Shard]]:
    return [(node, one) for node, one in typing.params.items() if isinstance(one, Shard) and len(shape_of(node)) > 1]


def _gathered_for(typing: Typing) -> list[tuple[fx.Node, Shard]]:
    """The split weights whose input was split in its features before it was gathered, each with its other dim."""
    found: dict[tuple[fx.Node, Shard], None] = {}
    for weight, placed in _split_weights(typing):
        for product in _products(weight):
            before = _before_gathered(product, typing) if len(shape_of(weight)) == 2 else None
            if before is not None:
                found[weight, Shard(1 - placed.dim, before.blocks)] = None
    return list(found)


def _before_gathered(product: fx.Node, typing: Typing) -> Shard | None:
    """How the input of a product would be split, in its features, had it not been gathered."""
    node = given = next((one for one in slots_of(product) if one.op != "get_attr"), product)
    gathered, moves = typing.on_edge.get((node, product)), []
    while gathered is None and node not in typing.at_node and carries(node):
        moves.append(node)
        node = node.args[0]  # type: ignore[assignment]
    gathered = gathered or typing.at_node.get(node)
    if gathered is None or gathered.forward != "all_gather" or not isinstance(gathered.source, Shard):
        return None
    split = gathered.source
    for one in reversed(moves):
        moved = carry(operation_of(one), split, typing.ranks)
        if not moved:
            return None
        split = moved[0]
    return split if split.dim == len(shape_of(given)) - 1 else None


def _cut(typing: Typing) -> list[tuple[fx.Node, Shard]]:
    """The split weights whose result has to be whole where the code cuts the split dim, with the parts of the cut."""
    found: dict[tuple[fx.Node, Shard], None] = {}
    for weight, placed in _split_weights(typing):
        for product in _products(weight):
            made = typing.produced.get(product, ())
            if len(made) == 1 and isinstance(made[0], Shard):
                blocks = _cut_after(product, made[0].dim, typing)
                if blocks not in (None, placed.blocks):
                    found[weight, Shard(placed.dim, blocks)] = None
    return list(found)


def _products(weight: fx.Node) -> list[fx.Node]:
    """What is computed with a weight, through what only turns it."""
    found, queue = [], list(readers(weight))
    while queue:
        node = queue.pop()
        if carries(node):
            queue += readers(node)
        else:
            found.append(node)
    return found


def _cut_after(product: fx.Node, dim: int, typing: Typing) -> Blocks | None:
    """How the first cut of a dim of a product, which has to be whole for it, cuts it; None if there is none."""
    whole, node = False, product
    while True:
        whole |= node in typing.at_node
        for user in readers(node):
            blocks = _blocks(user, node, dim) if whole or (node, user) in typing.on_edge else None
            if blocks is not None:
                return blocks
        users = readers(node)
        if len(users) != 1 or not carries(users[0]):
            return None
        whole |= (node, users[0]) in typing.on_edge
        node = users[0]
        moved = carry(operation_of(node), Shard(dim), typing.ranks)
        if not moved:
            return None
        dim = moved[0].dim


def _blocks(user: fx.Node, node: fx.Node, dim: int) -> Blocks | None:
    """Into what an operation cuts a dim: a number of equal blocks, or their sizes."""
    shapes, before = [tuple(int(size) for size in one.shape) for one in tensors_of(user)], shape_of(node)
    if canonical(name_of(user)) in ("split", "chunk"):
        sizes = tuple(one[dim] for one in shapes if len(one) == len(before))
        if len(sizes) < 2 or sum(sizes) != before[dim]:
            return None
        return len(sizes) if len(set(sizes)) == 1 else sizes
    if canonical(name_of(user)) in RESHAPE and carries(user) and len(shapes[0]) > len(before) and _taken_apart(user):
        for index, size in enumerate(shapes[0]):
            if math.prod(shapes[0][:index]) == math.prod(before[:dim]) and 1 < size < before[dim]:
                return size
    return None


def _taken_apart(node: fx.Node) -> bool:
    """Whether what is read of a value, turned or not, is one of several parts."""
    while True:
        users = readers(node)
        if any(canonical(name_of(one)) in ("unbind", "getitem", "select", "split", "chunk") for one in users):
            return True
        if len(users) != 1 or not carries(users[0]):
            return False
        node = users[0]
