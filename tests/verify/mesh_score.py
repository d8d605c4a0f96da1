"""How many planted faults of schedules on a mesh the checker finds, verify on simulated ranks, and verify on ranks.

`pytest -m slow tests/verify/test_mesh_score.py` prints the table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import slapo_py as slapo
from slapo_py.errors import VerificationError
from tests.layouts.test_check import FAULTS
from tests.verify.mesh_faults import MESH_FAULTS

MESH = {"tp": 2}


@dataclass(frozen=True)
class Planted:
    """A schedule with a fault, and the module and the step that verify is to name; step None where there is none."""

    name: str
    schedule: Callable[[], slapo.Schedule]
    module: str
    step: str | None


@dataclass(frozen=True)
class Found:
    """What one look at a fault gave. checker: its messages. simulated, ranks: the module and step that are named."""

    planted: Planted
    checker: list[str]
    simulated: tuple[str | None, str | None] | None
    ranks: tuple[str | None, str | None] | None

    @property
    def expected(self) -> tuple[str, str | None]:
        return self.planted.module, self.planted.step

    def __str__(self) -> str:
        marks = [_mark(one, self.expected) for one in (self.simulated, self.ranks)]
        return f"{self.planted.name:50} {'yes' if self.checker else 'NO':9}{marks[0]:24}{marks[1]}"


def _mark(found: tuple[str | None, str | None] | None, expected: tuple[str, str | None]) -> str:
    if found is None:
        return "NO"
    wrong = [what for what, one, other in zip(("module", "step"), found, expected) if one != other]
    return "yes" if not wrong else f"yes, other {' and '.join(wrong)}"


_DOWN, _UP = 'sch["down"].shard("weight", dim="in")', 'sch["up"].shard("weight", "bias", dim="out")'
_MORE: dict[str, tuple[str, str | None]] = {
    "x + 1 on a partial sum": ("down", _DOWN),
    "dropout on a partial sum": ("down", _DOWN),
    "a literal size that belongs to no attribute": ("", _UP),
    "doubled gradient after an all-gather": (
        "up", 'sch["up"].sync("output", value="all_gather", grad="reduce_scatter", dim=2)',
    ),
    "bias added p times": ("", 'sch.sync("output", value="all_reduce")'),
    "split bias of a product that is summed": ("down", 'sch["down"].shard("bias", dim=0)'),
    "a shard that is missing": ("model.layers.1.self_attn", None),
    "tied pair at one end": ("lm_head", None),
    "heads do not divide": ("up", _UP),
    "batch norm split over the batch": ("norm", 'sch.sync("input", value="split", dim=0)'),
    "divided and whole": ("drop", 'sch["drop"].configure(size=slapo.per_rank("tp"))'),
}  # fmt: skip
"""Of the checker's faults, those that are not among `MESH_FAULTS`, and what is to be named."""

PLANTED = (
    *(Planted(one.name, one.schedule, one.module, one.step) for one in MESH_FAULTS),
    *(Planted(name, FAULTS[name][0], module, step) for name, (module, step) in _MORE.items()),
)


def look(planted: Planted) -> Found:
    """Ask all three."""
    checker = [one.message for one in planted.schedule().check("tp")]
    return Found(planted, checker, named(planted.schedule(), simulate=True), named(planted.schedule(), simulate=False))


def named(sch: slapo.Schedule, simulate: bool) -> tuple[str | None, str | None] | None:
    """The module and the step that verify names; None where it finds nothing."""
    try:
        sch.verify(mesh=MESH, simulate=simulate)
    except VerificationError as error:
        report = error.report
        assert report.grade == "bug"
        return report.module, str(sch.history[report.step - 1]) if report.step else None
    return None


@dataclass(frozen=True)
class Score:
    """Of all planted faults: how many each has caught, and how many of those verify names rightly."""

    planted: int
    caught: tuple[int, int, int]
    right_module: tuple[int, int]
    right_step: tuple[int, int]

    def __str__(self) -> str:
        checker, *both = (f"{one} of {self.planted}" for one in self.caught)
        named = [
            f"{one} ({module} with the right module, {step} with the right step)"
            for one, module, step in zip(both, self.right_module, self.right_step, strict=True)
        ]
        return f"{checker} by the checker, {named[0]} by verify on simulated ranks, {named[1]} by verify on ranks"


def score(found: Sequence[Found]) -> Score:
    """The sums."""
    both = [[one.simulated for one in found], [one.ranks for one in found]]
    caught = [sum(one is not None for one in ones) for ones in both]
    expected = [one.expected for one in found]
    modules, steps = (
        [sum(one is not None and one[what] == due[what] for one, due in zip(ones, expected)) for ones in both]
        for what in (0, 1)
    )
    checker = sum(bool(one.checker) for one in found)
    return Score(len(found), (checker, *caught), tuple(modules), tuple(steps))  # type: ignore[arg-type]


def table(found: Sequence[Found]) -> str:
    """A line for each fault, and the sums."""
    head = f"{'fault':50} {'checker':9}{'verify, simulated':24}verify on ranks"
    return "\n".join([head, *map(str, found), str(score(found))])
