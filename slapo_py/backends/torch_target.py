"""Target "torch": plain PyTorch, one process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slapo_py.backends import batches, state
from slapo_py.backends.base import Engine, Training
from slapo_py.backends.optim import make_optimizer, make_scheduler, norm_and_clip
from slapo_py.backends.precision import MasterWeights, Weights
from slapo_py.errors import EngineError


class TorchEngine(Engine):
    """Trains a built module in one process. With one micro-batch each step is the plain PyTorch loop, to the bit."""

    target = "torch"

    def __init__(self, module: nn.Module, training: Training) -> None:
        super().__init__(module, training)
        self.weights = MasterWeights(module) if training.precision == "bf16" else Weights(module)
        self.optimizer = make_optimizer(training.optimizer, self.weights.named)
        self.scheduler = make_scheduler(training.scheduler, self.optimizer)

    def train_step(self, batch: Any) -> torch.Tensor:
        parts = batches.split(batch, self.training.micro_batches)
        count = self._count(parts)
        if not self.module.training:
            self.module.train()
        self.weights.drop_gradients()
        total = None
        try:
            for part in parts:
                loss = self._loss(part)
                if not loss.requires_grad:
                    raise EngineError(
                        "engine: the loss has no gradient. Compute it from the model's output with torch operations, "
                        "without detach() or item(), and call train_step outside torch.no_grad()."
                    )
                (loss / count).backward()
                self.weights.collect()
                total = loss.detach() if total is None else total + loss.detach()
            norm = norm_and_clip((parameter for _, parameter in self.weights.named), self.training.clip)
        except BaseException:
            self.weights.drop_gradients()
            raise
        self.optimizer.step()
        self.weights.publish()
        if self.scheduler is not None:
            self.scheduler.step()
        self.weights.drop_gradients()
        self.grad_norm = norm
        self.step_count += 1
        assert total is not None  # there is at least one part
        return total / count

    @torch.no_grad()
    def eval_step(self, batch: Any) -> torch.Tensor:
        parts = batches.split(batch, self.training.micro_batches, at_most=True)
        count = self._count(parts)
        with _eval_mode(self.module):
            losses = [self._loss(part).detach() for part in parts]
        return sum(losses[1:], losses[0]) / count

    def state_dict(self) -> dict[str, Any]:
        return state.model_state(self.module, self.weights)

    def save(self, directory: str | os.PathLike[str]) -> None:
        state.save(self, self.weights, directory)

    def load(self, directory: str | os.PathLike[str]) -> None:
        state.load(self, self.weights, directory)

    def _loss(self, part: Any) -> torch.Tensor:
        args, kwargs = batches.arguments(part, self.training.inputs)
        args, kwargs = self.weights.inputs((args, kwargs))
        try:
            output = self.module(*args, **kwargs)
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

    def _count(self, parts: list[Any]) -> int:
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
        if total <= 0:
            raise EngineError(
                f"engine: count(batch) is {total} for this batch, and the loss is divided by it. "
                "Leave out batches without a counted element."
            )
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
