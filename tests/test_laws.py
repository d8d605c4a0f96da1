"""Laws 1 and 2 as tables: the original is untouched after every call, and a refused one leaves the schedule as it was.

Each cell is one call on one model: `ACTIONS` are accepted, `REFUSALS` raise.
"""

import copy
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import slapo_py as slapo
from slapo_py import History, Schedule, Step
from slapo_py.errors import (
    ArgumentError,
    BuildError,
    CheckpointError,
    EngineError,
    HistoryError,
    NoExampleInputs,
    NoMatchError,
    PathError,
    RegistryError,
    StepError,
    TraceError,
)
from slapo_py.snapshot import Snapshot
from slapo_py.tracing.trace import misses
from tests.fingerprint import changes
from tests.laws import steps
from tests.laws.models import CASES, Case, original
from tests.laws.witness import Untouched, state
from tests.running import differences, record


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    with steps.registered(), steps.registered_wreck():
        yield


@dataclass
class Here:
    """What an action may use."""

    case: Case
    sch: Schedule
    """The base schedule: `block` is traced, `part` is marked, `other` is checkpointed, the model is annotated."""
    tmp: Path

    @property
    def model(self) -> nn.Module:
        return self.sch.original

    @property
    def inputs(self) -> dict[str, Any]:
        return self.case.inputs(2, 8)

    @property
    def first(self) -> str:
        """A parameter of `part`."""
        return next(name for name, _ in self.sch[self.case.part].module.named_parameters())

    def engine(self, **options: Any) -> Any:
        given = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "loss": loss, "count": count, **options}
        return slapo.build(self.sch, target="torch", **given)


def loss(output: Any, batch: Any) -> torch.Tensor:
    return next(one for one in tree_leaves(output) if isinstance(one, torch.Tensor)).float().square().sum()


def count(batch: dict[str, Any]) -> int:
    return len(next(one for one in batch.values() if isinstance(one, torch.Tensor)))


@functools.cache
def shared(name: str) -> tuple[Case, Schedule]:
    """One original and one schedule of each model, for all cells."""
    case = CASES[name]
    return case, slapo.create_schedule(original(case), case.inputs(2, 8))


ready: dict[str, tuple[nn.Module, History]] = {}
"""The schedules on which the base steps were done, and nothing since that changes anything."""


def prepared(name: str, tmp: Path) -> Here:
    case, sch = shared(name)
    if ready.get(name) == (sch.module, sch.history):
        return Here(case, sch, tmp)
    if len(sch.history):
        sch.undo(len(sch.history))
    sch[case.block].trace()
    sch[case.part].mark("base", times=2)
    sch[case.other].checkpoint()
    sch.annotate(next(name for name, _ in sch.module.named_parameters()), "kind", "first")
    ready[name] = (sch.module, sch.history)
    return Here(case, sch, tmp)


# What is accepted

Action = Callable[[Here], Any]
CHANGING: dict[str, Action] = {
    "trace": lambda h: h.sch[h.case.part].trace(),
    "trace flattened": lambda h: (h.sch.undo(4), h.sch[h.case.block].trace(flatten=True)),
    "trace with leaves": lambda h: (h.sch.undo(4), h.sch[h.case.block].trace(flatten=True, leaves=["*"])),
    "trace the parent": lambda h: h.sch[h.case.whole].trace(),
    "checkpoint": lambda h: h.sch[h.case.part].checkpoint(),
    "checkpoint what is traced": lambda h: h.sch[h.case.block].checkpoint(),
    "checkpoint by names": lambda h: h.sch[h.case.part].checkpoint(policy=["aten.mm", "aten.addmm.default"]),
    "checkpoint by a function": lambda h: h.sch[h.case.part].checkpoint(policy=steps.keep_matmuls),
    "compile": lambda h: h.sch[h.case.part].compile(backend="eager"),
    "compile what is traced": lambda h: h.sch[h.case.block].compile(backend="eager", dynamic=False, fullgraph=False),
    "annotate": lambda h: h.sch[h.case.part].annotate(h.first, "rate", {"lr": (0.1, None)}),
    "configure": lambda h: h.sch[h.case.part].configure(**h.case.attributes),
    "configure and trace": lambda h: h.sch[h.case.part].configure(**h.case.attributes).trace(),
    "a user's primitive": lambda h: h.sch[h.case.block].mark("one", "two", times=3),
    "a step of steps": lambda h: h.sch[h.case.block].recompute(),
    "a selection": lambda h: (h.sch.undo(4), h.sch.select(h.case.glob).trace().checkpoint().compile(backend="eager")),
    "undo": lambda h: h.sch.undo(),
    "undo all": lambda h: h.sch.undo(4),
    "replay": lambda h: replay_twice(h),
    "the source": lambda h: run_source(h),
    "other flags": lambda h: (h.sch.module.eval(), h.sch[h.case.part].module.train()),
}


