"""What the ranks of a mesh do together: each acts, and where one of them can't, none of them goes on."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from slapo_py.distributed.mesh import Mesh
from slapo_py.errors import CheckpointError

T = TypeVar("T")


class Together:
    """The ranks that save or load one engine. mesh: None for one process alone. Every method is a collective call."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.alone = mesh is None
        self.rank = 0 if mesh is None else dist.get_rank()
        self.ranks = 1 if mesh is None else dist.get_world_size()

    @property
    def first(self) -> bool:
        """Whether this rank does what one must do for all."""
        return self.rank == 0

    def every(self, mine: Any, what: str) -> list[Any]:
        """What each rank has, by rank: small things only. Raises `CheckpointError` if a rank has gone."""
        if self.alone:
            return [mine]
        found: list[Any] = [None] * self.ranks
        try:
            dist.all_gather_object(found, mine)
        except RuntimeError as error:
            raise gone(what, error) from error
        return found

    def agreed(self, act: Callable[[], T], what: str) -> T:
        """Each rank acts; what this one returns. what: "save" or "load", for the message.

        Where one raises, all do: that rank what it raised, the others `CheckpointError`.
        """
        if self.alone:
            return act()
        result, error = None, None
        try:
            result = act()
        except Exception as raised:
            error = raised
        try:
            said = self.every(None if error is None else f"{type(error).__name__}: {error}", what)
        except CheckpointError:
            if error is None:
                raise
            said = []  # what this rank has to say itself says more
        if error is not None:
            raise error
        for rank, one in enumerate(said):
            if one is not None:
                raise CheckpointError(f"{what}: rank {rank} can't, so no rank does. It says: {one}")
        return result  # type: ignore[return-value]

    def from_first(self, act: Callable[[], T], what: str) -> T:
        """The first rank acts; what it returns, on all ranks. Raises as `agreed` does."""
        mine = self.agreed(lambda: act() if self.first else None, what)
        found: T = self.every(mine, what)[0]
        return found


ALONE = Together(None)
"""One process."""


def gone(what: str, error: BaseException) -> CheckpointError:
    """What to raise where a collective has failed."""
    lines = str(error).strip().splitlines()
    return CheckpointError(
        f"{what}: another rank has ended, or gives no answer ({lines[0] if lines else type(error).__name__}). "
        f"Start the ranks again, and load the last folder that was saved: it is whole."
    )
