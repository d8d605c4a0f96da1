"""Worlds of ranks that outlive one `verify(mesh=...)`: forked, and one start for each size."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slapo_py.distributed.local_ranks import LocalRanks
from slapo_py.verify import on_ranks
from tests.ranks import Ranks


class Lent:
    """A world that is not ended with the verification that has it."""

    def __init__(self, world: Ranks) -> None:
        self._world = world

    @property
    def alive(self) -> bool:
        return self._world.alive

    def run(self, *arguments: Any, **options: Any) -> list[Any]:
        return self._world.run(*arguments, **options)

    def close(self) -> None:
        """It stays."""


@pytest.fixture(scope="session")
def lend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, float], Lent]]:
    """Makes a world of a size, or gives the one that there is."""
    worlds: dict[int, Ranks] = {}

    def lent(size: int, timeout: float) -> Lent:
        if size not in worlds or not worlds[size].alive:
            worlds[size] = Ranks(size, tmp_path_factory.mktemp("world"), timeout)
        return Lent(worlds[size])

    yield lent
    for world in worlds.values():
        world.close()


@pytest.fixture
def lent_ranks(lend: Callable[[int, float], Lent], monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify(mesh=...)` takes such worlds."""
    monkeypatch.setattr(on_ranks, LocalRanks.__name__, lend)
