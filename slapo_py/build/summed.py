"""Gradients of whole parameters that are partial sums on each rank: summed in backward, each as it is ready."""

import functools

from torch import Tensor, nn

from slapo_py.build.facts import facts_of
from slapo_py.distributed import raw
from slapo_py.distributed.mesh import Mesh


def sum_gradients(built: nn.Module, mesh: Mesh) -> None:
    """Let every backward of a built module sum the gradients that its facts say must be summed.

    An engine sums them itself, once a step.
    """
    named = dict(built.named_parameters())
    for name, fact in facts_of(built).items():
        for axis in fact.summed:
            if mesh.size(axis) > 1 and named[name].requires_grad:
                named[name].register_hook(functools.partial(_summed, mesh.ranks(axis).name))


def _summed(group: str, gradient: Tensor) -> Tensor:
    return raw.all_reduce(gradient, "sum", group)
