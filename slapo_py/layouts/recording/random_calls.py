"""Which calls of torch draw random numbers: seen below them, by the operations that they come down to."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_RANDOM = torch.Tag.nondeterministic_seeded


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of an operation draws random numbers: attention without dropout carries the tag, too."""
    if _RANDOM not in func.tags:
        return False
    names = [one.name for one in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    index = names.index("dropout_p")
    return bool(args[index] if index < len(args) else kwargs.get("dropout_p", 0.0))


class RandomCalls(TorchDispatchMode):
    """Within, counts the operations that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
