"""`sch.verify(mesh={"tp": 2})`: the schedule built on processes of this machine, against the original.

The processes start once, build once, and go through one scenario after the other. Each answers with its parts; here
they are put together and held against the original, as every rank would show them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slapo_py.build.facts import Facts
from slapo_py.distributed.local_ranks import LocalRanks
from slapo_py.distributed.mesh import DATA
from slapo_py.errors import ArgumentError, GuardError, PlacementError, RankError
from slapo_py.layouts.placement import Placement
from slapo_py.layouts.recording.nodes import is_border, shape_of
from slapo_py.verify.blame_on_mesh import aligned
from slapo_py.verify.borders import GRADIENT, numbered, of_gradient
from slapo_py.verify.grid import Grid
from slapo_py.verify.on_mesh import OnMesh
from slapo_py.verify.probes import Probe
from slapo_py.verify.rank import Held, Played, Stopped, packed, play, prepare
from slapo_py.verify.run import Key, Result, Run
from slapo_py.verify.scenarios import Scenario, batch_size
from slapo_py.verify.simulated import Crossing, RanksRun, gradient_of
from slapo_py.verify.trial import Trial, private
from slapo_py.verify.world import alone

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule

TIMEOUT = 600.0
"""Seconds for the ranks to build, and for one collective."""
_PATIENCE = 60.0
"""How many times as long as the original, and a second, a scenario may take."""


class OnRanks(OnMesh):
    """The scheduled side of a verification on processes of this machine.

    Where the checker finds something wrong it is switched off in them, so that what comes of it is seen.
    """

    def __init__(self, sch: "Schedule", sizes: Mapping[str, int], where: str) -> None:
        super().__init__(sch, sizes)
        self.where, self.grid = where, Grid(self.sizes)
        self.facts: Facts = {}
        """Of the built model, once it is built."""
        self._ranks: LocalRanks | None = None
        self._refused: dict[str, str] = {}
        """What collectives say to the sizes of a scenario, by its name."""

    def __str__(self) -> str:
        return f"on {len(self.grid.places)} ranks, {' x '.join(f'{axis}={size}' for axis, size in self.sizes.items())}"

    def left_out(self, trial: Trial) -> str:
        """Why a scenario has no grade."""
        return self._indivisible(trial.scenario) or super().left_out(trial)

    def _unfit(self, scenario: Scenario) -> str:
        """What is not for the sizes of a made-up scenario: the schedule, or a collective, planned for others."""
        refused = self._refused.get(scenario.name, "") if scenario.derived and not self.faults else ""
        return refused or super()._unfit(scenario)

    def _indivisible(self, scenario: Scenario) -> str:
        parts = self.sizes.get(DATA, 1)
        found = [batch_size(call.inputs) or 0 for call in scenario.calls]
        odd = next((one for one in found if one == 0 or one % parts), None)
        return "" if odd is None or parts == 1 else f"a batch of {odd} does not divide over {DATA!r} of size {parts}"

    def row(self, trial: Trial) -> Any:
        """The grade of a scenario, or None where the original can't run it, or the schedule can't for its size.

        Raises: ArgumentError, RankError.
        """
        odd = self._indivisible(trial.scenario)
        if odd and not trial.scenario.derived:
            raise ArgumentError(
                f"{self.where}: {odd}, so its ranks can't have equal shares of the example inputs. Give "
                f"create_schedule(example_inputs=...) a batch of {self.sizes[DATA]} rows, or a multiple of it."
            )
        if odd:
            return None
        if self.sizes.get(DATA, 1) > 1 and not trial.left_out:
            self._check_outputs(trial)
        return super().row(trial)

    def _check_outputs(self, trial: Trial) -> None:
        for key, value in trial.old.seen.items():
            learns = trial.old.seen.get(key._replace(kind="requires_grad of the output"))
            if key.kind == "output" and learns and not value.dim():
                raise ArgumentError(
                    f'{self.where}: the output{key.name} of the model is one number for the whole batch, and on "dp" '
                    f"each rank has that of its own rows. Leave what it is worked out from (labels) out of the example "
                    f"inputs: the loss of an engine is a sum over rows."
                )

    def run(self, trial: Trial) -> RanksRun:
        """The scenario on the ranks; with borders, if the trial looks at them. Raises: RankError."""
        assert trial.old.error is None  # it has run first: the size of an optimizer step is the original's
        limit = _PATIENCE * (1 + trial.old.seconds)
        ranks, probed = self.ranks, trial.probes is not None
        with alone():
            run = JoinedRun(private(self.sch.module), trial, self)
            try:
                return run.joined(ranks.run(play, trial.plan, probed, timeout=limit / 4 if probed else limit))
            except RankError as error:
                cause = error.__cause__
                if probed:  # it has shown already that something is wrong
                    return run.stopped(Stopped(error, None, None), error.rank)
                if not isinstance(cause, Stopped):
                    raise self._named(error, f'scenario "{trial.scenario.name}"') from error
                if isinstance(cause.error, PlacementError):
                    self._refused[trial.scenario.name] = str(cause.error)
                return run.stopped(cause, error.rank)

    @property
    def ranks(self) -> LocalRanks:
        """The processes, which have built their parts."""
        if self._ranks is None or not self._ranks.alive:
            check, payload = not self.faults, self._payload()
            self._ranks = LocalRanks(len(self.grid.places), TIMEOUT)
            try:
                self.facts = self._ranks.run(prepare, payload, self.sizes, check)[0]
            except RankError as error:
                raise self._named(error, "build") from error
        return self._ranks

    def _payload(self) -> bytes:
        try:
            with alone():
                return packed(self.sch.root.fresh(), self.sch.history)
        except Exception as error:  # whatever a class of the user's does when it is pickled
            raise ArgumentError(
                f"{self.where}: the model, the example inputs and the steps are sent to other processes, and can't be: "
                f"{type(error).__name__}: {error}. With simulate=True nothing is sent."
            ) from error

    def _named(self, error: RankError, what: str) -> RankError:
        cause = error.__cause__
        said = f"rank {error.rank} raises {type(cause).__name__}: {cause}" if cause is not None else str(error)
        named = RankError(f"{self.where} {self}, {what}: {said}")
        named.rank = error.rank
        return named

    def close(self) -> None:
        """End the processes."""
        if self._ranks is not None:
            self._ranks.close()


class JoinedRun(Run):
    """A scenario as each rank shows it: what it says by itself, and what the ranks hold between them.

    module: a private copy of the scheduled model, which is given what a rank holds before anything is noted of it.
    """

    def __init__(self, module: nn.Module, trial: Trial, side: OnRanks) -> None:
        super().__init__(module, trial.original, trial.plan, None, torch.enable_grad)
        self.side, self.grid, self.old = side, side.grid, trial.old
        self.results = [Result() for _ in self.grid.places]
        self.crossings: list[Crossing] = []
        self.raised: Crossing | None = None

    def stopped(self, cause: Stopped, rank: int) -> "JoinedRun":
        """The scenario was broken off, on a rank at least."""
        for result in self.results:
            result.error, result.raised_in, result.on = cause.error, cause.module, f" on rank {rank}"
            # guards fail after a fault, too: the tensors that come there have other sizes
            result.is_uncovered = isinstance(cause.error, GuardError) and not self.side.faults
        if cause.border is not None:
            side, path, index = cause.border
            self.raised = self._crossings().get(of_gradient(Probe(path, 1, side, str(index))))
        return self

    def joined(self, played: Sequence[Played]) -> "JoinedRun":
        """All that the ranks have shown."""
        self._join_borders(played)
        stopped = next(((one.stopped, rank) for rank, one in enumerate(played) if one.stopped is not None), None)
        if stopped is not None:
            return self.stopped(*stopped)
        for rank in self._each():
            self.note_facts("")
            for key, value in played[rank].seen.items():
                self.result.seen[key] = self._own(key, value, played, rank)
        for number, call in enumerate(self.scenario.calls):
            self.enter(call)
            for rank in self._each():
                self.result.call = number + 1
                self._show([one.held[number] for one in played], rank)
                self.note_held(call)
                self.note_parameters()
        for _ in self._each():
            self.note_facts(" afterwards")
        return self

    def _each(self) -> Iterator[int]:
        for rank, result in enumerate(self.results):
            self.result = result
            yield rank

    def _own(self, key: Key, value: Any, played: Sequence[Played], rank: int) -> Any:
        """What a rank says by itself, for all rows of the batch."""
        expected, every = self.old.seen.get(key), [one.seen.get(key) for one in played]
        if not all(isinstance(one, Tensor) for one in (expected, *every)):
            return value
        found = self.grid.rows(DATA, every, expected.shape, rank)  # type: ignore[arg-type, union-attr]
        if key.kind == "gradient of the input" and found is value:
            return self.grid.total(DATA, every, rank)
        return found

    def _show(self, held: Sequence[Held], rank: int) -> None:
        """Give the module what a rank has."""
        facts = self.side.facts
        for name, parameter in self.module.named_parameters():
            fact = facts[name]
            parameter.data.copy_(self.grid.parameter([one.parameters[name] for one in held], fact, rank))
            terms = [one.gradients[name] for one in held]
            totals = [self.grid.total(DATA, terms, one) for one in range(len(held))]
            there = [one for one in totals if one is not None]
            complete = len(there) == len(totals)
            parameter.grad = self.grid.parameter(there, fact, rank) if complete else None
            if not complete and not fact.placements:
                parameter.grad = totals[rank]
        for name, buffer in self.module.named_buffers():
            parts = [one.buffers[name] for one in held]
            buffer.data.copy_(self.grid.parameter(parts, facts[name], rank) if name in facts else parts[rank])

    # Borders

    def _join_borders(self, played: Sequence[Played]) -> None:
        """Values and gradients at borders that all ranks have seen, in the order in which the first has."""
        if not any(one.probed for one in played):
            return
        crossings = self._crossings()
        for key in played[0].probed:
            crossing = crossings.get(key)
            placements = _placements(crossing, self.side.axes) if crossing is not None else None
            if crossing is None or placements is None or not all(key in one.probed for one in played):
                continue
            self.crossings.append(crossing)
            parts = [one.probed[key] for one in played]
            values = [self.grid.value(parts, placements, rank) for rank in range(len(played))]
            for rank, result in enumerate(self.results):
                result.probed[key] = self.grid.rows(DATA, values, shape_of(crossing.node), rank)

    def _crossings(self) -> dict[Probe, Crossing]:
        """Where on the graphs of the axes a border is that the original has, for values and gradients."""
        by_axis = [self._crossings_on(axis) for axis in self.side.axes]
        return {
            key: replace(one, others={axis: held[key] for axis, held in zip(self.side.axes, by_axis)})
            for key, one in by_axis[0].items()
            if all(key in held for held in by_axis)
        }

    def _crossings_on(self, axis: str) -> dict[Probe, Crossing]:
        counts: Counter[tuple[str, str, int]] = Counter()
        every = {}
        for call in self.scenario.calls:
            program = self.side.program(call.inputs, bool(call.training), axis)
            for node in program.typing.graph.nodes:
                if is_border(node):
                    _, side, path, index = node.args
                    key = numbered(counts, path, side, index)
                    every[key] = Crossing(key, node, program)
                    every[of_gradient(key)] = Crossing(of_gradient(key), node, program)
        names = aligned(every.values(), self.old.probed)
        return {name: replace(every[key], key=name) for key, name in names.items()}


def _placements(crossing: Crossing, axes: Sequence[str]) -> dict[str, Placement] | None:
    """How the value, or the gradient, should lie on each axis; None for a gradient where there should be none."""
    found: dict[str, Placement] = {}
    for axis in axes:
        one = crossing.on(axis)
        back = one.key.kind.startswith(GRADIENT)
        placement = gradient_of(one) if back else one.program.typing.after[one.node][0]
        if placement is None:
            return None
        found[axis] = placement
    return found
