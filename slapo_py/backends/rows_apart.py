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
    for path, child in module.named_modules():
        why = _mixes_rows(child, module)
        if why:
            raise error(f"{what} at {path!r}: {type(child).__name__} {why.format(of=f'the {ranks} ranks of {DATA!r}')}")
    for name, parameter in module.named_parameters():
        if any(tensor_hooks(parameter)):
            raise error(
                f"{what} at {name!r}: the parameter has a hook, which would see the gradient of each of the {ranks} "
                f'ranks of "{DATA}" before they are summed. Take it off; clip= clips the whole gradient, and the '
                f"optimizer can scale it."
            )


def _mixes_rows(child: nn.Module, module: nn.Module) -> str:
    if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
        if child.training or not module.training:
            return (
                "normalises over the batch, and each of {of} has a part of it, so the result would be another one. "
                "Replace it by SyncBatchNorm or GroupNorm, or put it alone in eval mode, and the model around it in "
                "training mode."
            )
    if isinstance(child, _InstanceNorm) and child.track_running_stats:
        return (
            "keeps the mean of the rows that it is given, and each of {of} is given others. Write "
            "track_running_stats=False."
        )
    if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None:
        return (
            "writes to the rows that it looks up (max_norm), and each of {of} looks up others, so that they would have "
            "other weights. Write max_norm=None."
        )
    if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.scale_grad_by_freq:
        return (
            "divides gradients by how often a row is looked up, and each of {of} counts its own part of the batch. "
            "Write scale_grad_by_freq=False."
        )
    return ""
