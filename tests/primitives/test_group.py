"""group, checkpoint of a match, and fuse of a match: operations of a graph as a submodule of their own."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py import Schedule
from slapo_py.errors import (
    ArgumentError,
    GuardError,
    NoMatchError,
    RecomputeError,
    StaleMatchError,
    StepError,
    TraceError,
)
from slapo_py.report.measure import saved_activations
from tests.models import ids, net, tiny_gpt2
from tests.patterns.functions import block_mlp, residual, up_and_gelu
from tests.running import differences, record

# Dynamo looks at .grad of whatever a compiled module is called with.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def schedule(model: nn.Module | None = None) -> Schedule:
    sch = slapo.create_schedule(model or net(), {"ids": ids()})
    sch["blocks.0"].trace()
    return sch


def same(sch: Schedule) -> None:
    for train in (True, False):
        got, expected = (record(one, {"ids": ids()}, train) for one in (sch.module, sch.original))
        assert differences(got, expected) == []


@pytest.mark.parametrize(
    "pattern", [block_mlp, up_and_gelu, lambda x, y, training: x + F.dropout(y, 0.3, training) * 0.5]
)
def test_a_group_is_a_submodule_that_computes_the_same_bits(pattern: Any) -> None:
    sch = schedule()
    keys, parameters = list(sch.module.state_dict()), [name for name, _ in sch.module.named_parameters()]
    (match,) = sch["blocks.0"].find(pattern)
    sch["blocks.0"].group(match, "inner")
    assert "self.inner(" in str(sch["blocks.0"])
    same(sch)
    assert sch["blocks.0"].misses == 0
    assert list(sch.module.state_dict()) == keys
    assert [name for name, _ in sch.module.named_parameters()] == parameters
    assert type(sch["blocks.0.inner"].module).__name__ == "Grouped"
    with pytest.raises(slapo.ScheduleError, match="a step of the schedule"):
        _ = sch["blocks.0.inner"].original


def test_a_group_in_a_copy_calls_the_modules_of_the_copy() -> None:
    sch = schedule()
    sch["blocks.0"].group(up_and_gelu, "inner")
    for other in (copy.deepcopy(sch.module), pickle.loads(pickle.dumps(sch.module)), slapo.build(sch)):
        assert differences(record(other, {"ids": ids()}), record(sch.original, {"ids": ids()})) == []
        other.get_submodule("blocks.0.up").weight.data.zero_()
        assert differences(record(other, {"ids": ids()}), record(sch.original, {"ids": ids()})) != []


def test_the_history_stores_pattern_and_number() -> None:
    sch = slapo.create_schedule(tiny_gpt2(), {"input_ids": ids(2, 4)})
    block = sch["transformer.h.1"].trace()
    first, second = block.find(residual)
    block.group(second, "outer").group(first, "inner")
    assert str(sch.history) == "\n".join(
        [
            "import slapo_py as slapo",
            "import tests.patterns.functions",
            "",
            "",
            "def schedule(sch):",
            '    sch["transformer.h.1"].trace()',
            '    sch["transformer.h.1"].group(slapo.nth(tests.patterns.functions.residual, 1), "outer")',
            '    sch["transformer.h.1"].group(slapo.nth(tests.patterns.functions.residual, 0), "inner")',
        ]
    )
    printed = str(sch["transformer.h.1"])
    scope: dict[str, Any] = {}
    exec(str(sch.history), scope)
    scope["schedule"](sch.undo(3))
    assert str(sch["transformer.h.1"]) == printed


def test_matches_of_one_search_survive_each_other_and_nothing_else() -> None:
    sch = slapo.create_schedule(tiny_gpt2(), {"input_ids": ids(2, 4)})
    block = sch["transformer.h.1"].trace()
    first, second = block.find(residual)
    block.checkpoint(first)
    with pytest.raises(StaleMatchError, match=r'<Match of 1 nodes at "transformer.h.1": add> was found in a graph'):
        block.group(first, "again")
    norms = block.find(lambda x: slapo.call("ln_2", x))
    block.group(second, "second")
    with pytest.raises(StaleMatchError, match=r'Look again: sch\["transformer.h.1"\].find\(pattern\)'):
        block.group(norms[0], "norm")
    assert len(sch.history) == 3
    with pytest.raises(ArgumentError, match='a match of "transformer.h.1" was given to a step at "transformer.h.0"'):
        sch["transformer.h.0"].trace().group(norms[0], "norm")
    sch.undo(2)
    sch["transformer.h.1"].trace() if not _traced(sch) else None
    block.group(second, "second")


def _traced(sch: Schedule) -> bool:
    try:
        return bool(sch["transformer.h.1"].graph)
    except TraceError:
        return False


def test_a_checkpointed_match_keeps_less_and_computes_the_same() -> None:
    sch = schedule()

    def saved(model: nn.Module) -> int:
        torch.manual_seed(0)
        with saved_activations(model) as kept:
            model(ids())
        return kept.bytes

    before = saved(sch.module)
    sch["blocks.0"].checkpoint(block_mlp)
    assert saved(sch.module) < before
    same(sch)
    assert "checkpoint_0" in str(sch)


class Counted(nn.Module):
    """Batch norm inside what is recomputed: its statistics must move once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(torch.relu(self.norm(x))))


def test_a_module_that_a_checkpointed_group_calls_runs_once_for_its_buffers() -> None:
    x = torch.randn(5, 4)
    sch = slapo.create_schedule(Counted(), (x,))
    sch.trace()
    sch.checkpoint(lambda x: torch.relu(slapo.call("norm", x)))
    got, expected = (record(one, {"x": x}) for one in (sch.module, sch.original))
    assert differences(got, expected) == []
    assert int(got["buffer norm.num_batches_tracked"]) == 1


