"""compare: each figure says what it claims, nothing is left behind, and what can't be compared is refused."""

import gc
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.compare import Comparison, compare
from slapo_py.errors import ArgumentError, NoExampleInputs
from tests.fingerprint import changes, fingerprint, global_state
from tests.models import net, tiny_gpt2

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def given(length: int = 8) -> dict[str, Any]:
    ids = torch.arange(2 * length).reshape(2, length) % 31
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def schedules(model: nn.Module) -> dict[str, slapo.Schedule]:
    found = {
        name: slapo.create_schedule(model, example_inputs=given()) for name in ("plain", "traced", "ckpt", "wrong")
    }
    found["traced"].select("transformer.h.*").trace()
    found["ckpt"].select("transformer.h.*").checkpoint()
    found["wrong"]["transformer.ln_f"].configure(eps=1.0)
    return found


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_gpt2(n_embd=32).train()


@pytest.fixture(scope="module")
def found(model: nn.Module) -> Comparison:
    return compare(schedules(model), rounds=1)


def test_grades(found: Comparison) -> None:
    assert [row.name for row in found.rows] == ["plain", "traced", "ckpt", "wrong"]
    assert [row.grade for row in found.rows] == ["equal", "equal", "equal", "bug"]
    assert found["wrong"].note.startswith("verify")  # what went wrong, and where
    assert found["traced"].note == ""


def test_steps_and_misses(found: Comparison, model: nn.Module) -> None:
    assert [row.steps for row in found.rows] == [0, 2, 2, 1]
    assert [row.misses for row in found.rows] == [0, 0, 0, 0]
    other = slapo.create_schedule(model, example_inputs=given())
    other["transformer.h.0"].trace()
    longer = {**given(), "use_cache": True}
    assert compare({"missed": other}, longer, rounds=1)["missed"].misses > 0


def test_memory(found: Comparison) -> None:
    assert found["plain"].saved_bytes == found.plain.saved_bytes > 0
    assert found["plain"].peak_bytes == found.plain.peak_bytes > found.plain.saved_bytes / 2
    assert found["ckpt"].saved_bytes < found["plain"].saved_bytes / 2
    assert found["ckpt"].peak_bytes < found["plain"].peak_bytes
    assert found["ckpt"].peak_bytes > found["ckpt"].saved_bytes  # what is recomputed is alive for a while


def test_times_are_numbers(found: Comparison) -> None:
    for row in found.rows:
        assert row.time_ratio > 0
        assert row.schedule_seconds >= 0
        assert row.compile_seconds >= 0
    assert found.plain.time_ratio == 1.0


