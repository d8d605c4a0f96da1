"""`sch[path].group(match, "name")`: a match becomes a submodule of its own."""

from typing import Any

from slapo_py.errors import ArgumentError
from slapo_py.matches import occurrences
from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.rewriting import check_groups, check_name, make_groups
from slapo_py.schedule import Schedule


@register("group")
class Group(Primitive):
    """Make operations of a traced module's graph a submodule, called in their place.

    Before: `add = x + bias; gelu = F.gelu(add)`. After: `gelu = self.name(x, bias)`, and `sch[path]["name"]` is a place
    that can be checkpointed or compiled on its own. The submodule owns nothing: weights, and the modules that it calls,
    are given to it, so all names stay and results are bit-equal.

    `match`: one of `sch[path].find(pattern)`, or a pattern that matches once. `name`: that of the new submodule.

    Requires: a traced module whose forward does not go through all its submodules; no operation between those of the
    match that writes in place, switches a mode, or draws random numbers between theirs. Raises `NoMatchError`,
    `StaleMatchError`, `ArgumentError`, `StepError`, `TraceError`.
    """

    structural = True

    def check(self, place: Schedule, match: Any, name: str) -> None:
        check_name(place, name, "group")
        found = occurrences(place, match, "group")
        if len(found) != 1:
            raise ArgumentError(
                f'group at "{place.path}": {len(found)} matches can\'t be one submodule. Give one of them: '
                f'm = sch["{place.path}"].find(pattern); sch["{place.path}"].group(m[0], "{name}").'
            )
        check_groups(place, match, [name], "group")

    def apply(self, place: Schedule, match: Any, name: str) -> None:
        make_groups(place, match, [name], "group")
