"""`slapo.compare({...})`: several schedules of one model side by side, measured in one run."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slapo_py.build.build import build
from slapo_py.errors import ArgumentError, NoExampleInputs, VerificationError
from slapo_py.report.measure import PeakBytes, paired_ratio, saved_activations
from slapo_py.schedule import Schedule, create_schedule
from slapo_py.snapshot import nothing_collected, random_states_kept
from slapo_py.tracing import misses
from slapo_py.tracing.recorder import Inputs, normalize_inputs
from slapo_py.tracing.values import map_tensors

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Row:
    """What was found of one schedule.

    `time_ratio`: a forward and backward pass against the plain model's, the median of pairs that ran in turn.
    `saved_bytes`: what autograd keeps for the backward pass, each storage once, parameters left out. `peak_bytes`: the
    most that was alive at one time during both passes, recomputed activations included, parameters and their
    gradients left out (on CPU, compiled modules are counted as they run uncompiled). `compile_seconds`: how much
    longer the first call took than later ones; what this process has compiled before is not compiled again.
    """

    name: str
    grade: str
    steps: int
    time_ratio: float
    saved_bytes: int
    peak_bytes: int
    schedule_seconds: float
    compile_seconds: float
    misses: int
    note: str = ""


class Comparison:
    """The result of `compare`: `rows`, `plain` (the model without a schedule), and a table when printed."""

    def __init__(self, plain: Row, rows: Sequence[Row]) -> None:
        self.plain = plain
        self.rows = tuple(rows)

    def __getitem__(self, name: str) -> Row:
        return {row.name: row for row in self.rows}[name]

    def __rich__(self) -> Any:
        with random_states_kept():  # importing rich draws from Python's random state
            from slapo_py.report.tables import megabytes, table

            columns = ("", "verify", "steps", "time", "saved", "peak", "schedule", "first call", "misses")
            cells = [
                (
                    row.name, row.grade, row.steps, f"{row.time_ratio:.3f} x", megabytes(row.saved_bytes),
                    megabytes(row.peak_bytes), f"{row.schedule_seconds:.2f} s", f"+{row.compile_seconds:.2f} s",
                    row.misses,
                )
                for row in (self.plain, *self.rows)
            ]  # fmt: skip
            return table("forward and backward, against the model without a schedule", columns, cells)

    def __str__(self) -> str:
        with random_states_kept():
            from slapo_py.report.tables import plain

            notes = [f"{row.name}: {row.note}" for row in self.rows if row.note]
            width = 90 + max(len(row.name) for row in self.rows)
            return "\n".join([plain(self.__rich__(), width).rstrip(), *notes])

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(row.name for row in self.rows)}>"


def compare(
    schedules: Mapping[str, Schedule],
    batch: Any = None,
    *,
    loss: Loss | None = None,
    rounds: int = 10,
    png: "str | PathLike[str] | None" = None,
) -> Comparison:
    """Schedules of one model -> a table: are they right, how fast, how much memory, what did they cost.

        print(slapo.compare({"traced": a, "checkpointed": b}, {"input_ids": ids}))

    Each is verified, then built as a module of its own and run in turn with the model without a schedule: `rounds`
    pairs of a forward and a backward pass, in the mode (train or eval) that the original is in. A schedule that is
    wrong has the grade "bug"; it is shown, not raised.

    - batch: what the model is called with, as in `create_schedule`; the first schedule's first example inputs if None
    - loss(output, batch): a scalar tensor to go backward from; else the output's own `.loss`, or the sum of its
      floating tensors weighted with fixed random numbers
    - png: a file to draw the time ratios and bytes into (needs matplotlib)

    Raises `ArgumentError`, `NoExampleInputs`, and whatever the model raises. Nothing of the schedules, their original
    or torch's random states changes.
    """
    first = _check(schedules, rounds)
    given = normalize_inputs(first.root.example_inputs if batch is None else batch)
    if not given:
        raise NoExampleInputs(
            "compare needs to know what the model is called with. Write compare({...}, batch), or give create_schedule "
            "example_inputs."
        )
    gc.collect()  # what is left from before is nobody's time
    with random_states_kept(), nothing_collected(), torch.enable_grad():
        plain = create_schedule(first.root.original)
        run = _Run(given[0], batch, loss)
        base = _built(plain)
        rows = [_row(name, sch, run, base, rounds) for name, sch in schedules.items()]
        found = Comparison(_plain(run, base), rows)
    if png is not None:
        _draw(png, found)
    return found


def _check(schedules: Any, rounds: Any) -> Schedule:
    example = 'Write compare({"traced": sch, "checkpointed": other}).'
    if not isinstance(schedules, Mapping) or not schedules:
        raise ArgumentError(f"compare: needs a dict of schedules by name, found {schedules!r:.60}. {example}")
    for name, sch in schedules.items():
        if not isinstance(name, str) or not isinstance(sch, Schedule):
            raise ArgumentError(f"compare: {name!r} is {type(sch).__name__}, not a schedule under a name. {example}")
        if sch.path:
            raise ArgumentError(
                f"compare: {name!r} is the place {sch.path!r} of a schedule; whole schedules are compared. "
                f'Write "{name}": sch, for the sch that you made it from.'
            )
    (first_name, first), *others = schedules.items()
    for name, sch in others:
        if sch.root.original is not first.root.original:
            raise ArgumentError(
                f"compare: {name!r} and {first_name!r} are schedules of different models, whose figures say nothing "
                f"about each other. Make both with create_schedule(model) of the same model object."
            )
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ArgumentError(f"compare: rounds must be a whole number of at least 1, found {rounds!r}.")
    return first


class _Run:
    """One forward and backward pass, as every model in the comparison makes it."""

    def __init__(self, given: Inputs, batch: Any, loss: Loss | None) -> None:
        self.given, self.batch, self.loss = given, batch, loss
        self.weights: dict[tuple[int, torch.Size], Tensor] = {}

    def arguments(self) -> Inputs:
        """Fresh ones: a model may write into what it is given, and gradients gather on it."""
        copied: Inputs = map_tensors(
            self.given, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        )
        return copied

    def __call__(self, module: nn.Module, inputs: Inputs) -> None:
        args, kwargs = inputs
        value = self.value(module(*args, **kwargs))
        if value is not None:
            value.backward()  # type: ignore[no-untyped-call]

    def value(self, output: Any) -> Tensor | None:
        """What to go backward from; None if nothing depends on a parameter."""
        if self.loss is not None:
            value = self.loss(output, self.batch if self.batch is not None else self.given[1] or self.given[0])
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise ArgumentError(
                    f"compare: loss(output, batch) must give a scalar tensor, found "
                    f"{list(value.shape) if isinstance(value, Tensor) else type(value).__name__}. Write "
                    f"loss=lambda output, batch: output.logits.mean()."
                )
            return value if value.requires_grad else None
        own = getattr(output, "loss", None)
        if isinstance(own, Tensor) and own.requires_grad:
            return own
        parts = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad]
        total: Tensor | None = None
        for index, one in enumerate(parts):
            weighted = (one * self._weight(index, one)).sum()
            total = weighted if total is None else total + weighted
        return total

    def _weight(self, index: int, output: Tensor) -> Tensor:
        """Random, so that no gradient vanishes by symmetry; the same for every model."""
        key = (index, output.shape)
        if key not in self.weights:
            generator = torch.Generator().manual_seed(index)
            self.weights[key] = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
        return self.weights[key]

    def seconds(self, module: nn.Module) -> float:
        inputs = self.arguments()
        _wait()
        start = time.perf_counter()
        self(module, inputs)
        _wait()
        return time.perf_counter() - start

    def bytes(self, module: nn.Module) -> tuple[int, int]:
        """(saved for backward, peak), where the parameters have gradients already, as in a second micro-batch."""
        self(module, self.arguments())
        args, kwargs = self.arguments()
        with saved_activations(module) as saved:
            output = module(*args, **kwargs)
        del output
        args, kwargs = self.arguments()
        there = [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters() if p.grad is not None)]
        if any(one.is_cuda for one in there):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self(module, (args, kwargs))
            return saved.bytes, torch.cuda.max_memory_allocated() - before
        with PeakBytes([*there, *(one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))]) as peak:
            self(module, (args, kwargs))
        return saved.bytes, peak.peak


def _built(sch: Schedule) -> nn.Module:
    """A module of our own, in the modes of the original: a schedule's copy may have been switched for a while."""
    module, original = build(sch), sch.root.original
    modes = {name: one.training for name, one in original.named_modules()}
    for name, one in module.named_modules():
        one.training = modes.get(name, original.training)
    return module


