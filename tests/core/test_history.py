"""The history as a value: source that runs, JSON that executes nothing, replay that is identity."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import slapo_py as slapo
from slapo_py import History, Schedule, Step
from slapo_py.codec import PerRank
from slapo_py.errors import HistoryError, StepError
from tests.core import policies, steps
from tests.fingerprint import changes, fingerprint
from tests.models import ids, net
from tests.running import equal, run

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    with steps.registered(freeze=steps.Freeze, swap=steps.Swap):
        yield


@pytest.fixture
def sch() -> Schedule:
    sch = slapo.create_schedule(net())
    sch["blocks.0"].checkpoint(policy=policies.keep_matmuls)
    sch["blocks.1"].checkpoint(policy=["aten.addmm"])
    sch["blocks.1.norm"].configure(eps=1e-3)
    sch["head"].annotate("weight", "lr", {"scale": (1, 2.5), "kind": None})
    sch["blocks.0"].freeze('it\'s "quoted"\n')
    return sch


SOURCE = """import tests.core.policies


def schedule(sch):
    sch["blocks.0"].checkpoint(policy=tests.core.policies.keep_matmuls)
    sch["blocks.1"].checkpoint(policy=["aten.addmm"])
    sch["blocks.1.norm"].configure(eps=0.001)
    sch["head"].annotate("weight", "lr", {"scale": (1, 2.5), "kind": None})
    sch["blocks.0"].freeze(note="it's \\"quoted\\"\\n")"""


def test_it_prints_as_source(sch: Schedule) -> None:
    assert str(sch.history) == SOURCE
    assert str(History()) == "def schedule(sch):\n    pass"
    assert repr(sch.history) == "<History of 5 steps>"
    assert repr(sch.history[1]) == '<Step sch["blocks.1"].checkpoint(policy=["aten.addmm"])>'


def test_it_is_a_value(sch: Schedule) -> None:
    h = sch.history
    sch["norm"].freeze()
    assert len(h) == 5
    assert len(sch.history) == 6
    assert sch.history[:-1] == h
    assert hash(sch.history[:-1]) == hash(h)
    assert h != sch.history
    assert [step.primitive for step in h] == ["checkpoint", "checkpoint", "configure", "annotate", "freeze"]
    assert isinstance(h[1:3], History)
    assert h != list(h)


def test_a_list_that_changes_later_does_not_change_the_history(sch: Schedule) -> None:
    names = {"a": ["b"]}
    sch["norm"].annotate("weight", "names", names)
    names["a"].append("c")
    names["d"] = []
    assert str(sch.history[-1]) == 'sch["norm"].annotate("weight", "names", {"a": ["b"]})'


# All values

VALUES = [
    None, True, 1, -3, 1.5, -0.0, float("nan"), float("inf"), float("-inf"), "", "é\u2028\"'\\", [], [1, [2.0]],
    (), (1,), (1, (2, [3])), {}, {"a": 1, 2: (3,)}, {(1, 2): None}, {"$": "object", "name": "os:system"}, torch.float32,
    torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), slapo.per_rank("tp"), policies.keep_matmuls,
    policies.Holder, policies.Holder.nested, policies.Colors.RED, CheckpointPolicy.MUST_SAVE, len, int,
    math.sqrt, torch.nn.Linear,
]  # fmt: skip
ALLOW = ("tests.core.policies", "torch", "builtins", "math")


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value).partition(" at 0x")[0])
def test_load_of_save_is_equal_and_the_source_runs(value: Any, tmp_path: Path) -> None:
    h = History([Step("freeze", "blocks.0", (value,), {"note": [value]})])
    h.save(tmp_path / "h.json")
    again = History.load(tmp_path / "h.json", allow=ALLOW)
    assert again == h
    assert hash(again) == hash(h)
    assert repr(again[0].args) == repr(h[0].args)
    assert type(again[0].args[0]) is type(value)
    calls: list[Any] = []
    scope: dict[str, Any] = {}

    class Recorder(dict):  # type: ignore[type-arg]
        def __missing__(self, path: str) -> Any:
            return self

        def freeze(self, *args: Any, **kwargs: Any) -> None:
            calls.append(Step("freeze", "blocks.0", args, kwargs))

    exec(str(h), scope)
    scope["schedule"](Recorder())
    assert calls == list(h)


@pytest.mark.parametrize("other", [1.0, True, "1", (1,), None])
def test_values_of_other_types_are_other_steps(other: Any) -> None:
    assert Step("freeze", "", (1,)) != Step("freeze", "", (other,))


def test_keywords_in_another_order_are_the_same_step() -> None:
    assert Step("a", "b", (), {"x": 1, "y": 2}) == Step("a", "b", (), {"y": 2, "x": 1})
    assert Step("a", "b") != "a"


def test_modules_whose_names_would_clash_are_imported_under_another() -> None:
    from slapo_py.codec import Source

    writer = Source()
    assert [writer._import(name) for name in ("sch", "schedule.x", "torch", "torch.nn", "mine.a")] == [
        "sch_", "schedule_x_", "torch", "torch_nn_", "mine.a"
    ]  # fmt: skip
    assert "import schedule.x as schedule_x_" in writer.imports


def test_per_rank_needs_the_name_of_an_axis() -> None:
    assert slapo.per_rank("tp") == PerRank("tp")
    with pytest.raises(HistoryError, match=r'per_rank\(3\): needs the name of a mesh axis, as in per_rank\("tp"\)'):
        slapo.per_rank(3)  # type: ignore[arg-type]


# Replay


def test_replay_is_identity(sch: Schedule, tmp_path: Path) -> None:
    sch.history.save(tmp_path / "h.json")
    loaded = History.load(tmp_path / "h.json", allow=("tests",))
    other = slapo.create_schedule(net())
    assert loaded.replay(other) is other
    assert str(other) == str(sch)
    assert other.history == sch.history
    for a, b in zip(run(sch.module, {"ids": ids()}), run(other.module, {"ids": ids()})):
        assert equal(a, b)


FRESH = """
import sys, torch, slapo_py as slapo
from tests.core import steps
from tests.models import ids, net
with steps.registered(freeze=steps.Freeze, swap=steps.Swap):
    folder = sys.argv[1]
    sch = slapo.History.load(folder + "/h.json", allow=("tests.core",)).replay(slapo.create_schedule(net()))
    scope = {}
    exec(open(folder + "/h.py").read(), scope)
    other = slapo.create_schedule(net())
    scope["schedule"](other)
    assert other.history == sch.history
    torch.manual_seed(3)
    torch.save([str(sch), str(other), sch.module(ids()).detach()], folder + "/out.pt")
