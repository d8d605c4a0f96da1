"""Data-parallel ranks train as one process does: blocks, views, empty parts, optimizers, meshes in another order."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import slapo_py as slapo
from slapo_py.distributed.mesh import DATA
from slapo_py.errors import EngineError
from tests.mesh.conftest import Run
from tests.mesh.replicas import ROWS, Chosen, Layers, Wrapped, engine, mine, of_logits, split_head, step


def _accepted() -> list[str]:
    made = [engine(Layers(), optimizer=torch.optim.Adafactor)]
    for optimizer in (
        torch.optim.AdamW,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.Adam, amsgrad=True),
        _whole_ones_alone,
    ):
        made.append(split_head(optimizer))
        if optimizer is not _whole_ones_alone:
            made.append(engine(Layers(), optimizer=optimizer, data_parallel="fsdp"))
    return [type(one.optimizer).__name__ for one in made]


class Two(torch.optim.Adafactor):
    """Steps what is called a head as SGD does, and all else as Adafactor."""

    def __init__(self, params: Any, plain: bool = False) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group.setdefault("plain", plain)

    def step(self, closure: Any = None) -> Any:
        groups = list(self.param_groups)
        for group in groups:
            if group["plain"]:
                with torch.no_grad():
                    for one in group["params"]:
                        one -= 0.1 * one.grad
        self.param_groups = [group for group in groups if not group["plain"]]
        super().step()
        self.param_groups = groups


def _whole_ones_alone(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    heads, others = [], []
    for name, one in named:
        (heads if name.startswith("head") else others).append(one)
    return Two([{"params": heads, "plain": True}, {"params": others}])


def test_optimizers_that_go_with_parts(on_ranks: Run) -> None:
    for found in on_ranks(2, _accepted):
        assert found == ["Adafactor", "AdamW", "AdamW", "SGD", "SGD", "Adam", "Adam", "Two"]


def _run_again() -> list[float]:
    torch.manual_seed(0)
    made = engine(Chosen("again"), data_parallel="fsdp")
    return [float(step(made)) for _ in range(2)]


def test_a_block_that_one_rank_runs_again_in_backward(on_ranks: Run) -> None:
    first, second = on_ranks(2, _run_again)
    assert first == second


def _losses(kind: str, precision: str) -> list[float]:
    """Of three steps and an evaluation on rows that ranks can't share evenly."""
    torch.manual_seed(0)
    parts = torch.distributed.get_world_size()
    made = engine(Layers(), mesh={DATA: parts}, data_parallel=kind, precision=precision, micro_batches=2)
    rows = ROWS if parts == 1 else mine()
    found = [float(made.train_step(rows)) for _ in range(3)]
    uneven = ROWS if parts == 1 else ROWS.split((3, 1))[torch.distributed.get_rank()]
    return [*found, float(made.eval_step(uneven))]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_blocks_and_a_head_train_as_in_one_process(kind: str, precision: str, on_ranks: Run) -> None:
    (expected,) = on_ranks(1, _losses, "ddp", precision)
    for found in on_ranks(2, _losses, kind, precision):
        assert found == pytest.approx(expected, rel=1e-6 if precision == "fp32" else 2e-2)


class View(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, 4)


class WrittenTo(nn.Module):
    """The output of each block is a view, and is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([View(4, 4), View(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x += 1
        return x


def _of_views(kind: str) -> list[float]:
    torch.manual_seed(0)
    parts = torch.distributed.get_world_size()
    made = engine(WrittenTo(), mesh={DATA: parts}, data_parallel=kind)
    return [float(made.train_step(ROWS if parts == 1 else mine())) for _ in range(3)]


def test_blocks_whose_views_are_written_to(on_ranks: Run) -> None:
    (expected,) = on_ranks(1, _of_views, "ddp")
    for found in on_ranks(2, _of_views, "fsdp"):
        assert found == pytest.approx(expected, rel=1e-6)


def _of_unknown_outputs(kind: str) -> list[float]:
    torch.manual_seed(0)
    parts = torch.distributed.get_world_size()
    made = engine(Wrapped(Layers()), of_logits, mesh={DATA: parts}, data_parallel=kind)
    return [float(made.train_step(ROWS if parts == 1 else mine())) for _ in range(3)]


def test_blocks_train_under_an_output_that_is_not_looked_into(on_ranks: Run) -> None:
    (expected,) = on_ranks(1, _of_unknown_outputs, "ddp")
    for found in on_ranks(2, _of_unknown_outputs, "fsdp"):
        assert found == pytest.approx(expected, rel=1e-6)


def _rows_of() -> list[int]:
    torch.manual_seed(0)
    made = engine(Layers())
    found = made.part({"x": torch.arange(5), "scale": torch.tensor(1.0)})
    assert found["scale"] == 1
    with pytest.raises(EngineError, match='the batch has 1 row for 2 ranks of "dp"'):
        made.part(torch.ones(1, 4))
    return found["x"].tolist()


def test_the_part_of_a_batch(on_ranks: Run) -> None:
    assert on_ranks(2, _rows_of) == [[0, 1, 2], [3, 4]]
    alone = slapo.build(
        slapo.create_schedule(Layers(), (ROWS,)), target="torch", optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=lambda output, batch: output.sum(), count=len,
    )  # fmt: skip
    assert alone.part(ROWS) is ROWS


def _uncounted() -> float:
    torch.manual_seed(0)
    made = engine(Layers(), count=lambda batch: 4 if torch.distributed.get_rank() == 0 else 0)
    return float(made.train_step(mine()))


def test_a_rank_without_a_counted_element_takes_part(on_ranks: Run) -> None:
    first, second = on_ranks(2, _uncounted)
    assert first == second > 0


def _other_order() -> list[float]:
    """The inner axis comes first: ranks 0 and 2 are at one place of "dp"."""
    torch.manual_seed(0)
    sch = slapo.create_schedule(Layers(), (ROWS,))
    sch["head"].shard("weight", "bias", dim="out")
    sch.auto_sync("tp")
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=(DATA, "tp"))
    made = slapo.build(
        sch, target="torch", mesh=mesh, optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=lambda output, batch: output.square().sum(), count=len,
    )  # fmt: skip
    assert len(made.part(ROWS)) == 2
    return [float(made.train_step(made.part(ROWS))) for _ in range(2)]


@pytest.mark.slow
def test_a_mesh_whose_ranks_are_in_another_order(on_ranks: Run) -> None:
    first, *others = on_ranks(4, _other_order)
    assert all(one == first for one in others)