def _row(name: str, sch: Schedule, run: _Run, base: nn.Module, rounds: int) -> Row:
    fresh = create_schedule(sch.root.original, sch.root.example_inputs)
    start = time.perf_counter()
    sch.history.replay(fresh)
    schedule_seconds = time.perf_counter() - start
    module = _built(sch)
    first = run.seconds(module)
    run.seconds(base)
    pairs = [(run.seconds(base), run.seconds(module)) for _ in range(rounds)]
    old, new = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    saved, peak = run.bytes(module)
    missed = sum(misses(module).values())
    grade, note = _grade(sch)  # last: it may compile what the first call is to be charged with
    return Row(
        name, grade, len(sch.history), paired_ratio(new, old), saved, peak, schedule_seconds,
        max(0.0, first - statistics.median(new)), missed, note,
    )  # fmt: skip


def _plain(run: _Run, base: nn.Module) -> Row:
    saved, peak = run.bytes(base)
    return Row("(no schedule)", "", 0, 1.0, saved, peak, 0.0, 0.0, 0)


def _grade(sch: Schedule) -> tuple[str, str]:
    """The grade that `verify` gives, and why there is none or a bad one."""
    from slapo_py.verify.verify import verify

    try:
        return str(verify(sch).grade), ""
    except VerificationError as error:
        return "bug", str(error)
    except NoExampleInputs:
        return "?", "not verified: its create_schedule was given no example_inputs"


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _draw(path: "str | PathLike[str]", found: Comparison) -> None:
    with random_states_kept():
        from slapo_py.report.plots import bars

        rows = (found.plain, *found.rows)
        titles = "time, as a ratio", "saved for backward, MB", "peak, MB"
        panels = {
            titles[0]: {row.name: row.time_ratio for row in rows},
            titles[1]: {row.name: row.saved_bytes / 1e6 for row in rows},
            titles[2]: {row.name: row.peak_bytes / 1e6 for row in rows},
        }
        bars(str(path), panels, {titles[0]: 1.0})