def replay_twice(h: Here) -> None:
    history = h.sch.history
    h.sch.undo(4)
    history.replay(h.sch)
    assert h.sch.history == history


def run_source(h: Here) -> None:
    history, scope = h.sch.history, {}  # type: ignore[var-annotated]
    h.sch.undo(4)
    exec(str(history), scope)
    scope["schedule"](h.sch)
    assert h.sch.history == history


def look(h: Here) -> None:
    assert str(h.sch) and repr(h.sch) and str(h.sch.history) and repr(h.sch.history[0])
    place = h.sch[h.case.block]
    assert str(place) and place.graph.nodes and place.guards and place.misses == 0 and place.notes is not None
    assert len(h.sch.blame(h.case.block)) >= 1 and h.sch.annotations and place.original is not place.module
    assert list(h.sch) and len(h.sch.children) == len(h.sch) and str(h.sch.select("**")) and h.sch.select("**")[0]
    assert not h.sch.history.diff(h.sch.history) and h.sch.history.diff(History())
    assert slapo.list_primitives()


def rich(h: Here) -> None:
    from rich.console import Console

    with (h.tmp / "tree.txt").open("w") as file:
        Console(file=file).print(h.sch, h.sch[h.case.block])


def save_and_load(h: Here) -> None:
    h.sch.history.save(h.tmp / "h.json")
    assert History.load(h.tmp / "h.json") == h.sch.history


def create(h: Here) -> None:
    inputs = h.inputs
    for given in (None, inputs, [inputs, h.case.inputs(3, 6)], tuple(inputs.values())):
        slapo.create_schedule(h.model, given)
    slapo.create_schedule(h.model, [inputs, h.case.inputs(3, 6)])[h.case.part].trace()


def replay_elsewhere(h: Here) -> None:
    other = h.sch.history.replay(slapo.create_schedule(h.model, h.inputs))
    assert str(other) == str(h.sch)


def build(h: Here) -> None:
    built = slapo.build(h.sch)
    assert list(built.state_dict()) == list(h.model.state_dict())
    with torch.no_grad():
        for tensor in [*built.parameters(), *built.buffers()]:
            tensor.zero_()
    built.eval().requires_grad_(False)


def copies(h: Here) -> None:
    copy.deepcopy(h.sch.module).eval()
    torch.save(h.sch.module, h.tmp / "model.pt")
    torch.load(h.tmp / "model.pt", weights_only=False)


LOOKING: dict[str, Action] = {
    "look": look, "print with rich": rich, "save and load the history": save_and_load, "create again": create,
    "replay on another": replay_elsewhere, "build": build, "deepcopy and torch.save": copies,
}  # fmt: skip


def train(h: Here) -> None:
    engine = h.engine()
    for _ in range(3):
        engine.train_step(h.inputs)
    engine.eval_step(h.inputs)
    trained = dict(engine.module.named_parameters())
    assert any(not torch.equal(old, trained[name]) for name, old in h.model.named_parameters())


def train_and_keep(h: Here) -> None:
    engine = h.engine(precision="fp32" if h.case.name == "odd" else "bf16", micro_batches=2, clip=1.0)
    engine.train_step(h.inputs)
    engine.save(h.tmp / "run")
    engine.train_step(h.inputs)
    engine.load(h.tmp / "run")
    engine.state_dict()


TRAINING: dict[str, Action] = {"three steps of training": train, "bf16, save and load": train_and_keep}


