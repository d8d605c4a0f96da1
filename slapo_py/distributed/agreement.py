"""Whether all ranks mean the same collective: said before it is issued, so that a mistake is an error, not a hang."""

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from slapo_py.errors import PlacementError

_asking = [False]


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Within, the ranks of a group compare what they are about to do, and all raise where they differ.

    One small exchange per redistribution: for tests, for `verify`, and for a first step. Not in compiled code.
    """
    before, _asking[0] = _asking[0], True
    try:
        yield
    finally:
        _asking[0] = before


def asking() -> bool:
    """Whether `checked` is on."""
    return _asking[0]


def agree(said: str, groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Every rank of a mesh says what it does. groups: of its axes. Raises `PlacementError` on all where they differ."""
    known = [said]
    for group in groups:
        heard: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(heard, known, group=group)
        known = [one for some in heard for one in some]
    compare(known)


def compare(said: Sequence[str]) -> None:
    """Raises `PlacementError` where ranks said different things."""
    if len(set(said)) > 1:
        lines = "\n".join(f"  rank {rank}: {one}" for rank, one in enumerate(said))
        raise PlacementError(f"The ranks don't do the same; every rank must make the same calls in one order:\n{lines}")
