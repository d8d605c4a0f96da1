"""How much memory a call needs at its peak: counted by torch's storages, and by the system."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Counts the bytes of the storages that are made within and live at once. Pages of a mapped file are not memory.

    peak: the most of them. anonymous: the most that the process had, as the system says, beyond that at the start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak, self.anonymous, self._start = 0, 0, _anonymous()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and not isinstance(one, FakeTensor) and one.device.type == "cpu":
                self._note(one.untyped_storage())
        self.anonymous = max(self.anonymous, _anonymous() - self._start)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.live and not _is_mapped(storage.data_ptr()):
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key, None)
            self.peak = max(self.peak, sum(self.live.values()))


def peak_of(function: Callable[[], Any]) -> tuple[Any, int, int]:
    """What a call returns, and its peak in bytes: torch's and the system's."""
    with Storages() as counted:
        result = function()
    return result, counted.peak, counted.anonymous


def _anonymous() -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _is_mapped(pointer: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            low, high = (int(one, 16) for one in line.split()[0].split("-"))
            if low <= pointer < high:
                return True
    return False
