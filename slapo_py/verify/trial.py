"""One scenario on both models, and its grade."""

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slapo_py.build.materialize import materialize
from slapo_py.clone import clone
from slapo_py.errors import GuardError
from slapo_py.verify import noise
from slapo_py.verify.differences import BUG, EQUAL, ROUNDING, UNCOVERED, Difference, Scale, suspects
from slapo_py.verify.probes import Probes
from slapo_py.verify.report import Row
from slapo_py.verify.run import Plan, ProbeKind, Result, run
from slapo_py.verify.scenarios import Scenario
from slapo_py.verify.state import dropped
from slapo_py.verify.world import alone

NOISE_RUNS = 6
UNSTABLE_RUNS = 30
"""Where the original differs from itself, by who knows how much. A right schedule is off by more than twice the largest
of n + 1 equally drawn errors once in about 2 ** (n + 1) * (n + 2) times: 1 in 1000, of many values, for 6 runs; 1 in
7e10 for 30."""
Table = Callable[[Result], dict[Any, Any]]


def private(module: nn.Module) -> nn.Module:
    """A copy that shares nothing with the module."""
    return materialize(clone(module))


class Trial:
    """One scenario. The original's runs are kept, so that several schedules can be held against them."""

    def __init__(self, original: nn.Module, scenario: Scenario, seed: int, own: torch.dtype) -> None:
        self.original, self.scenario, self.own = original, scenario, own
        self.plan = Plan(scenario, seed)
        self.probes: ProbeKind | None = None
        self._noisy: dict[int, Result] = {}
        self.unstable: set[object] = set()
        """What differs between two runs of the original itself."""

    def run(self, module: nn.Module, **options: object) -> Result:
        """The scenario on a private copy of a module; what it leaves behind is put back."""
        with alone():
            return run(private(module), self.original, self.plan, probes=self.probes, **options)  # type: ignore[arg-type]

    @functools.cached_property
    def old(self) -> Result:
        return self.run(self.original)

    @functools.cached_property
    def again(self) -> Result:
        """A second run of the original, as right as the first: how far they differ, nobody can ask of a schedule."""
        return self.run(self.original)

    @functools.cached_property
    def exact(self) -> Result:
        """The reference: the original in float64."""
        mode = functools.partial(noise.Exact, self.dtype)
        return self.run(self.original, prepare=noise.double_module, change=noise.doubled, around=mode)

    def noisy(self, seed: int) -> Result:
        """A run of the original that is as right as its own."""
        if seed not in self._noisy:
            self._noisy[seed] = self.run(
                self.original,
                prepare=functools.partial(noise.perturb_parameters, seed=seed),
                change=noise.perturb_input(seed),
                around=functools.partial(noise.Noisy, seed, self.scenario.autocast),
            )
        return self._noisy[seed]

    @property
    def dtype(self) -> torch.dtype:
        return self.scenario.dtype or self.own

    @property
    def unit(self) -> torch.dtype:
        """The dtype whose unit in the last place counts."""
        return self.scenario.autocast or self.dtype

    def with_probes(self, kind: ProbeKind = Probes) -> "Trial":
        """The same trial with hooks on every module."""
        other = Trial(self.original, self.scenario, self.plan.seed, self.own)
        other.probes = kind
        return other

    def differences(self, new: Result, table: Table = lambda one: one.seen) -> list[Difference]:
        """All that differs between the original's run and another one, graded."""
        old_seen, new_seen = table(self.old), table(new)
        found = suspects(old_seen, new_seen)
        if not found:
            return []
        self.unstable = {one.key for one in suspects(old_seen, table(self.again))}
        found = [one for one in found if one.key not in self.unstable or one.may_be_rounding]
        return self._graded(found, old_seen, new_seen, table)

    def _graded(self, found: list[Difference], old: Any, new: Any, table: Table) -> list[Difference]:
        """Differences of values alone are held against the reference, with as many noise runs as it takes."""
        pending = [one for one in found if one.may_be_rounding]
        if not pending:
            return found
        exact = {} if self.exact.error is not None else table(self.exact)
        scales = {
            one.key: Scale(one, old[one.key], new[one.key], exact.get(one.key), _coarser(self.unit, old[one.key]))
            for one in pending
        }
        graded = {key: scale.graded() for key, scale in scales.items()}
        for seed in range(UNSTABLE_RUNS):
            settled = set() if seed < NOISE_RUNS else graded.keys() - self.unstable
            doubtful = [key for key, one in graded.items() if one.grade == BUG and key not in settled]
            if not doubtful:
                break
            run = self.noisy(seed)
            for key in doubtful if run.error is None else ():
                scales[key].weigh_in(table(run).get(key))
                graded[key] = scales[key].graded()
        return [graded.get(one.key, one) for one in found]

    @functools.cached_property
    def left_out(self) -> str:
        """Why the scenario says nothing about a schedule, if so: the original itself can't do it."""
        error = self.old.error
        if error is not None:
            lines = str(error).strip().splitlines() or [""]
            return f"the original raises {type(error).__name__}: {lines[0][:200]}"
        if self.scenario.unusual and not all(_finite(held) for key, held in self.old.seen.items() if _counts(key)):
            return "the original overflows"
        return ""

    def _other_refusal(self, module: nn.Module) -> str:
        """Where the original raises for a size that it does not take, the scheduled model does alike."""
        expected = self.old.error
        if expected is None or self.scenario.unusual:  # an operation may lack a dtype, and another one have it
            return ""
        raised = self.run(module).error
        if raised is None or isinstance(raised, (GuardError, type(expected))) or isinstance(expected, type(raised)):
            return ""
        return f"the scheduled model raises {type(raised).__name__}: {raised}; {self.left_out}"

    def row(self, module: nn.Module) -> Row | None:
        """The grade of a scheduled model, or None where even the original can't run the scenario."""
        if self.left_out:
            why = self._other_refusal(module)
            return Row(self.scenario.name, BUG, len(self.old.seen), (Difference(None, why),)) if why else None
        return self.graded([self.run(module)], module)

    def graded(self, results: Sequence[Result], module: nn.Module, aside: Container[str] = ()) -> Row:
        """The grade of what a scheduled model has shown, on each rank. aside: kinds that are not compared."""
        name, compared, new = self.scenario.name, len(self.old.seen), results[0]
        if new.is_uncovered:
            return Row(name, UNCOVERED, 0, note=f"the schedule does not cover this: {new.error}")
        if new.error is not None:
            raised = f"{type(new.error).__name__}: {new.error}"
            why = f"the scheduled model raises {raised}{new.on}; the original does not"
            return Row(name, BUG, compared, (Difference(None, why),))
        gone = dropped(module)
        there = {name for name, _ in module.named_modules(remove_duplicate=False)}
        found = [one for one in self.worst(results) if one.key.kind not in aside and not _declared(one, gone, there)]
        grades = {one.grade for one in found}
        grade = BUG if BUG in grades else ROUNDING if found else EQUAL
        found.sort(key=_importance)
        return Row(name, grade, compared, tuple(found), self._note(found))

    def worst(self, results: Sequence[Result], table: Table = lambda one: one.seen) -> list[Difference]:
        """All that differs on any rank: the worst of each. A rank that shows what the first does isn't graded again."""
        found: dict[Any, Difference] = {}
        for index, result in enumerate(results):
            if index and not suspects(table(results[0]), table(result)):
                continue
            for one in self.differences(result, table):
                held = found.get(one.key)
                if held is None or (one.grade == BUG, one.ratio) > (held.grade == BUG, held.ratio):
                    found[one.key] = one
        return list(found.values())

    def _note(self, found: list[Difference]) -> str:
        notes = ["two runs of the original itself differ, and more is allowed where they do"] if self.unstable else []
        if any(one.may_be_rounding for one in found) and self.exact.error is not None:
            notes.append(
                f"the original does not run in float64 ({type(self.exact.error).__name__}: {self.exact.error}), so "
                f"that its own numbers stood in for exact ones"
            )
        return "; ".join(notes)


_ORDER = ("output", "requires_grad of the output", "random state of", "buffer", "content of the input")


def _importance(found: Difference) -> tuple[bool, int, int, float]:
    """Bugs first; of those, what comes first when the model runs; of the same kind, the largest."""
    kind, _, call = found.key
    rank = _ORDER.index(kind) if kind in _ORDER else len(_ORDER)
    return found.grade != BUG, call, rank, -found.ratio


def _counts(key: Any) -> bool:
    return key.kind in ("output", "parameter") or key.kind.startswith("gradient of")


def _finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or bool(value.isfinite().all())


def _declared(found: Difference, gone: set[str], there: set[str]) -> bool:
    """What a replacement says itself: buffers that it does without, modules that are no longer there."""
    kind, name, _ = found.key
    if kind == "training flag" and name not in there:
        return True  # what they held is looked at under the names of their parameters and buffers
    return name in gone and kind in ("buffer", "persistence", "dtype", "shape", "requires_grad", "tie")


def _coarser(unit: torch.dtype, tensor: Tensor) -> torch.dtype:
    """The coarser of the scenario's dtype and the tensor's own."""
    if not tensor.is_floating_point():
        return unit
    return max(unit, tensor.dtype, key=lambda one: torch.finfo(one).eps)
