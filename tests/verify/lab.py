"""The model that faults are planted in, and the step that plants them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py import Primitive, Schedule

WIDTH, HEADS, VOCAB = 16, 2, 13


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.scale = (WIDTH // HEADS) ** -0.5

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)

    def scores(self, x: Tensor, mask: Tensor | None) -> Tensor:
        scores = self.heads(self.q(x)) @ self.heads(self.k(x)).transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return scores

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.drop(self.scores(x, mask).softmax(-1))
        return self.out((weights @ self.heads(self.v(x))).transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x))))


class Mix(nn.Module):
    """Two keyword arguments of one shape, which are easily swapped."""

    def forward(self, x: Tensor, *, gain: Tensor, shift: Tensor) -> Tensor:
        return x * gain + shift


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp, self.mix = Attention(), Mlp(), Mix()
        self.gain = nn.Parameter(torch.randn(WIDTH) * 0.1 + 1)
        self.shift = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), mask)
        x = x + self.mlp(self.norm2(x))
        return self.mix(x, gain=self.gain, shift=self.shift)


class Lab(nn.Module):
    """Token ids and floating features -> a dict, with attention, dropout, batch norm and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(-1, 1, WIDTH))

    def forward(self, ids: Tensor, features: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(ids) + features + self.offset
        for layer in self.layers:
            x = layer(x, mask)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return {"logits": self.head(x), "hidden": (x,)}


def lab(seed: int = 0) -> Lab:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Lab().train()


def inputs(batch: int = 4, seq: int = 5, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, seq, dtype=torch.bool)
    mask[0, -2:] = False
    ids = torch.randint(0, VOCAB, (batch, seq), generator=generator)
    return {"ids": ids, "features": torch.randn(batch, seq, WIDTH, generator=generator), "mask": mask}


class Alter(Primitive):
    """Change a module by a function, which may return another one to put in its place."""

    def check(self, place: Schedule, change: Callable[[nn.Module], Any]) -> None:
        pass

    def apply(self, place: Schedule, change: Callable[[nn.Module], Any]) -> None:
        new = change(place.module)
        if isinstance(new, nn.Module):
            parent, _, name = place.path.rpartition(".")
            place.root.module(parent)._modules[name] = new


@contextmanager
def altering() -> Iterator[None]:
    """`sch[path].alter(change)` is there for a while."""
    slapo.register("alter")(Alter)
    try:
        yield
    finally:
        slapo.unregister("alter")
