"""Training on a mesh: the losses, norms and parameters of one process."""

from typing import Any

import pytest

from tests.mesh.conftest import Run
from tests.mesh.training import train


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("options", [{}, {"sequence": True, "clip": 0.5, "micro_batches": 2}], ids=["plain", "more"])
def test_tensor_parallel(name: str, options: dict[str, Any], on_ranks: Run) -> None:
    for error, where, differ in on_ranks(2, _train, name, {"tp": 2}, options):
        assert error < 1e-9, where
        assert not differ


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_data_parallel(name: str, kind: str, on_ranks: Run) -> None:
    options = {"data_parallel": kind, "micro_batches": 2, "clip": 0.5}
    for error, where, _ in on_ranks(2, _train, name, {"dp": 2}, options):
        assert error < 1e-9, where


def _train(name: str, sizes: dict[str, int], options: dict[str, Any]) -> tuple[float, str, list[str]]:
    return train(name, sizes, **options)
