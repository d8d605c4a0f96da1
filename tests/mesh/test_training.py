"""Training on a mesh: the losses, norms and parameters of one process."""

from typing import Any

import pytest

from tests.mesh.conftest import Run
from tests.mesh.training import train
from tests.slow import slow_but

EVERY = [(name, more) for name in ("llama", "gpt2", "t5") for more in (False, True)]
KINDS = [(name, kind) for name in ("llama", "gpt2", "t5") for kind in ("ddp", "fsdp")]


@pytest.mark.parametrize(("name", "more"), slow_but([("llama", False), ("gpt2", True)], EVERY))
def test_tensor_parallel(name: str, more: bool, on_ranks: Run) -> None:
    options: dict[str, Any] = {"sequence": True, "clip": 0.5, "micro_batches": 2} if more else {}
    for error, where, differ in on_ranks(2, _train, name, {"tp": 2}, options):
        assert error < 1e-9, where
        assert not differ


@pytest.mark.parametrize(("name", "kind"), slow_but([("gpt2", "ddp"), ("t5", "fsdp")], KINDS))
def test_data_parallel(name: str, kind: str, on_ranks: Run) -> None:
    options = {"data_parallel": kind, "micro_batches": 2, "clip": 0.5}
    for error, where, _ in on_ranks(2, _train, name, {"dp": 2}, options):
        assert error < 1e-9, where


def _train(name: str, sizes: dict[str, int], options: dict[str, Any]) -> tuple[float, str, list[str]]:
    return train(name, sizes, **options)
