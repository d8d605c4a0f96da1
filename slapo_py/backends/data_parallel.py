"""How a built module runs on the data-parallel ranks of a mesh: alone, under DDP, or under FSDP2."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.errors import BuildError
from slapo_py.tracing.values import map_tensors


class Alone:
    """One data-parallel rank. `size`: of how many; a loss is multiplied by it, since gradients are averaged."""

    size = 1

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, in training."""
        return self.module(*args, **kwargs)

    def backward(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch: gradients are exchanged with the last."""
        return nullcontext()


class Replicated(Alone):
    """DDP: each rank has the module, and gradients are summed over the ranks."""

    def __init__(self, module: nn.Module, mesh: Mesh, every: bool) -> None:
        super().__init__(module)
        self.size, self.every = mesh.size(DATA), every
        # torch 2.13 has renamed this one and warns of the old name
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {buffers: False, "find_unused_parameters": True}
        self._wrapped = DistributedDataParallel(module, process_group=mesh.group(DATA), **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(*args, **kwargs)

    def backward(self, last: bool) -> AbstractContextManager[Any]:
        # where gradients are taken away after each micro-batch, each has to be exchanged
        return nullcontext() if last or self.every else self._wrapped.no_sync()


class FullySharded(Alone):
    """FSDP2: each rank has a part of every parameter, of its gradient and of the optimizer's state."""

    def __init__(self, module: nn.Module, mesh: Mesh, precision: str) -> None:
        super().__init__(module)
        self.size = mesh.size(DATA)
        policy = MixedPrecisionPolicy()
        if precision == "bf16":
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
            )
        part = mesh.device_mesh[DATA]
        for block in _blocks(module):
            block.register_forward_hook(_without_views)
            fully_shard(block, mesh=part, mp_policy=policy)
        fully_shard(module, mesh=part, mp_policy=policy)

    def backward(self, last: bool) -> AbstractContextManager[Any]:
        self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()


def _without_views(module: nn.Module, given: Any, out: Any) -> Any:
    """Copies of the outputs that are views: written to in place, such a one would lose FSDP2's hook in silence."""

    def copied(one: torch.Tensor) -> torch.Tensor:
        return one.clone() if one.requires_grad and one._is_view() else one

    return map_tensors(out, copied)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost module lists: the layers that are gathered one at a time.

    One that shares a parameter with what is outside of it stays with the whole.
    """
    users: dict[int, int] = {}
    for child in module.modules():
        for parameter in child._parameters.values():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    for child in module.children():
        members = list(child) if isinstance(child, nn.ModuleList) else []
        for member in members:
            inside = [one for part in member.modules() for one in part._parameters.values() if one is not None]
            if inside and all(users[id(one)] == sum(one is other for other in inside) for one in inside):
                yield member
        if not members:
            yield from _blocks(child)


def data_parallel(module: nn.Module, mesh: Mesh | None, kind: str, precision: str, every: bool) -> Alone:
    """What runs the module. kind: "ddp" or "fsdp"; every: whether gradients are taken away after each micro-batch.

    Raises `BuildError` for a module that normalises over the batch.
    """
    if mesh is None or mesh.size(DATA) == 1:
        return Alone(module)
    for path, child in module.named_modules():
        if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm) and child.training:
            raise BuildError(
                f"build at {path!r}: {type(child).__name__} normalises over the batch, and each of the "
                f'{mesh.size(DATA)} ranks of "{DATA}" has a part of it, so the result would be another one. '
                f"Replace it by SyncBatchNorm or GroupNorm, or put it in eval mode before create_schedule."
            )
    if kind == "fsdp":
        return FullySharded(module, mesh, precision)
    return Replicated(module, mesh, every)
