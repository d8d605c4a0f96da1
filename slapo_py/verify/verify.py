"""`sch.verify()`: the original and the scheduled model side by side, on private copies."""

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from slapo_py.errors import ArgumentError, NoExampleInputs, VerificationError
from slapo_py.layouts.checking.axes import used_axes
from slapo_py.tracing.recorder import Inputs, normalize_inputs
from slapo_py.verify.blame import Blame, accused
from slapo_py.verify.compiled import code_forgotten
from slapo_py.verify.differences import BUG, UNCOVERED
from slapo_py.verify.on_mesh import OnMesh, sizes_of
from slapo_py.verify.on_ranks import OnRanks
from slapo_py.verify.place import calls_of, original_at
from slapo_py.verify.report import Report, Row
from slapo_py.verify.scenarios import Scenario, mixed_flags, scenarios
from slapo_py.verify.trial import Trial

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


def verify(
    sch: "Schedule",
    *,
    steps: int = 1,
    seed: int = 0,
    mesh: Mapping[str, int] | None = None,
    simulate: bool = False,
) -> Report:
    """Run the original and the scheduled model on the same inputs, seeds and state, and grade every difference.

    Train and eval, with and without gradients, several batch sizes, micro-batches, dtypes, calls in a row, and `steps`
    optimizer steps. Compared are outputs, gradients of inputs and parameters, buffers, random states, names, ties,
    flags, and global state. A difference is held against the original in float64: it is rounding if its error is at
    most twice the original's own plus one unit in the last place. Nothing of the user's is touched.

    mesh, simulate: `mesh={"tp": 2}` builds the schedule on two processes of this machine, over gloo, with the
    collectives that it has and no others; every rank is held against the original, and parts are joined first. Dropout
    draws one mask for all ranks. Lower precision is left out. On "dp" each rank has its rows of the batch. With
    `simulate=True` the ranks of one axis run in lock step in this process instead. An axis of one rank is left out;
    without axes this is the verification without a mesh. An axis that no step uses is refused, but for "dp".

    Returns: a report whose `grade` is "equal" or "rounding"; it prints as a table.
    Requires: example inputs; parameters with values (none on "meta").
    Raises: VerificationError, for a difference that is a bug; it names the module and the step. RankError, where a
    rank can't build, was killed or gives no answer in time. NoExampleInputs, ArgumentError.
    """
    with code_forgotten() as said:
        report = _verified(sch, steps, seed, mesh, simulate)
    report.notes += said
    return report


def _verified(sch: "Schedule", steps: int, seed: int, mesh: Mapping[str, int] | None, simulate: bool) -> Report:
    where = f'verify at "{sch.path}"' if sch.path else "verify"
    _check(where, steps, seed)
    sizes, original = sizes_of(sch, where, mesh, simulate), original_at(sch, where)
    given = _example_inputs(sch, where)
    if sch.path:
        given = calls_of(sch, given, where)
    side: OneDevice | OnMesh = OneDevice(sch)
    if sizes:
        side = OnMesh(sch, sizes) if simulate else OnRanks(sch, sizes, where)
    with contextlib.closing(side):
        return _report(side, original, given, steps, seed, where)


def _report(
    side: "OneDevice | OnMesh", original: nn.Module, given: list[Inputs], steps: int, seed: int, where: str
) -> Report:
    own = _dtype_of(original)
    report = Report(f"{where} {side}".strip(), notes=side.notes())
    skipped = []
    for scenario in scenarios(given, steps, own, mixed_flags(original)):
        if not side.takes(scenario):
            continue
        trial = Trial(original, scenario, seed, own)
        if trial.left_out and not scenario.derived:
            raise ArgumentError(
                f'{where}: the original does not run on the example inputs (scenario "{scenario.name}"): '
                f"{trial.left_out}. Give create_schedule(example_inputs=...) what the model is called with."
            )
        row = side.row(trial)
        if row is None:
            skipped.append(f'"{scenario.name}" was left out: {side.left_out(trial)}.')
            continue
        report.rows.append(row)
        if row.grade == BUG:
            report.notes += skipped
            blame = side.blame(trial, row, report.what)
            report.module, report.step = blame.module, blame.step
            raise _failed(report, blame.message)
    report.notes += skipped
    if side.refused():
        raise _failed(
            report, f"{report.what}: no scenario shows a difference, and build refuses the schedule. {side.refused()}"
        )
    if all(row.grade == UNCOVERED for row in report.rows):
        raise _failed(
            report,
            f"{where}: the schedule covers none of the {len(report.rows)} scenarios, the example inputs included, so "
            f"nothing could be compared. {report.rows[0].note}. Create the schedule with example inputs of the kind "
            f"that the model is to run on.",
        )
    return report


class OneDevice:
    """The scheduled side of a verification as it runs on one device."""

    def __init__(self, sch: "Schedule") -> None:
        self.sch = sch

    def __str__(self) -> str:
        return ""

    def notes(self) -> list[str]:
        """What a reader of the report should know."""
        axes = used_axes(self.sch.root)
        if not axes:
            return []
        sizes = ", ".join(f'"{axis}": 2' for axis in axes)
        return [
            f"One device: what the schedule says of {' and '.join(map(repr, axes))} was not run. "
            f"verify(mesh={{{sizes}}}) runs it."
        ]

    def close(self) -> None:
        """Nothing is left to be ended."""

    def refused(self) -> str:
        """Why a build would refuse the schedule."""
        return ""

    def takes(self, scenario: Scenario) -> bool:
        """Whether it is run."""
        return True

    def row(self, trial: Trial) -> Row | None:
        """The grade of a scenario, or None where even the original can't run it."""
        return trial.row(self.sch.module)

    def left_out(self, trial: Trial) -> str:
        """Why a scenario has no grade."""
        return trial.left_out

    def blame(self, trial: Trial, row: Row, where: str) -> Blame:
        """Who is to blame for a bug in a scenario."""
        return accused(self.sch, trial, row, where)


def _failed(report: Report, message: str) -> VerificationError:
    error = VerificationError(message)
    error.report = report
    return error


def _check(where: str, steps: int, seed: int) -> None:
    for name, value in (("steps", steps), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ArgumentError(f"{where}: {name} must be a whole number, 0 or more; found {value!r}.")


def _example_inputs(sch: "Schedule", where: str) -> list[Inputs]:
    given = normalize_inputs(sch.root.example_inputs)
    if not given:
        raise NoExampleInputs(
            f"{where}: needs to know what the model is called with, and the schedule has no example inputs. Write "
            f"create_schedule(model, example_inputs=...)."
        )
    for tensor in [*sch.root.original.parameters(), *sch.root.original.buffers()]:
        if tensor.is_meta:
            raise ArgumentError(
                f"{where}: the model is on device 'meta', so it computes no numbers that could be compared. Verify the "
                f"schedule on a small model of the same kind with weights, or give this one weights first: "
                f"model.to_empty(device='cpu'), then model.load_state_dict(...)."
            )
    return given


def _dtype_of(module: nn.Module) -> torch.dtype:
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            return tensor.dtype
    return torch.get_default_dtype()
