"""A rank that fails or is killed in `save` or `load`: all ranks raise, and what was saved before is whole."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from slapo_py.backends import folder
from slapo_py.backends.together import Together
from slapo_py.errors import CheckpointError
from tests import refusals
from tests.mesh import failing
from tests.mesh.conftest import Run
from tests.mesh.saving import content, engine_of, step_of
from tests.ranks import RankError, Ranks


def note(every: list[list[tuple[str, int]]]) -> None:
    """Remember the refusals that ranks have met."""
    refusals.met.update((file, line) for lines in every for file, line in lines)


SPACE = r"No space left on device"
SAVES: list[tuple[str, int, list[str]]] = [
    ("data", 1, [rf"save: rank 1: OSError: .*{SPACE}", rf"save: rank 1: OSError: .*{SPACE}"]),
    ("sync", 1, [rf"rank 1 can't, so no rank does. It says: .*{SPACE}.*, and is whole", rf"save: .*{SPACE}"]),
    ("rest", 0, [rf"save: .*{SPACE}", rf"save: rank 0 can't, so no rank does. It says: .*{SPACE}"]),
    ("folder", 0, [rf"save: .*{SPACE}", rf"save: rank 0 can't, so no rank does. It says: .*{SPACE}"]),
    (
        "lost",
        1,
        [
            r"save: a rank has written '__1_0.distcp', and rank 0 does not find it in .* that all ranks share",
            r"save: rank 0 can't, so no rank does. It says: .*a rank has written '__1_0.distcp'",
        ],
    ),
]


@pytest.mark.parametrize(("fault", "rank", "said"), SAVES, ids=[f"{one[0]} of rank {one[1]}" for one in SAVES])
def test_an_error_on_one_rank_in_save(fault: str, rank: int, said: list[str], on_ranks: Run, tmp_path: Path) -> None:
    found = on_ranks(2, failing.failing_save, tmp_path / "run", fault, rank, said)
    assert [step for _, step in found] == [1, 1]
    note([lines for lines, _ in found])
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


LOADS: list[tuple[str, int, list[str]]] = [
    (
        "scheduler",
        1,
        [
            r"load: rank 1 can't, so no rank does. It says: .*refuses its saved state \(ValueError: no\)",
            r"load: the optimizer or scheduler refuses its saved state \(ValueError: no\)",
        ],
    ),
    ("damage", 0, [r"load: .*the content of '__1_0.distcp' has changed", r"load: .*'__1_0.distcp' has changed"]),
]


@pytest.mark.parametrize(("fault", "rank", "said"), LOADS, ids=[one[0] for one in LOADS])
def test_an_error_on_one_rank_in_load(fault: str, rank: int, said: list[str], on_ranks: Run, tmp_path: Path) -> None:
    note(on_ranks(2, failing.failing_load, tmp_path / "run", fault, rank, said))


def test_all_ranks_name_one_folder(on_ranks: Run, tmp_path: Path) -> None:
    messages = [
        r"rank 1 was given '.*of rank 1' and rank 0 '.*of rank 0'. Give all ranks the same folder",
        r"rank 0 was given '.*of rank 0' and rank 1 '.*of rank 1'. Give all ranks the same folder",
    ]
    note(on_ranks(2, failing.other_folders, tmp_path, messages))


def test_what_lies_in_an_unknown_way_is_refused(on_ranks: Run, tmp_path: Path) -> None:
    message = r"save: the optimizer's 'rows' has shape \(12,\) for 'embed.weight', of which this rank holds \(12, 8\)"
    message = message.replace("12", r"1\d")
    note(on_ranks(2, failing.unknown_lying, tmp_path / "run", message))
    assert not (tmp_path / "run").exists()


def test_another_model_is_refused_by_all(on_ranks: Run, tmp_path: Path) -> None:
    message = r"was saved with scheduler None and this engine has StepLR"
    note(on_ranks(2, failing.another_model, tmp_path / "run", [message, message]))


GONE = "another rank has ended, or gives no answer .* load the last folder that was saved: it is whole"
# (in what, the function, its n-th call, the rank, the step that is found afterwards)
KILLS: list[tuple[str, Any, str, int, int, int]] = [
    ("save", dcp.FileSystemWriter, "write_data", 1, 1, 1),
    ("save", folder, "_sync", 1, 1, 1),
    ("save", folder, "_replace", 1, 0, 1),
    ("save", os, "rename", 3, 0, 2),  # torch's own first; between the two renames, the new one is whole
    ("load", dcp.FileSystemReader, "read_data", 1, 1, 1),
]


def test_a_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*arguments: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_gather_object", closed)
    together = Together(None)
    together.alone, together.ranks = False, 2
    with pytest.raises(CheckpointError, match=r"load: another rank has ended, or gives no answer \(Connection closed"):
        together.agreed(lambda: 1, "load")
    with pytest.raises(CheckpointError, match=r"there is no folder"):
        together.agreed(lambda: folder.find("nowhere"), "load")


@pytest.mark.parametrize(
    ("doing", "owner", "name", "nth", "rank", "step"),
    [KILLS[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in KILLS[1:])],
    ids=[f"{one[0]}, {one[2]} of rank {one[4]}" for one in KILLS],
)
def test_a_rank_is_killed(
    doing: str, owner: Any, name: str, nth: int, rank: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "grace", 30.0)  # the others have to end by themselves
    (tmp_path / "world").mkdir()
    (tmp_path / "said").mkdir()
    directory = tmp_path / "runs" / "run"
    with Ranks(2, tmp_path / "world") as world, pytest.raises(RankError, match=f"Rank {rank} of 2: .* ended without"):
        world.run(failing.killed, directory, doing, owner, name, nth, rank, tmp_path / "said", timeout=120)
    said = json.loads((tmp_path / "said" / f"{1 - rank}.json").read_text(encoding="utf-8"))
    assert re.search(f"{doing}: {GONE}", said["message"])
    note([[(file, line) for file, line in said["lines"]]])
    engine = engine_of("tiny", None)
    engine.load(directory)
    assert engine.step_count == step
    step_of(engine, "tiny", step)
    engine.save(directory)
    assert [one.name for one in directory.parent.iterdir()] == ["run"]
    assert {f"optimizer/embed.weight/{key}" for key in ("exp_avg", "exp_avg_sq", "step")} <= {*content(directory)}
