"""Worlds of ranks that all tests of a file share: one start for each size."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ranks import Ranks

Run = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`on_ranks(size, function, *arguments)`: what it returns on each rank of a world of that size."""
    worlds: dict[int, Ranks] = {}

    def run(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        if size not in worlds or not worlds[size].alive:
            worlds[size] = Ranks(size, tmp_path_factory.mktemp("world"), timeout)
        return worlds[size].run(function, *arguments, timeout=timeout)

    yield run
    for world in worlds.values():
        world.close()
