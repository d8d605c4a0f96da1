"""What the tables and the random schedules have found, each in a few lines."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py import Primitive, Schedule
from slapo_py.errors import StepError, TraceError
from slapo_py.tracing.trace import misses
from tests.laws.models import OwnConfig
from tests.running import differences, record

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x * 2 if y is None else x * y


class Caller(nn.Module):
    """Calls its child in another way when an attribute says so."""

    def __init__(self) -> None:
        super().__init__()
        self.two = False
        self.scaled = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, x) if self.two else self.scaled(x)


def run_without_misses(sch: Schedule, path: str) -> None:
    assert torch.equal(sch.module(X), slapo.create_schedule(sch.original).module(X))
    assert sch[path].misses == 0


def test_a_trace_after_an_undone_configure_knows_the_calls_of_before() -> None:
    sch = slapo.create_schedule(Caller(), X)
    sch.configure(two=True)
    sch["scaled"].trace()
    assert "isinstance(y, Tensor)" in " ".join(sch["scaled"].guards)
    sch.undo(2)
    sch["scaled"].trace()
    run_without_misses(sch, "scaled")


class Changes(Primitive):
    """Configure, trace below, and break."""

    def check(self, place: Schedule) -> None:
        pass

    def apply(self, place: Schedule) -> None:
        place.configure(two=True)
        place["scaled"].trace()
        raise ValueError("mine")


def test_a_trace_after_a_step_that_broke_knows_the_calls_of_before() -> None:
    sch = slapo.create_schedule(Caller(), X)
    slapo.register("changes")(Changes)
    try:
        with pytest.raises(ValueError, match="mine"):
            sch.changes()
    finally:
        slapo.unregister("changes")
    sch["scaled"].trace()
    run_without_misses(sch, "scaled")


class Branching(nn.Module):
    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.branch = branch
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return -y if self.branch and y.sum() > 0 else y


def test_a_refused_trace_is_not_held_against_its_like() -> None:
    sch = slapo.create_schedule(nn.Sequential(Branching(False), Branching(True), Branching(False)), X)
    with pytest.raises(TraceError, match=r"at .1. \(Branching\): .*reads the value of a tensor"):
        sch["1"].trace()
    sch["2"].trace()
    sch["1"].configure(branch=False).trace()
    sch.undo(2)
    with pytest.raises(TraceError, match="at .1. .*reads the value of a tensor"):
        sch["1"].trace()


def test_a_refused_flattening_is_not_taken_for_another() -> None:
    sch = slapo.create_schedule(Caller(), X)
    sch["scaled"].checkpoint()
    with pytest.raises(StepError, match="flattening would bypass what was done at 'scaled'"):
        sch.trace(flatten=True)
    sch.undo()
    sch.trace(flatten=True)
    assert torch.equal(sch.module(X), sch.original(X))
    assert misses(sch.module) == {}


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = OwnConfig(3)


class Spoils(Primitive):
    """Change an object with slots, and break."""

    def check(self, place: Schedule) -> None:
        pass

    def apply(self, place: Schedule) -> None:
        own = place.module.own
        own.width = 4
        own.names["a"].append(5)
        del own.names
        raise ValueError("mine")


def test_objects_with_slots_are_put_back() -> None:
    sch = slapo.create_schedule(Configured())
    slapo.register("spoils")(Spoils)
    try:
        with pytest.raises(ValueError, match="mine"):
            sch.spoils()
    finally:
        slapo.unregister("spoils")
    assert sch.module.own.width == 3
    assert sch.module.own.names == {"a": [1, 2]}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("traced", [[], [""], ["scaled"], ["", "scaled"]], ids=str)
def test_a_compiled_module_within_a_compiled_one(traced: list[str]) -> None:
    sch = slapo.create_schedule(Caller(), X)
    for path in traced:
        sch[path].trace()
    sch["scaled"].compile(backend="eager")
    sch.compile(backend="eager")
    assert torch.equal(sch.module(X), sch.original(X))
    assert misses(sch.module) == {}


def test_a_compiled_module_within_one_counts_on_its_own_outside() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    sch = slapo.create_schedule(Caller(), X)
    sch["scaled"].compile(backend=backend)
    sch.module(X)
    assert len(compiled) == 1


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("outer", ["", "1", "1.layers.0"])
def test_a_checkpoint_within_a_checkpoint_keeps_which_arguments_are_the_same(outer: str, train: bool) -> None:
    """Attention takes another road when query, key and value are one tensor."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 8), encoder))
    sch["1.layers.0.self_attn"].checkpoint()
    sch[outer].checkpoint()
    given = {"input": torch.randn(2, 3, 4)}
    assert differences(record(sch.module, given, train), record(sch.original, given, train)) == []
