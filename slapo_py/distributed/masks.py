"""Dropout by logical index: the ranks together drop what one process drops.

    with LogicalMasks(Part(S(1), ranks)):
        y = F.dropout(x, 0.1)         # x: this rank's part of a tensor that is split along dim 1

Every rank draws the mask of the whole tensor, from a random state that is the same on all, and takes its own part of
it: memory and time of the whole mask, so this is for comparing runs on different meshes, not for training. It holds for
`F.dropout` and for the dropout of `F.scaled_dot_product_attention`; what draws in another way is refused.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slapo_py.distributed.collectives import Ranks
from slapo_py.distributed.rng import generators
from slapo_py.errors import PlacementError
from slapo_py.layouts.placement import Partial, Placement, Shard, local_shape, split
from slapo_py.scheduled import Forward, Layer


@dataclass(frozen=True)
class Part:
    """How the results of dropout lie on one mesh axis. size: of the whole split dim; None where all parts are alike."""

    placement: Placement
    ranks: Ranks
    size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.placement, Partial):
            raise PlacementError(
                f"LogicalMasks: the result of a dropout can't be {self.placement}: each rank would drop from its own "
                f"term. Sum the terms before the dropout."
            )

    def whole(self, size: int) -> int:
        """The size of the split dim, from that of this rank's part."""
        if isinstance(self.placement, Shard) and isinstance(self.placement.blocks, tuple):
            return sum(self.placement.blocks)
        return size * self.ranks.size if self.size is None else self.size


class LogicalMasks(TorchFunctionMode):
    """Within, the masks of dropout are parts of that of the whole tensor. parts: one a mesh axis, the outer one first.

    order: the dims of the whole tensor as one process has it, the outermost in memory first; None: as this rank's part
    lies. It may lie otherwise, after a collective.
    Put it around the module or function that drops, not around a checkpoint, which runs that again outside of this.
    F.dropout is equal to the bit to that of one process, attention but for rounding, on the CPU; on a GPU, where both
    draw in other ways, compare with a run of this with one rank an axis. Not for compiled code. Raises
    `PlacementError` for other random operations, and for a tensor that is not this rank's part.
    """

    def __init__(self, *parts: Part, order: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.parts, self.order = parts, order

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.dropout:
            return self._dropout(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        before = [one.get_state() for one in generators()]
        result = function(*args, **kwargs)
        if not all(map(torch.equal, before, [one.get_state() for one in generators()])):
            raise PlacementError(
                f"LogicalMasks: {getattr(function, '__name__', function)} draws random numbers; only F.dropout and "
                f"F.scaled_dot_product_attention draw by logical index. Set its probability to 0 for this comparison."
            )
        return result

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return F.dropout(input, p, training, inplace)
        noise = noise_of(input, p, self.parts, self.order)
        return input.mul_(noise) if inplace else input * noise

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        more: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
        if dropout_p == 0:
            return F.scaled_dot_product_attention(query, key, value, **more, enable_gqa=enable_gqa)
        wide = torch.promote_types(query.dtype, torch.float32)
        weights = torch.empty((*query.shape[:-1], key.shape[-2]), dtype=wide, device=query.device)
        features = query.dim() - 1  # where only these are split, each rank has all weights
        parts = [one for one in self.parts if not (isinstance(one.placement, Shard) and one.placement.dim == features)]
        noise = noise_of(weights, dropout_p, parts)
        return attention(query.to(wide), key.to(wide), value.to(wide), **more, enable_gqa=enable_gqa, noise=noise).to(
            query.dtype
        )


def order_of(x: Tensor) -> tuple[int, ...]:
    """The dims of a tensor, the outermost in memory first."""
    strides = range(x.dim(), 0, -1) if x.is_contiguous() else x.stride()
    return tuple(sorted(range(x.dim()), key=lambda dim: -int(strides[dim])))


def noise_of(x: Tensor, p: float, parts: Sequence[Part], order: tuple[int, ...] | None = None) -> Tensor:
    """What dropout multiplies this rank's part of a tensor by: 0 or 1 / (1 - p), drawn for the whole tensor.

    order: as in `LogicalMasks`.
    """
    whole = list(x.shape)
    for one in reversed(parts):
        if isinstance(one.placement, Shard):
            local_shape(whole, Shard(one.placement.dim), 1, 0)  # refuses a dim that there is not
            whole[one.placement.dim] = one.whole(whole[one.placement.dim])
    # Numbers are drawn in the order in which the elements lie in memory.
    laid = order_of(x) if order is None else order
    ones = torch.empty_permuted(whole, laid, dtype=x.dtype, device=x.device).fill_(1)
    with torch._C.DisableTorchFunction():  # another `LogicalMasks` may be around this one
        noise = F.dropout(ones, p)
    for one in parts:
        if isinstance(one.placement, Shard):
            noise = split(noise, one.placement, one.ranks.size)[one.ranks.rank]
    if noise.shape != x.shape:
        said = ", ".join(f"{one.placement} on rank {one.ranks.rank} of {one.ranks.size}" for one in parts)
        raise PlacementError(
            f"LogicalMasks: dropout is given {tuple(x.shape)}, and of a whole {tuple(whole)} a part that is {said} has "
            f"{tuple(noise.shape)}. Give the size of the whole dim: Part(placement, ranks, size)."
        )
    return noise


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    noise: Tensor | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention`, its weights multiplied by noise (..., queries, keys)."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.softmax(-1)
    return (weights if noise is None else weights * noise) @ value


@dataclass(frozen=True)
class MaskedByIndex(Layer):
    """Around a forward: `LogicalMasks(*parts)`. Inside `fork_rng` and checkpoints, outside what is compiled."""

    parts: tuple[Part, ...]
    order: tuple[int, ...] | None = None
    rank: ClassVar[int] = 25

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        @functools.wraps(forward)
        def forward_masked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with LogicalMasks(*self.parts, order=self.order):
                return forward(module, *args, **kwargs)

        return forward_masked

    def describe(self) -> str:
        return "masks by logical index"
