"""What transformers wraps around forwards: checkpointing of layers, and hooks that collect outputs of inner modules.

Both are transformers' own, not the user's: a trace has to see through them. Nothing here imports transformers.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

COLLECTING_FLAG = "_output_capturing_hooks_installed"
"""The attribute by which a model knows that it has its collecting hooks; they are put on in its first such call."""


def without_checkpointing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward without transformers' checkpointing, which wraps the forward of each subclass, ours too."""
    while getattr(getattr(forward, "__code__", None), "co_name", "") == "forward_with_checkpointing":
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward


def is_collecting_hook(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def collected() -> dict[str, int]:
    """How much has been collected so far, by kind (hidden_states, attentions); empty when nothing is asked for."""
    module = sys.modules.get("transformers.utils.output_capturing")
    active = module._active_collector.get() if module is not None else None
    return {name: len(values) for name, values in (active or {}).items() if isinstance(values, list)}


def collect(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
    """Run the collecting hooks of a module, and no others."""
    for hook in list(module.__dict__["_forward_hooks"].values()):
        if is_collecting_hook(hook):
            hook(module, args, out)
