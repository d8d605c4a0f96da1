"""`sch[path].checkpoint()`: recompute a module's activations in the backward pass instead of keeping them."""

import difflib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from slapo_py.errors import ArgumentError, StepError
from slapo_py.places import check_forward
from slapo_py.primitive import Primitive
from slapo_py.recompute import PLACES, run
from slapo_py.registry import register
from slapo_py.rewriting import check_groups, make_groups
from slapo_py.schedule import Schedule
from slapo_py.scheduled import Forward, Layer, dress, layer_of

Policy = Callable[..., Any] | Sequence[str] | None


@dataclass(frozen=True)
class Checkpointed(Layer):
    """Keeps the inputs of a forward and runs it again in the backward pass."""

    policy: Callable[..., Any] | tuple[str, ...] | None = None
    rank: ClassVar[int] = 50

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        policy = functools.partial(_keep, _overloads(self.policy)) if isinstance(self.policy, tuple) else self.policy

        @functools.wraps(forward)
        def checkpointed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Without gradients nothing is kept; torch.func has no backward pass in which to run anything again.
            if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
                return forward(self, *args, **kwargs)
            return run(forward, self, args, kwargs, policy)

        return checkpointed

    def describe(self) -> str:
        if self.policy is None:
            return "checkpoint"
        if isinstance(self.policy, tuple):
            return f"checkpoint(keeps {', '.join(self.policy)})"
        return f"checkpoint(policy {getattr(self.policy, '__name__', type(self.policy).__name__)})"


@register("checkpoint")
class Checkpoint(Primitive):
    """Keep only this module's inputs in the forward pass and run it again in the backward pass.

    Before: all activations inside the module are kept; after: none, or those that `policy` names. Outputs, gradients,
    buffers and random states are bit-equal. Names, hooks and the module object stay. Without gradients the module runs
    as it is. A cache among the arguments, batch norm's statistics and other plain state of the module are as if it had
    run once.

    `match`: matches of `sch[path].find(pattern)`, or a pattern for all of its matches: only the operations that they
    cover are recomputed, each match as a submodule (`checkpoint_0`, ...) of the traced module.
    `policy`: names of operations whose results are kept, such as `["aten.mm", "aten.addmm"]`, or a function
    `(ctx, op, *args, **kwargs) -> torch.utils.checkpoint.CheckpointPolicy`.

    Requires: a module with a forward that is not checkpointed yet; for matches, a traced one. Raises `ArgumentError`,
    `StepError`, `NoMatchError`, `StaleMatchError`, `TraceError`; at run time `RecomputeError` if the module writes into
    its own inputs in place while gradients are recorded.
    """

    structural = True

    def check(self, place: Schedule, match: Any = None, policy: Policy = None) -> None:
        where = f'checkpoint at "{place.path}"'
        _check_policy(where, policy)
        if match is not None:
            check_groups(place, match, "checkpoint", "checkpoint")
            return
        check_forward(place, "checkpoint")
        held = layer_of(place.module, Checkpointed)
        if held is not None:
            raise StepError(
                f"{where}: this module is checkpointed already ({held.describe()}). For another policy, "
                f"take that step back with sch.undo() and write the new call."
            )

    def apply(self, place: Schedule, match: Any = None, policy: Policy = None) -> None:
        kept = policy if policy is None or callable(policy) else tuple(policy)
        modules = {place.path: place.module}
        if match is not None:
            modules = make_groups(place, match, "checkpoint", "checkpoint")
        for path, module in modules.items():
            dress(module, Checkpointed(kept))
            PLACES[module] = path


def _check_policy(where: str, policy: Policy) -> None:
    if policy is None or callable(policy):
        return
    if isinstance(policy, str) or not isinstance(policy, Sequence) or not all(isinstance(op, str) for op in policy):
        shown = f"[{policy!r}]".replace("'", '"') if isinstance(policy, str) else '["aten.mm", "aten.addmm"]'
        raise ArgumentError(
            f"{where}: policy must be a function or a list of names of operations, found {policy!r}. "
            f"Write policy={shown}."
        )
    if not policy:
        raise ArgumentError(f"{where}: policy=[] keeps nothing. Write checkpoint() for that.")
    for name in policy:
        if not _find(name):
            raise ArgumentError(f"{where}: there is no operation {name!r}.{_similar(name)}")


def _keep(kept: frozenset[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _overloads(names: tuple[str, ...]) -> frozenset[Any]:
    return frozenset(op for name in names for op in _find(name))


def _find(name: str) -> list[Any]:
    """The operations that "aten.mm" (all its overloads) or "aten.mm.default" names; none if there is no such."""
    space, _, rest = name.partition(".")
    op, _, overload = rest.partition(".")
    if not op or not space:
        return []
    packet = getattr(getattr(torch.ops, space), op, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    if overload:
        return [getattr(packet, overload)] if overload in packet.overloads() else []
    return [getattr(packet, one) for one in packet.overloads()]


def _similar(name: str) -> str:
    known = {full.replace("::", ".").split(".out")[0] for full in torch._C._dispatch_get_all_op_names()}
    close = difflib.get_close_matches(name, known | {".".join(one.split(".")[:2]) for one in known}, n=3, cutoff=0.7)
    return (
        f" Did you mean {' or '.join(repr(one) for one in sorted(close))}?"
        if close
        else " They are named as in torch.ops: 'aten.mm'."
    )
