"""Modules to replace, and modules to put in their places."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from slapo_py.params import cat, split, transpose
from tests.engine.models import VOCAB


class Attention(nn.Module):
    """Causal attention as GPT-2 does it, with q, k and v apart; a lasting and a passing buffer."""

    def __init__(self, width: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.width = width
        self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril(), persistent=False)
        self.drop = nn.Dropout(0.1)
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return attend(self, x, self.q(x), self.k(x), self.v(x), scale)


def attend(module: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    if module.training:
        module.calls += 1
    length = x.shape[1]
    scores = (q @ k.transpose(-2, -1) * module.width**-0.5).masked_fill(~module.mask[:length, :length], -1e9)
    return module.o(module.drop(scores.softmax(-1)) @ v) * scale


class Fused(nn.Module):
    """The same with one product for q, k and v, registered in another order."""

    def __init__(self, old: Attention) -> None:
        super().__init__()
        width = self.width = old.width
        self.o = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.qkv = nn.Linear(width, 3 * width, bias=old.q.bias is not None)
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return attend(self, x, *self.qkv(x).chunk(3, dim=-1), scale)


class Transposed(Fused):
    """The fused weight lies the other way round, as in GPT-2."""

    def __init__(self, old: Attention) -> None:
        super().__init__(old)
        self.qkv.weight = nn.Parameter(self.qkv.weight.detach().t().clone())

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return attend(self, x, *(x @ self.qkv.weight + self.qkv.bias).chunk(3, dim=-1), scale)


class Parted(nn.Module):
    """`Fused` in the place of which q, k and v come apart."""

    def __init__(self, old: Fused) -> None:
        super().__init__()
        self.width = old.width
        self.q, self.k, self.v, self.o = (nn.Linear(old.width, old.width) for _ in range(4))
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return attend(self, x, self.q(x), self.k(x), self.v(x), scale)


FUSED = {f"qkv.{one}": cat(f"q.{one}", f"k.{one}", f"v.{one}") for one in ("weight", "bias")}
TRANSPOSED = {**FUSED, "qkv.weight": transpose(FUSED["qkv.weight"], 0, 1)}
PARTED = {
    f"{name}.{one}": part
    for one in ("weight", "bias")
    for name, part in zip("qkv", split(f"qkv.{one}", 3), strict=True)
}


class LM(nn.Module):
    """A small language model, its head tied to the embedding."""

    def __init__(self, attention: Any = Attention, layers: int = 2, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList([Block(attention, width) for _ in range(layers)])
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, **unused: Any) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, attention: Any, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = attention(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


def fused_attention(width: int) -> Fused:
    return Fused(Attention(width))


def lm(attention: Any = Attention, **sizes: Any) -> LM:
    torch.manual_seed(0)
    return LM(attention, **sizes)


class FusedLlama(nn.Module):
    def __init__(self, old: LlamaAttention) -> None:
        super().__init__()
        self.size, self.scaling, self.dropout = old.head_dim, old.scaling, old.attention_dropout
        self.sizes = [old.q_proj.out_features, old.k_proj.out_features, old.v_proj.out_features]
        self.qkv_proj = nn.Linear(old.q_proj.in_features, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(old.o_proj.in_features, old.o_proj.out_features, bias=False)

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any) -> Any:
        q, k, v = (
            one.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for one in self.qkv_proj(hidden_states).split(self.sizes, dim=-1)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.o_proj(_sdpa(q, k, v, attention_mask, self, True)), None


class FusedBert(nn.Module):
    def __init__(self, old: BertSelfAttention) -> None:
        super().__init__()
        self.size, self.scaling, self.dropout = old.attention_head_size, old.scaling, old.dropout.p
        self.qkv = nn.Linear(old.query.in_features, 3 * old.all_head_size)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, cache: Any = None, **_: Any) -> Any:
        q, k, v = (
            one.unflatten(-1, (-1, self.size)).transpose(1, 2) for one in self.qkv(hidden_states).chunk(3, dim=-1)
        )
        return _sdpa(q, k, v, attention_mask, self, False), None


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any, module: Any, causal: bool) -> Tensor:
    p = module.dropout if module.training else 0.0
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal and mask is None, scale=module.scaling, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(2)


LLAMA = {"qkv_proj.weight": cat("q_proj.weight", "k_proj.weight", "v_proj.weight")}
BERT = {f"qkv.{one}": cat(f"query.{one}", f"key.{one}", f"value.{one}") for one in ("weight", "bias")}
