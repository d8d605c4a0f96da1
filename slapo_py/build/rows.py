"""How many rows the batch has, for collectives whose blocks follow it: noted while the module around runs."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from slapo_py.errors import PlacementError
from slapo_py.layouts.inference.state import Conversion, Typing
from slapo_py.layouts.placement import Shard
from slapo_py.layouts.recording.borders import tensors_at
from slapo_py.layouts.recording.rows import around, follows_batch
from slapo_py.scheduled import Forward, Layer

_ROWS: ContextVar[int | None] = ContextVar("rows", default=None)


@dataclass(frozen=True)
class RowsNoted(Layer):
    """Notes the size of dim 0 of the first tensor that a forward is given; recomputed, it is noted again."""

    rank: ClassVar[int] = 5

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        @functools.wraps(forward)
        def noting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with _noted(tensors_at((args, kwargs))[0]):
                return forward(self, *args, **kwargs)

        return noting


@contextmanager
def _noted(first: Tensor) -> Iterator[None]:
    token = _ROWS.set(first.shape[0])
    try:
        yield
    finally:
        _ROWS.reset(token)


def rows_planned(one: Conversion) -> int:
    """The rows of the batch that a conversion was planned for, if its blocks follow them; else 0."""
    ends = (one.source, one.target)
    return next((int(end.blocks) for end in ends if isinstance(end, Shard) and follows_batch(one.node, end)), 0)  # type: ignore[arg-type]


def paths_noting(typing: Typing) -> list[str]:
    """The modules that must note the rows."""
    tops = [around(one.node) for one in typing.conversions() if rows_planned(one)]
    return list(dict.fromkeys(str(top.args[2]) for top in tops if top is not None))


def rows_noted(where: str) -> int:
    """The rows, for a collective at `where`. Raises `PlacementError` if the module around does not run."""
    rows = _ROWS.get()
    if rows is None:
        raise PlacementError(
            f"{where}: its blocks are as many as the batch has rows, and the module around, which knows them, does not "
            f"run. Checkpoint the module around instead of this one."
        )
    return rows