class Clock(nn.Module):
    """A model whose forward takes one second by its own clock, and five the first time."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        Clock.now += 5.0 if self.calls == 1 else 1.0
        return torch.sigmoid(self.lin(x))


def test_ratios_and_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["slapo_py.compare"], "time", types.SimpleNamespace(perf_counter=lambda: Clock.now))
    model = Clock()
    twice = slapo.create_schedule(model)
    twice.checkpoint()  # the forward runs again in the backward pass
    found = compare({"once": slapo.create_schedule(model), "twice": twice}, torch.ones(2, 4), rounds=3)
    assert [row.time_ratio for row in found.rows] == [1.0, 2.0]
    assert [row.compile_seconds for row in found.rows] == [4.0, 8.0]  # the second time it is as the first time was
    assert [row.schedule_seconds for row in found.rows] == [0.0, 0.0]


def test_the_printed_table(found: Comparison) -> None:
    text = str(found)
    for word in ("verify", "saved", "(no schedule)", "1.000 x", "ckpt", "equal", "bug", "wrong: "):
        assert word in text
    assert "\x1b" not in text
    assert repr(found) == "<Comparison of plain, traced, ckpt, wrong>"
    from rich.console import Console

    console = Console(width=150, color_system=None)
    with console.capture() as capture:
        console.print(found)
    assert "traced" in capture.get()


def test_a_picture(model: nn.Module, tmp_path: Path) -> None:
    sch = slapo.create_schedule(model, example_inputs=given())
    before = global_state()
    compare({"plain": sch}, rounds=1, png=tmp_path / "deep" / "bars.png")
    assert (tmp_path / "deep" / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert changes(before, global_state()) == []


# What is run


class Records(nn.Module):
    """Notes in which mode it runs and on what."""

    seen: list[tuple[bool, bool, int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.seen.append((self.training, torch.is_grad_enabled(), x.shape[0]))
        self.count += 1
        x.add_(1)
        return {"y": self.lin(x) * torch.rand(1), "z": self.lin(x), "mask": x.detach() > 0}


@pytest.mark.parametrize("train", [True, False])
def test_the_mode_is_that_of_the_original(train: bool) -> None:
    model = Records().train(train)
    Records.seen.clear()
    x = torch.zeros(3, 4)
    sch = slapo.create_schedule(model)
    sch.module.train(not train)
    with torch.no_grad():
        row = compare({"one": sch}, x, rounds=1)["one"]
    assert set(Records.seen) == {(train, True, 3)}
    assert row.grade == "?"
    assert "no example_inputs" in row.note
    assert torch.equal(x, torch.zeros(3, 4))
    assert row.saved_bytes > 0


def test_the_loss() -> None:
    calls: list[Any] = []

    def loss(output: Any, batch: Any) -> Tensor:
        calls.append(batch)
        return output["z"].square().mean()

    batch = {"x": torch.zeros(3, 4)}
    compare({"one": slapo.create_schedule(Records())}, batch, loss=loss, rounds=1)
    assert calls
    assert all(one is batch for one in calls)


def test_a_model_without_gradients() -> None:
    model = Records().requires_grad_(False)
    row = compare({"one": slapo.create_schedule(model)}, torch.zeros(3, 4), rounds=1)["one"]
    assert row.saved_bytes == 0


# Nothing stays


def test_nothing_of_the_schedules_changes(model: nn.Module) -> None:
    made = schedules(model)
    before = [fingerprint(model), *(fingerprint(one.module) for one in made.values()), global_state()]
    histories = [one.history for one in made.values()]
    compare(made, rounds=1)
    after = [fingerprint(model), *(fingerprint(one.module) for one in made.values()), global_state()]
    assert [changes(a, b) for a, b in zip(before, after, strict=True)] == [[]] * len(before)
    assert [one.history for one in made.values()] == histories
    assert gc.isenabled()


class Breaks(nn.Module):
    """Runs a few times, then no more."""

    left = 3

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1)
        Breaks.left -= 1
        if Breaks.left < 0:
            raise RuntimeError("no more")
        return self.lin(x)


def test_an_error_of_the_model_is_raised_and_all_is_as_before() -> None:
    model = Breaks()
    sch = slapo.create_schedule(model)
    before = fingerprint(model), fingerprint(sch.module), global_state()
    with pytest.raises(RuntimeError, match="no more"):
        compare({"one": sch}, torch.zeros(1, 4), rounds=5)
    after = fingerprint(model), fingerprint(sch.module), global_state()
    assert [changes(a, b) for a, b in zip(before, after, strict=True)] == [[], [], []]
    assert gc.isenabled()


# Refusals

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "empty": (lambda: compare({}), ArgumentError, r"needs a dict of schedules by name, found \{\}\. Write compare\("),
    "a list": (lambda: compare([slapo.create_schedule(net())]), ArgumentError, "needs a dict of schedules"),  # type: ignore[arg-type]
    "a module": (
        lambda: compare({"a": net()}),  # type: ignore[dict-item]
        ArgumentError,
        "'a' is Net, not a schedule under a name",
    ),
    "a place": (
        lambda: compare({"a": slapo.create_schedule(net())["head"]}),
        ArgumentError,
        r"'a' is the place 'head' of a schedule; whole .* Write \"a\": sch",
    ),
    "two models": (
        lambda: compare({"a": slapo.create_schedule(net()), "b": slapo.create_schedule(net())}),
        ArgumentError,
        r"'b' and 'a' are schedules of different models.*create_schedule\(model\) of the same",
    ),
    "rounds": (
        lambda: compare({"a": slapo.create_schedule(net())}, rounds=0),
        ArgumentError,
        "rounds must be a whole number of at least 1, found 0",
    ),
    "no batch": (
        lambda: compare({"a": slapo.create_schedule(net())}),
        NoExampleInputs,
        r"Write compare\(\{\.\.\.\}, batch\), or give create_schedule",
    ),
    "a loss of another form": (
        lambda: compare(
            {"a": slapo.create_schedule(Records())}, torch.zeros(3, 4), loss=lambda out, batch: out["z"], rounds=1
        ),
        ArgumentError,
        r"must give a scalar tensor, found \[3, 4\]\. Write loss=lambda",
    ),
    "a loss that is a number": (
        lambda: compare({"a": slapo.create_schedule(Records())}, torch.zeros(3, 4), loss=lambda *_: 1.0, rounds=1),  # type: ignore[arg-type,return-value]
        ArgumentError,
        "must give a scalar tensor, found float",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
