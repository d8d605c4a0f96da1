"""`sch[path].annotate("weight", "lr", 0.1)`: a tag that follows a parameter."""

import difflib
from typing import Any

from torch import nn

from slapo_py.codec import key as value_key
from slapo_py.errors import ArgumentError, StepError
from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.schedule import Schedule


@register("annotate")
class Annotate(Primitive):
    """Put a tag on a parameter: before no tag, after `sch.annotations[param][key] == value`.

    The tag belongs to the parameter, not to its name: all its ties carry it, and it stays through later steps.

    Requires: `param` is the name of a parameter of this module or below (`"weight"`, `"c_fc.weight"`); the key is a
    string that this parameter does not carry yet. Raises `ArgumentError`, `StepError`.
    """

    structural = True
    reaches_flattened = True
    outlives = True

    def check(self, place: Schedule, param: str, key: str, value: Any) -> None:
        where = f'annotate at "{place.path}"'
        if not isinstance(key, str) or not key:
            raise ArgumentError(
                f'{where}: the key must be a string, found {key!r}. Write annotate("{param}", "lr", 0.1).'
            )
        name = _first_name(place, param, where)
        tags = place.root.annotations.get(name, {})
        if key in tags:
            same = value_key(tags[key]) == value_key(value)
            raise StepError(
                f"{where}: parameter {name!r} carries {key!r} = {tags[key]!r} already"
                f"{' (the very same value)' if same else ''}. Choose another key, or take that step back with "
                f"sch.undo(); sch.blame() lists the steps."
            )

    def apply(self, place: Schedule, param: str, key: str, value: Any) -> None:
        name = _first_name(place, param, "annotate")
        place.root.annotations.setdefault(name, {})[key] = value


def _first_name(place: Schedule, param: str, where: str) -> str:
    """The first name, in the whole model, of a parameter named from this place."""
    here: dict[str, nn.Parameter] = dict(place.module.named_parameters(remove_duplicate=False))
    if not isinstance(param, str) or param not in here:
        close = difflib.get_close_matches(str(param), here, n=3, cutoff=0.5) or list(here)[:5]
        buffers = dict(place.module.named_buffers())
        kind = " It is a buffer; only parameters carry tags." if param in buffers else ""
        known = ", ".join(repr(name) for name in close) or "none"
        raise ArgumentError(
            f"{where}: there is no parameter {param!r} here.{kind} Parameters with such names: {known}."
        )
    return next(name for name, one in place.root.copy.named_parameters() if one is here[param])
