"""Blocks that are as many as the batch has rows.

(B, S, H) split along S becomes, flattened to (B * S, H), split along dim 0 in B blocks. Written into a schedule as a
number, B would hold for the batch of the example alone; so `sync(..., parts="batch")` says where the number comes from:
it is the size of dim 0 of the first tensor that enters the module around.
"""

from torch import fx

from slapo_py.layouts.placement import Placement, Shard
from slapo_py.layouts.recording.borders import ENTER, border
from slapo_py.layouts.recording.nodes import is_border, shape_of

BATCH = "batch"


class Rows(int):
    """A number of blocks that was given as "batch"."""


def around(node: fx.Node) -> fx.Node | None:
    """The border at which the first tensor enters the module around: around the one whose border a node is, or in."""
    path = str(node.meta.get("within", ""))
    inside = [path] if not is_border(node) else []
    while path:
        path = path.rpartition(".")[0]
        inside.append(path)
    above = node.prev
    while above.op != "root":
        if above.target is border and above.args[1] == ENTER and above.args[3] == 0 and above.args[2] in inside:
            return above
        above = above.prev
    return None


def follows_batch(node: fx.Node, placement: Placement) -> bool:
    """Whether a value is split in as many blocks as the batch has rows, because its batch and sequence are one dim."""
    if not isinstance(placement, Shard) or placement.dim != 0:
        return False
    top = around(node)
    return (
        top is not None and len(shape_of(node)) < len(shape_of(top)) and placement.blocks == shape_of(top)[0]
    )  # of a batch of one there is one block


def parts_of(node: fx.Node, shard: Shard) -> "int | tuple[int, ...] | str":
    """The blocks of a split value as a schedule writes them."""
    return BATCH if follows_batch(node, shard) else shard.blocks
