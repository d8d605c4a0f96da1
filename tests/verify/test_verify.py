"""The report, places, refusals, and that nothing of the user's is touched."""

import random
import time
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import ArgumentError, NoExampleInputs, PathError, VerificationError
from tests.fingerprint import changes, global_state
from tests.laws.witness import Untouched
from tests.models import Net, ids, net
from tests.verify.lab import altering, inputs, lab


def schedule(model: nn.Module | None = None) -> slapo.Schedule:
    return slapo.create_schedule(model or net(), (ids(),))


# The report


def test_the_report_is_a_table() -> None:
    sch = schedule()
    sch["blocks.0"].trace()
    report = sch.verify()
    text = str(report)
    assert report.grade == "equal"
    assert text.startswith("verify: equal")
    for scenario in ("train", "eval, no_grad", "batch of 1", "1 optimizer step", "model in bfloat16"):
        assert f"│ {scenario} " in text
    assert repr(report).startswith("<Report of verify: equal, ")
    assert report.__rich__() is not None
    assert all(row.compared > 100 for row in report.rows)


def test_steps_and_seed_count() -> None:
    sch = schedule()
    names = [[row.scenario for row in sch.verify(steps=steps).rows] for steps in (0, 2)]
    assert "2 optimizer steps" in names[1]
    assert not any("optimizer" in name for name in names[0])


def test_several_example_inputs_are_all_run() -> None:
    sch = slapo.create_schedule(net(), [(ids(),), (ids(2, 7),)])
    names = [row.scenario for row in sch.verify().rows]
    assert "train, example inputs 1" in names
    assert "eval, example inputs 2" in names


def test_a_message_in_plain_sentences() -> None:
    with altering():
        sch = schedule()
        sch["blocks.0"].trace()
        sch["blocks.1.drop"].alter(_more_dropout)
        sch["blocks.1"].checkpoint()
        with pytest.raises(VerificationError, match=r'^verify: in the scenario "train", the output ') as caught:
            sch.verify()
    said = str(caught.value)
    assert 'The first module that diverges is "blocks.1.drop" (Dropout).' in said
    assert 'step 2: sch["blocks.1.drop"].alter(tests.verify.test_verify._more_dropout)' in said
    assert "sch.undo(2)" in said
    assert caught.value.report.rows[-1].grade == "bug"
    assert "bug" in str(caught.value.report)


def _more_dropout(one: nn.Dropout) -> None:
    one.p = 0.4


def test_a_copy_changed_by_hand_is_told_from_a_step() -> None:
    sch = schedule()
    sch["blocks.0"].trace()
    sch["blocks.1"].module.scale = 0.25
    with pytest.raises(VerificationError, match="changed by hand") as caught:
        sch.verify()
    assert caught.value.report.step is None
    assert caught.value.report.module == "blocks.1"


def test_a_copy_without_steps_changed_by_hand() -> None:
    sch = schedule()
    sch["blocks.1"].module.scale = 0.25
    with pytest.raises(VerificationError, match="no steps"):
        sch.verify()


# Places


def test_one_module_alone() -> None:
    with altering():
        sch = slapo.create_schedule(lab(), inputs())
        sch["layers.0.mlp.drop"].alter(_more_dropout)
        assert sch["layers.1"].verify().grade == "equal"
        with pytest.raises(VerificationError, match=r'verify at "layers.0.mlp": in the scenario "train"') as caught:
            sch["layers.0.mlp"].verify()
    assert (caught.value.report.module, caught.value.report.step) == ("layers.0.mlp.drop", 1)


def test_a_place_is_called_with_keywords_as_in_the_model() -> None:
    sch = slapo.create_schedule(lab(), inputs())
    sch["layers.0.mix"].trace()
    assert sch["layers.0.mix"].verify().grade == "equal"


def test_a_place_that_a_step_made() -> None:
    with altering():
        sch = schedule()
        sch["blocks.0"].alter(_with_a_part)
        with pytest.raises(PathError, match=r'a step made it.*sch\["blocks.0"\].verify\(\)'):
            sch["blocks.0.part"].verify()


def _with_a_part(one: nn.Module) -> None:
    one.part = nn.Identity()


def test_a_place_that_is_never_called() -> None:
    model = net()
    model.unused = nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match=r'verify at "unused".*never calls this module'):
        schedule(model)["unused"].verify()


# Refusals


