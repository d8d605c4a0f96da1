"""Primitives as a user would write them, registered from outside for the time of a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

import slapo_py as slapo
from slapo_py import Primitive, Schedule
from slapo_py.errors import ArgumentError


class Freeze(Primitive):
    """Note on the module that it is frozen."""

    structural = True

    def check(self, place: Schedule, note: str = "frozen") -> None:
        if not isinstance(note, str):
            raise ArgumentError(f"freeze at {place.path!r}: note must be a string, found {note!r}.")

    def apply(self, place: Schedule, note: str = "frozen") -> None:
        place.module.note = note


class Swap(Primitive):
    """Put a new module in the place of this one, then break if asked to."""

    def check(self, place: Schedule, width: int, *names: str, fail: Any = None) -> None:
        pass

    def apply(self, place: Schedule, width: int, *names: str, fail: Any = None) -> None:
        parent, _, name = place.path.rpartition(".")
        holder = place.root.module(parent)
        holder._modules[name] = nn.Identity()
        holder.register_buffer("made", nn.Identity.__new__(nn.Identity) and None)
        if fail is not None:
            raise fail


class Wreck(Primitive):
    """Change everything that a step can reach, then break."""

    def check(self, place: Schedule, fail: Any) -> None:
        pass

    def apply(self, place: Schedule, fail: Any) -> None:
        place["up"].checkpoint()
        place["up"].annotate("weight", "a", 1)
        module = place.module
        module.flags.append("wrecked")
        module.scale = 9.0
        module.extra = nn.Linear(1, 1)
        module.register_buffer("count", nn.Parameter(place["up"].module.weight).data)
        module.register_forward_hook(lambda *args: None)
        module.up.weight.requires_grad_(False)
        del module.norm
        module.down.train(not module.down.training)
        module.__class__ = nn.Identity
        place.root.copy.config["nested"] = None
        place.root.copy.blocks.register_forward_hook(lambda *args: None)
        raise fail


class Both(Primitive):
    """A step that is made of other steps."""

    structural = True

    def check(self, place: Schedule) -> None:
        pass

    def apply(self, place: Schedule) -> None:
        place.checkpoint()
        place.select("*").freeze("inner")


@contextmanager
def registered(**primitives: type[Primitive]) -> Iterator[None]:
    for name, primitive in primitives.items():
        slapo.register(name)(primitive)
    try:
        yield
    finally:
        for name in primitives:
            slapo.unregister(name)
