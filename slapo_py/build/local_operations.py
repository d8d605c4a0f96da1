"""Operations that a rank does otherwise than the whole model: a lookup in its rows, a loss over its classes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from slapo_py.distributed.collectives import Ranks
from slapo_py.distributed.cross_entropy import PLAIN, Slice, cross_entropy
from slapo_py.distributed.embedding import embedding
from slapo_py.layouts.recording.nodes import shape_of, slots_of
from slapo_py.layouts.rules.lines import classes_of
from slapo_py.layouts.simulating.local import Names, loss_arguments, loss_names


@dataclass(frozen=True)
class Lookup:
    """`F.embedding` in this rank's rows of a table of `total` rows."""

    total: int
    ranks: Ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return embedding(*args, **kwargs, total=self.total, ranks=self.ranks)


@dataclass(frozen=True)
class Loss:
    """`F.cross_entropy` over this rank's part of `classes` classes, or a kernel that is one, called by its `names`."""

    classes: int
    ranks: Ranks
    names: Names
    by: Slice

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = loss_arguments(self.names, args, kwargs)
        logits, labels = given.pop("input"), given.pop("target")
        return cross_entropy(logits, labels, **given, classes=self.classes, ranks=self.ranks, by=self.by)


def _lookup(node: fx.Node, ranks: Ranks) -> Lookup:
    table = slots_of(node)[1]
    return Lookup(shape_of(table)[0], ranks)


def _loss(node: fx.Node, ranks: Ranks) -> Loss:
    fused: Any = node.target
    own = classes_of(fused)
    by = PLAIN if own is None else Slice(own.parts, own.gradient)
    return Loss(shape_of(slots_of(node)[0])[-1], ranks, loss_names(fused), by)


REPLACEMENTS: dict[str, Callable[[fx.Node, Ranks], Callable[..., Tensor]]] = {
    "embedding": _lookup,
    "cross_entropy": _loss,
}
"""By what a signature of the layouts says that it needs: made of the node at whole shapes."""