def added_and_normed(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    z = x + y
    return z, F.layer_norm(z, (16,), w, b)


def test_compiled_matches_share_their_code() -> None:
    sch = slapo.create_schedule(tiny_gpt2(n_layer=3), {"input_ids": ids(2, 4)})
    sch.select("transformer.h.*").trace()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in sch.select("transformer.h.*"):
        block.fuse(added_and_normed, compiler="eager")
    kinds = {type(one) for name, one in sch.module.named_modules() if name.endswith("fused_0")}
    assert len(kinds) == 1
    got, expected = (record(one, {"input_ids": ids(2, 4)}, train=False) for one in (sch.module, sch.original))
    assert differences(got, expected) == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Pair(nn.Module):
    """A child whose output has a structure that the trace of the parent relies on."""

    def forward(self, x: Tensor) -> Any:
        return (x, None)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        first = self.pair(x)[0]
        return torch.tanh(first)


def test_a_group_still_checks_what_its_submodules_give_back() -> None:
    x = torch.ones(2, 3)
    sch = slapo.create_schedule(Parent(), (x,))
    sch.trace().group(lambda x: torch.tanh(slapo.call("pair", x)[0]), "inner")
    assert torch.equal(sch.module(x), torch.tanh(x))
    sch.module.pair.forward = lambda x: x  # gives a tensor, whose [0] would be a row
    with pytest.raises(GuardError, match="pair gave back another structure than when its parent was traced"):
        sch.module(x)


class Everything(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for one in self:
            x = one(x)
        return torch.tanh(x + 1)


def test_what_is_refused() -> None:
    sch = schedule()
    with pytest.raises(
        TraceError, match=r'not traced, so it has no graph. Trace it first: sch\["blocks.1"\].trace\(\)'
    ):
        sch["blocks.1"].group(block_mlp, "inner")
    with pytest.raises(ArgumentError, match="must be a Python identifier, found 'a b'"):
        sch["blocks.0"].group(block_mlp, "a b")
    with pytest.raises(ArgumentError, match="Block already has an attribute 'scale'"):
        sch["blocks.0"].group(block_mlp, "scale")
    with pytest.raises(NoMatchError, match='group at "blocks.0"'):
        sch["blocks.0"].group(lambda x: torch.sin(x), "inner")
    with pytest.raises(ArgumentError, match="needs a pattern"):
        sch["blocks.0"].group(3, "inner")
    with pytest.raises(ArgumentError, match="nth\\(pattern, -1\\): needs the number of a match"):
        slapo.nth(block_mlp, -1)
    with pytest.raises(NoMatchError, match="there is no match number 1 of this pattern, counted from 0; there are 1"):
        sch["blocks.0"].group(slapo.nth(block_mlp, 1), "inner")
    with pytest.raises(ArgumentError, match="two of the given matches share the node 'gelu'"):
        sch["blocks.0"].checkpoint([slapo.nth(block_mlp, 0), slapo.nth(up_and_gelu, 0)])
    other = slapo.create_schedule(tiny_gpt2(), {"input_ids": ids(2, 4)})
    other["transformer.h.0"].trace()
    with pytest.raises(ArgumentError, match="2 matches can't be one submodule. Give one of them"):
        other["transformer.h.0"].group(residual, "inner")
    every = slapo.create_schedule(Everything(nn.Linear(2, 2)), (torch.ones(1, 2),))
    every.trace()
    with pytest.raises(StepError, match="goes through all its submodules, so one more would be called, too"):
        every.group(lambda x: torch.tanh(x + 1), "inner")
    with pytest.raises(ArgumentError, match="a kernel is given by its name, found"):
        sch["blocks.0"].fuse(block_mlp)
    with pytest.raises(ArgumentError, match="knows no compiler 'inductr'. Did you mean compiler='inductor'"):
        sch["blocks.0"].fuse(block_mlp, compiler="inductr")
    assert len(sch.history) == 1


def test_a_match_that_can_not_be_one_call_is_refused() -> None:
    class Between(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = torch.relu(x)
            b = x * 2
            b.add_(1)
            return torch.tanh(a) + b

    sch = slapo.create_schedule(Between(), (torch.randn(2, 3),))
    sch.trace()
    with pytest.raises(StepError, match='group at "": .* writes in place or switches a mode'):
        sch.group(lambda x: torch.tanh(torch.relu(x)), "inner")


def test_a_call_that_the_trace_does_not_cover_runs_the_original_beside_a_group() -> None:
    sch = schedule()
    sch["blocks.0"].group(block_mlp, "inner")
    x, shift = torch.randn(3, 5, 8), torch.randn(8)
    sch.module.eval(), sch.original.eval()
    got = sch["blocks.0"].module(x, shift=shift)
    assert torch.equal(got, sch["blocks.0"].original(x, shift=shift))
    assert sch["blocks.0"].misses == 1


def test_a_group_has_the_mode_of_its_module() -> None:
    for training in (True, False):
        sch = schedule(net().train(training))
        sch["blocks.0"].group(block_mlp, "inner")
        assert sch["blocks.0.inner"].module.training is training


def test_a_checkpointed_group_sees_that_a_weight_of_what_it_calls_was_written_into() -> None:
    sch = schedule()
    sch["blocks.0"].checkpoint(up_and_gelu)
    built = slapo.build(sch)
    result = built(ids()).sum()
    with torch.no_grad():
        built.get_submodule("blocks.0.up").weight.add_(1)
    with pytest.raises(RecomputeError, match="a parameter of Grouped was written into between the forward and the"):
        result.backward()
