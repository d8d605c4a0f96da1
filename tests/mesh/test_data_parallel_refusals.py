"""What data-parallel ranks must not do in silence: other numbers than one process has, or none at all."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo_py.distributed.mesh import DATA
from slapo_py.errors import BuildError, EngineError
from tests.mesh.conftest import Run
from tests.mesh.replicas import Chosen, Layers, Wrapped, engine, mine, of_logits, split_head, step


class Branches(nn.Module):
    """Each row has its own branch."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base(x).tanh()
        return self.a(hidden) if torch.distributed.get_rank() == 0 else self.b(hidden)


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


def _no_gradient() -> bool:
    torch.manual_seed(0)
    made = engine(Wrapped(nn.Linear(4, 4)), of_logits, data_parallel="fsdp")
    return _refuses(EngineError, "no parameter has got a gradient", partial(step, made))


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


def _rows_of_other_ranks(kind: str, layer: Callable[[], nn.Module], match: str) -> bool:
    model = nn.Sequential(layer())
    return _refuses(BuildError, f"build at '0': {match}", lambda: engine(model, data_parallel=kind))


ROWS_OF_OTHERS: list[tuple[Callable[[], nn.Module], str]] = [
    (
        lambda: nn.BatchNorm1d(4),
        'BatchNorm1d normalises over the batch.*each of the 2 ranks of "dp".* Replace it by Sync',
    ),
    (lambda: nn.InstanceNorm1d(4, track_running_stats=True), "InstanceNorm1d .* Write track_running_stats=False"),
    (lambda: nn.Embedding(4, 4, max_norm=1.0), "Embedding writes to the rows .* Write max_norm=None"),
    (lambda: nn.EmbeddingBag(4, 4, max_norm=1.0), "EmbeddingBag writes to the rows .* Write max_norm=None"),
    (lambda: nn.Embedding(4, 4, scale_grad_by_freq=True), "Embedding divides gradients .*scale_grad_by_freq=False"),
]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(("layer", "match"), ROWS_OF_OTHERS)
def test_layers_that_look_at_the_rows_of_others(
    layer: Callable[[], nn.Module], match: str, kind: str, on_ranks: Run
) -> None:
    assert on_ranks(2, _rows_of_other_ranks, kind, layer, match) == [True, True]


def _hooked(kind: str) -> bool:
    model = Layers()
    model.head.weight.register_hook(lambda grad: grad / grad.norm())
    match = "build at 'head.weight': the parameter has a hook, .* each of the 2 ranks .* clip= clips"
    return _refuses(BuildError, match, lambda: engine(model, data_parallel=kind))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_hook_that_would_see_a_part_of_a_gradient(kind: str, on_ranks: Run) -> None:
    assert on_ranks(2, _hooked, kind) == [True, True]


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


def _of_whole_tensors_that_are_split() -> bool:
    match = "the optimizer Adafactor looks at whole tensors, and a rank has only its part of 'head.weight'"
    return _refuses(BuildError, match, lambda: split_head(torch.optim.Adafactor))


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
