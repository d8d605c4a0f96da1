"""Cursors, all or nothing, undo."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import slapo_py as slapo
from slapo_py import History, Schedule
from slapo_py.errors import ArgumentError, HistoryError, PathError, StaleCursorError, StepError, TraceError
from tests.core import steps
from tests.fingerprint import changes, fingerprint, global_state
from tests.models import ids, net, tiny_gpt2
from tests.running import equal, run


@pytest.fixture
def sch() -> Schedule:
    return slapo.create_schedule(net())


@pytest.fixture
def own() -> Iterator[None]:
    with steps.registered(freeze=steps.Freeze, swap=steps.Swap, wreck=steps.Wreck, both=steps.Both):
        yield


def state(sch: Schedule) -> dict[str, Any]:
    return {
        **fingerprint(sch.module),
        "history": sch.history,
        "annotations": repr(sch.root.annotations),
        "source": str(sch.history),
    }


# Cursors


def test_a_cursor_is_a_path(sch: Schedule) -> None:
    place = sch["blocks.0"]
    assert place.path == "blocks.0"
    assert place.module is sch.module.blocks[0]
    assert place.original is sch.original.blocks[0]
    assert place.module is not place.original
    assert sch["blocks"]["0"] == sch["blocks"][0] == place
    assert hash(sch["blocks"]["0"]) == hash(place)
    assert sch["blocks.1"] != place
    assert slapo.create_schedule(sch.original)["blocks.0"] != place
    assert place != "blocks.0"
    assert place["up"].path == "blocks.0.up"
    assert sch[""] == sch


def test_a_cursor_looks_like_a_container_of_places(sch: Schedule) -> None:
    assert [one.path for one in sch] == ["embed", "blocks", "norm", "head"]
    assert sch["blocks"].children == (sch["blocks.0"], sch["blocks.1"])
    assert len(sch["blocks"]) == 2
    assert len(sch["head"]) == 0
    assert bool(sch["head"])
    assert "blocks.0.up" in sch
    assert "0.up" in sch["blocks"]
    assert "blocks.2" not in sch
    assert 3 not in sch
    assert repr(sch["head"]) == '<Schedule of Linear at "head", 0 steps>'


def test_several_names_of_a_module_lead_to_one_path() -> None:
    inner = nn.Linear(3, 3)
    sch = slapo.create_schedule(nn.Sequential(inner, nn.Sequential(nn.ReLU(), inner)))
    assert sch["1.1"] == sch["0"]
    sch["1.1"].checkpoint()
    assert str(sch.history[0]) == 'sch["0"].checkpoint()'
    with pytest.raises(StepError, match='checkpoint at "0": this module is checkpointed already'):
        sch["0"].checkpoint()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("blocks.0.upp", r"sch\['blocks.0.upp'\]: the model has no module of this name. Children of 'blocks.0': norm, "
         r'up, down, drop. Did you mean sch\["blocks.0.up"\]'),
        ("down", r'Children of the model: embed, blocks, norm, head. Did you mean .*sch\["blocks.0.down"\]'),
        ("qqqq", r"print\(sch\) shows all paths"),
        ("blocks.0.scale", r"no module of this name"),
        ("blocks..0", r"no module of this name"),
    ],
)  # fmt: skip
def test_an_unknown_path_is_refused_with_names_like_it(sch: Schedule, path: str, message: str) -> None:
    before = state(sch)
    with pytest.raises(PathError, match=message):
        sch[path]
    assert changes(before, state(sch)) == []


def test_a_line_that_a_message_suggests_works(sch: Schedule) -> None:
    with pytest.raises(PathError, match="Did you mean") as caught:
        sch["blocks.0.dwn"]
    line = str(caught.value).split("Did you mean ")[1].split("?")[0].split(" ")[0]
    assert eval(line, {"sch": sch}).path == "blocks.0.down"


def test_a_path_is_a_string(sch: Schedule) -> None:
    with pytest.raises(PathError, match=r"needs a path such as .* found float"):
        sch[1.5]  # type: ignore[index]


def test_a_model_is_a_module() -> None:
    with pytest.raises(ArgumentError, match="needs a torch.nn.Module, found type"):
        slapo.create_schedule(nn.Linear)  # type: ignore[arg-type]


@pytest.mark.usefixtures("own")
def test_a_stale_cursor_names_the_step_that_removed_it(sch: Schedule) -> None:
    inner, place = sch["blocks.0.up"], sch["blocks.0"]
    place.swap(3)
    assert isinstance(place.module, nn.Identity)
    message = r"sch\['blocks.0.up'\]: this place is gone: the step sch\[\"blocks.0\"\].swap\(3\) removed it"
    with pytest.raises(StaleCursorError, match=message):
        inner.checkpoint()
    with pytest.raises(StaleCursorError, match=message):
        sch["blocks.0.up"]
    assert "removed place" in repr(inner)
    sch.undo()
    assert inner.module is sch.module.blocks[0].up


def test_a_place_removed_by_hand_is_stale(sch: Schedule) -> None:
    place = sch["head"]
    del sch.module.head
    with pytest.raises(StaleCursorError, match="it is no longer part of the model"):
        place.module  # noqa: B018


@pytest.mark.usefixtures("own")
def test_a_place_that_a_step_made_has_no_original(sch: Schedule) -> None:
    sch.module.blocks.append(nn.Identity())
    with pytest.raises(PathError, match=r"sch\['blocks.2'\].original: the original model has no module of this name"):
        sch["blocks.2"].original  # noqa: B018


def test_a_place_without_a_trace_has_no_graph(sch: Schedule) -> None:
    for name in ("graph", "guards", "misses"):
        with pytest.raises(TraceError, match=r'sch\["head"\]: this place is not traced.*sch\["head"\].trace\(\)'):
            getattr(sch["head"], name)


# Laws 1 and 2

FAILURES = [ValueError("mine"), KeyboardInterrupt(), slapo.ScheduleError("no")]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("fail", FAILURES, ids=lambda one: type(one).__name__)
def test_all_or_nothing_when_apply_raises(sch: Schedule, fail: BaseException) -> None:
    sch["blocks.1"].checkpoint()
    sch["head"].annotate("weight", "kind", [1])
    sch.module.blocks[0].up.weight.grad = torch.zeros_like(sch.module.blocks[0].up.weight)
    before, original, world = state(sch), fingerprint(sch.original), global_state()
    with pytest.raises(type(fail)):
        sch["blocks.0"].wreck(fail)
    with pytest.raises(type(fail)):
        sch["blocks.0"].swap(1, fail=fail)
    assert changes(before, state(sch)) == []
    assert changes(original, fingerprint(sch.original)) == []
    assert changes(world, global_state()) == []
    sch["blocks.0"].checkpoint()
    assert len(sch.history) == 3


@pytest.mark.usefixtures("own")
def test_what_the_failing_step_changed_is_really_looked_at(sch: Schedule) -> None:
    """The test above could pass for a step that changes nothing: this one does."""
    before = state(sch)
    primitive = steps.Wreck()
    with pytest.raises(ValueError, match="mine"):
        primitive.apply(sch["blocks.0"], ValueError("mine"))
    assert len(changes(before, state(sch))) > 10


@pytest.mark.usefixtures("own")
def test_a_selection_is_all_or_nothing(sch: Schedule) -> None:
    sch["blocks.1"].checkpoint()
    before = state(sch)
    with pytest.raises(StepError, match='checkpoint at "blocks.1"'):
        sch.select("blocks.*").checkpoint()
    assert changes(before, state(sch)) == []


@pytest.mark.usefixtures("own")
def test_a_step_made_of_steps_is_one_step(sch: Schedule) -> None:
    sch["blocks.0"].both()
    assert [str(step) for step in sch.history] == ['sch["blocks.0"].both()']
    assert sch["blocks.0.up"].module.note == "inner"
    again = sch.history.replay(slapo.create_schedule(sch.original))
    assert again["blocks.0.up"].module.note == "inner"
    assert str(again) == str(sch)


@pytest.mark.parametrize("make", [net, tiny_gpt2])
def test_steps_leave_the_original_and_the_world_untouched(make: Any) -> None:
    model = make()
    before, world = fingerprint(model), global_state()
    sch = slapo.create_schedule(model)
    first = sch.select("**.0")[0]
    first.checkpoint().annotate(next(iter(dict(first.module.named_parameters()))), "k", 1)
    first.compile(backend="eager")
    str(sch), str(sch.history), sch.blame(first.path)
    sch.undo()
    with pytest.raises(StepError, match="checkpointed already"):
        first.checkpoint()
    assert changes(before, fingerprint(model)) == []
    assert changes(world, global_state()) == []


def test_nothing_is_collected_within_a_step(sch: Schedule) -> None:
    """A callback of the garbage collector would run in the middle of a recording."""
    enabled: list[bool] = []

    class Collecting(slapo.Primitive):
        """Look whether the collector is on."""

        def check(self, place: Schedule) -> None:
            enabled.append(gc.isenabled())

        def apply(self, place: Schedule) -> None:
            enabled.append(gc.isenabled())

    with steps.registered(collecting=Collecting):
        sch.collecting()
    assert enabled == [False, False]
    assert gc.isenabled()


# Undo


@pytest.mark.usefixtures("own")
def test_undo_is_replay_of_the_rest(sch: Schedule) -> None:
    sch["blocks.0"].checkpoint()
    sch["blocks.1"].freeze("later").checkpoint()
    sch["blocks.0.norm"].configure(eps=1e-3)
    sch["head"].annotate("weight", "k", 1)
    whole = sch.history
    for k in range(1, len(whole) + 1):
        other = whole[:-k].replay(slapo.create_schedule(sch.original))
        undone = whole.replay(slapo.create_schedule(sch.original)).undo(k)
        assert undone.history == whole[:-k]
        assert str(undone) == str(other)
        assert undone.annotations == other.annotations
        pairs = zip(run(undone.module, {"ids": ids()}), run(other.module, {"ids": ids()}))
        assert all(equal(a, b) for a, b in pairs)
    assert sch.history == whole


def test_undo_keeps_the_training_flags_and_cursors(sch: Schedule) -> None:
    place = sch["blocks.0"].checkpoint()
    sch.module.eval()
    sch.module.blocks[1].train()
    old = sch.module
    assert sch.undo() is sch
    assert sch.module is not old
    assert not sch.module.training
    assert sch.module.blocks[1].up.training
    assert place.module is sch.module.blocks[0]
    assert sch.original.training


@pytest.mark.parametrize("k", [0, 2, -1, True, 1.0, None])
def test_undo_of_what_is_not_there_is_refused(sch: Schedule, k: Any) -> None:
    sch["blocks.0"].checkpoint()
    before = state(sch)
    with pytest.raises(ArgumentError, match=r"undo\(.*\): needs a whole number of steps between 1 and 1"):
        sch.undo(k)
    assert changes(before, state(sch)) == []


def test_an_undo_that_fails_changes_nothing(sch: Schedule) -> None:
    with steps.registered(freeze=steps.Freeze):
        sch["blocks.0"].freeze().checkpoint()
    before = state(sch)
    with pytest.raises(HistoryError, match="step 1, .*no primitive 'freeze' is registered here"):
        sch.undo()
    assert changes(before, state(sch)) == []


@pytest.mark.usefixtures("own")
def test_blame_lists_the_steps_that_touched_a_place(sch: Schedule) -> None:
    sch["blocks.0"].checkpoint()
    sch["blocks.0.up"].checkpoint()
    sch["blocks.1"].freeze()
    sch["head"].freeze()
    assert [step.path for step in sch.blame("blocks.0")] == ["blocks.0", "blocks.0.up"]
    assert [step.path for step in sch.blame("blocks.0.up")] == ["blocks.0.up"]
    assert [step.path for step in sch["blocks"].blame("1")] == ["blocks.1"]
    assert sch.blame() == sch.history
    assert isinstance(sch.blame("norm"), History)
    assert len(sch.blame("norm")) == 0


def test_undo_of_nothing() -> None:
    with pytest.raises(ArgumentError, match=r"undo\(1\): the history is empty; there is no step to take back"):
        slapo.create_schedule(net()).undo()