LACKING = {
    ("odd", "deepcopy and torch.save"),  # it holds a lock
    ("odd", "trace flattened over steps"),  # it can't be traced whole
    ("transformer_encoder", "trace flattened over steps"),  # torch's fast path reads requires_grad
    ("wide_resnet", "a selection of some that can't"),  # it has no container without a forward
    ("albert", "a selection"),  # it has one layer, which is shared
    ("albert", "a selection that refuses at its end"),
}


def cells(*tables: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(name, action, id=f"{name}: {action}")
        for name in CASES
        for table in tables
        for action in table
        if (name, action) not in LACKING
    ]


@pytest.mark.parametrize(("name", "action"), cells(CHANGING))
def test_a_step_leaves_the_original_untouched(name: str, action: str, tmp_path: Path) -> None:
    untouched = Untouched(shared(name)[1].original)
    here = prepared(name, tmp_path)
    assert untouched.changes() == []
    before = state(here.sch)
    del ready[name]
    CHANGING[action](here)
    assert untouched.changes() == []
    assert changes(before, state(here.sch))  # it did something


@pytest.mark.parametrize(("name", "action"), cells(LOOKING))
def test_looking_changes_nothing(name: str, action: str, tmp_path: Path) -> None:
    here = prepared(name, tmp_path)
    untouched, before = Untouched(here.model), state(here.sch)
    LOOKING[action](here)
    assert untouched.changes() == []
    assert changes(before, state(here.sch)) == []


@pytest.mark.parametrize(("name", "action"), cells(TRAINING))
def test_training_the_built_engine_changes_nothing_but_the_random_state(name: str, action: str, tmp_path: Path) -> None:
    here = prepared(name, tmp_path)
    untouched, before = Untouched(here.model), state(here.sch)
    TRAINING[action](here)
    assert untouched.changes(random=False) == []
    assert changes(before, state(here.sch)) == []


# What is refused: (call, error, message)

Refusal = tuple[Action, type[BaseException], str]


def forged(h: Here, **changed: Any) -> Path:
    step = {"primitive": "checkpoint", "path": "", "args": [], "kwargs": {}, **changed}
    path = h.tmp / "h.json"
    path.write_text(json.dumps({"format": "slapo_py history", "version": 1, "steps": [step]}))
    return path


def broken_engine(h: Here) -> Any:
    return h.engine(loss=lambda output, batch: 3).train_step(h.inputs)


def damaged(h: Here) -> Any:
    engine = h.engine()
    engine.save(h.tmp / "run")
    (h.tmp / "run" / "engine.pt").unlink()
    return engine.load(h.tmp / "run")


def without_inputs(h: Here) -> Any:
    return slapo.create_schedule(h.model)[h.case.part].trace()


def undo_without_a_primitive(h: Here) -> None:
    slapo.unregister("mark")
    try:
        h.sch.undo()
    finally:
        slapo.register("mark")(steps.Mark)


