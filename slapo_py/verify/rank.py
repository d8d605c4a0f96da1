"""One rank of `sch.verify(mesh=...)`: it builds its part of a schedule, and puts it through scenarios.

Functions of this file run in processes of their own, called by `on_ranks.py`. What they answer is a rank's own: its
parts of parameters and gradients, what its rows of the batch give. The caller puts them together.
"""

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from slapo_py.build.build import build
from slapo_py.build.facts import Facts, facts_of
from slapo_py.build.materialize import materialize
from slapo_py.build.unchecked import checker_off
from slapo_py.distributed import raw
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.layouts.recording.borders import Border
from slapo_py.primitive import TABLE
from slapo_py.tracing.recorder import Inputs
from slapo_py.verify.leaves import tensors_of
from slapo_py.verify.probes import Probe
from slapo_py.verify.run import Key, Plan, Run, cast, seed_all
from slapo_py.verify.scenarios import Call, batch_size, rows
from slapo_py.verify.watch import Watch
from slapo_py.verify.world import alone


class Stopped(Exception):
    """What a scenario raised on this rank, in which module, and at which border on the way back."""

    def __init__(self, error: Exception, module: str | None, border: Border | None) -> None:
        super().__init__(error, module, border)
        self.error, self.module, self.border = error, module, border


@dataclass(frozen=True)
class Held:
    """What a rank holds after a call, by the names of the built module. parameters: after the optimizer step."""

    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    parameters: dict[str, Tensor]


@dataclass(frozen=True)
class Played:
    """What a rank shows of a scenario: all that it can say by itself, what it holds, and what passed its borders.

    stopped: what it raised, where borders are looked at; else it raises that.
    """

    seen: dict[Key, Any]
    held: list[Held]
    probed: dict[Probe, Tensor]
    stopped: Stopped | None = None


@dataclass(frozen=True)
class _Ready:
    """A rank that has built its part."""

    original: nn.Module
    built: nn.Module
    mesh: Mesh


_READY: list[_Ready] = []


def packed(schedule: Any, history: Any) -> bytes:
    """A schedule without steps, and the steps, for `prepare`. Tensors that share memory still do after it.

    Primitives come along: one of the user's own may be registered in a script, which the ranks don't run.
    """
    primitives = {name: (TABLE[name], getattr(type(schedule), name)) for name in {one.primitive for one in history}}
    buffer = io.BytesIO()
    torch.save((schedule, history, primitives), buffer, pickle_module=cloudpickle)
    return buffer.getvalue()


def prepare(payload: bytes, sizes: Mapping[str, int], check: bool) -> Facts:
    """Build this rank's part, and keep it. check: whether a wrong schedule is refused. Returns: its facts."""
    schedule, history, primitives = torch.load(io.BytesIO(payload), weights_only=False)
    for name, (primitive, method) in primitives.items():
        if name not in TABLE:
            TABLE[name] = primitive
            setattr(type(schedule), name, method)
    with alone(), contextlib.nullcontext() if check else checker_off():
        history.replay(schedule)
        mesh = Mesh.of(sizes)
        built = build(schedule, mesh=mesh, logical_masks=True)
    _READY[:] = [_Ready(schedule.original, built, mesh)]
    return facts_of(built)


def play(plan: Plan, probed: bool) -> Played:
    """Put a copy of what was built through a scenario. probed: look at every border. Raises: Stopped."""
    (ready,) = _READY
    with alone(), torch.compiler.set_stance("force_eager") if probed else contextlib.nullcontext():
        module, watch = materialize(ready.built), Watch()
        if probed:
            watch.put_on(module)
        return _RankRun(module, ready, plan, watch, probed).play()


class _RankRun(Run):
    def __init__(self, module: nn.Module, ready: _Ready, plan: Plan, watch: Watch, probed: bool) -> None:
        super().__init__(module, ready.original, plan, None, contextlib.nullcontext)
        self.mesh, self.watch, self.probed = ready.mesh, watch, probed
        self.at, self.parts = ready.mesh.coordinate(DATA), ready.mesh.size(DATA)
        self.held: list[Held] = []

    def play(self) -> Played:
        """All calls of the scenario."""
        cast(self.module, self.scenario)
        seed_all(self.plan.seed)
        try:
            for number, call in enumerate(self.scenario.calls, 1):
                self.result.call = number
                self.call(call)
        except Exception as error:
            stopped = Stopped(error, self.watch.raised_in, self.watch.arrived)
            if not self.probed:
                raise stopped from error
            return Played(self.result.seen, self.held, self.watch.seen, stopped)
        return Played(self.result.seen, self.held, self.watch.seen)

    def call(self, call: Call) -> None:
        self.enter(call)
        given, wanted = self.inputs(call)
        with torch.set_grad_enabled(call.grad):
            args, kwargs = given
            out = self.module(*args, **kwargs)
        self.note_output(given, out)
        if call.grad:
            self._backward(out)
        self.note_around(call, given, wanted)
        named = dict(self.module.named_parameters())
        gradients = {name: None if one.grad is None else one.grad.clone() for name, one in named.items()}
        buffers = {name: one.clone() for name, one in self.module.named_buffers()}
        if call.step:
            self._step()
        self.held.append(Held(gradients, buffers, {name: one.detach().clone() for name, one in named.items()}))

    def inputs(self, call: Call) -> tuple[Inputs, list[tuple[str, Tensor]]]:
        """This rank's rows of the batch."""
        if self.parts > 1:
            share = (batch_size(call.inputs) or 0) // self.parts
            call = replace(call, inputs=rows(call.inputs, range(self.at * share, (self.at + 1) * share)))
        return super().inputs(call)

    def _backward(self, out: Any) -> None:
        outs = [(i, one) for i, (_, one) in enumerate(tensors_of(out)) if one.requires_grad]
        if outs:
            torch.autograd.backward([one for _, one in outs], [self._cotangent(i, one) for i, one in outs])

    def _cotangent(self, index: int, output: Tensor) -> Tensor:
        """This rank's rows of the gradient of an output."""
        if self.parts == 1:
            return self.plan.cotangent(index, output)
        whole = output.new_empty((output.shape[0] * self.parts, *output.shape[1:]))
        return self.plan.cotangent(index, whole).tensor_split(self.parts)[self.at]

    def _step(self) -> None:
        if self.parts > 1:
            for one in self.module.parameters():
                there = torch.tensor([one.grad is not None], dtype=torch.float32)
                if raw.all_reduce(there, "max", self.mesh.ranks(DATA).name):
                    term = torch.zeros_like(one) if one.grad is None else one.grad
                    one.grad = raw.all_reduce(term.detach(), "sum", self.mesh.ranks(DATA).name)
        super()._step()
