"""Law 8: replay is identity. Shown on random legal schedules that use every primitive."""

import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import slapo_py as slapo
from slapo_py import History
from tests.laws import steps
from tests.laws.random_schedules import MODELS, WEIGHTS, Call, Made, apply, outcome, reset, sequences, start
from tests.laws.witness import form
from tests.running import differences

ROOT = Path(__file__).parents[1]
EACH = 90
"""Examples of each model; a few of them turn out to be the same."""

# Dynamo looks at .grad of whatever a compiled module is called with.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    with steps.registered():
        yield


@functools.cache
def explored(name: str, folder: Path) -> tuple[list[Made], Counter[str]]:
    """Draw schedules of one model, check each in this process, and keep them for the next one."""
    model = MODELS[name]
    schedule = start(model)
    made: dict[History, Made] = {}
    tally: Counter[str] = Counter()

    @settings(
        max_examples=EACH,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(sequence=sequences(model), back=st.integers(1, 8))
    def explore(sequence: list[Call], back: int) -> None:
        sch = reset(schedule)
        tally["refused"] += apply(sch, sequence)
        tally["accepted"] += len(sch.history)
        history, printed = sch.history, str(sch)
        if not len(history) or history in made:
            return
        drawn = form(sch)
        made[history] = Made(name, history, printed, outcome(sch, model))

        history.save(folder / "h.json")
        loaded = History.load(folder / "h.json", allow=("tests",))
        assert loaded == history
        assert str(loaded) == str(history)
        assert hash(loaded) == hash(history)

        scope: dict[str, Any] = {}
        exec(str(history), scope)
        scope["schedule"](reset(sch))
        assert form(sch) == drawn
        assert differences(outcome(sch, model), made[history].result) == []

        k = min(back, len(history))
        sch.undo(k)
        assert sch.history == history[:-k]
        undone = form(sch)
        loaded[:-k].replay(reset(sch))
        assert form(sch) == undone

    explore()
    return list(made.values()), tally


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedules")


@pytest.mark.parametrize("name", MODELS)
def test_random_schedules_in_this_process(name: str, folder: Path) -> None:
    made, tally = explored(name, folder)
    print(f"{name}: {len(made)} schedules, {tally['accepted']} steps accepted and {tally['refused']} refused")
    assert len(made) > EACH * 0.7
    assert tally["accepted"] > tally["refused"]  # most of what is drawn is legal


def test_random_schedules_in_a_fresh_process(folder: Path) -> None:
    made = [one for name in MODELS for one in explored(name, folder)[0]]
    used = Counter(primitive for one in made for primitive in {step.primitive for step in one.history})
    assert len(made) >= 200
    assert {name: used[name] for name in slapo.list_primitives() if used[name] < 10} == {}
    assert set(WEIGHTS) == set(slapo.list_primitives())  # a new primitive is drawn, too
    for number, one in enumerate(made):
        one.history.save(folder / f"{number}.json")
    torch.save([(one.model, one.printed, one.result) for one in made], folder / "expected.pt")
    done = subprocess.run(
        [sys.executable, "-m", "tests.laws.replay_all", str(folder)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"replayed {len(made)}\n"
