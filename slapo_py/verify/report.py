"""What verify found, as a value and as a table."""

from dataclasses import dataclass, field
from typing import Any

from slapo_py.snapshot import random_states_kept
from slapo_py.verify.differences import BUG, EQUAL, ROUNDING, Difference


@dataclass(frozen=True)
class Row:
    """One scenario: its grade, how many things were compared, and those that differ, the worst first."""

    scenario: str
    grade: str
    compared: int
    differences: tuple[Difference, ...] = ()
    note: str = ""

    @property
    def worst(self) -> float:
        """The largest error, as a share of what is allowed."""
        return max((one.ratio for one in self.differences), default=0.0)


@dataclass
class Report:
    """The result of `verify`: `grade` is "equal" or "rounding" ("bug" in the report of a VerificationError).

    `module` and `step` are what a bug was traced to, where it could be.
    """

    what: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    module: str | None = None
    step: int | None = None

    @property
    def grade(self) -> str:
        grades = {row.grade for row in self.rows}
        return next((grade for grade in (BUG, ROUNDING) if grade in grades), EQUAL)

    def _table(self) -> Any:
        from slapo_py.report.tables import table

        rows = [
            (row.scenario, row.grade, row.compared, len(row.differences) or None, _percent(row.worst))
            for row in self.rows
        ]
        columns = ("", "grade", "compared", "differ", "of the allowed error")
        return table(f"{self.what}: {self.grade}", columns, rows)

    def __rich__(self) -> Any:
        with random_states_kept():  # importing rich draws from Python's random state
            from rich.console import Group
            from rich.text import Text

            return Group(self._table(), *(Text(note) for note in self._remarks()))

    def __str__(self) -> str:
        with random_states_kept():
            from slapo_py.report.tables import plain

            return plain(self._table()) + "".join(f"{note}\n" for note in self._remarks())

    def _remarks(self) -> list[str]:
        return [*(f"{row.scenario}: {row.note}" for row in self.rows if row.note), *self.notes]

    def __repr__(self) -> str:
        return f"<Report of {self.what}: {self.grade}, {len(self.rows)} scenarios>"


def _percent(share: float) -> str | None:
    return f"{100 * share:.0f} %" if share else None
