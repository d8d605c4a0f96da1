"""One node on every rank at once: an operation at the sizes that each rank has, and what is done otherwise there.

Dropout draws one mask for the whole tensor, as that lies in memory, and gives each rank its part of it, so that the
ranks together drop what one process drops. Whatever else draws, draws the same on every rank.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from slapo_py.distributed.masks import attention
from slapo_py.layouts.placement import Partial, Placement, R, Shard, split
from slapo_py.layouts.recording.nodes import name_of, slots_of, tensors_of
from slapo_py.layouts.rules.signatures import Signature
from slapo_py.layouts.rules.table import canonical
from slapo_py.layouts.simulating import local

Parts = list[Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def parts_of(tensor: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    """The parts of one tensor; of a partial sum, the first rank has it all."""
    if isinstance(placement, Shard):
        return [one.clone() for one in split(tensor, placement, ranks)]
    if isinstance(placement, Partial) and placement.op == "sum":
        return [tensor.clone(), *(torch.zeros_like(tensor) for _ in range(ranks - 1))]
    return [tensor.clone() for _ in range(ranks)]


def computed(node: fx.Node, given: list[Arguments], signature: Signature | None) -> Parts:
    """What each rank makes of its arguments; `signature` says what is done otherwise on parts."""
    needs = signature.needs if signature is not None else ""
    if needs == "embedding":
        return local.embedding_in_lock_step(given)
    if needs == "cross_entropy":
        return local.cross_entropy_in_lock_step(node.target, given)  # type: ignore[arg-type]
    if signature is not None and _drops(node, given[0]):
        return _dropped(node, given, signature.outputs[0])
    state = torch.get_rng_state()
    found = [called(node, *given[0])]
    draws = not torch.equal(state, torch.get_rng_state())
    for args, kwargs in given[1:]:
        if draws:
            torch.set_rng_state(state)
        found.append(called(node, args, kwargs))
    return found


def called(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The function or method of a node on values."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


_DROPOUT = ("input", "p", "training", "inplace")
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _drops(node: fx.Node, given: Arguments) -> bool:
    args, kwargs = given
    if canonical(name_of(node)) == "dropout":
        return True
    named = {**dict(zip(_ATTENTION, args)), **kwargs}
    return name_of(node) == "scaled_dot_product_attention" and bool(named.get("dropout_p"))


def _dropped(node: fx.Node, given: list[Arguments], placement: Placement) -> Parts:
    """Dropout with one mask for all ranks, drawn at the whole shape."""
    if name_of(node) == "scaled_dot_product_attention":
        return _dropped_attention(node, given, placement)
    named = [{**dict(zip(_DROPOUT, args)), **kwargs} for args, kwargs in given]
    first, inputs = named[0], [one["input"] for one in named]
    p, training = first.get("p", 0.5), first.get("training", first.get("train", True))
    if not training:
        return [called(node, *one) for one in given]
    masks = _masks(_ones(slots_of(node)[0].meta["val"], inputs[0].dtype), placement, inputs, p)
    writes = first.get("inplace", False) or name_of(node) == "dropout_"
    return [one.mul_(mask) if writes else one * mask for one, mask in zip(inputs, masks)]


def _ones(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Ones with the shape and strides of a tensor: numbers may be drawn in the order in which elements lie."""
    if not like.numel():
        return torch.ones(like.shape, dtype=dtype)
    last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride()))
    return torch.ones(int(last) + 1, dtype=dtype).as_strided(like.shape, like.stride())


def _masks(ones: Tensor, placement: Placement, like: Sequence[Tensor], p: float) -> list[Tensor]:
    """What each rank multiplies by. Ranks with tensors of other shapes than they should have draw masks of these.

    ones: as the whole tensor lies.
    """
    whole = F.dropout(ones, p)
    shard = placement if isinstance(placement, Shard) else None
    masks = [whole] * len(like) if shard is None else split(whole, shard, len(like))
    fitting = [mask if mask.shape == one.shape else None for mask, one in zip(masks, like)]
    return [F.dropout(torch.ones_like(one), p) if mask is None else mask for mask, one in zip(fitting, like)]


def _dropped_attention(node: fx.Node, given: list[Arguments], placement: Placement) -> Parts:
    (result,) = tensors_of(node)
    named = [{**dict(zip(_ATTENTION, args)), **kwargs} for args, kwargs in given]
    like = [one["query"].new_empty((*one["query"].shape[:-1], one["key"].shape[-2])) for one in named]
    features = isinstance(placement, Shard) and placement.dim == result.dim() - 1  # each rank has all weights
    ones = torch.ones((*result.shape[:-1], _length(node)), dtype=like[0].dtype)
    masks = _masks(ones, R if features else placement, like, named[0]["dropout_p"])
    plain = [{key: value for key, value in one.items() if key != "dropout_p"} for one in named]
    return [attention(**one, noise=noise) for one, noise in zip(plain, masks)]


def _length(node: fx.Node) -> int:
    """The number of keys of an attention, whole."""
    key = node.args[1] if len(node.args) > 1 else node.kwargs["key"]
    return int(key.meta["val"].shape[-2])  # type: ignore[union-attr]
