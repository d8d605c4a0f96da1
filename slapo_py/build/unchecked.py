"""A schedule carried out as it is written, right or wrong, with the checker switched off: for verify alone.

    with checker_off():
        built = slapo.build(sch, mesh=..., logical_masks=True)

Its own collectives stand at its borders and no others. What a build does by itself is as inference has it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from slapo_py.distributed import raw
from slapo_py.distributed.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Mask,
    Move,
    Ranks,
    ReduceScatter,
    Split,
    paired,
)
from slapo_py.layouts.inference.state import Typing, is_local
from slapo_py.layouts.placement import Shard
from slapo_py.layouts.simulating.as_written import Exchange, exchanges
from slapo_py.layouts.syncs import Sync

_OFF: ContextVar[bool] = ContextVar("checker_off", default=False)


@contextmanager
def checker_off() -> Iterator[None]:
    """Within, `build` on a mesh carries out what a schedule says, also where it is wrong."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


def is_checked() -> bool:
    """Whether `build` refuses a wrong schedule."""
    return not _OFF.get()


@dataclass(frozen=True)
class Written:
    """A sync as it is written: a collective on the value and one on its gradient, whatever arrives."""

    value: "_Done"
    gradient: "_Done"

    @staticmethod
    def of(sync: Sync, node: fx.Node, typing: Typing, ranks: Ranks) -> "Written":
        """What a sync of a schedule is on this rank."""
        value, gradient = exchanges(sync, node, typing)
        return Written(_Done(ranks, value), _Done(ranks, gradient))

    def __call__(self, x: Tensor) -> Tensor:
        return paired(x, (self.value,), (self.gradient,))


@dataclass(frozen=True)
class _Done(Move):
    """An exchange, done to a tensor of any size."""

    exchange: Exchange

    def __call__(self, x: Tensor) -> Tensor:
        move = self._move(x)
        return x if move is None else move(x)

    def _move(self, x: Tensor) -> Move | None:
        ranks, before, after = self.ranks, self.exchange.before, self.exchange.after
        match self.exchange.kind:
            case "all_reduce":
                return AllReduce(ranks)
            case "mask":
                return Mask(ranks)
            case "all_gather" if isinstance(before, Shard):
                return AllGather(ranks, before, self._whole(x, before.dim))
            case "split" if isinstance(after, Shard):
                return Split(ranks, after)
            case "reduce_scatter" if isinstance(after, Shard):
                return ReduceScatter(ranks, after)
            case "all_to_all" if isinstance(before, Shard) and isinstance(after, Shard):
                return AllToAll(ranks, before, after, self._whole(x, before.dim))
        return None

    def _whole(self, x: Tensor, dim: int) -> int:
        """The sizes of all ranks' parts together."""
        return int(raw.all_reduce(torch.tensor([x.shape[dim]]), "sum", self.ranks.name))


def without_what_is_missing(typing: Typing, syncs: Mapping[fx.Node, Sync], divided: Mapping[str, set[str]]) -> Typing:
    """The plan of one axis without the collectives and sizes that inference puts in.

    syncs, divided: the schedule's own collectives, and the attributes that it divides.
    """
    resized = {
        node: {
            place: one
            for place, one in sizes.items()
            if node in typing.made_local or (one.owner is not None and one.owner[1] in divided.get(one.owner[0], ()))
        }
        for node, sizes in typing.resized.items()
    }
    return replace(
        typing,
        at_node={node: one for node, one in typing.at_node.items() if node in syncs or is_local(one)},
        on_edge={edge: one for edge, one in typing.on_edge.items() if is_local(one)},
        grad_on_edge={edge: one for edge, one in typing.grad_on_edge.items() if is_local(one)},
        resized=resized,
    )