REFUSALS: dict[str, Refusal] = {
    "path": (lambda h: h.sch[h.case.part + "x"].trace(), PathError, "the model has no module of this name"),
    "path of another type": (lambda h: h.sch[1.5], PathError, "needs a path such as"),
    "glob": (lambda h: h.sch.select("nothing.*.here"), NoMatchError, "no module in this model matches"),
    "glob of nothing": (lambda h: h.sch.select(""), NoMatchError, "needs a glob"),
    "trace twice": (lambda h: h.sch[h.case.block].trace(), StepError, "is traced already"),
    "trace leaves": (lambda h: h.sch[h.case.part].trace(leaves="attn"), ArgumentError, "must be a list of paths"),
    "trace leaves unflattened": (lambda h: h.sch[h.case.part].trace(leaves=["a"]), ArgumentError, "stay calls unless"),
    "trace without inputs": (without_inputs, NoExampleInputs, "needs to know what the model is called with"),
    "trace of a wrong call": (
        lambda h: slapo.create_schedule(h.model, {"nonsense": 1})[h.case.part].trace(),
        TraceError, "does not run on the example inputs",
    ),
    "graph of what is not traced": (lambda h: h.sch[h.case.other].graph, TraceError, "is not traced"),
    "checkpoint twice": (lambda h: h.sch[h.case.other].checkpoint(), StepError, "is checkpointed already"),
    "checkpoint policy": (
        lambda h: h.sch[h.case.part].checkpoint(policy="aten.mm"), ArgumentError, "must be a function or a list",
    ),
    "checkpoint empty policy": (lambda h: h.sch[h.case.part].checkpoint(policy=[]), ArgumentError, "keeps nothing"),
    "checkpoint operation": (
        lambda h: h.sch[h.case.part].checkpoint(policy=["aten.mn"]), ArgumentError, "there is no operation 'aten.mn'",
    ),
    "compile option": (lambda h: h.sch[h.case.part].compile(backnd="x"), ArgumentError, "has no option 'backnd'"),
    "compile backend": (lambda h: h.sch[h.case.part].compile(backend="eagr"), ArgumentError, "knows no backend"),
    "compile mode": (lambda h: h.sch[h.case.part].compile(mode="fast"), ArgumentError, "knows no mode"),
    "compile mode and options": (
        lambda h: h.sch[h.case.part].compile(mode="default", options={}), ArgumentError, "either mode= or options=",
    ),
    "compile options": (lambda h: h.sch[h.case.part].compile(options=[1]), ArgumentError, "must be a dict"),
    "annotate parameter": (lambda h: h.sch.annotate("nothing", "k", 1), ArgumentError, "there is no parameter"),
    "annotate key": (lambda h: h.sch[h.case.part].annotate(h.first, 3, 1), ArgumentError, "key must be a string"),
    "configure nothing": (lambda h: h.sch[h.case.part].configure(), ArgumentError, "needs at least one attribute"),
    "configure unknown": (lambda h: h.sch[h.case.part].configure(scael=1), ArgumentError, "has no attribute 'scael'"),
    "configure training": (lambda h: h.sch[h.case.part].configure(training=True), ArgumentError, "the training flag"),
    "configure private": (lambda h: h.sch[h.case.part].configure(_modules={}), ArgumentError, "a private attribute"),
    "configure method": (lambda h: h.sch[h.case.part].configure(forward=1), ArgumentError, "a method or property"),
    "configure tensor": (
        lambda h: h.sch[h.case.part].configure(**{next(iter(h.case.attributes)): torch.ones(1)}),
        ArgumentError, "would put a tensor",
    ),
    "configure half": (
        lambda h: h.sch[h.case.part].configure(**h.case.attributes, nothing=1), ArgumentError, "has no attribute",
    ),
    "arguments": (lambda h: h.sch.mark(), ArgumentError, "missing a required argument: 'text'"),
    "unknown argument": (lambda h: h.sch.checkpoint(polcy=1), ArgumentError, "Did you mean policy="),
    "a user's check": (lambda h: h.sch[h.case.part].mark("again"), ArgumentError, "is marked already"),
    "a user's error": (lambda h: h.sch[h.case.part].wreck(ValueError("mine")), ValueError, "mine"),
    "a user's error at the model": (lambda h: h.sch.wreck(RuntimeError("mine")), RuntimeError, "mine"),
    "an interrupt": (lambda h: h.sch[h.case.block].wreck(KeyboardInterrupt("stop")), KeyboardInterrupt, "stop"),
    "one step within a step": (lambda h: h.sch[h.case.other].recompute(), StepError, "is checkpointed already"),
    "a selection that refuses at its end": (
        lambda h: h.sch.select(h.case.glob).checkpoint(), StepError, "is checkpointed already",
    ),
    "a selection that refuses in its middle": (
        lambda h: h.sch.select("**").mark("again"), ArgumentError, "is marked already",
    ),
    "a selection of some that can't": (
        lambda h: h.sch.select("**").compile(backend="eager"), ArgumentError, "container without a forward|set on the",
    ),
    "trace flattened over steps": (
        lambda h: h.sch[h.case.whole].trace(flatten=True), StepError, "flattening would bypass what was done at",
    ),
    "undo of nothing": (lambda h: h.sch.undo(0), ArgumentError, "needs a whole number of steps"),
    "undo of more": (lambda h: h.sch.undo(99), ArgumentError, "needs a whole number of steps"),
    "undo that can't replay": (undo_without_a_primitive, HistoryError, "no primitive 'mark' is registered here"),
    "replay of the same": (lambda h: h.sch.history.replay(h.sch), HistoryError, "step 1, .* is traced already"),
    "replay that fails half-way": (
        lambda h: History([Step("mark", "", ("x",)), Step("mark", h.case.part, ("x",))]).replay(h.sch),
        HistoryError, "replay: step 2",
    ),
    "replay with a user's error": (
        lambda h: History([Step("wreck", h.case.part, (), {"fail": ValueError("mine")})]).replay(h.sch),
        ValueError, "mine",
    ),
    "replay of the unknown": (lambda h: History([Step("x", "")]).replay(h.sch), HistoryError, "no primitive 'x'"),
    "history to save": (
        lambda h: History([Step("mark", "", (object(),))]).save(h.tmp / "h.json"), HistoryError, "in this process only",
    ),
    "history to load": (
        lambda h: History.load(forged(h, args=[{"$": "object", "name": "os:system"}])),
        HistoryError, "outside the allowed modules",
    ),
    "register": (lambda h: slapo.register("mark")(steps.Mark), RegistryError, "has this name already"),
    "unregister": (lambda h: slapo.unregister("marc"), RegistryError, "no such primitive"),
    "build of a place": (lambda h: slapo.build(h.sch[h.case.block]), BuildError, "takes the whole schedule"),
    "build of a model": (lambda h: slapo.build(h.model), BuildError, "needs a schedule"),  # type: ignore[arg-type]
    "build with a mesh": (lambda h: slapo.build(h.sch, mesh=1), BuildError, "mesh= takes sizes by axis"),  # type: ignore[call-overload]
    "build for no target": (lambda h: slapo.build(h.sch, clip=1.0), BuildError, "no target is named"),  # type: ignore[call-overload]
    "build for another target": (
        lambda h: slapo.build(h.sch, target="abacus"), BuildError, "abacus",  # type: ignore[call-overload]
    ),
    "build without a loss": (lambda h: h.engine(loss=None), BuildError, "an engine needs loss="),
    "build in another precision": (lambda h: h.engine(precision="fp8"), BuildError, "precision="),
    "a loss that is none": (broken_engine, EngineError, "loss.* returned 3"),
    "load of nothing": (lambda h: h.engine().load(h.tmp / "nothing"), CheckpointError, "there is no folder"),
    "load of half": (damaged, CheckpointError, "incomplete: 'engine.pt' is missing"),
}  # fmt: skip


