"""Attention functions as a user writes them: importable, so that histories with them can be saved."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def repeated(kv: Tensor, query: Tensor) -> Tensor:
    """Heads of keys or values as many as there are of queries."""
    groups = query.shape[1] // kv.shape[1]
    return kv if groups == 1 else kv.repeat_interleave(groups, dim=1)


def matmuls(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """What eager attention computes, operation by operation."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, repeated(key, query).transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, repeated(value, query)).transpose(1, 2).contiguous(), weights


def biased(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """With T5's bias of positions; without dropout, and it says so by not naming it."""
    mask = attention_mask if position_bias is None else position_bias
    mask = mask if attention_mask is None or position_bias is None else position_bias + attention_mask
    return matmuls(module, query, key, value, mask, scaling)


def doubled(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """No attention at all: a sign that it was called."""
    return 2 * repeated(value, query).transpose(1, 2)[:, : query.shape[2]], None


def too_few(query: Tensor, key: Tensor) -> Tensor:
    return query + key
