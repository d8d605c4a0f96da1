"""cross_entropy where each rank has the logits of some of the classes: its own classes by the kernel, on a GPU.

`slapo_py.distributed.cross_entropy` says what is exchanged, and takes any two functions that do what these do.
"""

from typing import Any

from torch import Tensor

from slapo_py.distributed import cross_entropy as split
from slapo_py.distributed.collectives import Ranks
from slapo_py.kernels.cross_entropy import slice_gradient, slice_parts

FUSED = split.Slice(slice_parts, slice_gradient)


def parallel_cross_entropy(logits: Tensor, labels: Tensor, *, classes: int, ranks: Ranks, **options: Any) -> Tensor:
    """`slapo_py.distributed.cross_entropy.cross_entropy` by the kernel: the same arguments, results and errors."""
    return split.cross_entropy(logits, labels, classes=classes, ranks=ranks, by=FUSED, **options)
