"""One scenario on one model: everything that can be seen of it, as a flat table."""

import contextlib
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slapo_py.errors import GuardError
from slapo_py.tracing.recorder import Inputs
from slapo_py.tracing.values import map_tensors
from slapo_py.verify.borders import Borders
from slapo_py.verify.leaves import leaves, once, shared, tensors_of
from slapo_py.verify.probes import Probes
from slapo_py.verify.scenarios import Call, Scenario
from slapo_py.verify.state import buffers, dropped, facts, gradients, named_state
from slapo_py.verify.world import global_state, random_states

Change = Callable[[Tensor], Tensor]
Around = Callable[[], contextlib.AbstractContextManager[Any]]
ProbeKind = Callable[[nn.Module, nn.Module], "Probes | Borders"]
"""Makes the hooks on a private copy, of it and the original."""


class Key(NamedTuple):
    """What was seen: its kind, its name, and the number of the call after which it was seen (0: before the first)."""

    kind: str
    name: str
    call: int


class Plan:
    """What all runs of one scenario share: the seed, the gradients of the outputs, the size of an optimizer step."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        self.rate: float | None = None
        self._drawn: dict[Any, Tensor] = {}

    def cotangent(self, index: int, like: Tensor) -> Tensor:
        """A fixed random gradient of an output: the loss sees every element of it."""
        key = (index, tuple(like.shape), like.is_complex())
        if key not in self._drawn:
            generator = torch.Generator().manual_seed(self.seed * 1000 + index)
            dtype = torch.complex128 if like.is_complex() else torch.float64
            drawn = torch.randn(like.shape, generator=generator, dtype=dtype) / math.sqrt(max(1, like.numel()))
            # every dtype that the scenario may run in holds it exactly, so that all runs have the same loss
            self._drawn[key] = drawn if like.is_complex() else drawn.to(torch.bfloat16).double()
        return self._drawn[key].to(device=like.device, dtype=like.dtype)


class Result:
    """What one run has shown. `error` is what it raised, if it raised; `raised_in` the module, if there were probes.

    on: which rank raised, for a message. is_uncovered: it raised that the schedule is not for such inputs. seconds: how
    long it took.
    """

    def __init__(self) -> None:
        self.seen: dict[Key, Any] = {}
        self.probed: dict[Any, Any] = {}
        self.error: Exception | None = None
        self.raised_in: str | None = None
        self.on = ""
        self.is_uncovered = False
        self.seconds = 0.0
        self.call = 0

    def note(self, kind: str, name: str, value: Any) -> None:
        self.seen[Key(kind, name, self.call)] = value.detach().clone() if isinstance(value, Tensor) else value


def run(
    module: nn.Module,
    original: nn.Module,
    plan: Plan,
    *,
    prepare: Callable[[nn.Module], None] | None = None,
    change: Change | None = None,
    around: Around = contextlib.nullcontext,
    probes: ProbeKind | None = None,
) -> Result:
    """Put a private copy through a scenario.

    `prepare` changes the module first, `change` each input; `around` is entered around each call and backward pass.
    An Exception of the model is kept in the result; what isn't one (KeyboardInterrupt) passes.
    """
    one = Run(module, original, plan, change, around)
    cast(module, plan.scenario)
    if prepare is not None:
        prepare(module)
    one.note_facts("")
    seen = probes(module, original) if probes else None
    seed_all(plan.seed)
    result, begun = one.result, time.monotonic()
    try:
        with seen or contextlib.nullcontext():
            for number, call in enumerate(plan.scenario.calls, 1):
                result.call = number
                one.call(call)
    except Exception as error:
        result.error, result.is_uncovered = error, isinstance(error, GuardError)
        result.raised_in = seen.innermost if seen else None
    else:
        one.note_facts(" afterwards")
    result.probed, result.seconds = seen.seen if seen else {}, time.monotonic() - begun
    return result


class Run:
    """One private copy on its way through a scenario."""

    def __init__(
        self, module: nn.Module, original: nn.Module, plan: Plan, change: Change | None, around: Around
    ) -> None:
        self.module, self.plan, self.change, self.around = module, plan, change, around
        self.scenario = plan.scenario
        self.known = {name for name, _ in original.named_modules(remove_duplicate=False)}
        self.gone = dropped(module)
        self.world = global_state()
        self.flags: dict[str, bool] = {}
        self.result = Result()

    def note_facts(self, when: str) -> None:
        for (what, name), value in facts(self.module, self.known, self.gone).items():
            if not (what == "training flag" and when):  # those are looked at after each call
                self.result.note(what + when, name, value)

    def call(self, call: Call) -> None:
        self.enter(call)
        given, wanted = self.inputs(call)
        with self.around(), torch.inference_mode(call.inference), torch.set_grad_enabled(call.grad):
            with _autocast(self.module, self.scenario):
                args, kwargs = given
                out = self.module(*args, **kwargs)
        self.note_output(given, out)
        if call.grad:
            self._backward(out)
        self.note_after(call, given, wanted)
        if call.step:
            self._step()
        self.note_parameters()

    def enter(self, call: Call) -> None:
        """The mode that a call asks for."""
        if call.training is not None:
            self.module.train(call.training)
        self.flags = self._flags()

    def note_output(self, given: Inputs, out: Any) -> None:
        note = self.result.note
        for name, leaf in leaves(out):
            note("output", name, leaf)
            if isinstance(leaf, Tensor):
                note("requires_grad of the output", name, leaf.requires_grad)
                note("sharing of the output", name, shared(leaf, given, out))

    def note_after(self, call: Call, given: Inputs, wanted: list[tuple[str, Tensor]]) -> None:
        """What a call and its backward pass have left behind."""
        self.note_held(call)
        self.note_around(call, given, wanted)

    def note_held(self, call: Call) -> None:
        """Of that, what the model holds: gradients and buffers."""
        note = self.result.note
        if call.grad:
            for name, gradient in gradients(self.module).items():
                note("gradient of the parameter", name, gradient)
        for name, buffer in buffers(self.module).items():
            if name not in self.gone:
                note("buffer", name, buffer)

    def note_around(self, call: Call, given: Inputs, wanted: list[tuple[str, Tensor]]) -> None:
        """Of that, what is not the model's: the inputs, random states, global state, flags."""
        note = self.result.note
        if call.grad:
            for name, one in wanted:
                note("gradient of the input", name, one.grad)
        for name, leaf in leaves(given):
            note("content of the input", _called(name), leaf)
        for name, state in random_states().items():
            note("random state of", name, state)
        now = global_state()
        for name in {**self.world, **now}:  # what is gone counts, too
            if now.get(name) != self.world.get(name):
                note("global state", name, now.get(name))
        for name, flag in self._flags().items():
            if flag is not self.flags.get(name):
                note("training flag", name, flag)

    def note_parameters(self) -> None:
        for name, parameter in named_state(self.module).items():
            self.result.note("parameter", name, parameter)

    def _flags(self) -> dict[str, bool]:
        return {name: one.training for name, one in self.module.named_modules() if name in self.known}

    def _backward(self, out: Any) -> None:
        outs = [(i, one) for i, (_, one) in enumerate(tensors_of(out)) if one.requires_grad]
        if outs:
            cotangents = [self.plan.cotangent(i, one) for i, one in outs]
            with self.around():
                torch.autograd.backward([one for _, one in outs], cotangents)

    def inputs(self, call: Call) -> tuple[Inputs, list[tuple[str, Tensor]]]:
        """Copies of the inputs, and the leaves whose gradients are asked for."""
        scenario = self.scenario
        held: dict[int, Tensor] = {}

        @once
        def fresh(tensor: Tensor) -> Tensor:
            new = tensor.detach().clone()
            if new.is_floating_point():
                new = new * scenario.scale if scenario.scale != 1.0 and not scenario.shift else new
                new = new.to(scenario.dtype) if scenario.dtype else new
            if self.change is not None:
                new = self.change(new)
            floating = new.is_floating_point() or new.is_complex()
            if not (call.grad and floating and (tensor.requires_grad or scenario.inputs_require_grad)):
                return new
            leaf = new.requires_grad_()
            passed = leaf.clone()  # not the leaf itself: a model may write into its input
            held[id(passed)] = leaf
            return passed

        with torch.enable_grad():
            given: Inputs = map_tensors(call.inputs, fresh)
        return given, [(_called(name), held[id(one)]) for name, one in tensors_of(given) if id(one) in held]

    def _step(self) -> None:
        """Plain SGD, by a step that is large enough to be seen and small enough not to blow up."""
        moved = [one for one in self.module.parameters() if one.grad is not None and one.requires_grad]
        if self.plan.rate is None:  # all runs of the scenario take the size of the first
            size = sum(float(one.detach().double().square().sum()) for one in moved)
            slope = sum(float(one.grad.double().square().sum()) for one in moved if one.grad is not None)
            wanted = 0.02 * math.sqrt(size / slope) if slope > 0 else 0.0
            self.plan.rate = 2.0 ** round(math.log2(wanted)) if 0 < wanted < math.inf else 0.01
        with torch.no_grad():
            for one in moved:
                one.add_(one.grad if one.grad is not None else 0.0, alpha=-self.plan.rate)
        for one in self.module.parameters():
            one.grad = None


def _called(name: str) -> str:
    """`[0][1]` -> `argument 1`, `[1]['x']` -> `x`: how a user would say which input."""
    if name.startswith("[0]["):
        number, _, rest = name[4:].partition("]")
        return f"argument {number}{rest}"
    if name.startswith("[1]['"):
        word, _, rest = name[5:].partition("']")
        return word + rest
    return name


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def cast(module: nn.Module, scenario: Scenario) -> None:
    if scenario.dtype is not None:
        module.to(scenario.dtype)
    if scenario.scale != 1.0 or scenario.shift:
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.mul_(scenario.scale).add_(scenario.shift)


@contextlib.contextmanager
def _autocast(module: nn.Module, scenario: Scenario) -> Iterator[None]:
    if scenario.autocast is None:
        yield
        return
    device = next((one.device.type for one in module.parameters()), "cpu")
    with torch.autocast(device, scenario.autocast):
        yield