ODD: dict[str, Refusal] = {
    "trace of a branch": (lambda h: h.sch["picky"].trace(), TraceError, "reads the value of a tensor .*models.py"),
    "trace of what is not called": (lambda h: h.sch["unused"].trace(), TraceError, "was not called"),
    "trace of a container": (lambda h: h.sch["blocks"].trace(), ArgumentError, "container without a forward"),
    "checkpoint of a container": (lambda h: h.sch["blocks"].checkpoint(), ArgumentError, "container without a forward"),
    "trace of an own forward": (lambda h: h.sch["own"].trace(), ArgumentError, "forward that was set on the object"),
    "annotate a buffer": (lambda h: h.sch.annotate("mean", "k", 1), ArgumentError, "It is a buffer"),
    "annotate twice": (lambda h: h.sch["head"].annotate("weight", "kind", 1), StepError, "carries 'kind'"),
    "configure a child": (lambda h: h.sch.configure(head=1), ArgumentError, "a module"),
    "configure per rank": (
        lambda h: h.sch["blocks.a"].configure(scale=slapo.per_rank("tp")), ArgumentError, "needs an int to divide",
    ),
}  # fmt: skip


seen: dict[str, tuple[Any, Untouched, dict[str, Any]]] = {}
"""What was there before a refusal; while refusals change nothing, it is the same before the next one."""


def refused(name: str, refusal: Refusal, tmp: Path) -> None:
    call, error, message = refusal
    here = prepared(name, tmp)
    registered = slapo.list_primitives()
    known, untouched, before = seen.pop(name, (None, None, None))
    if known is not ready[name] or untouched is None or before is None:
        untouched, before = Untouched(here.model), state(here.sch)
    with pytest.raises(error, match=message):
        call(here)
    # A batch that can't be trained on is found after the forward, which may have drawn from the random state.
    assert untouched.changes(random=error is not EngineError) == []
    assert changes(before, state(here.sch)) == []
    assert slapo.list_primitives() == registered
    seen[name] = (ready[name], untouched, before)


