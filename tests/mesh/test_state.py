"""`save`, `load` and `state_dict` on a mesh: any mesh takes over what any other has saved."""

import itertools
import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slapo_py.backends import parts, random_state
from slapo_py.build import slicing
from slapo_py.build.facts import Fact
from slapo_py.layouts.placement import Shard
from tests.mesh import saving
from tests.mesh.conftest import Run
from tests.mesh.saving import Sizes, content, loaded, loaded_elsewhere, trained_and_saved
from tests.slow import slow_but

TOLERANCE = 1e-9  # float64


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of those that differ."""
    assert one.keys() == other.keys()
    return [key for key in one if not torch.allclose(one[key], other[key], rtol=1e-7, atol=TOLERANCE)]


MESHES: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "tp 2 x dp 2, ddp": ({"dp": 2, "tp": 2}, {}),
    "tp 2 x dp 2, fsdp": ({"dp": 2, "tp": 2}, {"data_parallel": "fsdp"}),
    "tp 4": ({"tp": 4}, {}),
    "dp 2, fsdp": ({"dp": 2}, {"data_parallel": "fsdp"}),
}


def ranks(sizes: Sizes) -> int:
    return sizes.get("dp", 1) * sizes.get("tp", 1)


def check_round_trips(name: str, saved_by: str, on_ranks: Run, folder: Path) -> None:
    """One process and all meshes load what one mesh has saved, and one process's folder goes to the mesh."""
    sizes, options = MESHES[saved_by]
    alone = trained_and_saved(folder / "alone", name, None, {})
    every = on_ranks(ranks(sizes), trained_and_saved, folder / "saved", name, sizes, options)
    assert all(torch.allclose(torch.tensor(one), torch.tensor(alone), rtol=TOLERANCE, atol=0) for one in every)
    was = content(folder / "saved")
    assert not close(was, content(folder / "alone"))
    evaluated, after, digests = loaded(folder / "saved", name, None, {}, folder / "again, alone")
    assert abs(after - every[0][2]) < TOLERANCE
    assert same(content(folder / "again, alone"), was)
    assert abs(saving.loss_of_original(folder / "saved.pt", name) - evaluated) < TOLERANCE
    for mesh, (others, more) in MESHES.items():
        again = folder / f"again, {mesh}"
        for loss, next_loss, found in on_ranks(ranks(others), loaded, folder / "saved", name, others, more, again):
            assert abs(loss - evaluated) < TOLERANCE
            if mesh == saved_by:
                assert next_loss == every[0][2]  # to the bit
            assert abs(next_loss - every[0][2]) < TOLERANCE
            assert found == digests
        assert same(content(again), was)
    for _, next_loss, _ in on_ranks(ranks(sizes), loaded, folder / "alone", name, sizes, options, folder / "back"):
        assert abs(next_loss - alone[2]) < TOLERANCE
    assert same(content(folder / "back"), content(folder / "alone"))


TRIPS = [(name, f"tp 2 x dp 2, {kind}") for name in ("tiny", "fused") for kind in ("ddp", "fsdp")]


