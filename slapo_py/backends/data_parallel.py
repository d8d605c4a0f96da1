"""How a built module runs on the data-parallel ranks of a mesh: alone, under DDP, or under FSDP2."""

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from slapo_py.backends.rows_apart import check_rows_apart
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.errors import BuildError, EngineError
from slapo_py.tracing.values import map_tensors


class Alone:
    """One data-parallel rank. `size`: of how many; a loss is multiplied by it, since gradients are averaged."""

    size = 1

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def check_ready(self) -> None:
        """Before a step: raise `EngineError` where it would give other numbers than one process has."""
        if self.size > 1:
            check_rows_apart(self.module, self.size, "engine", EngineError)

    def check_gradients(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """After the last backward of a step, before anything is updated: raise `EngineError` as well."""

    def broken_off(self) -> None:
        """A step has raised on its way."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, in training."""
        return self.module(*args, **kwargs)

    def backward(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch: gradients are exchanged with the last."""
        return nullcontext()

    def evaluation(self) -> AbstractContextManager[Any]:
        """Around the forwards of an evaluation. Raises `EngineError` at its end where they were wrong."""
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
        self.size, self.mesh, self.broken = mesh.size(DATA), mesh, False
        _check_spreadable(module)
        inner = outer = MixedPrecisionPolicy()
        if precision == "bf16":  # between the blocks everything is bfloat16; the loss is computed in float32
            inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            outer = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
        part = mesh.device_mesh[DATA]
        self._order: list[int] = []  # of the blocks that have run in this step, again and again
        self._noting = False
        for index, block in enumerate(_blocks(module)):
            block.register_forward_pre_hook(self._notes(index))
            block.register_forward_hook(_without_views)
            fully_shard(block, mesh=part, mp_policy=inner)
        fully_shard(module, mesh=part, mp_policy=outer)

    def check_ready(self) -> None:
        super().check_ready()
        if self.broken:
            raise EngineError(
                "engine: an earlier step has raised on its way, and FSDP2 keeps half of its gradients, so that the "
                "next ones would be wrong. Build the engine again and load its last save."
            )
        self._order.clear()

    def broken_off(self) -> None:
        self.broken = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._noted():
            return self.module(*args, **kwargs)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Within, the order of the blocks is noted: not in backward, where checkpoints run them again."""
        self._noting = True
        try:
            yield
        finally:
            self._noting = False

    def _notes(self, index: int) -> Callable[[nn.Module, Any], None]:
        def note(block: nn.Module, given: Any) -> None:
            if self._noting:
                self._order.append(index)

        return note

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        self._order.clear()
        with self._noted():
            yield
        self._check_order([])

    def _check_order(self, more: list[bool]) -> torch.Tensor:
        """Raise `EngineError` where ranks ran other blocks: FSDP2 gathers what they ask for, in order, unseen.

        Returns `more` of each rank, as rows.
        """
        order = zlib.crc32(repr(self._order).encode())
        mine = torch.tensor([order, *more], dtype=torch.int64, device=self.mesh.device_mesh.device_type)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self.mesh.group(DATA))
        found = torch.stack(every)
        if (found[:, 0] != found[0, 0]).any():
            raise EngineError(
                f'engine: the ranks of "{DATA}" have run the blocks in different orders, and FSDP2 would have '
                "exchanged the parts of different blocks. Let every rank run the same blocks in the same order, or "
                'write data_parallel="ddp".'
            )
        return found[:, 1:]

    def backward(self, last: bool) -> AbstractContextManager[Any]:
        self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def check_gradients(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        # FSDP2 adds up what the ranks have, in order: it doesn't ask whether these are the same parameters.
        names = [name for name, _ in named]
        found_here = [parameter.grad is not None for _, parameter in named]
        found = self._check_order(found_here)
        if not found.any():
            raise EngineError(
                "engine: no parameter has got a gradient: FSDP2 finds the tensors of an output in tensors, tuples, "
                'lists, dicts and dataclasses only. Return one of these, or write data_parallel="ddp".'
            )
        differ = (found != found[0]).any(0).nonzero().flatten().tolist()
        if differ:
            raise EngineError(
                f'engine: {names[differ[0]]!r} has a gradient on some ranks of "{DATA}" only, and FSDP2 would add '
                "those of different parameters. Let every rank use it (times 0, say), or write "
                'data_parallel="ddp".'
            )


def _check_spreadable(module: nn.Module) -> None:
    """Refuse what FSDP2 can't spread, by name. Raises `BuildError`."""
    for path, child in module.named_modules():
        if getattr(child, "sparse", False) is True and isinstance(child, nn.Embedding | nn.EmbeddingBag):
            raise BuildError(
                f'build at {path!r}: FSDP2 has no sparse gradients. Write sparse=False, or data_parallel="ddp".'
            )
    for path, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise BuildError(
                f"build at {path!r}: FSDP2 can't spread a parameter without dims. Give it one, as in "
                f'nn.Parameter(torch.ones(1)), or write data_parallel="ddp".'
            )


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

    Raises `BuildError` for what ranks that have rows of their own would do otherwise, as a norm over the batch.
    """
    if mesh is None or mesh.size(DATA) == 1:
        return Alone(module)
    check_rows_apart(module, mesh.size(DATA), "build", BuildError)
    if kind == "fsdp":
        return FullySharded(module, mesh, precision)
    return Replicated(module, mesh, every)
