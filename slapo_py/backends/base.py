"""What every target's engine offers, and what it is given."""

import abc
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from slapo_py.backends import batches
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.errors import BuildError, EngineError
from slapo_py.tracing import missed_guards, misses


@dataclass(frozen=True)
class Training:
    """How to train: the arguments of `build` that are the same for all targets, checked."""

    optimizer: Callable[..., torch.optim.Optimizer]
    loss: Callable[[Any, Any], torch.Tensor]
    count: Callable[[Any], int]
    scheduler: Callable[..., Any] | None = None
    micro_batches: int = 1
    precision: str = "fp32"
    clip: float | None = None
    inputs: Callable[[Any], Any] | None = None
    data_parallel: str = "ddp"
    logical_masks: bool = False

    @classmethod
    def checked(cls, **options: Any) -> "Training":
        """Raises: BuildError, naming the argument and what to write."""
        for name, example in _REQUIRED.items():
            if options[name] is None:
                raise BuildError(f"build: an engine needs {name}=. For example: {example}.")
        if isinstance(options["optimizer"], torch.optim.Optimizer):
            raise BuildError(
                "build: optimizer= takes a factory, and this optimizer already holds other parameters than the built "
                f"module's. Write optimizer=partial(torch.optim.{type(options['optimizer']).__name__}, lr=...)."
            )
        for name in ("optimizer", "loss", "count", "scheduler", "inputs"):
            if options[name] is not None and not callable(options[name]):
                raise BuildError(
                    f"build: {name}= takes a function and got {options[name]!r}. For example: {_EXAMPLES[name]}."
                )
        parts = options["micro_batches"]
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            raise BuildError(f"build: micro_batches={parts!r}: write a whole number from 1.")
        if options["precision"] not in ("fp32", "bf16"):
            raise BuildError(f'build: precision={options["precision"]!r}: write precision="fp32" or precision="bf16".')
        if options["data_parallel"] not in ("ddp", "fsdp"):
            raise BuildError(
                f'build: data_parallel={options["data_parallel"]!r}: write data_parallel="ddp" (every rank has the '
                f'parameters whole) or "fsdp" (every rank has a part of them).'
            )
        clip = options["clip"]
        if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
            raise BuildError(f"build: clip={clip!r}: write a number above 0, or clip=None for no clipping.")
        return cls(**options)


_REQUIRED = {
    "optimizer": "optimizer=partial(torch.optim.AdamW, lr=1e-3)",
    "loss": 'loss=lambda output, batch: F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten(), '
    'reduction="sum")',
    "count": 'count=lambda batch: batch["labels"].numel()',
}
_EXAMPLES = {
    **_REQUIRED,
    "scheduler": "scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=100)",
    "inputs": 'inputs=lambda batch: {"input_ids": batch["input_ids"]}',
}


class Engine(abc.ABC):
    """A built module with what trains it. `build(sch, target=...)` makes one.

    A step is: split the batch, for each part forward, `loss` and backward, divide once by the global `count`, take
    the gradient's norm, clip if asked, step the optimizer and the scheduler. Nothing is skipped: a loss that is not
    finite is returned as it is, and its gradients are used.

    On a mesh a rank that raises or is killed leaves no other waiting: those that hear of it raise, with a note that
    names it, and one that waits 15 s for it in a call says so on stderr and ends (`slapo_py.distributed.failures`).
    """

    target: ClassVar[str]

    module: nn.Module
    """The built module, under the original's names."""
    optimizer: torch.optim.Optimizer
    scheduler: Any
    """What the scheduler factory returned, or None."""
    training: Training
    mesh: Mesh | None
    """The mesh that it was built on; None for one process."""
    grad_norm: torch.Tensor | None
    """Global L2 norm of the last step's gradient, before clipping. None before the first step."""
    step_count: int
    """Optimizer steps taken."""

    def __init__(self, module: nn.Module, training: Training, mesh: Mesh | None = None) -> None:
        self.module = module
        self.mesh = mesh
        self.training = training
        self.scheduler = None
        self.grad_norm = None
        self.step_count = 0

    @property
    def misses(self) -> dict[str, int]:
        """Calls that no trace covered, by the path of the traced module: they ran the original. Empty if none did."""
        return misses(self.module)

    @property
    def missed_guards(self) -> dict[str, Counter[str]]:
        """Why they missed: by path, the guards that failed first, and how often."""
        return missed_guards(self.module)

    def part(self, batch: Any) -> Any:
        """This rank's rows of a batch that all ranks know: those of its place on "dp"; in one process all of them.

        Cut along dim 0 as for micro-batches. Raises: EngineError for fewer rows than places.
        """
        if self.mesh is None:
            return batch
        size = self.mesh.size(DATA)
        parts = batches.split(batch, size, at_most=True)
        if len(parts) < size:
            raise EngineError(
                f'engine: the batch has {len(parts)} row{"s" if len(parts) != 1 else ""} for {size} ranks of "{DATA}": '
                f"each takes one at least. Give larger batches."
            )
        return parts[self.mesh.coordinate(DATA)]

    @abc.abstractmethod
    def train_step(self, batch: Any) -> torch.Tensor:
        """One optimizer step; returns the mean loss over the batch (a scalar, detached).

        The module is put in training mode if it isn't in it; submodules that were put in eval mode alone stay there.
        A step that raises leaves parameters and optimizer as they were, and no gradients.
        Raises: EngineError for a batch, loss or count that can't be trained on.
        """

    @abc.abstractmethod
    def eval_step(self, batch: Any) -> torch.Tensor:
        """The mean loss over the batch in eval mode, without gradients. Modes are put back. Raises: EngineError."""

    @abc.abstractmethod
    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """The model's state under the original's names, in whole shapes: loads strictly into the original.

        With precision="bf16" these are the float32 values. Tensors are the live ones, as in `nn.Module.state_dict`.
        On a mesh every rank must call it, and each gets copies of all parameters. `whole=False` gives, for each
        tensor, a `slapo_py.backends.parts.Part`: what this rank holds, the shape of the whole, and where in it that
        lies. These are the live ones, but for parameters that replace(params=...) has made of others.
        """

    @abc.abstractmethod
    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write model, optimizer, scheduler, random states and step count to a folder, all or nothing.

        Killed at any moment, the folder's previous state is whole. On a mesh every rank must call it with the same
        folder, on a disk that they share; each writes its own parts, and where one fails, all raise. Buffers and what
        modules keep as extra state are those of rank 0. Raises: CheckpointError.
        """

    @abc.abstractmethod
    def load(self, directory: str | os.PathLike[str]) -> None:
        """Take all that `save` wrote, the process's random states too. Refused, it changes nothing, on no rank.

        One process and any mesh can load what any other has saved; on a mesh every rank must call it. On the mesh that
        it comes from, each rank has its own random state again. On another one, ranks of one place on "dp" have that
        of the first rank that was at this place; where there was none, that of rank 0, set apart by the place if the
        places that there were had states of their own.
        Raises: CheckpointError, naming what is missing or does not fit.
        """

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        return (
            f"{type(self).__name__}({type(self.module).__name__}, {parameters:,} parameters, "
            f"{self.training.precision}, micro_batches={self.training.micro_batches}, step {self.step_count})"
        )
