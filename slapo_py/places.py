"""Checks of a place that several primitives share."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from slapo_py.errors import ArgumentError, StepError
from slapo_py.scheduled import bare
from slapo_py.tracing import trace_of

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


def check_forward(place: "Schedule", primitive: str) -> None:
    """Refuse a module whose forward a layer can't go around."""
    module = place.module
    kind = bare(module).__name__
    if bare(module).forward is nn.Module.forward:
        glob = f"{place.path}.*" if place.path else "*"
        raise ArgumentError(
            f'{primitive} at "{place.path}": {kind} is a container without a forward, so it is never called. '
            f'Do this at its children: sch.select("{glob}").{primitive}(...).'
        )
    if "forward" in vars(module):
        # The attribute hides the class's forward, and with it everything that a step puts around it.
        raise ArgumentError(
            f'{primitive} at "{place.path}": this {kind} has a forward that was set on the object (m.forward = ...). '
            f"Define it in the class, or take it off before create_schedule."
        )


def hooks_of(module: nn.Module) -> Iterator[object]:
    """The hooks that run when a module is called or its gradients are computed."""
    for name, held in vars(module).items():
        if isinstance(held, dict) and name.endswith("_hooks") and "state_dict" not in name:
            yield from held.values()


def tensor_hooks(tensor: Tensor | None) -> Iterator[object]:
    """The hooks that run when a tensor's gradient is computed."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        yield from (getattr(tensor, name, None) or {}).values()


@contextmanager
def shared_kept(place: "Schedule", primitive: str) -> Iterator[None]:
    """The parameters are the original's too: a step that writes into one, or freezes it, is refused."""
    held = {id(one): (name, one, one._version, one.requires_grad) for name, one in _tensors(place)}
    yield
    for name, tensor, version, requires_grad in held.values():
        if tensor._version != version or tensor.requires_grad is not requires_grad:
            done = "writes into" if tensor._version != version else "sets requires_grad of"
            raise StepError(
                f'{primitive} at "{place.path}": apply {done} {name!r}, which is the original\'s tensor too. Put a new '
                f"tensor in its place, or do this to what slapo_py.build(sch) returns."
            )


def _tensors(place: "Schedule") -> Iterator[tuple[str, Tensor]]:
    module = place.module
    return itertools.chain(module.named_parameters(), module.named_buffers())


def check_called(place: "Schedule", primitive: str) -> None:
    """Refuse a module that is part of a graph above it: it is not called any more, so nothing around it would run."""
    kind = bare(place.module).__name__
    parts = place.path.split(".") if place.path else []
    for depth in range(len(parts)):
        above, below = ".".join(parts[:depth]), ".".join(parts[depth:])
        trace = trace_of(place.root.module(above))
        if trace is not None and below in trace.inlined:
            raise StepError(
                f'{primitive} at "{place.path}": this {kind} is part of the flattened graph of "{above}" and is not '
                f'called any more. Keep it a call: sch["{above}"].trace(flatten=True, leaves=["{below}"]).'
            )
        ends = range(depth + 1, len(parts) + 1)
        if trace is not None and any(trace.takes_in(".".join(parts[depth:end])) for end in ends):
            raise StepError(
                f'{primitive} at "{place.path}": a step on the graph of "{above}" has taken in what this {kind} does, '
                f'and it is not called any more. Take that step back: sch.blame("{above}") lists the steps.'
            )
