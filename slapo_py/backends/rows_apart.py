"""Modules that go wrong, in silence, where each data-parallel rank has rows of its own."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from slapo_py.distributed.mesh import DATA
from slapo_py.errors import ScheduleError
from slapo_py.places import tensor_hooks


def check_rows_apart(module: nn.Module, ranks: int, what: str, error: type[ScheduleError]) -> None:
    """Refuse what looks at more than one row, or at a gradient before it is summed.

    A norm over the batch that trains, or will: a step puts a module that is in eval mode in training mode. Embeddings
    that change with what they look up. Hooks of parameters. Raises the error that is given.
    """
    of = f'each of the {ranks} ranks of "{DATA}"'
    for path, child in module.named_modules():
        why = _mixes_rows(child, of, trains=child.training or not module.training)
        if why:
            raise error(f"{what} at {path!r}: {type(child).__name__} {why}")
    for name, parameter in module.named_parameters():
        if any(tensor_hooks(parameter)):
            raise error(
                f"{what} at {name!r}: the parameter has a hook, which would see the gradient of each of the {ranks} "
                f'ranks of "{DATA}" before they are summed. Take it off; clip= clips the whole gradient, and the '
                f"optimizer can scale it."
            )


def _mixes_rows(child: nn.Module, of: str, trains: bool) -> str:
    """Why a module would do otherwise, and what to write; "" if it does not."""
    if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm) and trains:
        return (
            f"normalises over the batch, and {of} has a part of it, so the result would be another one. Replace it by "
            f"SyncBatchNorm or GroupNorm, or put it alone in eval mode, and the model around it in training mode."
        )
    if isinstance(child, _InstanceNorm) and child.track_running_stats and trains:
        return (
            f"keeps the mean of the rows that it is given, and {of} is given others. Write track_running_stats=False."
        )
    if not isinstance(child, nn.Embedding | nn.EmbeddingBag):
        return ""
    if child.max_norm is not None:
        return (
            f"writes to the rows that it looks up (max_norm), and {of} looks up others, so that they would have other "
            f"weights. Write max_norm=None."
        )
    if child.scale_grad_by_freq and child.weight.requires_grad:
        return (
            f"divides gradients by how often a row is looked up, and {of} counts its own part of the batch. Write "
            f"scale_grad_by_freq=False."
        )
    return ""
