"""Training on a mesh: the losses, norms and parameters of one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import slapo_py as slapo
from slapo_py.distributed.mesh import Mesh
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


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_bf16_computes_in_bf16_and_keeps_float32(kind: str, axis: str, on_ranks: Run) -> None:
    for computed, kept, loss in on_ranks(2, _half, {axis: 2}, kind):
        assert computed == torch.bfloat16
        assert kept == torch.float32
        assert loss == pytest.approx(on_ranks(1, _half, {axis: 1}, kind)[0][2], rel=1e-2)


def _half(sizes: dict[str, int], kind: str) -> tuple[torch.dtype, torch.dtype, float]:
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.randn(4, 8),))
    if "tp" in sizes:
        sch["0"].shard("weight", "bias", dim="out")
        sch["1"].shard("weight", dim="in")
        sch.auto_sync("tp")
    engine = slapo.build(
        sch,
        target="torch",
        mesh=sizes,
        data_parallel=kind,
        precision="bf16",
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=lambda output, batch: output.square().sum(),
        count=len,
    )
    seen: list[torch.dtype] = []
    engine.module[1].register_forward_pre_hook(lambda module, given: seen.append(given[0].dtype))
    rows = torch.randn(4, 8).tensor_split(sizes.get("dp", 1))[Mesh.of(sizes).coordinate("dp")]
    for _ in range(2):
        loss = engine.train_step(rows)
    return seen[-1], engine.optimizer.param_groups[0]["params"][0].dtype, float(loss)
