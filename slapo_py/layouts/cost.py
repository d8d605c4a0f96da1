"""What a conversion costs, for choices: bytes in all over the ranks, and what must never be chosen."""

import math

from slapo_py.layouts.placement import P, Placement, R, Shard


def cost(
    source: Placement, target: Placement, size: int, ranks: int, *, parameter: bool, gradient: bool, added: bool
) -> float:
    """Bytes of converting a tensor of `size` bytes, whole, forward and backward.

    Half bytes break ties: what is whole stays whole. parameter: a declared split is never undone, and a whole parameter
    may be split at no cost, or, if it is a term that is `added`, be kept by one rank (a bias that is added once).
    """
    if source == target:
        return 0
    if parameter:
        if source == R and isinstance(target, Shard):
            return 0.5
        return 0 if source == R and target == P and added else math.inf
    back = 1 if gradient else 0
    if source == P and target == R:
        return 2 * (ranks - 1) * size
    if source == P and isinstance(target, Shard):
        return (1 + back) * (ranks - 1) * size + 1
    if isinstance(source, Shard) and target == R:
        return (1 + back) * (ranks - 1) * size
    if source == R and isinstance(target, Shard):
        return back * (ranks - 1) * size + 0.5
    if isinstance(source, Shard) and isinstance(target, Shard):
        return (1 + back) * (ranks - 1) / ranks * size
    return math.inf  # to a partial sum: legal, and never wanted of an activation