@pytest.mark.parametrize(("name", "refusal"), cells(REFUSALS))
def test_a_refusal_changes_nothing(name: str, refusal: str, tmp_path: Path) -> None:
    refused(name, REFUSALS[refusal], tmp_path)


@pytest.mark.parametrize("refusal", ODD)
def test_a_refusal_of_an_odd_place_changes_nothing(refusal: str, tmp_path: Path) -> None:
    refused("odd", ODD[refusal], tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_after_all_that_the_schedule_still_works(name: str, tmp_path: Path) -> None:
    """A refusal must not leave something behind that no fingerprint sees."""
    here = prepared(name, tmp_path)
    for refusal, (call, error, message) in REFUSALS.items():
        if (name, refusal) not in LACKING:
            with pytest.raises(error, match=message):
                call(here)
    fresh = here.sch.history.replay(slapo.create_schedule(here.model, here.inputs))
    assert str(here.sch) == str(fresh)
    built, other = slapo.build(here.sch), slapo.build(fresh)
    results = [record(built, here.inputs), record(other, here.inputs), record(copied(here.model), here.inputs)]
    assert differences(results[0], results[1]) == []
    assert differences(results[0], results[2]) == []
    assert misses(built) == {}


# The tests above can fail

Fault = Callable[[nn.Module, Schedule], Any]
FAULTS: dict[str, Fault] = {
    "attribute": lambda model, sch: setattr(model.norm, "eps", 1e-3),
    "new attribute": lambda model, sch: setattr(model.blocks["b"], "note", 1),
    "nested attribute": lambda model, sch: model.blocks["a"].tables["by name"].append(2),
    "deeply nested": lambda model, sch: model.config["nested"][1].update(x=3),
    "config": lambda model, sch: setattr(model.blocks["a"].own_config, "width", 9),
    "flag": lambda model, sch: model.blocks["a"].drop.train(not model.blocks["a"].drop.training),
    "class": lambda model, sch: setattr(model.norm, "__class__", nn.Identity),
    "child": lambda model, sch: setattr(model, "norm", copy.deepcopy(model.norm)),
    "order": lambda model, sch: (
        model._modules.move_to_end("embed")
        if hasattr(model._modules, "move_to_end")
        else model._modules.update(embed=model._modules.pop("embed"))
    ),
    "hook": lambda model, sch: model.norm.register_forward_hook(print),
    "hook of a tensor": lambda model, sch: model.head.weight.register_hook(print),
    "parameter": lambda model, sch: setattr(model.norm, "weight", nn.Parameter(model.norm.weight.detach())),
    "tie": lambda model, sch: setattr(model.head, "weight", nn.Parameter(model.head.weight.detach())),
    "value": lambda model, sch: model.norm.weight.detach().add_(1),
    "value without a version": lambda model, sch: model.norm.weight.data.add_(1),
    "value through the copy": lambda model, sch: sch.module.norm.weight.data.add_(1),
    "buffer": lambda model, sch: model.mean.add_(1),
    "frozen": lambda model, sch: model.norm.weight.requires_grad_(True),
    "gradient": lambda model, sch: setattr(model.embed.weight, "grad", None),
    "gradient's value": lambda model, sch: model.embed.weight.grad.add_(1),
    "random state": lambda model, sch: torch.rand(1),
    "default dtype": lambda model, sch: torch.set_default_dtype(torch.float64),
    "grad mode": lambda model, sch: torch.set_grad_enabled(False),
    "patched": lambda model, sch: setattr(nn.Module, "__call__", lambda self, *args: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)  # put back afterwards
    case = CASES["odd"]
    model = original(case)
    sch = slapo.create_schedule(model, case.inputs(2, 8))
    untouched = Untouched(model)
    assert untouched.changes() == []
    try:
        FAULTS[fault](model, sch)
        found = untouched.changes()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert found


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_that_is_not_put_back_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    sch = slapo.create_schedule(original(case), case.inputs(2, 8))
    before = state(sch)
    monkeypatch.setattr(Snapshot, "restore", lambda self: None)
    with pytest.raises(ValueError, match="mine"):
        sch[case.part].wreck(ValueError("mine"))
    assert len(changes(before, state(sch))) > 10


def copied(model: nn.Module) -> nn.Module:
    return slapo.build(slapo.create_schedule(model))
