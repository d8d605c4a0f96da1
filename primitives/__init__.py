"""The primitives: one a file, named after its method. Importing this registers them all."""

from slapo_py.primitives.annotate import Annotate
from slapo_py.primitives.attention import Attention
from slapo_py.primitives.checkpoint import Checkpoint
from slapo_py.primitives.compile import Compile
from slapo_py.primitives.configure import Configure
from slapo_py.primitives.decompose import Decompose
from slapo_py.primitives.fork_rng import ForkRng
from slapo_py.primitives.fuse import Fuse
from slapo_py.primitives.group import Group
from slapo_py.primitives.reduce_grad import ReduceGrad
from slapo_py.primitives.replace import Replace
from slapo_py.primitives.shard import ShardParameters
from slapo_py.primitives.sync import SyncBorder
from slapo_py.primitives.trace import Trace

__all__ = [
    "Annotate",
    "Attention",
    "Checkpoint",
    "Compile",
    "Configure",
    "Decompose",
    "ForkRng",
    "Fuse",
    "Group",
    "ReduceGrad",
    "Replace",
    "ShardParameters",
    "SyncBorder",
    "Trace",
]