"""


def test_replay_in_a_fresh_process_is_identity(sch: Schedule, tmp_path: Path) -> None:
    sch.history.save(tmp_path / "h.json")
    (tmp_path / "h.py").write_text(str(sch.history), encoding="utf-8")
    subprocess.run([sys.executable, "-c", FRESH, str(tmp_path)], check=True, cwd=ROOT, timeout=120)
    loaded, executed, output = torch.load(tmp_path / "out.pt")
    assert loaded == executed == str(sch)
    torch.manual_seed(3)
    assert torch.equal(output, sch.module(ids()))


def test_replay_is_all_or_nothing(sch: Schedule) -> None:
    other = slapo.create_schedule(net())
    other["blocks.1"].checkpoint()
    before, history = fingerprint(other.module), other.history
    with pytest.raises(
        HistoryError, match=r'replay: step 2, sch\["blocks.1"\].checkpoint\(.*\): StepError: checkpoint at'
    ):
        sch.history.replay(other)
    assert changes(before, fingerprint(other.module)) == []
    assert other.history == history


def test_replay_of_another_model_names_the_step(sch: Schedule) -> None:
    with pytest.raises(HistoryError, match=r"step 1, .*: PathError: sch\['blocks.0'\]: the model has no module"):
        sch.history.replay(slapo.create_schedule(torch.nn.Linear(2, 2)))


def test_an_error_that_is_not_ours_keeps_its_type() -> None:
    h = History([Step("swap", "blocks.0", (1,), {"fail": ValueError("mine")})])
    with pytest.raises(ValueError, match="mine") as caught:
        h.replay(slapo.create_schedule(net()))
    assert caught.value.__notes__[0].startswith('replay: step 1, sch["blocks.0"].swap(')


def test_an_unknown_primitive_is_refused() -> None:
    with pytest.raises(HistoryError, match="step 1, .*no primitive 'frieze' is registered here"):
        History([Step("frieze", "")]).replay(slapo.create_schedule(net()))


# Live objects


def test_live_objects_replay_here_and_are_not_saved(sch: Schedule, tmp_path: Path) -> None:
    def local(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    sch["blocks.1.up"].checkpoint(policy=local)
    again = sch.history.replay(slapo.create_schedule(sch.original))
    assert again.history == sch.history
    assert sch.history[-1:].diff(History([Step("checkpoint", "blocks.1.up", (), {"policy": lambda: 0})]))
    with pytest.raises(
        HistoryError, match=r"history.save: step 6, sch\[\"blocks.1.up\"\].*local.* at .*test_history.py:\d+ exists in"
    ):
        sch.history.save(tmp_path / "h.json")
    assert list(tmp_path.iterdir()) == []
    text = str(sch.history[-1:])
    assert text.startswith("# live_0 is test_live_objects")
    assert 'sch["blocks.1.up"].checkpoint(policy=live_0)' in text
    scope: dict[str, Any] = {}
    exec(text, scope)
    with pytest.raises(NameError, match="live_0"):
        scope["schedule"](sch)


@pytest.mark.parametrize("value", [object(), lambda: 0, torch.zeros(1), print.__self__, {1, 2}, type("New", (), {})])
def test_what_can_not_be_imported_is_live(value: Any, tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="step 1, .* exists in this process only"):
        History([Step("freeze", "", (value,))]).save(tmp_path / "h.json")


def test_objects_of_main_are_live(tmp_path: Path) -> None:
    source = """
