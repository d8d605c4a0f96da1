"""Tracing: one module's forward becomes a static torch.fx graph, under guards."""

from slapo_py.tracing.recorder import Recording, record
from slapo_py.tracing.trace import Trace, missed_guards, misses, trace_of
from slapo_py.tracing.tracer import Tracer

__all__ = ["Recording", "Trace", "Tracer", "missed_guards", "misses", "record", "trace_of"]
