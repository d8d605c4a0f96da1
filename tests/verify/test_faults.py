"""What verify must find, and what it must not take for a bug."""

from collections import Counter

import pytest

from slapo_py.errors import VerificationError
from tests.verify.faults import FAULTS, Fault
from tests.verify.lab import altering
from tests.verify.rewrites import REWRITES, Rewrite
from tests.verify.score import alarms, scheduled, score

QUICK = {fault.kind: fault for fault in reversed(FAULTS)}
"""The first fault of each kind; the others are slow."""


@pytest.mark.parametrize("fault", QUICK.values(), ids=lambda one: one.name)
def test_a_planted_fault_is_found_and_named(fault: Fault) -> None:
    with altering():
        sch = scheduled(fault)
        with pytest.raises(VerificationError, match=r"It comes with step 3: sch.*alter\(") as caught:
            sch.verify()
    report = caught.value.report
    assert report.grade == "bug"
    assert (report.module, report.step) == (fault.expected, 3)


def test_each_kind_has_at_least_two_faults() -> None:
    kinds = Counter(fault.kind for fault in FAULTS)
    assert len(kinds) == 11
    assert min(kinds.values()) >= 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_score(capsys: pytest.CaptureFixture[str]) -> None:
    found = score()
    with capsys.disabled():
        print(f"\n{found}")
    assert (found.planted, found.caught, found.right_module, found.right_step) == (60, 60, 60, 60)


@pytest.mark.parametrize("rewrite", REWRITES[::4], ids=lambda one: one.name)
def test_a_right_rewrite_is_no_bug(rewrite: Rewrite) -> None:
    found = alarms([rewrite])
    assert not found.false
    assert found.grades == {"rounding": 1}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_false_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    found = alarms(seeds=range(4))
    with capsys.disabled():
        print(f"\n{found}")
    assert not found.false
    assert sum(found.grades.values()) == 4 * len(REWRITES) == 60
