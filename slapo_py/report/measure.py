"""Figures that are compared within one run."""

import contextlib
import statistics
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class SavedActivations:
    """What autograd keeps for the backward: each storage once, parameters and buffers left out."""

    _storages: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self._storages.values())


@contextlib.contextmanager
def saved_activations(model: nn.Module) -> Iterator[SavedActivations]:
    """Count the bytes that autograd saves for the backward of what runs inside.

    What a checkpointed module drops and recomputes is not counted; its inputs are.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved = SavedActivations()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors that were made inside and alive at one time.

    Activations, gradients and what is recomputed, each storage once; what was there before (parameters, inputs) is not
    counted. It is what an allocator would see but for temporaries inside an operation, and the same in each run.
    """

    def __init__(self, before: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self._known: set[int] = set()
        self._kept = [tensor.untyped_storage() for tensor in before]  # alive, so that their ids stay theirs
        self._known.update(storage._cdata for storage in self._kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._freed, key, size).atexit = False  # the object lives as long as the memory

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def paired_ratio(new: Sequence[float], old: Sequence[float]) -> float:
    """The median of new[i] / old[i]: both halves of a pair saw the same state of the machine."""
    return statistics.median(n / o for n, o in zip(new, old, strict=True))
