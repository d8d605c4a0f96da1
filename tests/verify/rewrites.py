"""Right rewrites whose sums run in another order: verify must not take them for bugs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.verify.lab import Attention, Mlp

Change = Callable[..., Any]


@dataclass(frozen=True)
class Rewrite:
    name: str
    at: tuple[str, ...]
    change: Change


REWRITES: list[Rewrite] = []
_BLOCKS = ("layers.0", "layers.1")


def rewrite(*at: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function below becomes the forward at these places."""

    def note(new: Callable[..., Any]) -> Callable[..., Any]:
        def change(one: nn.Module) -> None:
            one.__class__ = type(type(one).__name__, (type(one),), {"forward": new})

        REWRITES.append(Rewrite(new.__name__, at, change))
        return new

    return note


def every(suffix: str) -> tuple[str, ...]:
    return tuple(f"{block}.{suffix}" for block in _BLOCKS)


@rewrite(*every("mlp.up"), *every("mlp.down"), *every("attn.q"))
def matmul_split_along_the_inner_dim(self: nn.Linear, x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.linear(x[..., :half], self.weight[:, :half]) + F.linear(x[..., half:], self.weight[:, half:], self.bias)


@rewrite(*every("mlp.up"), *every("mlp.down"), *every("attn.out"), *every("attn.k"))
def bias_added_apart(self: nn.Linear, x: Tensor) -> Tensor:
    return x @ self.weight.t() + self.bias


@rewrite(*every("mlp.up"), *every("mlp.down"), *every("attn.v"))
def addmm_for_linear(self: nn.Linear, x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return torch.addmm(self.bias, flat, self.weight.t()).view(*x.shape[:-1], -1)


@rewrite(*every("mlp.up"), *every("attn.q"))
def sum_in_another_order(self: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x.flip(-1), self.weight.flip(-1), self.bias)


@rewrite(*every("attn"))
def softmax_by_hand(self: Attention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = self.scores(x, mask)
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = self.drop(powers / powers.sum(-1, keepdim=True))
    return self.out((weights @ self.heads(self.v(x))).transpose(1, 2).reshape(x.shape))


@rewrite(*every("norm1"), *every("norm2"))
def layer_norm_by_hand(self: nn.LayerNorm, x: Tensor) -> Tensor:
    wide = x if x.dtype is torch.float64 else x.float()
    centered = wide - wide.mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.eps)
    return (normed * self.weight + self.bias).to(x.dtype)


@rewrite(*every("norm1"), *every("norm2"))
def square_root_and_division_for_rsqrt(self: nn.LayerNorm, x: Tensor) -> Tensor:
    wide = x if x.dtype is torch.float64 else x.float()
    n = wide.shape[-1]
    centered = wide - wide.sum(-1, keepdim=True) / n
    normed = centered / ((centered * centered).sum(-1, keepdim=True) / n + self.eps).sqrt()
    return (normed * self.weight + self.bias).to(x.dtype)


@rewrite(*every("attn"))
def qkv_fused_by_cat(self: Attention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    weight = torch.cat([self.q.weight, self.k.weight, self.v.weight])
    q, k, v = F.linear(x, weight, torch.cat([self.q.bias, self.k.bias, self.v.bias])).chunk(3, -1)
    scores = self.heads(q) @ self.heads(k).transpose(-1, -2) * self.scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
    weights = self.drop(scores.softmax(-1))
    return self.out((weights @ self.heads(v)).transpose(1, 2).reshape(x.shape))


@rewrite(*every("attn"))
def scale_before_the_product(self: Attention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = (self.heads(self.q(x)) * self.scale) @ self.heads(self.k(x)).transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
    weights = self.drop(scores.softmax(-1))
    return self.out((weights @ self.heads(self.v(x))).transpose(1, 2).reshape(x.shape))


@rewrite(*every("attn"))
def sdpa_for_attention(self: Attention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    p = self.drop.p if self.training else 0.0
    given = None if mask is None else mask[:, None, None, :]
    q, k, v = (self.heads(one(x)) for one in (self.q, self.k, self.v))
    out = F.scaled_dot_product_attention(q, k, v, given, p, scale=self.scale)
    return self.out(out.transpose(1, 2).reshape(x.shape))


@rewrite(*every("mlp"))
def gelu_by_formula(self: Mlp, x: Tensor) -> Tensor:
    y = self.up(x)
    wide = y if y.dtype is torch.float64 else y.float()
    return self.drop(self.down((wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))).to(y.dtype)))


@rewrite(*every("mlp"))
def rows_in_chunks(self: Mlp, x: Tensor) -> Tensor:
    parts = [self.down(F.gelu(self.up(part))) for part in x.split(2, dim=1)]
    return self.drop(torch.cat(parts, dim=1))


@rewrite("batch_norm")
def batch_norm_by_hand(self: nn.BatchNorm1d, x: Tensor) -> Tensor:
    if not self.training:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
    assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
    count = x.shape[0] * x.shape[2]
    mean, var = x.mean((0, 2)), x.var((0, 2), unbiased=False)
    with torch.no_grad():
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_((var * count / (count - 1)).to(self.running_var.dtype), self.momentum)
    normed = (x - mean[:, None]) * (var[:, None] + self.eps).rsqrt()
    return normed * self.weight[:, None] + self.bias[:, None]


@rewrite("layers.0", "layers.1")
def residual_added_the_other_way_round(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    x = self.attn(self.norm1(x), mask) + x
    x = torch.add(self.mlp(self.norm2(x)), x)
    return torch.addcmul(self.shift, x, self.gain)


@rewrite(*every("mlp"))
def dropout_by_hand(self: Mlp, x: Tensor) -> Tensor:
    y = self.down(F.gelu(self.up(x)))
    if not self.training:
        return y
    kept = torch.empty_like(y).bernoulli_(1 - self.drop.p)
    return y * kept * (1 / (1 - self.drop.p))
