"""`sch.verify(mesh={"tp": 2}, simulate=True)`: the schedule's ranks against the original, in one process."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slapo_py.distributed.mesh import DATA
from slapo_py.errors import ArgumentError
from slapo_py.layouts.checking.axes import refuse, used_axes
from slapo_py.layouts.inference.state import Fault
from slapo_py.layouts.simulating.as_written import Inputs, Program, Ranks, program
from slapo_py.layouts.syncs import placements_of, reduced_of
from slapo_py.tracing.recorder import normalize_inputs
from slapo_py.tracing.values import signature
from slapo_py.verify.blame import Blame
from slapo_py.verify.blame_on_mesh import accused_on_mesh
from slapo_py.verify.differences import BUG
from slapo_py.verify.report import Row
from slapo_py.verify.scenarios import Scenario
from slapo_py.verify.simulated import RanksRun, SimulatedRun
from slapo_py.verify.trial import Trial, private
from slapo_py.verify.world import alone

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule

ASIDE = {"sharing of the output"}
"""A tensor that every rank has whole is one of its own on each."""
_SAME = {"inputs with other strides", "twice the length", "batch of 3", "train, no_grad", "eval, no_grad"}
"""What such scenarios find has nothing to do with the ranks, or others find it, too."""


def sizes_of(sch: "Schedule", where: str, mesh: Any, simulate: bool) -> dict[str, int]:
    """The axes of a mesh that have more than one rank, with their sizes, and of which something is to be seen.

    That is what the schedule says something of and, where ranks are real, "dp", which splits the batch. Raises:
    ArgumentError.
    """
    if mesh is None:
        if simulate:
            raise ArgumentError(f'{where}: simulate=True needs a mesh. Write verify(mesh={{"tp": 2}}, simulate=True).')
        return {}
    sizes = dict(mesh) if isinstance(mesh, Mapping) else {"": mesh}
    for axis, size in sizes.items() or [("", 0)]:
        if not isinstance(axis, str) or not axis.isidentifier() or not _is_size(size):
            raise ArgumentError(
                f'{where}: mesh must give the size of each axis, as in mesh={{"tp": 2}}; found {mesh!r}.'
            )
    split = {axis: size for axis, size in sizes.items() if size > 1}
    for axis in split:
        if axis != DATA:
            refuse(sch.root, where, axis)
    used = used_axes(sch.root)
    if simulate and len(split) > 1:
        lines = [f'verify(mesh={{"{axis}": {size}}}, simulate=True)' for axis, size in split.items() if axis in used]
        write = f"Write {' or '.join(lines)}, or leave" if lines else "Leave"
        raise ArgumentError(
            f"{where}: one axis of a mesh can be simulated at a time, and {' and '.join(split)} have more than one "
            f"rank. {write} simulate=True out, for processes."
        )
    if sch.path:
        raise ArgumentError(
            f"{where}: how the tensors that enter a module lie on the ranks is known for the whole model alone. Write "
            f"sch.verify(mesh={sizes}) at the root."
        )
    return {axis: size for axis, size in split.items() if axis in used or (axis == DATA and not simulate)}


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


class OnMesh:
    """The scheduled side of a verification on the simulated ranks of an axis.

    sizes: of the axes; the programs that ranks run for each are kept by sizes of inputs and mode.
    """

    def __init__(self, sch: "Schedule", sizes: Mapping[str, int]) -> None:
        self.sch, self.sizes = sch, dict(sizes)
        self._programs: dict[Any, Program] = {}

    @property
    def axes(self) -> list[str]:
        """Those that the schedule says something of; one in any case."""
        return [one for one in self.sizes if one in used_axes(self.sch.root)] or list(self.sizes)[:1]

    def __str__(self) -> str:
        ((axis, ranks),) = self.sizes.items()
        return f"on {ranks} simulated ranks of {axis!r}"

    def close(self) -> None:
        """Nothing is left to be ended."""

    def refused(self) -> str:
        """Why a build would refuse the schedule."""
        return self.faults[0].message if self.faults else ""

    def notes(self) -> list[str]:
        """What a reader of the report should know."""
        return []

    def takes(self, scenario: Scenario) -> bool:
        """Lower precision is left out: sums over ranks have a rounding of their own there."""
        plain = scenario.dtype is None and scenario.autocast is None and scenario.name not in _SAME
        return plain and not any(one.inference or one.training is None for one in scenario.calls)

    def row(self, trial: Trial) -> Row | None:
        """The grade of a scenario, or None where the original can't run it, or the schedule raises for its size.

        A schedule that gives other numbers at another size, and doesn't raise, is wrong.
        """
        if trial.left_out:
            return None
        run = self.run(trial)
        row = trial.graded(run.results, run.module, ASIDE)
        raised = row.grade == BUG and run.results[0].error is not None
        return None if raised and self._unfit(trial.scenario) else row

    def left_out(self, trial: Trial) -> str:
        """Why a scenario has no grade."""
        return trial.left_out or f"the schedule is not for such sizes: {self._unfit(trial.scenario)}"

    def _unfit(self, scenario: Scenario) -> str:
        """What the checker says at the sizes of a made-up scenario, and doesn't at those of the example inputs."""
        if not scenario.derived or self.faults:
            return ""
        found = [
            one
            for axis in self.axes
            for call in scenario.calls
            for one in self.program(call.inputs, bool(call.training), axis).faults
        ]
        return found[0].message if found else ""

    def blame(self, trial: Trial, row: Row, where: str) -> Blame:
        """Who is to blame for a bug in a scenario."""
        return accused_on_mesh(self, trial, row, where)

    @functools.cached_property
    def faults(self) -> list[Fault]:
        """What the checker says of the schedule at the sizes of the example inputs."""
        examples = normalize_inputs(self.sch.root.example_inputs)
        return [fault for axis in self.axes for one in examples for fault in self.program(one, True, axis).faults]

    def run(self, trial: Trial) -> RanksRun:
        """The scenario on the ranks; with borders, if the trial looks at them."""
        assert trial.old.error is None  # it has run first: the size of an optimizer step is the original's
        root, (axis,) = self.sch.root, self.sizes
        with alone():
            module = private(self.sch.module)
            ranks = Ranks(module, placements_of(root, axis), self.sizes[axis])
            summed = reduced_of(root, axis)
            probed = trial.probes is not None

            def of_axis(inputs: Inputs, training: bool) -> Program:
                return self.program(inputs, training, axis)

            return SimulatedRun(module, trial.original, trial.plan, ranks, of_axis, summed, probed).play()

    def program(self, inputs: Inputs, training: bool, axis: str) -> Program:
        """What the ranks of an axis run for such inputs."""
        key = (signature(inputs), training, axis)
        if key not in self._programs:
            with alone():
                self._programs[key] = program(self.sch, inputs, training, axis, self.sizes[axis])
        return self._programs[key]
