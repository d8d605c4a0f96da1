"""A bug in the model, found in the original with an ordinary forward hook; the schedule stays as it is.

Run: python examples/debugging.py
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo


class Attention(nn.Module):
    first_hidden = 1  # a token sees itself and what came before it

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(self.first_hidden)
        return self.out(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v)


class BuggyAttention(Attention):
    first_hidden = 0  # off by one: the first token sees nothing, and softmax over nothing is NaN


class Block(nn.Module):
    def __init__(self, width: int, attention: type[Attention]) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), attention(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


def make_model(attention: type[Attention]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), Block(32, attention), Block(32, attention), nn.Linear(32, 64))


def first_nan(model: nn.Module, ids: Tensor) -> str:
    """The first module that turns good inputs into NaN. A breakpoint() in the hook would stop right there."""
    found: list[str] = []

    def look(name: str, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if output.isnan().any() and not args[0].isnan().any():
            found.append(name)

    hooks = [m.register_forward_hook(partial(look, name)) for name, m in model.named_modules() if "." in name]
    model(ids)
    for hook in hooks:
        hook.remove()
    return found[0]


def train(sch: slapo.Schedule, ids: Tensor) -> float:
    def loss(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten(), reduction="sum")

    adamw = partial(torch.optim.AdamW, lr=1e-2)
    engine = slapo.build(sch, target="torch", optimizer=adamw, loss=loss, count=lambda batch: batch[0][:, 1:].numel())
    return [float(engine.train_step((ids,))) for _ in range(20)][-1]


ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
sch = slapo.create_schedule(make_model(BuggyAttention), example_inputs=(ids,))
sch["1"].trace().checkpoint()
sch["2.attention"].trace()
print(f"loss of the scheduled model: {train(sch, ids)}")
print(f"the first NaN in the original comes out of: {first_nan(sch.original, ids)}")

fixed = slapo.create_schedule(make_model(Attention), example_inputs=(ids,))
sch.history.replay(fixed)  # the same schedule on the corrected model
print(fixed.history)
print(f"loss with the mask corrected: {train(fixed, ids):.3f}")
