"""Small plain models for the tests of the language itself."""

from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Dropout, batch norm and a second path: whatever must be the same twice, in a few lines."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.3)
        self.scale = 0.5
        self.flags = ["a"]

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        y = self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        return x + y * self.scale if shift is None else x + y * self.scale + shift


class Net(nn.Module):
    """Two blocks, batch norm, and a head tied to the embedding."""

    def __init__(self, width: int = 8, vocab: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.config = {"width": width, "nested": [1, 2]}

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def ids(batch: int = 3, seq: int = 5) -> Tensor:
    return torch.randint(0, 11, (batch, seq), generator=torch.Generator().manual_seed(1))


def tiny_gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 31, "n_positions": 16, **changes}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    return GPT2LMHeadModel(config)
