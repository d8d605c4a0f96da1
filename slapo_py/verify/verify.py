"""`sch.verify()`: the original and the scheduled model side by side, on private copies."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from slapo_py.errors import ArgumentError, NoExampleInputs, VerificationError
from slapo_py.tracing.recorder import Inputs, normalize_inputs
from slapo_py.verify.blame import accused
from slapo_py.verify.compiled import code_forgotten
from slapo_py.verify.differences import BUG, UNCOVERED
from slapo_py.verify.place import calls_of, original_at
from slapo_py.verify.report import Report
from slapo_py.verify.scenarios import mixed_flags, scenarios
from slapo_py.verify.trial import Trial

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


def verify(sch: "Schedule", *, steps: int = 1, seed: int = 0) -> Report:
    """Run the original and the scheduled model on the same inputs, seeds and state, and grade every difference.

    Train and eval, with and without gradients, several batch sizes, micro-batches, dtypes, calls in a row, and `steps`
    optimizer steps. Compared are outputs, gradients of inputs and parameters, buffers, random states, names, ties,
    flags, and global state. A difference is held against the original in float64: it is rounding if its error is at
    most twice the original's own plus one unit in the last place. Nothing of the user's is touched.

    Returns: a report whose `grade` is "equal" or "rounding"; it prints as a table.
    Requires: example inputs; parameters with values (none on "meta").
    Raises: VerificationError, for a difference that is a bug; it names the module and the step. NoExampleInputs,
    ArgumentError.
    """
    with code_forgotten() as said:
        report = _verified(sch, steps, seed)
    report.notes += said
    return report


def _verified(sch: "Schedule", steps: int, seed: int) -> Report:
    where = f'verify at "{sch.path}"' if sch.path else "verify"
    _check(where, steps, seed)
    module, original = sch.module, original_at(sch, where)
    given = _example_inputs(sch, where)
    if sch.path:
        given = calls_of(sch, given, where)
    own = _dtype_of(original)
    report = Report(where)
    skipped = []
    for scenario in scenarios(given, steps, own, mixed_flags(original)):
        trial = Trial(original, scenario, seed, own)
        if trial.left_out and not scenario.derived:
            raise ArgumentError(
                f'{where}: the original does not run on the example inputs (scenario "{scenario.name}"): '
                f"{trial.left_out}. Give create_schedule(example_inputs=...) what the model is called with."
            )
        row = trial.row(module)
        if row is None:
            skipped.append(f'"{scenario.name}" was left out: {trial.left_out}.')
            continue
        report.rows.append(row)
        if row.grade == BUG:
            report.notes += skipped
            blame = accused(sch, trial, row, where)
            report.module, report.step = blame.module, blame.step
            raise _failed(report, blame.message)
    report.notes += skipped
    if all(row.grade == UNCOVERED for row in report.rows):
        raise _failed(
            report,
            f"{where}: the schedule covers none of the {len(report.rows)} scenarios, the example inputs included, so "
            f"nothing could be compared. {report.rows[0].note}. Create the schedule with example inputs of the kind "
            f"that the model is to run on.",
        )
    return report


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
