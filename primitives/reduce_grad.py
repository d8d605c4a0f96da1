"""`sch[path].reduce_grad("weight")`: the gradient of a whole parameter is summed over a mesh axis."""

import difflib

from torch import nn

from slapo_py.errors import ArgumentError, StepError
from slapo_py.layouts.syncs import reduce_tag, reduced_of
from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.schedule import Schedule


@register("reduce_grad")
class ReduceGrad(Primitive):
    """Sum the gradients of parameters over a mesh axis: before each rank has that of its part of the data, after all.

    A parameter that every rank holds whole, and that meets split data (a norm under sequence parallelism), has a
    partial sum as its gradient on each rank. It is recorded, and takes effect in `build`.

    Requires: names of parameters at or below this module whose gradient is not summed on this axis yet. Raises
    `ArgumentError`, `StepError`.
    """

    structural = True
    reaches_flattened = True

    def check(self, place: Schedule, *params: str, axis: str = "tp") -> None:
        where = f'reduce_grad at "{place.path}"'
        here: dict[str, nn.Parameter] = dict(place.module.named_parameters(remove_duplicate=False))
        if not params:
            raise ArgumentError(f'{where}: needs names of parameters, as in reduce_grad("weight").')
        for name in params:
            if name not in here:
                close = difflib.get_close_matches(str(name), here, n=3) or list(here)[:5]
                raise ArgumentError(
                    f"{where}: there is no parameter {name!r} here. Parameters with such names: "
                    f"{', '.join(map(repr, close)) or 'none'}."
                )
            if place.root.first_name(here[name]) in reduced_of(place.root, axis):
                raise StepError(f'{where}: the gradient of {name!r} is summed over "{axis}" already. Leave this out.')

    def apply(self, place: Schedule, *params: str, axis: str = "tp") -> None:
        here = dict(place.module.named_parameters(remove_duplicate=False))
        for name in params:
            place.root.annotations.setdefault(place.root.first_name(here[name]), {})[reduce_tag(axis)] = True
