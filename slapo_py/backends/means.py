"""A loss that is a mean where a sum is needed: the graph of its gradient says so."""

from torch import Tensor

from slapo_py.errors import EngineError

_SAME = ("ViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0", "SqueezeBackward0", "CloneBackward0")
"""What leaves a scalar as it is."""
_MEAN = 1
"""How torch's losses keep reduction="mean"."""


def check_sum(loss: Tensor, count: int, parts: int) -> None:
    """Refuse a loss that is plainly a mean, though more is counted than micro-batches: it would be divided again.

    count: of the whole batch. parts: how many losses are added up for it. Raises `EngineError`.
    """
    if count > parts and is_mean(loss):
        raise EngineError(
            f"engine: loss(output, batch) returned a mean, and it is divided by the count, {count}, of the whole batch "
            f'once more. Return the sum, for example with reduction="sum"; a mean over equal parts may stay with '
            f"count=lambda batch: 1."
        )


def is_mean(loss: Tensor) -> bool:
    """Whether the last operation of a loss takes a mean."""
    node = loss.grad_fn
    while node is not None and node.name() in _SAME:
        node = node.next_functions[0][0]
    if node is None:
        return False
    return node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN
