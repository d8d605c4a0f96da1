"""`sch[path].sync("output", "all_reduce")`: a collective where a tensor enters or leaves a module."""

from slapo_py.errors import ArgumentError, StepError
from slapo_py.layouts.checking.steps import or_change, sync_step
from slapo_py.layouts.recording.rows import BATCH
from slapo_py.layouts.syncs import AUTO, COLLECTIVES, Sync
from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.schedule import Schedule


@register("sync")
class SyncBorder(Primitive):
    """Put a collective at a border of this module: one on the value going forward, one on its gradient going back.

    at: "input" or "output"; index: which of the tensors there, counted from 0. value: "all_reduce", "all_gather",
    "reduce_scatter", "all_to_all", "split" or None. grad: the same, or "auto": the one that fits, which `sch.check()`
    works out. dim: the dim that is split after (before, for all_gather), in `parts` blocks. Where batch and sequence
    are one dim, parts is "batch": as many blocks as the first tensor has rows that enters the module around. It is
    recorded, and takes effect in `build`.

    Requires: no sync at this border on this axis yet. Raises `ArgumentError`, `StepError`.
    """

    structural = True
    reaches_flattened = True

    def check(
        self,
        place: Schedule,
        at: str,
        value: str | None = None,
        grad: str | None = AUTO,
        dim: int | None = None,
        axis: str = "tp",
        index: int = 0,
        parts: int | str = 1,
    ) -> None:
        where = f'sync at "{place.path}"'
        if at not in ("input", "output"):
            raise ArgumentError(f'{where}: at must be "input" or "output", found {at!r}.')
        for name, one in (("value", value), ("grad", grad)):
            if one is not None and one not in COLLECTIVES and not (name == "grad" and one == AUTO):
                raise ArgumentError(f"{where}: {name} must be None or one of {', '.join(COLLECTIVES)}, found {one!r}.")
        if value is None and grad in (None, AUTO):
            raise ArgumentError(f'{where}: does nothing. Write sync("{at}", "all_reduce"), say.')
        if value in ("all_gather", "reduce_scatter", "all_to_all", "split") and dim is None:
            raise ArgumentError(f'{where}: {value} needs the dim: sync("{at}", "{value}", dim=1).')
        if isinstance(parts, str) and (parts != BATCH or dim not in (0, None)):
            raise ArgumentError(
                f'{where}: parts must be a number, or "batch" with dim=0, found parts={parts!r} with dim={dim!r}.'
            )
        if not isinstance(axis, str) or not axis.isidentifier():
            raise ArgumentError(f'{where}: axis must be the name of a mesh axis, as "tp", found {axis!r}.')
        if _key(at, index, axis) in place.root.syncs.get(place.path, {}):
            step = sync_step(place.root, place.path, at, index, axis)
            raise StepError(
                f'{where}: {at} {index} has a sync on "{axis}" already; one sync has both collectives, '
                f"sync({at!r}, value, grad=...). Leave this step out{or_change(place.root, step)}"
            )

    def apply(
        self,
        place: Schedule,
        at: str,
        value: str | None = None,
        grad: str | None = AUTO,
        dim: int | None = None,
        axis: str = "tp",
        index: int = 0,
        parts: int | str = 1,
    ) -> None:
        made = Sync(at, index, axis, value, grad, dim, parts)
        place.root.syncs.setdefault(place.path, {})[_key(at, index, axis)] = made


def _key(at: str, index: int, axis: str) -> str:
    return f"{at} {index} on {axis}"
