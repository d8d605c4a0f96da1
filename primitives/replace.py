"""`sch[path].replace(new)`: another module in this one's place; `replace(new, what)`: in the place of matches."""

from typing import Any

from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.replacing.matched import check_replacement, replace_matches
from slapo_py.replacing.placing import check_put, put
from slapo_py.schedule import Schedule


@register("replace")
class Replace(Primitive):
    """Put another module in this one's place, or in the place of matches of a pattern.

    `replace(new)`: before, the old module; after, `new` under all of its names. `new` is a module (a copy of it is put
    in) or a factory `old -> module`: a function, or a class whose constructor takes the old module. Each parameter and
    buffer of the new module becomes the old one of the same name and shape, the very object; or `params` says where it
    comes from: `{"qkv.weight": slapo.params.cat("q.weight", "k.weight", "v.weight")}`. So nothing is drawn anew, ties
    hold, and `state_dict`, checkpoints and optimizer state keep the original's names and shapes, both ways. Hooks,
    annotations and training flags move on.

    `replace(new, what)`: `what` is a pattern or matches of `sch[path].find(pattern)`, at a traced place. Each match
    becomes a call of the function `new`, or of a module of its own: a module, a class or, with `params`, a factory.

    Requires: a module that takes what the old one was called with, and, by name or `params`, each element of the old
    parameters once; no other step at or below the place (annotate and configure apart); no hook below that finds no
    module of its name; no other reference to the old module. Raises `ArgumentError`, `StepError`; for matches also
    `NoMatchError`, `StaleMatchError`, `TraceError`, `PatternError`.
    """

    def check(self, place: Schedule, new: Any, what: Any = None, params: Any = None) -> None:
        if what is None:
            check_put(place, new, params)
        else:
            check_replacement(place, new, what, params)

    def apply(self, place: Schedule, new: Any, what: Any = None, params: Any = None) -> None:
        if what is None:
            put(place, new, params)
        else:
            replace_matches(place, new, what, params)
