"""What data-parallel ranks must not do in silence: other numbers than one process has, or none at all."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import slapo_py as slapo
from slapo_py.distributed.mesh import DATA
from slapo_py.errors import BuildError, EngineError
from tests.mesh.conftest import Run

ROWS = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


class Branches(nn.Module):
    """Each row has its own branch."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base(x).tanh()
        return self.a(hidden) if torch.distributed.get_rank() == 0 else self.b(hidden)


class Out:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Wrapped(nn.Module):
    """FSDP2 doesn't look into what it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return Out(self.inner(x))


class Chosen(Layers):
    """Each rank runs its own of two blocks of one shape, or both in its own order; or runs one of them again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        rank = torch.distributed.get_rank() if self.training or self.kind != "one in training" else 0
        if self.kind == "again" and rank == 0:  # with nothing to exchange in it: only backward runs it again
            x = torch.utils.checkpoint.checkpoint(self.layers[0], x, use_reentrant=False).tanh()
        elif self.kind == "again":
            x = self.layers[0](x).tanh()
        for index in {"other order": (rank, 1 - rank), "again": (1,)}.get(self.kind, (rank,)):
            x = self.layers[index](x).tanh()
        return self.head(x)


def engine(model: nn.Module, loss: Any = None, mesh: Any = None, count: Any = len, **options: Any) -> Any:
    options.setdefault("optimizer", partial(torch.optim.SGD, lr=0.1))
    return slapo.build(
        slapo.create_schedule(model, (ROWS,)),
        target="torch",
        mesh={DATA: 2} if mesh is None else mesh,
        loss=loss or (lambda output, batch: output.square().sum()),
        count=count,
        **options,
    )


def mine(rows: Tensor = ROWS) -> Tensor:
    return rows.tensor_split(2)[torch.distributed.get_rank()]


def _refuses(error: Any, match: str, function: Callable[[], Any]) -> bool:
    with pytest.raises(error, match=match):
        function()
    return True


def _other_parameters() -> bool:
    torch.manual_seed(0)
    made = engine(Branches(), data_parallel="fsdp")
    before = {name: one.clone() for name, one in made.state_dict().items()}
    refused = _refuses(EngineError, "'a.weight' has a gradient on some ranks of \"dp\" only", partial(step, made))
    return refused and all(torch.equal(one, before[name]) for name, one in made.state_dict().items())


def step(made: Any) -> Any:
    return made.train_step(mine())


def _no_gradient() -> bool:
    torch.manual_seed(0)
    made = engine(Wrapped(nn.Linear(4, 4)), _of_logits, data_parallel="fsdp")
    return _refuses(EngineError, "no parameter has got a gradient", partial(step, made))


def _of_logits(output: Any, batch: Tensor) -> Tensor:
    return output.logits.square().sum()


def _broken_off() -> bool:
    bad = [True]

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        if bad[0]:
            raise ValueError("not today")
        return output.square().sum()

    torch.manual_seed(0)
    made = engine(Layers(), loss, data_parallel="fsdp")
    _refuses(ValueError, "not today", partial(step, made))
    bad[0] = False
    return _refuses(EngineError, "an earlier step has raised on its way", partial(step, made))


def _norm_in_eval_mode() -> bool:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    match = "build at '1': BatchNorm1d normalises over the batch"
    return _refuses(BuildError, match, lambda: engine(model.eval()))


def _norm_that_trains_later() -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].eval()
    made = engine(model)
    step(made)
    made.module.train()
    return _refuses(EngineError, "engine at '1': BatchNorm1d normalises over the batch", partial(step, made))


def _sparse() -> bool:
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    return _refuses(BuildError, "FSDP2 has no sparse gradients", lambda: engine(model, data_parallel="fsdp"))


class Scaled(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))


def _scalar() -> bool:
    match = "build at 'scale': FSDP2 can't spread a parameter without dims"
    return _refuses(BuildError, match, lambda: engine(Scaled(), data_parallel="fsdp"))


def _other_blocks(kind: str) -> bool:
    torch.manual_seed(0)
    made = engine(Chosen(kind), data_parallel="fsdp")
    before = {name: one.clone() for name, one in made.state_dict().items()}
    match = 'engine: the ranks of "dp" have run the blocks in different orders'
    if kind == "one in training":
        made.eval_step(mine())
    else:
        _refuses(EngineError, match, lambda: made.eval_step(mine()))
    refused = _refuses(EngineError, match, partial(step, made))
    return refused and all(torch.equal(one, before[name]) for name, one in made.state_dict().items())


def _one_block() -> bool:
    return _other_blocks("one")


def _one_block_in_training() -> bool:
    return _other_blocks("one in training")


def _blocks_in_other_order() -> bool:
    return _other_blocks("other order")


def _of_whole_tensors() -> bool:
    match = "the optimizer Adafactor looks at whole tensors, and a rank has only its part of 'layers.0.weight'"
    optimizer = torch.optim.Adafactor
    return _refuses(BuildError, match, lambda: engine(Layers(), optimizer=optimizer, data_parallel="fsdp"))


def _split_head(optimizer: Any) -> Any:
    sch = slapo.create_schedule(Layers(), (ROWS,))
    sch["head"].shard("weight", "bias", dim="out")
    sch.auto_sync("tp")
    return slapo.build(
        sch, target="torch", mesh={"tp": 2}, optimizer=optimizer, loss=lambda output, batch: output.sum(), count=len
    )


def _of_whole_tensors_that_are_split() -> bool:
    match = "the optimizer Adafactor looks at whole tensors, and a rank has only its part of 'head.weight'"
    return _refuses(BuildError, match, lambda: _split_head(torch.optim.Adafactor))


def _descending() -> bool:
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=(DATA,))
    return _refuses(BuildError, 'do not ascend along "dp"', lambda: engine(Layers(), mesh=mesh))


@pytest.mark.parametrize(
    "case",
    [
        _other_parameters, _no_gradient, _broken_off, _norm_in_eval_mode, _norm_that_trains_later, _sparse, _scalar,
        _descending, _one_block, _one_block_in_training, _blocks_in_other_order, _of_whole_tensors,
        _of_whole_tensors_that_are_split,
    ],
)  # fmt: skip
def test_refused_by_all(case: Callable[[], bool], on_ranks: Run) -> None:
    assert on_ranks(2, case) == [True, True]


def _accepted() -> list[str]:
    made = [engine(Layers(), optimizer=torch.optim.Adafactor)]
    for optimizer in (
        torch.optim.AdamW,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.Adam, amsgrad=True),
        _whole_ones_alone,
    ):
        made.append(_split_head(optimizer))
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
    made = engine(Wrapped(Layers()), _of_logits, mesh={DATA: parts}, data_parallel=kind)
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
    _refuses(EngineError, 'the batch has 1 row for 2 ranks of "dp"', lambda: made.part(torch.ones(1, 4)))
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
