"""The primitives: one a file, named after its method. Importing this registers them all."""

from slapo_py.primitives.annotate import Annotate
from slapo_py.primitives.checkpoint import Checkpoint
from slapo_py.primitives.compile import Compile
from slapo_py.primitives.configure import Configure
from slapo_py.primitives.trace import Trace

__all__ = ["Annotate", "Checkpoint", "Compile", "Configure", "Trace"]