@pytest.mark.parametrize(("name", "saved_by"), slow_but([TRIPS[0], TRIPS[3]], TRIPS))
def test_round_trips(name: str, saved_by: str, on_ranks: Run, tmp_path: Path) -> None:
    check_round_trips(name, saved_by, on_ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("saved_by", ["tp 2 x dp 2, ddp", "tp 2 x dp 2, fsdp"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_round_trips_of_families(name: str, saved_by: str, on_ranks: Run, tmp_path: Path) -> None:
    check_round_trips(name, saved_by, on_ranks, tmp_path)


@pytest.mark.slow
def test_round_trips_of_t5(on_ranks: Run, tmp_path: Path) -> None:
    check_round_trips("t5", "tp 2 x dp 2, fsdp", on_ranks, tmp_path)


BF16: dict[str, Any] = {"precision": "bf16", "dtype": torch.float32}


def test_masters_are_saved_and_loaded_exactly(on_ranks: Run, tmp_path: Path) -> None:
    sizes = {"dp": 2, "tp": 2}
    losses = on_ranks(4, trained_and_saved, tmp_path / "saved", "tiny", sizes, BF16)
    was = content(tmp_path / "saved")
    assert was["model/layers.0.gate.weight"].dtype == torch.float32
    assert not torch.equal(was["model/layers.0.gate.weight"], was["model/layers.0.gate.weight"].bfloat16().float())
    for others in (sizes, {"tp": 4}):
        found = on_ranks(4, loaded, tmp_path / "saved", "tiny", others, BF16, tmp_path / f"again {others}")
        assert same(content(tmp_path / f"again {others}"), was)
        for _, next_loss, _ in found:
            assert next_loss == losses[0][2] if others == sizes else abs(next_loss / losses[0][2] - 1) < 2e-2
    _, next_loss, _ = loaded(tmp_path / "saved", "tiny", None, BF16, tmp_path / "alone")
    assert same(content(tmp_path / "alone"), was) and abs(next_loss / losses[0][2] - 1) < 2e-2


def test_each_rank_writes_its_own_parts_only(on_ranks: Run, tmp_path: Path) -> None:
    """Each element is in the folder once, and no rank has written much more than its share."""
    on_ranks(4, trained_and_saved, tmp_path / "run", "tiny", {"dp": 2, "tp": 2}, {"data_parallel": "fsdp"})
    marker = json.loads((tmp_path / "run" / "slapo.json").read_text())
    written = saving.written(tmp_path / "run")
    total = sum(math.prod(one["shape"]) for one in marker["tensors"].values())
    assert sorted(written) == [f"__{rank}_0.distcp" for rank in range(4)]
    assert sum(written.values()) == total
    assert max(written.values()) < 0.35 * total
    assert {*written, ".metadata", "engine.pt"} == {*marker["files"]}


def test_buffers_are_those_of_the_first_rank(on_ranks: Run, tmp_path: Path) -> None:
    on_ranks(2, saving.saved_with_own_buffers, tmp_path / "run")
    found = content(tmp_path / "run")
    assert [int(found[f"model/own{index}"]) for index in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("options", [{}, {"data_parallel": "fsdp"}], ids=["ddp", "fsdp"])
def test_state_dict_by_part(options: dict[str, Any], on_ranks: Run) -> None:
    every = on_ranks(4, saving.boxes, "tiny", {"dp": 2, "tp": 2}, options)
    for name, (shape, _) in every[0].items():
        count = np.zeros(shape, int)
        for one in every:
            for box in one[name][1]:
                count[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))] += 1
        split = "embed" in name or re.search(r"(gate|up|down)\.weight|(gate|up)\.bias|head", name)
        # under FSDP2 each element of a parameter is on the ranks of one place on "tp" once; a buffer is everywhere
        copies = (2 if split else 4) // (2 if options and name != "scale" else 1)
        assert (count == copies).all(), name


CUTS: list[tuple[tuple[int, ...], dict[str, Shard], Sizes]] = [
    ((7, 3), {"tp": Shard(0)}, {"tp": 4}),
    ((12, 5), {"tp": Shard(0, 3)}, {"tp": 2}),
    ((5, 14), {"tp": Shard(1, (8, 4, 2))}, {"tp": 2}),
    ((5, 13), {"tp": Shard(1, (7, 4, 2))}, {"tp": 2}),
    ((9, 10), {"a": Shard(0), "tp": Shard(1)}, {"a": 2, "tp": 3}),
    ((24, 2), {"a": Shard(0, 3), "tp": Shard(0, 3)}, {"a": 2, "tp": 2}),
    ((24, 2), {"a": Shard(0, (8, 16)), "tp": Shard(0, (8, 16))}, {"a": 2, "tp": 2}),
    ((6,), {"tp": Shard(0, 2)}, {"tp": 1}),
    ((), {}, {"tp": 2}),
    ((0, 4), {"tp": Shard(1)}, {"tp": 1}),
]


@pytest.mark.parametrize(("shape", "placements", "sizes"), CUTS)
def test_boxes_are_the_parts_that_build_cuts(shape: Any, placements: dict[str, Shard], sizes: Sizes) -> None:
    whole = torch.arange(int(np.prod(shape)), dtype=torch.float64).reshape(shape)
    count = torch.zeros(shape)
    for place in itertools.product(*(range(size) for size in sizes.values())):
        mesh: Any = SimpleNamespace(size=sizes.get, coordinate=dict(zip(sizes, place, strict=True)).get)
        cut = slicing.part_of(whole, placements, mesh)
        part = parts.part_of(cut, Fact(("w",), shape, placements), mesh)
        assert torch.equal(part.cut(whole), cut)
        for box in part.boxes:
            assert torch.equal(box.of_whole(whole), box.of_part(cut))
            box.of_whole(count).add_(1)
    assert (count == (1 if placements else 2)).all()


def test_dropout_goes_on_to_the_bit(on_ranks: Run, tmp_path: Path) -> None:
    sizes = {"dp": 2, "tp": 2}
    losses = on_ranks(4, trained_and_saved, tmp_path / "run", "noisy", sizes, {})
    found = on_ranks(4, loaded_elsewhere, 99, tmp_path / "run", "noisy", sizes, {})
    assert [one[1] for one in found] == [one[2] for one in losses]


class Drawing(nn.Module):
    """Holds a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator()


def _mesh(sizes: Sizes, place: dict[str, int]) -> Any:
    return SimpleNamespace(
        sizes=sizes, size=lambda axis: sizes.get(axis, 1), coordinate=lambda axis: place.get(axis, 0)
    )


def _seed(module: Drawing, seed: int) -> None:
    torch.manual_seed(seed)
    module.rng.manual_seed(seed + 100)
    random.seed(seed)
    np.random.seed(seed)


def _drawn(module: Drawing) -> tuple[float, ...]:
    own = torch.rand((), generator=module.rng)
    return float(torch.rand(())), float(own), random.random(), float(np.random.rand())


def _places(sizes: Sizes) -> list[dict[str, int]]:
    return [dict(zip(sizes, place, strict=True)) for place in itertools.product(*(range(n) for n in sizes.values()))]


@pytest.mark.parametrize(
    "loads", [{}, {"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"dp": 2}, {"dp": 4, "tp": 2}], ids=str
)
@pytest.mark.parametrize("saves", [{}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2}], ids=str)
def test_random_states_of_a_mesh_on_another(saves: Sizes, loads: Sizes) -> None:
    module, states, numbers = Drawing(), [], {}
    kept = random_state.process_state()
    try:
        for seed, place in enumerate(_places(saves)):
            _seed(module, seed)
            states.append(random_state.state_here(module, _mesh(saves, place) if saves else None))
            numbers[tuple(sorted(place.items()))] = _drawn(module)
        found = {}
        for place in _places(loads):
            _seed(module, 77)
            mesh = _mesh(loads, place) if loads else None
            random_state.set_state_here(module, mesh, random_state.axes_of(_mesh(saves, {})), states)
            found[tuple(sorted(place.items()))] = _drawn(module)
    finally:
        random_state.set_process_state(kept)
    same_mesh = sorted(saves.items()) == sorted(loads.items())
    for where, drawn in found.items():
        at = dict(where).get("dp", 0)
        if same_mesh:
            assert drawn == numbers[where]
            continue
        if at < saves.get("dp", 1) or "dp" not in saves:
            assert drawn == numbers[tuple(sorted((axis, at if axis == "dp" else 0) for axis in saves))]
        else:
            assert not {*drawn} & {number for one in numbers.values() for number in one}
        assert all(one == drawn for other, one in found.items() if dict(other).get("dp", 0) == at)
    places = loads.get("dp", 1) if "dp" in saves else 1
    assert len({one[0] for one in found.values()}) == (len(found) if same_mesh else places)


def test_ranks_that_drew_alike_still_do_where_there_are_more() -> None:
    module, saves, loads = Drawing(), {"dp": 2}, {"dp": 4}
    kept = random_state.process_state()
    try:
        _seed(module, 5)
        states = [random_state.state_here(module, _mesh(saves, place)) for place in _places(saves)]
        expected, found = _drawn(module), []
        for place in _places(loads):
            random_state.set_state_here(module, _mesh(loads, place), saves, states)
            found.append(_drawn(module))
    finally:
        random_state.set_process_state(kept)
    assert found == [expected] * 4
