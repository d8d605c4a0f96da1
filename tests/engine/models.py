"""Small models, and what every engine test does with them."""

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from slapo_py.backends.base import Engine
from slapo_py.build import build
from slapo_py.schedule import Schedule, create_schedule

VOCAB = 23


class TinyLM(nn.Module):
    """Embedding tied to the head, dropout, batch statistics, a persistent and a non-persistent buffer."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(32, 16, bias=False)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.full((16,), 1.5), persistent=False)

    def forward(self, ids: torch.Tensor, **unused: Any) -> torch.Tensor:
        if self.training:
            self.calls += 1
        x = self.embed(ids)
        x = x + self.down(self.drop(F.gelu(self.up(self.norm(x))))) * self.scale.to(x.dtype)
        return self.head(x)


def batches(n: int, rows: int = 6, length: int = 5, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Batches whose rows have different numbers of counted tokens."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(n):
        ids = torch.randint(0, VOCAB, (rows, length), generator=draw)
        labels = torch.where(torch.rand(rows, length, generator=draw) < 0.3, -100, ids)
        labels[:, 0] = ids[:, 0]
        found.append({"ids": ids, "labels": labels})
    return found


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def count(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"] != -100).sum())


adamw = partial(torch.optim.AdamW, lr=1e-2)
decay = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


def engine_of(model: nn.Module | Schedule, **options: Any) -> Engine:
    sch = model if isinstance(model, Schedule) else create_schedule(model)
    return build(sch, target="torch", **{"optimizer": adamw, "loss": loss, "count": count, **options})


def plain_loop(
    model: nn.Module,
    data: list[dict[str, torch.Tensor]],
    optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    scheduler: Callable[..., Any] | None = None,
    clip: float | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The training loop that everybody writes: yields (mean loss, gradient norm) of each step."""
    steps = optimizer(model.parameters())
    rates = scheduler(steps) if scheduler else None
    model.train()
    for batch in data:
        mean = loss(model(**batch), batch) / count(batch)
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip)
        steps.step()
        if rates:
            rates.step()
        steps.zero_grad()
        yield mean.detach(), norm


def fingerprint(model: nn.Module) -> list[Any]:
    """All of a model that could be touched, with the process's random states."""
    found: list[Any] = [torch.get_rng_state().tolist(), repr(random.getstate()), repr(np.random.get_state())]
    found += [torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()]
    for path, module in model.named_modules():
        found += [path, id(module), type(module), module.training, sorted(vars(module))]
        found += [(name, repr(value)) for name, value in sorted(vars(module).items()) if name[:1] != "_"]
        found += [(name, list(value)) for name, value in sorted(vars(module).items()) if name.endswith("hooks")]
        if hasattr(module, "config"):
            found.append(copy.deepcopy(module.config.to_dict()))
    for path, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        found += [path, id(tensor), tensor._version, tensor.dtype, tensor.requires_grad, tensor.data_ptr()]
        found += [None if tensor.grad is None else tensor.grad.tolist(), tensor.detach().tolist(), sorted(vars(tensor))]
    return found


def same_state(one: nn.Module | dict[str, Any], other: nn.Module | dict[str, Any]) -> bool:
    a = one.state_dict() if isinstance(one, nn.Module) else one
    b = other.state_dict() if isinstance(other, nn.Module) else other
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)
