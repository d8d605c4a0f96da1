"""What a conversion costs, for choices: bytes in all over the ranks, and what must never be chosen."""

import functools
import math

from slapo_py.layouts.conversions import factor, how
from slapo_py.layouts.inference.state import Typing
from slapo_py.layouts.placement import P, Partial, Placement, R, Shard
from slapo_py.layouts.recording.nodes import bytes_of

# What the gradient costs on its way back, and what breaks ties: what is whole stays whole.
_BACK = {
    "all_reduce": "nothing",
    "reduce_scatter": "all_gather",
    "all_gather": "reduce_scatter",
    "split": "all_gather",
    "all_to_all": "all_to_all",
}
_TIES = {"reduce_scatter": 0.25, "split": 0.5}


def cost(
    source: Placement, target: Placement, size: int, ranks: int, *, parameter: bool, gradient: bool, added: bool
) -> float:
    """Bytes of converting a tensor of `size` bytes, whole, forward and, if it has a gradient, backward.

    parameter: a declared split is never undone, and a whole parameter may be split at no cost, or, if it is a term that
    is `added`, be kept by one rank (a bias that is added once).
    """
    if source == target:
        return 0
    if parameter:
        if source == R and isinstance(target, Shard):
            return 0.5
        return 0 if source == R and target == P and added else math.inf
    kind = how(source, target)
    if kind is None or isinstance(target, Partial):
        return math.inf  # to a partial sum: legal, and never wanted of an activation
    # What a sum is scattered for has to be gathered somewhere, if not by its gradient then further on.
    return _factor(kind, ranks, gradient or kind == "reduce_scatter") * size + _TIES.get(kind, 0)


def sent(typing: Typing) -> float:
    """The bytes that all conversions send, forward and backward, and those of summed gradients."""
    moved = ((kind, one.node) for one in typing.conversions() for kind in (one.forward, one.backward))
    summed = (("all_reduce", node) for node in typing.reduced)
    return sum(float(factor(kind, typing.ranks)) * bytes_of(node) for kind, node in (*moved, *summed))


@functools.cache
def _factor(kind: str, ranks: int, gradient: bool) -> float:
    return float(factor(kind, ranks) + (factor(_BACK[kind], ranks) if gradient else 0))
