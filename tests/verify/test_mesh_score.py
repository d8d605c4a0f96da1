"""The score: what the checker finds of the planted faults of schedules on a mesh, and what verify finds without it."""

import pytest

from tests.layouts.test_check import FAULTS
from tests.verify.mesh_score import PLANTED, look, score, table

QUICK = ("bias added p times", "divided and whole")
"""On small models; the others are slow."""


@pytest.mark.usefixtures("lent_ranks")
@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_caught_by_all_three(name: str) -> None:
    (planted,) = [one for one in PLANTED if one.name == name]
    found = look(planted)
    assert found.checker and found.simulated == found.ranks == found.expected
    assert str(found).split() == [*name.split(), "yes", "yes", "yes"]


def test_every_kind_of_fault_is_planted() -> None:
    """The checker's tests have some under another name."""
    names = {one.name for one in PLANTED}
    assert len(names) == len(PLANTED) == 27
    same = {
        "doubled forward", "doubled backward", "gradient of a whole parameter", "summed gradient after an all-gather",
        "split gradient where reduce-scatter is due", "norm gradient under sequence parallelism", "wrong shard dim",
    }  # fmt: skip
    assert set(FAULTS) - names == same


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("lent_ranks")
def test_the_score(capsys: pytest.CaptureFixture[str]) -> None:
    found = [look(one) for one in PLANTED]
    with capsys.disabled():
        print(f"\n{table(found)}")
    result = score(found)
    assert (result.planted, result.caught) == (27, (27, 27, 27))
    assert (result.right_module, result.right_step) == ((27, 27), (24, 24))
