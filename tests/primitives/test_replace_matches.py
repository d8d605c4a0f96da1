"""replace of matches in a traced module: by a function, once, for some and for all."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py import History, Schedule
from slapo_py.errors import ArgumentError, GuardError, NoMatchError, StepError
from tests.models import Block, ids, net, tiny_gpt2
from tests.patterns.functions import block_mlp, block_mlp_parts, gives_a_pair, my_add, residual, scaled, scaled_add
from tests.running import differences, record


def schedule() -> Schedule:
    sch = slapo.create_schedule(net(), {"ids": ids()})
    sch.select("blocks.*").trace()
    return sch


def same(sch: Schedule, inputs: dict[str, Any]) -> None:
    for train in (True, False):
        got, expected = (record(one, inputs, train) for one in (sch.module, sch.original))
        assert differences(got, expected) == []
    assert slapo.misses(sch.module) == {}


def test_every_match_is_replaced_on_its_own() -> None:
    """The original took two separate matches for one of two outputs."""
    sch = slapo.create_schedule(tiny_gpt2(), {"input_ids": ids(2, 4)})
    sch.select("transformer.h.*").trace().replace(my_add, residual)
    assert str(sch["transformer.h.0"]).count("my_add(") == 2
    same(sch, {"input_ids": ids(2, 4)})


def test_given_matches_are_replaced_and_the_others_stay() -> None:
    sch = slapo.create_schedule(tiny_gpt2(), {"input_ids": ids(2, 4)})
    block = sch["transformer.h.0"].trace()
    first, second = block.find(residual)
    block.replace(my_add, second)
    assert (str(block).count("my_add("), str(block).count(" + ")) == (1, 1)
    block.replace(my_add, [first])
    assert str(block).count("my_add(") == 2
    same(sch, {"input_ids": ids(2, 4)})
    assert [str(step).partition("what=")[2] for step in sch.history[1:]] == [
        "slapo.nth(tests.patterns.functions.residual, 1))",
        "[slapo.nth(tests.patterns.functions.residual, 0)])",
    ]


def test_a_history_with_patterns_is_saved_loaded_and_replayed(tmp_path: Path) -> None:
    sch = schedule()
    sch["blocks.0"].replace(block_mlp_parts, slapo.pattern(block_mlp))
    sch["blocks.1"].replace(block_mlp_parts, block_mlp)
    sch.history.save(tmp_path / "h.json")
    loaded = History.load(tmp_path / "h.json", allow="tests")
    assert loaded == sch.history
    again = loaded.replay(slapo.create_schedule(net(), {"ids": ids()}))
    assert str(again) == str(sch)
    same(again, {"ids": ids()})


def test_a_named_wild_is_given_by_its_name() -> None:
    sch = schedule()
    sch["blocks.1"].replace(scaled_add, scaled)
    assert "scaled_add(x, drop, scale = 0.5)" in str(sch["blocks.1"])
    same(sch, {"ids": ids()})


def test_what_a_match_has_read_of_a_submodule_is_guarded() -> None:
    """The dropout's p became a constant of the graph: another p must not go unnoticed."""

    def dropped(x: Tensor, training: bool, p: float) -> Tensor:
        return F.dropout(x, p, training)

    sch = schedule()
    sch.module.train()
    sch["blocks.0"].replace(dropped, lambda x, training: F.dropout(x, slapo.wild("p"), training))
    sch.module(ids())
    sch["blocks.0.drop"].module.p = 0.9
    with pytest.raises(GuardError, match=r"self.drop.p == 0.3 does not hold, and a step on its graph is not bit-exact"):
        sch.module(ids())
    with pytest.raises(
        StepError, match='was read when "blocks.0" was traced, and the graph of "blocks.0" has been rewr'
    ):
        sch["blocks.0.drop"].configure(p=0.1)


def test_a_submodule_of_another_class_is_not_taken_for_the_one_that_was_matched() -> None:
    def dropped(x: Tensor, training: bool) -> Tensor:
        return F.dropout(x, 0.3, training)

    sch = schedule()
    sch["blocks.0"].replace(dropped, lambda x, training: F.dropout(x, 0.3, training))
    sch.module(ids())
    sch["blocks.0"].module.drop = nn.AlphaDropout(0.3)
    with pytest.raises(GuardError, match=r"type\(self.drop\) is Dropout does not hold"):
        sch.module(ids())


def test_inputs_in_kwargs_and_replacements_with_defaults() -> None:
    class Softmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(input=torch.mul(other=x, input=x), dim=-1)

    def replacement(x: Tensor, dim: int = -1, *, flag: bool = True) -> Tensor:
        return F.softmax(x * x, dim)

    x = torch.randn(2, 3)
    sch = slapo.create_schedule(Softmax(), (x,))
    sch.trace().replace(replacement, lambda x: F.softmax(x * x, -1))
    same(sch, {"x": x})


