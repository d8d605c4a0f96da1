"""Tracing: one module's forward becomes a static torch.fx graph, under guards."""

from slapo_py.tracing.recorder import Recording, record
from slapo_py.tracing.trace import Trace, misses, trace_of
from slapo_py.tracing.tracer import Tracer

__all__ = ["Recording", "Trace", "Tracer", "misses", "record", "trace_of"]
