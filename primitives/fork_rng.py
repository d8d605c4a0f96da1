"""`sch[path].fork_rng()`: random operations at and below a module draw differently on each rank of a mesh axis."""

from slapo_py.distributed.forks import Forked, forks_of
from slapo_py.errors import ArgumentError, StepError
from slapo_py.places import check_forward
from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.schedule import Schedule
from slapo_py.scheduled import dress, layer_of


@register("fork_rng")
class ForkRng(Primitive):
    """Let random operations at and below this module draw differently on each rank of a mesh axis.

    Before: ranks of the axis draw alike, as fits what each of them holds whole; after: each draws its own, as fits what
    is split over them (dropout between a split Linear and the next one). What is drawn outside, and in eval mode, stays
    alike on them. `torch.compile` breaks its graph here in training: compile what is inside, not around it. It is
    recorded as a layer of the module (`slapo_py.distributed.forks.forks_of`), and takes effect in `build`.

    `auto_sync` adds it where all that a module draws is for values that are split over the axis. `check` has a fault
    where a value in it is whole: the ranks would go apart. Where one module draws for both, as the attention of GPT-2
    does for its heads and for its result, no place is right: the ranks then drop alike, copies in the parts of what is
    split. Make what draws for the whole value a module beside it.

    Requires: a module with a forward; nothing above, here or below whose random operations differ over this axis
    already. Raises `ArgumentError`, `StepError`.
    """

    structural = True

    def check(self, place: Schedule, axis: str = "tp") -> None:
        where = f'fork_rng at "{place.path}"'
        if not isinstance(axis, str) or not axis.isidentifier():
            raise ArgumentError(f'{where}: axis must be the name of a mesh axis, as "tp", found {axis!r}.')
        check_forward(place, "fork_rng")
        below, whole = set(place.module.modules()), place.root.copy
        for path, axes in forks_of(whole).items():
            held = whole.get_submodule(path)
            inside = place.module in held.modules()
            if axis in axes and (inside or held in below):
                said = f'sch["{path}"]' if path else "the whole model"
                remedy = "Leave this step out." if inside else "Take that step back first, or leave this one out."
                raise StepError(
                    f'{where}: random operations at and below {said} differ over "{axis}" already. {remedy}'
                )

    def apply(self, place: Schedule, axis: str = "tp") -> None:
        held = layer_of(place.module, Forked)
        dress(place.module, Forked((*(held.axes if held is not None else ()), axis)))
