"""Primitives register from outside, and say at once what is wrong with them."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import slapo_py as slapo
from slapo_py import Primitive, Schedule, Selection, register
from slapo_py.errors import ArgumentError, RegistryError, StepError
from tests.core import steps
from tests.models import net


@pytest.fixture
def sch() -> Iterator[Schedule]:
    with steps.registered(freeze=steps.Freeze, swap=steps.Swap):
        yield slapo.create_schedule(net())


def test_ours_are_registered() -> None:
    assert set(slapo.list_primitives()) >= {"annotate", "checkpoint", "compile", "configure", "trace"}


@pytest.mark.parametrize("owner", [Schedule, Selection])
def test_help_is_true(sch: Schedule, owner: type) -> None:
    method = owner.freeze  # type: ignore[attr-defined]
    assert str(inspect.signature(method)) == f"(self, /, note: str = 'frozen') -> {inspect.formatannotation(owner)}"
    assert method.__doc__ == "Note on the module that it is frozen."
    assert method.__qualname__ == f"{owner.__name__}.freeze"
    assert method.__module__ == "tests.core.steps"
    for name in slapo.list_primitives():
        assert inspect.getdoc(getattr(owner, name))


def test_a_step_returns_the_cursor_and_is_recorded(sch: Schedule) -> None:
    place = sch["blocks.0"]
    assert place.freeze("a") is place
    assert place.module.note == "a"
    assert not hasattr(place.original, "note")
    assert str(sch.history[0]) == 'sch["blocks.0"].freeze(note="a")'


def test_two_ways_to_write_a_call_are_one_step(sch: Schedule) -> None:
    place = sch["blocks.0"]
    place.freeze("x").freeze(note="x").freeze().freeze("frozen").freeze(note="frozen")
    assert sch.history[0] == sch.history[1]
    assert sch.history[2] == sch.history[3] == sch.history[4]
    assert sch.history[1] != sch.history[2]
    sch["blocks.0"].swap(3, "a", "b", fail=None)
    sch["blocks.1"].swap(width=3)
    assert str(sch.history[5]) == 'sch["blocks.0"].swap(3, "a", "b")'
    assert str(sch.history[6]) == 'sch["blocks.1"].swap(3)'


def test_wrong_arguments_are_refused_in_the_words_of_the_call(sch: Schedule) -> None:
    with pytest.raises(ArgumentError, match=r'"blocks.0": got an unexpected keyword argument \'notes\'. Did you mean '
                       r"note=\? It is called as freeze\(note: str = 'frozen'\)"):  # fmt: skip
        sch["blocks.0"].freeze(notes="a")
    with pytest.raises(ArgumentError, match="swap at the whole model: missing a required argument: 'width'"):
        sch.swap()
    assert len(sch.history) == 0


def test_a_check_of_the_user_refuses(sch: Schedule) -> None:
    with pytest.raises(ArgumentError, match="freeze at 'blocks.0': note must be a string, found 3"):
        sch["blocks.0"].freeze(3)


def test_a_step_does_not_draw_from_the_random_state() -> None:
    import torch

    class Drawing(Primitive):
        """Draw."""

        def check(self, place: Schedule) -> None:
            torch.rand(1)

        def apply(self, place: Schedule) -> None:
            torch.rand(1)

    before = torch.get_rng_state()
    with steps.registered(drawing=Drawing):
        slapo.create_schedule(net())["head"].drawing()
    torch.manual_seed(0)
    assert torch.equal(before, torch.get_rng_state())


def test_unregister() -> None:
    with steps.registered(freeze=steps.Freeze):
        assert hasattr(Schedule, "freeze")
    assert not hasattr(Schedule, "freeze")
    assert not hasattr(Selection, "freeze")
    with pytest.raises(RegistryError, match="unregister\\('freeze'\\): no such primitive. Registered: annotate, "):
        slapo.unregister("freeze")


class Good(Primitive):
    """Fine."""

    def check(self, place: Any) -> None: ...
    def apply(self, place: Any) -> None: ...


class NoDoc(Primitive):
    def check(self, place: Any) -> None: ...
    def apply(self, place: Any) -> None: ...


class NoApply(Primitive):
    """Half."""

    def check(self, place: Any) -> None: ...


class Differ(Primitive):
    """Two minds."""

    def check(self, place: Any, a: int = 1) -> None: ...
    def apply(self, place: Any, a: int = 2) -> None: ...


class NoPlace(Primitive):
    """Nowhere."""

    def check(self, a: int) -> None: ...
    def apply(self, a: int) -> None: ...


REFUSED = {
    "not a name": ("two words", Good, "needs a plain Python name"),
    "keyword": ("with", Good, "needs a plain Python name"),
    "private": ("_freeze", Good, "needs a plain Python name"),
    "no string": (3, Good, "needs a plain Python name"),
    "taken": ("checkpoint", Good, r'Checkpoint has this name already.*slapo_py.unregister\("checkpoint"\)'),
    "hides": ("select", Good, "would hide Schedule.select. Choose another name"),
    "hides in a selection": ("paths", Good, "would hide Selection.paths"),
    "no primitive": ("new", int, "needs a subclass of slapo_py.Primitive, found <class 'int'>"),
    "no class": ("new", len, "needs a subclass of slapo_py.Primitive"),
    "no docstring": ("new", NoDoc, r"NoDoc needs a docstring: help\(sch.new\) shows it"),
    "no apply": ("new", NoApply, r"NoApply lacks apply. Write def apply\(self, place, \.\.\.\)"),
    "other arguments": ("new", Differ, r"check\(.*a: int = 1.*and apply\(.*a: int = 2.* must take the same arguments"),
    "no place": ("new", NoPlace, r"NoPlace.check\(self, a: int\).* must begin with \(self, place, \.\.\.\)"),
}


@pytest.mark.parametrize(("name", "cls", "message"), REFUSED.values(), ids=REFUSED)
def test_registering_is_refused(name: Any, cls: Any, message: str) -> None:
    before = slapo.list_primitives(), set(vars(Schedule)), set(vars(Selection))
    with pytest.raises(RegistryError, match=message):
        slapo.register(name)(cls)
    assert before == (slapo.list_primitives(), set(vars(Schedule)), set(vars(Selection)))


def test_the_originals_tensors_are_kept_from_a_step() -> None:
    class Writes(Primitive):
        """Write into a parameter, or freeze it."""

        def check(self, place: Schedule, freeze: bool) -> None:
            pass

        def apply(self, place: Schedule, freeze: bool) -> None:
            if freeze:
                place.module.weight.requires_grad_(False)
            else:
                nn.init.zeros_(place.module.weight)

    register("writes")(Writes)
    try:
        model = nn.Sequential(nn.Linear(2, 2))
        sch = slapo.create_schedule(model)
        with pytest.raises(
            StepError, match=r"""writes at "0": apply sets requires_grad of 'weight', which is the orig"""
        ):
            sch["0"].writes(True)
        assert model[0].weight.requires_grad and not sch.history
        with pytest.raises(
            StepError, match=r"apply writes into 'weight'.*or do this to what slapo_py\.build\(sch\) ret"
        ):
            sch["0"].writes(False)
        assert not sch.history
    finally:
        slapo.unregister("writes")


def test_a_users_step_below_a_flattened_trace_is_refused() -> None:
    class Hook(Primitive):
        """Put a hook on the module."""

        def check(self, place: Schedule) -> None:
            pass

        def apply(self, place: Schedule) -> None:
            place.module.register_forward_hook(lambda module, args, out: out * 2)

    register("hooked")(Hook)
    try:
        sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)), example_inputs=(torch.randn(3, 2),))
        sch.trace(flatten=True)
        with pytest.raises(StepError, match=r'hooked at "0": this Linear is part of the flattened graph of ""'):
            sch["0"].hooked()
    finally:
        slapo.unregister("hooked")


def test_register_without_a_name() -> None:
    with pytest.raises(RegistryError, match=r'register: needs a name\. Write @slapo\.register\("named"\)'):

        @register  # type: ignore[arg-type, type-var]
        class Named(Primitive):
            """No name."""