def test_no_example_inputs() -> None:
    with pytest.raises(NoExampleInputs, match=r"create_schedule\(model, example_inputs=\.\.\.\)"):
        slapo.create_schedule(net()).verify()


def test_no_values_on_meta() -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ArgumentError, match="on device 'meta'.*to_empty"):
        schedule(model).verify()


@pytest.mark.parametrize("options", [{"steps": -1}, {"steps": True}, {"seed": "a"}, {"seed": 1.5}], ids=str)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="must be a whole number"):
        schedule().verify(**options)


def test_an_original_that_does_not_run() -> None:
    with pytest.raises(ArgumentError, match="does not run on the example inputs.*IndexError"):
        slapo.create_schedule(net(), (ids() + 100,)).verify()


# Law 1


class Stop(BaseException):
    """What no `except Exception` catches."""


class Raising(nn.Module):
    """Touches all that it can reach, and raises from the call on that it is told."""

    def __init__(self, error: BaseException | None, after: int) -> None:
        super().__init__()
        self.net = net()
        self.error, self.after = error, after
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1)
        random.random()
        numpy.random.rand()
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)
        if self.error is not None and len(self.log) > self.after:
            torch.set_default_dtype(torch.float64)
            raise self.error
        return self.net(x)


@pytest.mark.parametrize("error", [None, ValueError("mine"), Stop(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("after", [0, 1])
def test_nothing_of_the_users_is_touched(error: BaseException | None, after: int) -> None:
    model = Raising(error, after)
    for parameter in list(model.parameters())[:3]:
        parameter.grad = torch.ones_like(parameter)
    sch = schedule(model)
    sch["net.blocks.1"].checkpoint()
    copy = sch.module
    copies = [id(one) for one in copy.modules()]
    flags = [one.training for one in copy.modules()]
    before = Untouched(model)
    if error is None:
        assert sch.verify().grade == "equal"
    else:
        with pytest.raises((ArgumentError, Stop, KeyboardInterrupt)):
            sch.verify()
    assert before.changes() == []
    assert [id(one) for one in copy.modules()] == copies
    assert [one.training for one in copy.modules()] == flags
    assert sch.module is copy
    assert len(sch.history) == 1


def test_nothing_is_touched_by_a_bug_either() -> None:
    with altering():
        model = lab()
        sch = slapo.create_schedule(model, inputs())
        sch["layers.1.mlp.drop"].alter(_more_dropout)
        before, given = Untouched(model), {name: one.clone() for name, one in sch.root.example_inputs.items()}
        with pytest.raises(VerificationError, match="scenario"):
            sch.verify()
    assert before.changes() == []
    assert all(torch.equal(one, sch.root.example_inputs[name]) for name, one in given.items())


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_surrounds_the_call_stays(around: Any) -> None:
    sch = schedule()
    with around(), torch.autocast("cpu", torch.bfloat16):
        before = global_state()
        assert sch.verify(steps=0).grade == "equal"
        assert changes(before, global_state()) == []


def test_what_surrounds_the_call_changes_no_grade() -> None:
    with altering():
        sch = slapo.create_schedule(lab(), inputs())
        sch["layers.0.norm1"].alter(_larger_eps)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            with pytest.raises(VerificationError, match='scenario "train"'):
                sch.verify()


def _larger_eps(one: nn.LayerNorm) -> None:
    one.eps = 2e-5


def test_misses_of_the_users_copy_do_not_move() -> None:
    sch = schedule()
    sch["blocks.0"].trace()
    sch.verify()
    assert sch["blocks.0"].misses == 0


# What is no bug


class Clock(nn.Module):
    """Gives back something that is another in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.lin(x), time.perf_counter_ns()


def test_what_differs_in_the_original_itself_is_left_out() -> None:
    sch = slapo.create_schedule(Clock(), (torch.randn(3, 4),))
    sch["lin"].checkpoint()
    report = sch.verify()
    assert report.grade == "equal"
    assert "two runs of the original itself" in str(report)


class FixedBatch(nn.Module):
    """An original that takes only the batch of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).view(3, 4)


def test_derived_scenarios_that_the_original_refuses_are_left_out() -> None:
    report = slapo.create_schedule(FixedBatch(), (torch.randn(3, 4),)).verify()
    assert report.grade == "equal"
    assert not any("batch of 1" in row.scenario for row in report.rows)
    assert any('"batch of 1"' in note and "the original raises" in note for note in report.notes)
