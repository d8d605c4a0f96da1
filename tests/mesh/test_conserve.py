"""Nothing is lost on a mesh: each element of each parameter is there as often as its placement says."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.build import slicing
from slapo_py.build.facts import facts_of
from slapo_py.distributed.mesh import Mesh
from slapo_py.errors import BuildError
from tests.layouts.plans import PLANS
from tests.mesh.conftest import Run
from tests.mesh.training import count, inputs, loss
from tests.slow import slow_but

FAMILIES = ("llama", "gpt2", "t5")
MESHES = {"tp 2": {"tp": 2}, "tp 4": {"tp": 4}, "dp 2 x tp 2": {"dp": 2, "tp": 2}}
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-2)


def numbered(name: str, ranks: int, vocabulary: int = 96) -> slapo.Schedule:
    """A family whose every element has a number of its own, from 1."""
    model = PLANS[name].build(PLANS[name].attention)
    if vocabulary != 96:
        model.resize_token_embeddings(vocabulary)
    start = 1
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(torch.arange(start, start + parameter.numel()).view(parameter.shape))
            start += parameter.numel()
    sch = slapo.create_schedule(model, PLANS[name].inputs())
    PLANS[name].split(sch)
    return sch.auto_sync("tp", ranks=ranks)


def missing_or_twice(sch: slapo.Schedule, built: nn.Module, mesh: Mesh, spread: tuple[str, ...] = ()) -> list[str]:
    """The parameters of which some element is not on the mesh as often as it should. spread: axes of FSDP."""
    mine = {name: one.detach() for name, one in built.named_parameters()}
    mine = {name: one.to_local() if hasattr(one, "to_local") else one for name, one in mine.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    wrong, facts = [], facts_of(built)
    for name, parameter in sch.original.named_parameters():
        found = Counter(number for held in every for number in held[name].flatten().tolist())
        copies = 1
        for axis, size in mesh.sizes.items():
            copies *= 1 if axis in facts[name].placements or axis in spread else size
        if found != dict.fromkeys(parameter.flatten().tolist(), copies):
            wrong.append(name)
    assert {*mine} == {name for name, _ in sch.original.named_parameters()}
    return wrong


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", slow_but(["gpt2"], FAMILIES))
def test_each_element_is_there_as_often_as_its_placement_says(name: str, sizes: dict[str, int], on_ranks: Run) -> None:
    assert on_ranks(4 if "dp" in sizes else sizes["tp"], _wrong, name, sizes) == [[]] * (
        4 if len(sizes) > 1 else sizes["tp"]
    )


def _wrong(name: str, sizes: dict[str, int], vocabulary: int = 96) -> list[str]:
    sch, mesh = numbered(name, sizes["tp"], vocabulary), Mesh.of(sizes)
    return missing_or_twice(sch, slapo.build(sch, mesh=mesh), mesh)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_uneven_parts(name: str, on_ranks: Run) -> None:
    assert on_ranks(4, _wrong, name, {"tp": 4}, 99) == [[]] * 4


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", slow_but(["gpt2"], FAMILIES))
def test_engines_hold_and_train_each_element(name: str, kind: str, on_ranks: Run) -> None:
    for wrong, partition in on_ranks(4, _in_engine, name, kind):
        assert not wrong
        assert partition


def _in_engine(name: str, kind: str) -> tuple[list[str], bool]:
    mesh = Mesh.of({"dp": 2, "tp": 2})
    sch = numbered(name, 2)
    engine = slapo.build(
        sch, target="torch", mesh=mesh, data_parallel=kind, optimizer=OPTIMIZER, loss=loss, count=count, inputs=inputs
    )
    names = {id(one): key for key, one in engine.module.named_parameters()}
    held = [names[id(one)] for group in engine.optimizer.param_groups for one in group["params"]]
    trainable = [key for key, one in sch.original.named_parameters() if one.requires_grad]
    wrong = missing_or_twice(sch, engine.module, mesh, ("dp",) if kind == "fsdp" else ())
    return wrong, sorted(held) == sorted(trainable)


# Planted


def lost(part: Tensor) -> Tensor:
    return part[:-1].clone()


def doubled(part: Tensor) -> Tensor:
    """The next to last row twice, the last one not at all."""
    return torch.cat([part[:-1], part[-2:-1]])


def another(part: Tensor) -> Tensor:
    return part + 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lost,
            r"at 'transformer.wte.weight': this rank holds \(47, 32\) of \(96, 32\), and S\(0\) on tp is \(48, 32\)",
        ),
        (doubled, r"at 'transformer.wte.weight': the parts of all ranks together are not the whole of \(96, 32\)"),
        (another, r"at 'transformer.wte.weight': the parts of all ranks together are not the whole"),
    ],
)
def test_a_planted_fault_is_caught_on_all_ranks(fault: Callable[[Tensor], Tensor], message: str, on_ranks: Run) -> None:
    assert on_ranks(2, _planted, fault, message) == [True, True]


def _planted(fault: Callable[[Tensor], Tensor], message: str) -> bool:
    parts_of = slicing.parts_of

    def planted(module: nn.Module, *others: Any) -> dict[int, Tensor]:
        found = parts_of(module, *others)
        table = module.transformer.wte.weight
        if message.startswith("at 'transformer.wte.weight': this rank") or dist.get_rank() == 1:
            found[id(table)] = fault(found[id(table)])
        return found

    sch = numbered("gpt2", 2)
    with mock.patch("slapo_py.build.build.parts_of", planted), pytest.raises(BuildError, match=message):
        slapo.build(sch, mesh={"tp": 2})
    return True


def test_a_part_that_all_ranks_hold_is_caught(on_ranks: Run) -> None:
    assert on_ranks(2, _same_part) == [True, True]


def _same_part() -> bool:
    with (
        mock.patch.object(Mesh, "coordinate", lambda mesh, axis: 0),
        pytest.raises(BuildError, match="elements are lost, or held twice"),
    ):
        slapo.build(numbered("llama", 2), mesh={"tp": 2})
    return True


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}])
def test_ranks_with_other_models_are_refused(sizes: dict[str, int], on_ranks: Run) -> None:
    assert on_ranks(2, _other_models, sizes) == [True, True]


def _other_models(sizes: dict[str, int]) -> bool:
    torch.manual_seed(dist.get_rank())
    sch = slapo.create_schedule(nn.Linear(4, 4), (torch.ones(2, 4),))
    if "tp" in sizes:
        sch.shard("weight", "bias", dim="out").auto_sync("tp", ranks=2)
    message = "not the whole of" if "tp" in sizes else "the ranks hold other values"
    with pytest.raises(BuildError, match=rf"at 'weight': .*{message}.*the same model"):
        slapo.build(sch, mesh=sizes)
    return True


def test_an_init_that_draws_elsewhere_is_refused(on_ranks: Run) -> None:
    assert on_ranks(2, _own_generator) == [True, True]


def _own_generator() -> bool:
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.device("meta"):
        sch = slapo.create_schedule(nn.Linear(4, 4))
    with pytest.raises(BuildError, match="at 'weight': the ranks hold other values.*default generator only"):
        slapo.build(sch, mesh={"dp": 2}, init=lambda name, tensor: tensor.normal_(generator=generator))
    return True
