"""torch's own fast path of encoder layers goes past the modules inside, and so past their collectives: it stays off."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from slapo_py.scheduled import Forward, Layer, dress

_FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


@dataclass(frozen=True)
class NoFastPath(Layer):
    """In evaluation without gradients the module does as in training: it calls its children."""

    rank: ClassVar[int] = 5

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        @functools.wraps(forward)
        def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with _switched_off():
                return forward(self, *args, **kwargs)

        return called


@contextmanager
def _switched_off() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def without_fast_path(module: nn.Module) -> None:
    """Let every module that has a fast path go without it."""
    for child in list(module.modules()):
        if isinstance(child, _FAST):
            dress(child, NoFastPath())
