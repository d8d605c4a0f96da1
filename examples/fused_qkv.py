"""One matrix for q, k and v, and checkpoints that the model without it reads: train fused, go on plain.

Run: python examples/fused_qkv.py
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.params import cat


class Attention(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True))


class FusedAttention(nn.Module):
    """What `Attention` computes, with one matrix product in the place of three."""

    def __init__(self, old: Attention) -> None:
        super().__init__()
        width = old.out.in_features
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


QKV = {f"qkv.{kind}": cat(f"q.{kind}", f"k.{kind}", f"v.{kind}") for kind in ("weight", "bias")}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), Attention(), nn.LayerNorm(32), Attention(), nn.Linear(32, 64))


def engine_of(sch: slapo.Schedule) -> Any:
    return slapo.build(
        sch,
        target="torch",
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[0].flatten(), reduction="sum"),
        count=lambda batch: batch[0].numel(),
    )


def main() -> None:
    model = make_model()
    data = [(torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(seed)),) for seed in range(20)]
    sch = slapo.create_schedule(model)
    for path in ("1", "3"):
        sch[path].replace(FusedAttention, params=QKV)
    print(sch)
    fused, plain = engine_of(sch), engine_of(slapo.create_schedule(make_model()))
    with TemporaryDirectory() as folder:
        for batch in data[:10]:
            fused.train_step(batch)
        fused.save(Path(folder) / "run")  # under the original's names: weights, and both moments of AdamW
        plain.load(Path(folder) / "run")
    for batch in data[10:]:
        losses = fused.train_step(batch), plain.train_step(batch)
    print(f"after 20 steps: fused {losses[0]:.6f}, plain from step 10 on {losses[1]:.6f}")
    model.load_state_dict(fused.state_dict())
    print("keys of the checkpoint:", *[name for name in fused.state_dict() if name.startswith("1.")])


if __name__ == "__main__":
    main()
