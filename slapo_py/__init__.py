"""A schedule language for PyTorch: write a model plainly, say apart from it how it is executed."""

from slapo_py import kernels as kernels
from slapo_py import params as params
from slapo_py import primitives as primitives  # registers them; the only place that pulls them in
from slapo_py.backends.base import Engine
from slapo_py.build import build
from slapo_py.build.own_init import own_init
from slapo_py.codec import per_rank
from slapo_py.compare import compare
from slapo_py.distributed.launch import World, launch
from slapo_py.errors import RankError, ScheduleError, VerificationError
from slapo_py.history import History, Step
from slapo_py.layouts.placement import Partial, Placement, Replicate, Shard
from slapo_py.layouts.plan import Plan, plan
from slapo_py.matches import Match, nth
from slapo_py.patterns import Pattern, call, pattern, wild
from slapo_py.primitive import Primitive
from slapo_py.registry import list_primitives, register, unregister
from slapo_py.schedule import Schedule, create_schedule
from slapo_py.selection import Selection
from slapo_py.tracing import missed_guards, misses

__all__ = [
    "Engine",
    "History",
    "Match",
    "Partial",
    "Pattern",
    "Placement",
    "Plan",
    "Primitive",
    "RankError",
    "Replicate",
    "Schedule",
    "ScheduleError",
    "Selection",
    "Shard",
    "Step",
    "VerificationError",
    "World",
    "build",
    "call",
    "compare",
    "create_schedule",
    "kernels",
    "launch",
    "list_primitives",
    "missed_guards",
    "misses",
    "nth",
    "own_init",
    "params",
    "pattern",
    "per_rank",
    "plan",
    "register",
    "unregister",
    "wild",
]