import slapo_py as slapo
def policy(): pass
try:
    slapo.History([slapo.Step("checkpoint", "", (), {"policy": policy})]).save("h.json")
except slapo.ScheduleError as error:
    assert "step 1" in str(error) and "__main__" in str(error)
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout == "refused\n", done.stderr


# Diff


def test_diff(sch: Schedule) -> None:
    same = sch.history.diff(History(list(sch.history)))
    assert not same
    assert str(same) == "no difference"
    other = slapo.create_schedule(net())
    other["blocks.0"].checkpoint(policy=policies.keep_matmuls)
    other["blocks.1"].checkpoint()
    diff = sch.history[:3].diff(other.history)
    assert diff
    assert str(diff).splitlines() == [
        '  sch["blocks.0"].checkpoint(policy=tests.core.policies.keep_matmuls)',
        '- sch["blocks.1"].checkpoint(policy=["aten.addmm"])',
        '- sch["blocks.1.norm"].configure(eps=0.001)',
        '+ sch["blocks.1"].checkpoint()',
    ]
    assert [step.path for step in diff.removed] == ["blocks.1", "blocks.1.norm"]
    assert diff.added == list(other.history[1:])
    assert repr(diff) == "<HistoryDiff: 2 removed, 1 added>"


# Loading what someone else wrote


def forged(tmp_path: Path, **changes: Any) -> Path:
    step = {"primitive": "freeze", "path": "blocks.0", "args": [], "kwargs": {}, **changes}
    path = tmp_path / "h.json"
    path.write_text(json.dumps({"format": "slapo_py history", "version": 1, "steps": [step]}), encoding="utf-8")
    return path


def of(name: str) -> dict[str, Any]:
    return {"kwargs": {"note": {"$": "object", "name": name}}}


STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "primitive": ({"primitive": "chekpoint"}, "no primitive 'chekpoint' is registered here. Did you mean 'checkpoint'"),
    "primitive far off": ({"primitive": "zzz"}, "Import the module that registers it first"),
    "primitive no name": ({"primitive": "a.b"}, "'a.b' is no name of a primitive"),
    "primitive number": ({"primitive": 3}, "3 is no name of a primitive"),
    "dunder": ({"primitive": "__class__"}, "no primitive '__class__'"),
    "a method that is no primitive": ({"primitive": "undo"}, "no primitive 'undo'"),
    "path": ({"path": "a..b"}, "'a..b' is no path of a module"),
    "path number": ({"path": 1}, "1 is no path"),
    "args": ({"args": {}}, "needs a list of arguments and a dict"),
    "kwargs": ({"kwargs": []}, "needs a list of arguments and a dict"),
    "kwargs names": ({"kwargs": {"a b": 1}}, "by identifiers"),
    "kwargs keyword": ({"kwargs": {"with": 1}}, "by identifiers"),
    "more": ({"more": 1}, "needs exactly the fields primitive, path, args and kwargs"),
    "kind": ({"args": [{"$": "pickle", "value": ""}]}, "value of unknown kind 'pickle'"),
    "no kind": ({"args": [{"a": 1}]}, "value of unknown kind None"),
    "field": ({"args": [{"$": "dtype", "name": 3}]}, "a dtype needs exactly the field 'name' with a str"),
    "fields": ({"args": [{"$": "dtype", "name": "float32", "x": 1}]}, "a dtype needs exactly the field"),
    "value": ({"args": [{"$": "per_rank", "axis": "tp", "x": 1}]}, "a per_rank needs exactly the fields .'axis'."),
    "dtype": ({"args": [{"$": "dtype", "name": "nn"}]}, "torch has no dtype 'nn'"),
    "dtype path": ({"args": [{"$": "dtype", "name": "a.b"}]}, "torch has no dtype"),
    "device": ({"args": [{"$": "device", "name": "toaster"}]}, "torch has no device 'toaster'"),
    "axis": ({"args": [{"$": "per_rank", "axis": "a b"}]}, "needs the name of a mesh axis"),
    "float": ({"args": [{"$": "float", "value": "1"}]}, "'1' is no float"),
    "pairs": ({"args": [{"$": "dict", "items": [1]}]}, "pairs of key and value, found 1"),
    "key": ({"args": [{"$": "dict", "items": [[[1], 1]]}]}, "can't be the key of a dict"),
    "key within": ({"args": [{"$": "dict", "items": [[{"$": "tuple", "items": [[1]]}, 1]]}]}, "unhashable"),
    "tuple": ({"args": [{"$": "tuple", "items": [{"$": "object", "name": "os:system"}]}]}, "outside the allowed"),
    "object form": (of("os.system"), "no importable name of the form package.module:name"),
    "object code": (of("tests.core.policies:__import__('os')"), "no importable name of the form"),
    "object call": (of("tests.core.policies:keep_matmuls()"), "no importable name of the form"),
    "outside": (of("os:system"), r"names 'os:system', which lies outside the allowed modules \(tests.core.policies\)."
                r'.*allow=\("tests.core.policies", "os",\)'),
    "not the whole name": (of("tests.core.policies_evil:x"), "outside the allowed modules"),
    "above": (of("tests.core:policies"), "outside the allowed modules"),
    "through a module": (of("tests.core.policies:os.system"), "defines no 'os.system'"),
    "a module": (of("tests.core.policies:os"), "defines no 'os'"),
    "a name from elsewhere": (of("tests.core.policies:CheckpointPolicy"),
                              "but torch.utils.checkpoint:CheckpointPolicy"),
    "through globals": (of("tests.core.policies:keep_matmuls.__globals__"), "is no function, class or .*but a dict"),
    "a value": (of("tests.core.policies:VALUE"), "is no function, class or enum member of that module, but a int"),
    "absent": (of("tests.core.policies:nothing"), "module 'tests.core.policies' defines no 'nothing'"),
    "absent module": (of("tests.core.policies.deeper:x"), "can't be imported"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), STEPS.values(), ids=STEPS)
