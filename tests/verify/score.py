"""How many planted faults verify finds, and names rightly; how often it is wrong about what is right."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import slapo_py as slapo
from slapo_py.errors import VerificationError
from tests.verify.faults import FAULTS, Fault
from tests.verify.lab import altering, inputs, lab
from tests.verify.rewrites import REWRITES, Rewrite


@dataclass
class Score:
    planted: int = 0
    caught: int = 0
    right_module: int = 0
    right_step: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.caught} of {self.planted} planted faults caught, {self.right_module} with the right module, "
        return "\n".join([text + f"{self.right_step} with the right step", *self.wrong])


def scheduled(fault: Fault) -> slapo.Schedule:
    """A schedule with innocent steps around the one that plants the fault, which is step 3."""
    sch = slapo.create_schedule(lab(), inputs())
    sch["layers.0.mix"].trace()
    sch["embed"].annotate("weight", "lr", 0.1)
    sch[fault.at].alter(fault.change)
    sch["layers.0.attn.k"].checkpoint()
    sch["head"].annotate("weight", "decay", 0.0)
    return sch


def score(faults: Sequence[Fault] = FAULTS) -> Score:
    """Verify each fault in a schedule of its own. `wrong` says what was missed or named wrongly."""
    result = Score(planted=len(faults))
    with altering():
        for fault in faults:
            try:
                report = scheduled(fault).verify()
                result.wrong.append(f"{fault.kind}: {fault.name}: not caught, graded {report.grade}")
                continue
            except VerificationError as error:
                report = error.report
                said = str(error)
            result.caught += 1
            result.right_module += report.module == fault.expected
            result.right_step += report.step == 3
            if (report.module, report.step) != (fault.expected, 3):
                result.wrong.append(f"{fault.kind}: {fault.name}: {said}")
    return result


@dataclass
class Alarms:
    """Of the right rewrites: the grades that they got, and what was taken for a bug."""

    grades: dict[str, int] = field(default_factory=dict)
    false: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        graded = ", ".join(f"{count} {grade}" for grade, count in sorted(self.grades.items()))
        return "\n".join([f"right rewrites: {graded}; {len(self.false)} false alarms", *self.false])


def alarms(rewrites: Sequence[Rewrite] = REWRITES, seeds: Sequence[int] = (0,)) -> Alarms:
    """Verify each right rewrite with weights, inputs and cotangents of each seed."""
    result = Alarms()
    with altering():
        for one in rewrites:
            for seed in seeds:
                sch = slapo.create_schedule(lab(seed), inputs(seed=seed))
                for place in one.at:
                    sch[place].alter(one.change)
                try:
                    grade = sch.verify(seed=seed).grade
                except VerificationError as error:
                    grade = "bug"
                    result.false.append(f"{one.name}, seed {seed}: {error}")
                result.grades[grade] = result.grades.get(grade, 0) + 1
    return result
