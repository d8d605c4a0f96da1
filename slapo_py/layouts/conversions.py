"""Which collective turns one placement into another, what it costs, and the cheapest way over placements between.

Costs are bytes in all over the ranks for even parts. T: bytes of the whole tensor; p: ranks of the axis.

| from, to | how | bytes |
|---|---|---|
| P(op), R | all-reduce | 2(p-1) T |
| P(op), S | reduce-scatter | (p-1) T |
| S, R | all-gather | (p-1) T |
| S, another S | all-to-all | (p-1)/p T |
| R, S | split | 0 |
| S, P(op) | pad: zeros around the part, or what op ignores | 0 |
| R, P | mask: rank 0 keeps it, the others hold zeros | 0 |
| R, P(max) or P(min) | keep: the maximum of equal tensors | 0 |
| P(op), P of another op | none; over S: reduce-scatter and pad | (p-1) T |

(As in OneFlow's `sbp_infer_util.cpp`, arXiv 2110.15032, which has no maximum and no minimum.)

On a mesh a tensor has one placement per axis; the outer axis, the first, is applied first. So with S of the same dim
twice the inner axis splits the parts of the outer one, and with P of two ops the inner one is reduced first. Therefore
an axis changes to or from S(dim) only while no inner axis has S of that dim, and to or from P(op) only while no inner
axis has P of another op.
"""

import functools
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from slapo_py.layouts.placement import P, Partial, Placement, R, Replicate, Shard

Layout = tuple[Placement, ...]
"""A placement for each axis of a mesh, the outer axis first."""


def how(source: Placement, target: Placement) -> str | None:
    """The name of the one collective or local step between two placements of an axis; None where there is none."""
    match source, target:
        case _ if source == target:
            return "nothing"
        case Partial(), Replicate():
            return "all_reduce"
        case Partial(), Shard():
            return "reduce_scatter"
        case Shard(), Replicate():
            return "all_gather"
        case Shard(), Shard():
            return "all_to_all"
        case Replicate(), Shard():
            return "split"
        case Shard(), Partial():
            return "pad"
        case Replicate(), Partial(op):
            return "mask" if op == "sum" else "keep"
    return None


@functools.cache
def factor(kind: str, ranks: int) -> Fraction:
    """What a step of a kind sends in all, as a multiple of the whole tensor's bytes."""
    dear = {
        "all_reduce": Fraction(2 * (ranks - 1)),
        "reduce_scatter": Fraction(ranks - 1),
        "all_gather": Fraction(ranks - 1),
        "all_to_all": Fraction(ranks - 1, ranks),
    }
    return dear.get(kind, Fraction(0))


@dataclass(frozen=True)
class Step:
    """One axis goes from one placement to another while the other axes stay: layout -> `after`."""

    layout: Layout
    axis: int
    target: Placement

    @property
    def source(self) -> Placement:
        """The placement that changes."""
        return self.layout[self.axis]

    @property
    def kind(self) -> str:
        """As `how` names it."""
        return how(self.source, self.target) or "none"

    @property
    def after(self) -> Layout:
        """The layout that it leads to."""
        return (*self.layout[: self.axis], self.target, *self.layout[self.axis + 1 :])

    def is_legal(self, sizes: Sequence[int]) -> bool:
        """Whether one collective does it, with what the inner axes hold."""
        inner = [one for one, size in zip(self.layout[self.axis + 1 :], sizes[self.axis + 1 :]) if size > 1]
        ends = (self.source, self.target)
        dims = {one.dim for one in ends if isinstance(one, Shard)}
        ops = {one.op for one in ends if isinstance(one, Partial)}
        return how(*ends) is not None and not any(
            (isinstance(one, Shard) and one.dim in dims) or (isinstance(one, Partial) and ops - {one.op})
            for one in inner
        )

    def cost(self, sizes: Sequence[int]) -> Fraction:
        """Bytes in all over every rank of the mesh, as a multiple of the whole tensor's."""
        others = [(one, size) for at, (one, size) in enumerate(zip(self.layout, sizes)) if at != self.axis]
        groups = math.prod(size for _, size in others)
        parts = math.prod(size for one, size in others if isinstance(one, Shard))
        return factor(self.kind, sizes[self.axis]) * Fraction(groups, parts)


def total(steps: Sequence[Step], sizes: Sequence[int]) -> Fraction:
    """The cost of steps, one after the other."""
    return sum((step.cost(sizes) for step in steps), Fraction(0))


def candidates(source: Layout, target: Layout, axis: int, dims: Sequence[int]) -> list[Placement]:
    """The placements that an axis may have on the way: its own two, R, P, and S of these dims."""
    return list(dict.fromkeys([target[axis], source[axis], R, P, *(Shard(dim) for dim in dims)]))


def steps_from(layout: Layout, sizes: Sequence[int], allowed: Sequence[Sequence[Placement]]) -> Iterator[Step]:
    """Every single step from a layout."""
    for axis, ends in enumerate(allowed):
        for end in ends:
            step = Step(layout, axis, end)
            if end != layout[axis] and step.is_legal(sizes):
                yield step


@functools.lru_cache(maxsize=4096)
def cheapest(source: Layout, target: Layout, sizes: tuple[int, ...], dims: tuple[int, ...] = ()) -> tuple[Step, ...]:
    """The steps that send least from one layout to another. The same on every rank.

    Of such the fewest, and of these the ones that make fewest terms, which are whole tensors on every rank.

    sizes: of the mesh axes, the outer one first. dims: along which the tensor may be split on the way; give those that
    divide, because parts of others are padded. There is always a way: over R on every axis.
    """
    allowed = [candidates(source, target, axis, dims) for axis in range(len(sizes))]
    best = {source: (Fraction(0), 0, 0)}
    queue: list[tuple[Fraction, int, int, int, Layout, tuple[Step, ...]]] = [(*best[source], 0, source, ())]
    pushed = 0
    while queue:
        cost, count, terms, _, layout, steps = heapq.heappop(queue)
        if layout == target:
            return steps
        if best[layout] < (cost, count, terms):
            continue
        for step in steps_from(layout, sizes, allowed):
            reached = (cost + step.cost(sizes), count + 1, terms + isinstance(step.target, Partial))
            if step.after not in best or reached < best[step.after]:
                best[step.after] = reached
                pushed += 1
                heapq.heappush(queue, (*reached, pushed, step.after, (*steps, step)))
    raise AssertionError(f"no way from {source} to {target}")  # Every axis can go to R and from there.


def cost(
    source: Placement | Layout,
    target: Placement | Layout,
    sizes: int | tuple[int, ...],
    nbytes: int,
    dims: tuple[int, ...] = (),
) -> Fraction:
    """Bytes in all over the ranks for a tensor of `nbytes`, the cheapest way, for even parts. Arguments as `cheapest`.

    Without dims a change of P's op has no S to go over and pays an all-reduce.
    """
    sizes = (sizes,) if isinstance(sizes, int) else sizes
    source = (source,) if isinstance(source, Placement) else source
    target = (target,) if isinstance(target, Placement) else target
    return total(cheapest(source, target, sizes, dims), sizes) * nbytes