def test_several_outputs() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a = torch.tanh(x + y)
            return a * torch.relu(x * y) - a

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x + y), torch.relu(x * y)

    x, y = torch.randn(2, 2, 3)
    sch = slapo.create_schedule(Two(), (x, y))
    sch.trace().replace(both, both)
    assert [node.name for node in sch.graph.nodes if node.target is both] == ["both"]
    same(sch, {"x": x, "y": y})


def test_a_function_that_gives_back_something_else_is_caught_when_it_runs() -> None:
    sch = slapo.create_schedule(tiny_gpt2(), {"input_ids": ids(2, 4)})
    sch["transformer.h.0"].trace().replace(gives_a_pair, residual)
    with pytest.raises(GuardError, match="gives_a_pair gives back something else than what it stands for: a tensor is"):
        sch.module(ids(2, 4))

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(x), torch.relu(x)

    x = torch.randn(2, 3)
    two = slapo.create_schedule(Two(), (x,))
    two.trace().replace(lambda x: torch.stack([x, x, x]), lambda x: (torch.tanh(x), torch.relu(x)))
    with pytest.raises(GuardError, match="a tuple of 2 values is needed"):
        two.module(x)


def test_lambdas_and_partials_run_and_are_refused_by_save(tmp_path: Path) -> None:
    sch = schedule()
    sch["blocks.0"].replace(lambda x, w, b: F.gelu(F.linear(x, w, b)), block_mlp)
    same(sch, {"ids": ids()})
    same_again = copy.deepcopy(sch.module)
    assert differences(record(same_again, {"ids": ids()}), record(sch.original, {"ids": ids()})) == []
    with pytest.raises(slapo.ScheduleError, match="exists in this process only"):
        sch.history.save(tmp_path / "h.json")


def test_a_replaced_module_is_built_pickled_and_compiled() -> None:
    sch = schedule()
    sch.select("blocks.*").replace(block_mlp_parts, block_mlp)
    built = slapo.build(sch)
    for one in (built, pickle.loads(pickle.dumps(built)), copy.deepcopy(built)):
        assert differences(record(one, {"ids": ids()}), record(sch.original, {"ids": ids()})) == []


def test_patterns_span_what_flatten_has_made_one_graph() -> None:
    sch = slapo.create_schedule(net(), {"ids": ids()})
    sch["blocks.0"].trace(flatten=True)
    assert [node.op for node in sch["blocks.0"].graph.nodes if node.op == "call_module"] == []
    sch["blocks.0"].replace(block_mlp_parts, block_mlp)
    same(sch, {"ids": ids()})


def test_an_intermediate_value_that_is_used_outside_is_no_match() -> None:
    class Outside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            return torch.tanh(y) * y

    sch = slapo.create_schedule(Outside(), (torch.randn(2, 3),))
    with pytest.raises(NoMatchError, match='replace at "": .*outside'):
        sch.trace().replace(lambda x: torch.tanh(x + 1), lambda x: torch.tanh(x + 1))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, shift=None)


def test_what_is_refused() -> None:
    sch = schedule()
    block = sch["blocks.0"]
    with pytest.raises(ArgumentError, match=r"block_mlp\(x.*can't be called with what the pattern has, \(x, y\)"):
        block.replace(block_mlp, lambda x, y: y * 0.5 + x)
    with pytest.raises(
        ArgumentError, match="can't be called with .* scale=...\\): got an unexpected keyword .*'scale'"
    ):
        block.replace(my_add, scaled)
    with pytest.raises(
        ArgumentError, match="would stand for operations that use 'up.bias', 'up.weight', and is not given"
    ):
        block.replace(lambda x: x, lambda x: slapo.call("up", x))
    with pytest.raises(ArgumentError, match="'drop' drops in train mode only, and .*<lambda> isn't told the mode"):
        block.replace(lambda x: F.dropout(x, 0.3), lambda x: nn.Dropout(0.3)(x))
    with pytest.raises(ArgumentError, match="needs a function, a module or a factory of one, found 3"):
        block.replace(3, block_mlp)
    with pytest.raises(NoMatchError, match='replace at "blocks.0"'):
        block.replace(my_add, lambda x, y: torch.sin(x) + y)
    with pytest.raises(ArgumentError, match="needs a pattern .a function over torch operations. or matches"):
        block.replace(my_add, "residual")
    sch["blocks.1"].checkpoint()
    sch["blocks.1"].replace(block_mlp_parts, block_mlp)  # around the graph, not in it
    same(sch, {"ids": ids()})
