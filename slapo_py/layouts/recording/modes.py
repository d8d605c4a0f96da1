"""What a forward switches on and off for a part of itself, at the nodes of a recording: gradients, autocast."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.amp import autocast_mode

_MODES = "modes"


def note_modes(graph: fx.Graph) -> None:
    """Write down at each node what was switched when it was recorded; the switches are needed no more then."""
    learns: Any = True
    casts: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            learns = node.args[0]
        elif node.target is autocast_mode._enter_autocast:
            casts[node] = node.args
        elif node.target is autocast_mode._exit_autocast:
            casts.pop(node.args[0])
        elif casts or not learns:
            node.meta[_MODES] = bool(learns), tuple(casts.values())


@contextlib.contextmanager
def modes_of(node: fx.Node) -> Iterator[None]:
    """Within, it is switched as at a node. Gradients that the caller has switched off stay off."""
    learns, casts = node.meta.get(_MODES, (True, ()))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(learns and torch.is_grad_enabled()))
        for one in casts:
            stack.enter_context(torch.autocast(*one))
        yield
