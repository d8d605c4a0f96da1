"""Figures that are compared within one run."""

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


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


def paired_ratio(new: Sequence[float], old: Sequence[float]) -> float:
    """The median of new[i] / old[i]: both halves of a pair saw the same state of the machine."""
    return statistics.median(n / o for n, o in zip(new, old, strict=True))
