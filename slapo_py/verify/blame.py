"""Who is to blame for a bug: the first module that diverges, and the step of the history that made it so."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from slapo_py.codec import Source
from slapo_py.errors import ScheduleError
from slapo_py.history import History
from slapo_py.scheduled import bare
from slapo_py.verify.culprit import first_module
from slapo_py.verify.differences import BUG, Difference
from slapo_py.verify.report import Row
from slapo_py.verify.trial import Trial
from slapo_py.verify.world import kept

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


@dataclass(frozen=True)
class Blame:
    """`module`: its path, seen from the whole model. `step`: its number in the history, from 1."""

    module: str | None
    step: int | None
    message: str


def accused(sch: "Schedule", trial: Trial, row: Row, where: str) -> Blame:
    """Run the one scenario again: with hooks on every module, then on shorter and shorter histories."""
    inner = _module(sch, trial, row)
    module = None if inner is None else ".".join(part for part in (sch.path, inner) if part)
    step, why = _step(sch, trial)
    return Blame(module, step, _message(sch, row, where, module, step, why))


GRADIENT = "gradient of the parameter"

# The module


def _module(sch: "Schedule", trial: Trial, row: Row) -> str | None:
    """The first module that diverges, seen from the place."""
    probed = trial.with_probes()
    if probed.old.error is not None:
        return _owner(trial.original, row.differences[0])
    new = probed.run(sch.module)
    bugs = [one.key.name for one in row.differences if one.grade == BUG and one.key and one.key.kind == GRADIENT]
    several = tied(
        trial.original
    )  # whose gradient comes from several places, and says little about where it went wrong
    parameters = [name for name in bugs if name not in several] or bugs
    found = probed.differences(new, lambda result: result.probed)
    culprit = first_module(probed.old.probed, new.probed, found, parameters)
    if culprit is not None:
        return culprit
    return new.raised_in if new.error is not None else _owner(trial.original, row.differences[0])


def tied(module: nn.Module) -> set[str]:
    """The names of parameters that have several names."""
    names: dict[int, list[str]] = {}
    for name, one in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    return {name for several in names.values() if len(several) > 1 for name in several}


def _owner(original: nn.Module, found: Difference) -> str | None:
    """The module that holds what a fact is about: a parameter, a buffer, a flag."""
    if found.key is None or found.key.kind in ("output", "random state of", "global state"):
        return None
    name = found.name or found.key.name
    if not name:
        return None
    modules = {path for path, _ in original.named_modules(remove_duplicate=False)}
    return name if found.key.kind == "training flag" else _nearest(name.rpartition(".")[0], modules)


def _nearest(path: str, known: set[str]) -> str:
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path


# The step


def _step(sch: "Schedule", trial: Trial) -> tuple[int | None, str]:
    """The number of the step after which the scenario is a bug and before which it isn't, or why there is none."""
    history = sch.history
    if not history:
        return None, "The history has no steps: the scheduled model was changed by hand."
    try:
        if not _is_bad(sch, trial, history):
            return None, "Replaying the history doesn't show it: the scheduled model was also changed by hand."
        low, high = 0, len(history)  # the first `low` steps are good, the first `high` are bad
        if _is_bad(sch, trial, history[:0]):
            return None, "It shows without any step, too: the original is not the model that it was when it was cloned."
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if _is_bad(sch, trial, history[:middle]) else (middle, high)
    except ScheduleError as error:
        return None, f"Which step made it so can't be said: {error}"
    return high, ""


def _is_bad(sch: "Schedule", trial: Trial, steps: History) -> bool:
    with kept():
        other = sch.root.fresh()
        steps.replay(other)
    module = other.root.find(sch.path)
    row = trial.row(module) if module is not None else None
    return row is not None and row.grade == BUG


# The words


def _message(sch: "Schedule", row: Row, where: str, module: str | None, step: int | None, why: str) -> str:
    text = diverging(sch, row, where, module)
    if step is None:
        return f"{text} {why} error.report has all that was compared."
    written = sch.history[step - 1].source(Source())
    back = len(sch.history) - step + 1
    text += f" It comes with step {step}: {written}; the steps before it are right."
    text += f" Correct that step, or take it back with sch.undo({back}); error.report has all that was compared."
    return text


def diverging(sch: "Schedule", row: Row, where: str, module: str | None) -> str:
    """What differs most, and the first module that diverges."""
    first, others = row.differences[0], sum(one.grade == BUG for one in row.differences) - 1
    text = f'{where}: in the scenario "{row.scenario}", {said(first)}.'
    if others:
        text += f" {others} more differ in this scenario."
    if module is not None:
        there = sch.root.find(module) or sch.root.find(module, within=sch.root.original) or sch.root.original
        kind = bare(there).__name__
        at = f'"{module}" ({kind})' if module else f"the whole model ({kind}), outside of its children"
        text += f" The first module that diverges is {at}."
    return text


def said(found: Difference) -> str:
    """A difference as half a sentence."""
    if found.key is None:
        return found.why
    kind, name, call = found.key
    after = f" after call {call}" if call > 1 else ""
    by = f" (off by {found.error:.3g}, allowed is {found.allowed:.3g})" if found.error else ""
    return f"the {kind}{' ' + name if name else ''}{after} {found.why}{by}"
