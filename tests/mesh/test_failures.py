"""A rank that raises or is killed: the others say who it was and end, and what was saved before can be gone on with."""

from pathlib import Path

import pytest

from slapo_py.distributed import failures
from slapo_py.errors import RankError
from tests.mesh import dying
from tests.mesh.conftest import Run
from tests.ranks import Ranks

QUICK = [("forward", "raise"), ("forward", "kill")]
EVERY = [(place, how) for place in dying.PLACES for how in ("raise", "kill")]
AGREED = {"count"}
"""Where ranks ask each other before they go on: there the others raise at once."""


def cases() -> list[object]:
    return [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in EVERY if one not in QUICK)]


@pytest.mark.parametrize(("place", "how"), cases())
def test_the_others_end(place: str, how: str, on_ranks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "grace", 60.0)  # nobody ends the others but they themselves
    directory = tmp_path / "run"
    found = r"Rank 1 of 2: Traceback[\s\S]*ValueError: planted"
    if how == "kill":
        found = r"Rank 1 of 2: the process ended without an answer \(killed by SIGKILL\)"
    elif place in AGREED:
        found = r"Rank 0 of 2: [\s\S]*rank 1 can't take its batch, so no rank does. It says: ValueError: planted"
    with Ranks(2, tmp_path, timeout=200) as world:
        processes = list(world._processes)
        with pytest.raises(RankError, match=found) as caught:
            world.run(dying.fail, place, how, directory, tmp_path, True)
        statuses = [process.ended(0) for process in processes]
    said = {one.suffix: one.read_text(encoding="utf-8") for one in tmp_path.glob("0.*")}
    if how == "kill":  # the others raise; or end, where they were about to connect to it
        assert "slapo_py: rank 1 was killed, or has ended" in said.get(".txt", said[".err"])
    elif place not in AGREED:
        assert isinstance(caught.value.__cause__, ValueError)
        assert statuses[0] == failures.WAITED
        call = next((one for one in ("build", "save", "load", "eval_step") if one in place), "train_step")
        message = f"slapo_py: rank 1 failed in {call}: ValueError: planted. Rank 0 waits for it in "
        assert message in said[".err"]
    assert on_ranks(2, dying.losses, directory) == [one[1:] for one in on_ranks(2, dying.losses, None)]


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_that_all_raise_go_on(slow: int, on_ranks: Run) -> None:
    first, second = on_ranks(2, dying.all_raise_and_go_on, slow)
    assert first == second
    expected = on_ranks(2, dying.losses, None)[0]
    assert list(first) == expected[:2]


def test_a_rank_that_goes_on_is_waited_for(on_ranks: Run) -> None:
    assert on_ranks(2, dying.one_raises_and_goes_on) == [3, 2]


def test_ranks_that_are_in_different_calls_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "grace", 60.0)
    with Ranks(2, tmp_path, timeout=200) as world:
        processes = list(world._processes)
        with pytest.raises(RankError, match="the process ended without an answer|its process is gone"):
            world.run(dying.elsewhere, tmp_path)
        statuses = [process.ended(10) for process in processes]
    assert failures.WAITED in statuses
    said = {rank: (tmp_path / f"{rank}.err").read_text(encoding="utf-8") for rank in (0, 1)}
    there = "every rank has to make the same calls, in the same order"
    expected = (
        f"slapo_py: rank 1 is in train_step: {there}. Rank 0 waits for it in the end of the script, and ends",
        f"slapo_py: rank 0 is in the end of the script: {there}. Rank 1 waits for it in train_step, and ends",
    )
    assert any(message in said[rank] for rank, message in enumerate(expected))


def test_how_long_it_takes() -> None:
    """The times are set so that the others end within 30 s."""
    assert failures.PATIENCE + 2 * failures._LOOK + failures._SEARCH < 30
