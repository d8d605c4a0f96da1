"""Small models for data-parallel ranks, and engines on them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.distributed.mesh import DATA

ROWS = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


class Out:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Wrapped(nn.Module):
    """FSDP2 doesn't look into what it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return Out(self.inner(x))


class Chosen(Layers):
    """Each rank runs its own of two blocks of one shape, or both in its own order; or runs one of them again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        rank = torch.distributed.get_rank() if self.training or self.kind != "one in training" else 0
        if self.kind == "again" and rank == 0:  # with nothing to exchange in it: only backward runs it again
            x = torch.utils.checkpoint.checkpoint(self.layers[0], x, use_reentrant=False).tanh()
        elif self.kind == "again":
            x = self.layers[0](x).tanh()
        for index in {"other order": (rank, 1 - rank), "again": (1,)}.get(self.kind, (rank,)):
            x = self.layers[index](x).tanh()
        return self.head(x)


def engine(model: nn.Module, loss: Any = None, mesh: Any = None, count: Any = len, **options: Any) -> Any:
    options.setdefault("optimizer", partial(torch.optim.SGD, lr=0.1))
    return slapo.build(
        slapo.create_schedule(model, (ROWS,)),
        target="torch",
        mesh={DATA: 2} if mesh is None else mesh,
        loss=loss or (lambda output, batch: output.square().sum()),
        count=count,
        **options,
    )


def mine(rows: Tensor = ROWS) -> Tensor:
    return rows.tensor_split(2)[torch.distributed.get_rank()]


def split_head(optimizer: Any) -> Any:
    sch = slapo.create_schedule(Layers(), (ROWS,))
    sch["head"].shard("weight", "bias", dim="out")
    sch.auto_sync("tp")
    return slapo.build(
        sch, target="torch", mesh={"tp": 2}, optimizer=optimizer, loss=lambda output, batch: output.sum(), count=len
    )


def step(made: Any) -> Any:
    return made.train_step(mine())


def of_logits(output: Any, batch: Tensor) -> Tensor:
    return output.logits.square().sum()
