"""A scenario on p simulated ranks: what each of them shows, as a table like that of the original's run."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from slapo_py.errors import GuardError
from slapo_py.layouts.placement import Placement, R
from slapo_py.layouts.simulating.as_written import Inputs, Program, Ranks
from slapo_py.layouts.simulating.simulate import whole
from slapo_py.verify.borders import numbered, of_gradient
from slapo_py.verify.leaves import tensors_of
from slapo_py.verify.probes import Probe
from slapo_py.verify.run import Plan, Result, Run, cast, seed_all
from slapo_py.verify.scenarios import Call

Programs = Callable[[Inputs, bool], Program]
"""What the ranks run, for inputs in train or eval mode."""


@dataclass(frozen=True)
class Crossing:
    """A tensor crosses a border, forward, or its gradient does, back: at a node of the graph that all ranks run.

    others: the same on other axes.
    """

    key: Probe
    node: fx.Node
    program: Program
    others: "Mapping[str, Crossing]" = field(default_factory=dict)

    def on(self, axis: str) -> "Crossing":
        """The same as another axis has it."""
        return self.others.get(axis, self)


class RanksRun(Protocol):
    """A scenario that ranks have been through.

    module: what they show, with the names of the original. crossings: in the order of execution, if borders are looked
    at. raised: where the gradient was, if the backward pass was broken off.
    """

    module: nn.Module
    results: list[Result]
    crossings: list[Crossing]
    raised: Crossing | None


class SimulatedRun(Run):
    """The ranks of one mesh axis on their way through a scenario, in lock step.

    module: a private copy of the scheduled model; before anything is noted of a rank, it is given what that rank has.
    summed: the first names of parameters whose gradient the schedule sums. crossings: in the order of execution, if
    borders are looked at.
    """

    def __init__(
        self,
        module: nn.Module,
        original: nn.Module,
        plan: Plan,
        ranks: Ranks,
        programs: Programs,
        summed: set[str],
        probed: bool,
    ) -> None:
        super().__init__(module, original, plan, None, torch.enable_grad)
        self.ranks, self.programs, self.probed = ranks, programs, probed
        self.results = [Result() for _ in range(ranks.count)]
        self.crossings: list[Crossing] = []
        self.raised: Crossing | None = None
        self._summed = [one for name, one in module.named_parameters() if name in summed]
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._back: list[tuple[Crossing, list[Tensor | None]]] = []

    def play(self) -> "SimulatedRun":
        """All calls of the scenario. What the model raises is kept in the results."""
        cast(self.module, self.scenario)
        for _ in self._each():
            self.note_facts("")
        seed_all(self.plan.seed)
        try:
            for number, call in enumerate(self.scenario.calls, 1):
                for result in self.results:
                    result.call = number
                self.call(call)
        except Exception as error:
            for result in self.results:
                result.error, result.raised_in = error, self.ranks.at
                result.is_uncovered = isinstance(error, GuardError)
            self._note_raised()
        else:
            for _ in self._each():
                self.note_facts(" afterwards")
        self._note_gradients()
        return self

    def _note_raised(self) -> None:
        """A sync that raised on the way back is where the gradient diverges."""
        if self.ranks.border is not None:
            program, node = self.ranks.border
            _, side, path, index = node.args
            self.raised = Crossing(of_gradient(Probe(str(path), 0, str(side), str(index))), node, program)

    def call(self, call: Call) -> None:
        self.enter(call)
        given = [self.inputs(call) for _ in self.results]
        program = self.programs(call.inputs, self.module.training)

        def passed(node: fx.Node, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
            self._passed(program, node, before, after)

        with torch.set_grad_enabled(call.grad):
            outs = self.ranks.run(program, [one for one, _ in given], passed if self.probed else None)
        for rank in self._each():
            self.note_output(given[rank][0], outs[rank])
        if call.grad:
            self._backward(outs)
        self.ranks.border = None
        self._note_gradients()
        for rank in self._each():
            self._show(rank)
            self.note_after(call, *given[rank])
        if call.step:
            self._step()
        for rank in self._each():
            self._show(rank)
            self.note_parameters()

    def _each(self) -> Iterator[int]:
        """Rank after rank; what is noted meanwhile is noted of that one."""
        for rank, result in enumerate(self.results):
            self.result = result
            yield rank

    def _backward(self, out: list[Any]) -> None:
        found = [(i, one) for each in out for i, (_, one) in enumerate(tensors_of(each)) if one.requires_grad]
        if found:
            torch.autograd.backward([one for _, one in found], [self.plan.cotangent(i, one) for i, one in found])

    def _gradients(self, parameter: Tensor) -> list[Tensor | None]:
        """The gradient of each rank's part of a parameter."""
        grads = [part.grad for part in self.ranks.parts(parameter)]
        there = [one for one in grads if one is not None]
        if there and any(one is parameter for one in self._summed):
            return [torch.stack(there).sum(0)] * len(grads)
        return grads

    def _show(self, rank: int) -> None:
        """Give the module what a rank has."""
        for parameter in self.module.parameters():
            parts, grads = self.ranks.parts(parameter), self._gradients(parameter)
            parameter.data.copy_(self.ranks.whole(parameter, [one.detach() for one in parts], rank))
            there = [one for one in grads if one is not None]
            complete = grads[rank] is not None and (self.ranks.placement(parameter) == R or len(there) == len(grads))
            if self.ranks.placement(parameter) == R:
                parameter.grad = grads[rank]
            else:
                parameter.grad = self.ranks.whole(parameter, there, rank) if complete else None
        for buffer in self.module.buffers():
            buffer.data.copy_(self.ranks.whole(buffer, self.ranks.parts(buffer), rank))

    def _step(self) -> None:
        """The optimizer step of each rank on its own parts; all runs of the scenario take the size of the first."""
        assert self.plan.rate is not None
        for parameter in self.module.parameters():
            parts = self.ranks.parts(parameter)
            with torch.no_grad():
                for part, grad in zip(parts, self._gradients(parameter)):
                    if grad is not None:
                        part.add_(grad, alpha=-self.plan.rate)
            for part in parts:
                part.grad = None

    # Borders

    def _passed(self, program: Program, node: fx.Node, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        _, side, path, index = node.args
        key = numbered(self._counts, str(path), str(side), int(index))  # type: ignore[arg-type]
        crossing = Crossing(key, node, program)
        self.crossings.append(crossing)
        self._note_probe(key, [one.detach() for one in after], program.typing.after[node][0])
        if all(one.requires_grad for one in before):
            grads: list[Tensor | None] = [None] * len(before)
            for rank, one in enumerate(before):
                one.register_hook(_kept(grads, rank))
            self._back.append((Crossing(of_gradient(key), node, program), grads))

    def _note_gradients(self) -> None:
        """The gradients that have crossed borders since the last call, in the order of execution."""
        for crossing, grads in reversed(self._back):
            expected = gradient_of(crossing)
            there = [one for one in grads if one is not None]
            if expected is not None and len(there) == len(grads):
                self.crossings.append(crossing)
                self._note_probe(crossing.key, there, expected)
        self._back.clear()

    def _note_probe(self, key: Probe, parts: Sequence[Tensor], placement: Placement) -> None:
        for rank, result in enumerate(self.results):
            result.probed[key] = _seen(parts, placement, rank)


def gradient_of(crossing: Crossing) -> Placement | None:
    """How a gradient should lie on the ranks when it has left a border; None where there is none."""
    typing = crossing.program.typing
    own = typing.at_node.get(crossing.node)
    return own.grad_target if own is not None and own.grad_target else typing.gradient.get(crossing.node)


def _seen(parts: Sequence[Tensor], placement: Placement, rank: int) -> Tensor:
    """The whole value as a rank's part shows it. Parts that don't fit together are shown as they are."""
    if placement == R:
        return parts[rank].clone()
    try:
        return whole(parts, placement)
    except Exception:  # of other shapes than they should have
        return parts[rank].clone()


def _kept(grads: list[Tensor | None], rank: int) -> Callable[[Tensor], None]:
    def keep(grad: Tensor) -> None:
        grads[rank] = grad.detach().clone()

    return keep