def test_a_forged_step_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match=f"step 1: .*{message}"):
        History.load(forged(tmp_path, **changed), allow=("tests.core.policies",))


FILES = {
    "no json": ("{", "is not JSON"),
    "deep": ("[" * 100_000, "is not JSON"),
    "a list": ("[]", "is not a history of slapo_py"),
    "format": ('{"format": "other"}', "is not a history of slapo_py: the field 'format' must be 'slapo_py history'"),
    "version": (
        '{"format": "slapo_py history", "version": 2, "steps": []}',
        "has version 2; this slapo_py reads version 1",
    ),
    "fields": ('{"format": "slapo_py history", "version": 1}', "needs exactly the fields format, version and steps"),
    "steps": ('{"format": "slapo_py history", "version": 1, "steps": {}}', "needs exactly the fields"),
    "a step": (
        '{"format": "slapo_py history", "version": 1, "steps": [3]}',
        "step 1: needs exactly the fields primitive",
    ),
}


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_history_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text(text)
    with pytest.raises(HistoryError, match=f"History.load.*: {message}"):
        History.load(tmp_path / "h.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="can't be read"):
        History.load(tmp_path / "none.json")


def test_nothing_of_a_refused_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the module of an allowed name, when another step of the file is refused."""
    (tmp_path / "allowed_one.py").write_text("__import__('pathlib').Path('executed').touch()\ndef f(): pass\n")
    (tmp_path / "other_one.py").write_text("__import__('pathlib').Path('executed').touch()\ndef f(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def file(*names: str) -> str:
        made = [{"primitive": "freeze", "path": "", "args": [], **of(name)} for name in names]
        Path("h.json").write_text(json.dumps({"format": "slapo_py history", "version": 1, "steps": made}))
        return "h.json"

    with pytest.raises(HistoryError, match="step 2: names 'other_one:f'"):
        History.load(file("allowed_one:f", "other_one:f"), allow=("allowed_one",))
    with pytest.raises(HistoryError, match="step 1: names 'allowed_one:f'"):
        History.load(file("allowed_one:f"))
    assert not Path("executed").exists()
    assert "allowed_one" not in sys.modules
    assert len(History.load(file("allowed_one:f"), allow="allowed_one")) == 1
    del sys.modules["allowed_one"]


def test_double_steps_after_loading_are_refused_like_written_ones(sch: Schedule, tmp_path: Path) -> None:
    sch.history.save(tmp_path / "h.json")
    with pytest.raises(HistoryError, match="StepError: checkpoint at .* is checkpointed already") as caught:
        History.load(tmp_path / "h.json", allow=("tests",)).replay(sch)
    assert isinstance(caught.value.__cause__, StepError)
