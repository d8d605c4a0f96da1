"""Target "torch": plain PyTorch, in one process or on the ranks of a mesh."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from slapo_py.backends import batches, state
from slapo_py.backends.base import Engine, Training
from slapo_py.backends.data_parallel import data_parallel
from slapo_py.backends.elementwise import check_elementwise
from slapo_py.backends.global_numbers import Agreed, agreed, drawn_alike, norm_and_clip_on, sum_partial, summed
from slapo_py.backends.means import check_sum
from slapo_py.backends.optim import make_optimizer, make_scheduler, norm_and_clip
from slapo_py.backends.precision import MasterWeights, Weights
from slapo_py.build.facts import facts_of
from slapo_py.distributed.failures import fails_together
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.distributed.rng import forked
from slapo_py.errors import EngineError


class TorchEngine(Engine):
    """Trains a built module. In one process with one micro-batch each step is the plain PyTorch loop, to the bit.

    On a mesh each data-parallel rank is given its own part of the batch; ranks that differ on other axes only are given
    the same. The loss is divided by the count of all parts, and what is returned is the mean over them.
    """

    target = "torch"

    def __init__(self, module: nn.Module, training: Training, mesh: Mesh | None = None) -> None:
        super().__init__(module, training, mesh)
        self.facts = facts_of(module)
        spread = training.data_parallel == "fsdp" and mesh is not None and mesh.size(DATA) > 1
        masters = training.precision == "bf16" and not spread  # FSDP2 keeps its own
        self.weights = MasterWeights(module) if masters else Weights(module)
        self.replicas = data_parallel(module, mesh, training.data_parallel, training.precision, every=masters)
        self.weights.renew()
        self.optimizer = make_optimizer(training.optimizer, self.weights.named)
        check_elementwise(self.optimizer, self._split(spread))
        self.scheduler = make_scheduler(training.scheduler, self.optimizer)

    def _split(self, spread: bool) -> dict[str, tuple[nn.Parameter, set[int]]]:
        """The parameters that this rank has a part of, by name, each with the dims that are cut.

        spread: whether FSDP2 has cut all of them along dim 0.
        """
        found = {}
        for name, parameter in self.weights.named:
            placements = self.facts[name].placements if self.mesh is not None and name in self.facts else {}
            dims = {one.dim for axis, one in placements.items() if self.mesh is not None and self.mesh.size(axis) > 1}
            dims |= {0} if spread else set()
            if dims:
                found[name] = (parameter, dims)
        return found

    @fails_together
    def train_step(self, batch: Any) -> torch.Tensor:
        parts, known = self._prepared(batch)
        count = known.count
        if not self.module.training:
            self.module.train()
        self.replicas.check_ready()
        self.weights.drop_gradients()
        total = None
        try:
            for index, part in enumerate(parts):
                with self.replicas.backward(last=index == len(parts) - 1):
                    with self._apart(), drawn_alike(known.apart, self.training.logical_masks):
                        loss = self._loss(part, self.replicas)
                    if self.step_count == 0:
                        check_sum(loss, count, len(parts) * self.replicas.size)
                    self._backward(loss, count)
                self.weights.collect()
                total = loss.detach() if total is None else total + loss.detach()
            self.replicas.check_gradients(self.weights.named)
            norm = self._norm()
        except BaseException:
            self.weights.drop_gradients()
            self.replicas.broken_off()
            raise
        self.optimizer.step()
        self.weights.publish()
        if self.scheduler is not None:
            self.scheduler.step()
        self.weights.drop_gradients()
        self.grad_norm = norm
        self.step_count += 1
        assert total is not None  # there is at least one part
        return summed(total, self.mesh) / count

    def _backward(self, loss: torch.Tensor, count: int) -> None:
        if not loss.requires_grad:
            raise EngineError(
                "engine: the loss has no gradient. Compute it from the model's output with torch operations, "
                "without detach() or item(), and call train_step outside torch.no_grad()."
            )
        (loss * self.replicas.size / count if self.replicas.size > 1 else loss / count).backward()

    def _apart(self) -> AbstractContextManager[Any]:
        """Data-parallel ranks draw differently, each for its own rows; ranks of other axes draw alike."""
        if self.mesh is None or self.replicas.size == 1 or self.training.logical_masks:
            return nullcontext()
        return forked({DATA: self.mesh.coordinate(DATA)})

    def _norm(self) -> torch.Tensor:
        if self.mesh is None:
            return norm_and_clip((parameter for _, parameter in self.weights.named), self.training.clip)
        sum_partial(self.weights.named, self.facts, self.mesh)
        return norm_and_clip_on(self.weights.named, self.facts, self.mesh, self.training.clip)

    @fails_together
    @torch.no_grad()
    def eval_step(self, batch: Any) -> torch.Tensor:
        parts, known = self._prepared(batch, at_most=True)
        with _eval_mode(self.module), self.replicas.evaluation():
            losses = [self._loss(part, self.module).detach() for part in parts]
        return summed(sum(losses[1:], losses[0]), self.mesh) / known.count

    @fails_together
    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        return state.state_dict(self, self.weights, self.mesh, whole)

    @fails_together
    def save(self, directory: str | os.PathLike[str]) -> None:
        state.save(self, self.weights, directory, self.mesh)

    @fails_together
    def load(self, directory: str | os.PathLike[str]) -> None:
        state.load(self, self.weights, directory, self.mesh)

    def _loss(self, part: Any, module: Callable[..., Any]) -> torch.Tensor:
        args, kwargs = batches.arguments(part, self.training.inputs)
        args, kwargs = self.weights.inputs((args, kwargs))
        try:
            output = module(*args, **kwargs)
        except TypeError as error:
            if self.training.inputs is None:
                error.add_note("engine: the model was called with the whole batch; build(..., inputs=...) chooses")
            raise
        output = self.weights.outputs(output)
        loss = self.training.loss(output, part)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            found = f"a tensor of {tuple(loss.shape)} {loss.dtype}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise EngineError(
                f"engine: loss(output, batch) returned {found}; it is the sum over the batch, a scalar tensor. "
                'Sum it, for example with reduction="sum".'
            )
        # a sum in half precision has 8 bits: no more than the terms are lost to it, but the quotient is exact enough
        return loss.reshape(()).float() if loss.dtype in (torch.bfloat16, torch.float16) else loss.reshape(())

    def _prepared(self, batch: Any, at_most: bool = False) -> tuple[list[Any], Agreed]:
        """The micro-batches, and what all ranks know: nothing has been sent if one refuses its own."""
        parts: list[Any] = []

        def prepare() -> tuple[int, int]:
            parts[:] = batches.split(batch, self.training.micro_batches, at_most=at_most)
            return self._counted(parts), len(parts)

        if self.mesh is None:
            known = Agreed(*prepare())
        else:
            known = agreed(prepare, batch, self.mesh, self.step_count == 0, self.training.logical_masks)
        if known.count <= 0:
            raise EngineError(
                f"engine: count(batch) is {known.count} for this batch, and the loss is divided by it. "
                "Leave out batches without a counted element."
            )
        return (parts if len(parts) == known.parts else batches.split(batch, known.parts)), known

    def _counted(self, parts: list[Any]) -> int:
        total = 0
        for part in parts:
            count = self.training.count(part)
            if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_floating_point():
                count = int(count.item())
            if not isinstance(count, int):
                raise EngineError(
                    f"engine: count(batch) returned {count!r}; it is a whole number of tokens or rows. "
                    'For example: count=lambda batch: batch["labels"].numel().'
                )
            total += count
        return total


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training
