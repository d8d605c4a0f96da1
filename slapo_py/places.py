"""Checks of a place that several primitives share."""

from torch import nn

from slapo_py.errors import ArgumentError, StepError
from slapo_py.schedule import Schedule
from slapo_py.scheduled import bare
from slapo_py.tracing import trace_of


def check_forward(place: Schedule, primitive: str) -> None:
    """Refuse a module whose forward a layer can't go around."""
    module = place.module
    kind = bare(module).__name__
    if bare(module).forward is nn.Module.forward:
        glob = f"{place.path}.*" if place.path else "*"
        raise ArgumentError(
            f'{primitive} at "{place.path}": {kind} is a container without a forward, so it is never called. '
            f'Do this at its children: sch.select("{glob}").{primitive}(...).'
        )
    parts = place.path.split(".") if place.path else []
    for depth in range(len(parts)):
        above, below = ".".join(parts[:depth]), ".".join(parts[depth:])
        trace = trace_of(place.root.module(above))
        if trace is not None and below in trace.inlined:
            raise StepError(
                f'{primitive} at "{place.path}": this {kind} is part of the flattened graph of "{above}" and is not '
                f'called any more. Keep it a call: sch["{above}"].trace(flatten=True, leaves=["{below}"]).'
            )
    if "forward" in vars(module):
        # The attribute hides the class's forward, and with it everything that a step puts around it.
        raise ArgumentError(
            f'{primitive} at "{place.path}": this {kind} has a forward that was set on the object (m.forward = ...). '
            f"Define it in the class, or take it off before create_schedule."
        )
