"""replace of matches in a traced module by a module of their own, with their parameters."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py import History, Match, Schedule
from slapo_py.errors import ArgumentError, GuardError, NoMatchError, StaleCursorError, StepError, TraceError
from slapo_py.params import cat
from tests.models import ids, tiny_gpt2
from tests.running import differences, record


class FusedLinear(nn.Module):
    """Several linears of one input as one: gives back a tuple of their results."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [one.out_features for one in parts]
        self.linear = nn.Linear(parts[0].in_features, sum(self.sizes), bias=parts[0].bias is not None)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x).split(self.sizes, dim=-1)


def fused_linear(match: Match) -> FusedLinear:
    return FusedLinear([match.place.module.get_submodule(path) for path in match.modules])


def llama_qkv(x: Tensor) -> tuple[Any, ...]:
    return slapo.call("q_proj", x), slapo.call("k_proj", x), slapo.call("v_proj", x)


def bert_qkv(x: Tensor) -> tuple[Any, ...]:
    return slapo.call("query", x), slapo.call("key", x), slapo.call("value", x)


LLAMA = {"linear.weight": cat("q_proj.weight", "k_proj.weight", "v_proj.weight")}
BERT = {f"linear.{kind}": cat(f"query.{kind}", f"key.{kind}", f"value.{kind}") for kind in ("weight", "bias")}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=23, num_key_value_heads=2, use_cache=False, **sizes))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(vocab_size=23, max_position_embeddings=16, **sizes))


FAMILIES: dict[str, Any] = {
    "llama": (llama, "model.layers.*.self_attn", llama_qkv, LLAMA, ("q_proj", "k_proj", "v_proj")),
    "bert": (bert, "bert.encoder.layer.*.attention.self", bert_qkv, BERT, ("query", "key", "value")),
}


def fused(family: str) -> Schedule:
    make, glob, pattern, params, _ = FAMILIES[family]
    sch = slapo.create_schedule(make(), {"input_ids": ids(2, 5)})
    sch.select(glob).trace().replace(fused_linear, pattern, params=params)
    return sch


def close(sch: Schedule, module: nn.Module, train: bool = True) -> None:
    """Outputs and, under the original's names, gradients."""
    from slapo_py.replacing.mapped_state import to_original

    got, expected = (record(one, {"input_ids": ids(2, 5)}, train) for one in (module, sch.original))
    gradients = {name.removeprefix("gradient of "): one for name, one in got.items() if name.startswith("gradient of ")}
    for name, one in to_original(module, gradients).items():
        torch.testing.assert_close(one, expected[f"gradient of {name}"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got["output 0"], expected["output 0"], rtol=1e-5, atol=1e-6)
    assert torch.equal(got["random state"], expected["random state"])


@pytest.mark.parametrize("family", FAMILIES)
def test_three_projections_become_one(family: str) -> None:
    *_, glob, _, _, children = FAMILIES[family]
    sch = fused(family)
    for place in sch.select(glob):
        assert "fused_linear_0 = self.fused_linear_0(hidden_states)" in str(place)
        assert not any(name in place for name in children)
        assert place["fused_linear_0.linear"].module.weight.shape[1] == 16
    for train in (True, False):
        close(sch, sch.module, train)
    built = slapo.build(sch)
    for one in (built, copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        close(sch, one)
        assert list(one.state_dict()) == list(sch.original.state_dict())
        one.load_state_dict(sch.original.state_dict(), strict=True)
    assert slapo.misses(sch.module) == slapo.misses(built) == {}
    assert all(torch.equal(one, sch.original.state_dict()[name]) for name, one in built.state_dict().items())


def test_a_history_is_replayed_saved_and_undone(tmp_path: Path) -> None:
    sch = fused("llama")
    sch.history.save(tmp_path / "h.json")
    loaded = History.load(tmp_path / "h.json", allow="tests")
    assert loaded == sch.history
    again = loaded.replay(slapo.create_schedule(llama(), {"input_ids": ids(2, 5)}))
    assert str(again) == str(sch)
    close(again, again.module)
    assert 'params={"linear.weight": slapo.params.cat("q_proj.weight", "k_proj.weight", "v_proj.weight")}' in str(
        loaded
    )
    again.undo(2)
    assert "q_proj" in again["model.layers.1.self_attn"]
    assert differences(record(again.module, {"input_ids": ids(2, 5)}), record(llama(), {"input_ids": ids(2, 5)})) == []


def test_places_that_a_match_took_are_gone_and_say_why() -> None:
    sch = slapo.create_schedule(llama(), {"input_ids": ids(2, 5)})
    place = sch["model.layers.0.self_attn"].trace()
    q = place["q_proj"]
    place.replace(fused_linear, llama_qkv, params=LLAMA)
    with pytest.raises(StaleCursorError, match=r"the step sch\[.model.layers.0.self_attn.\].replace\("):
        q.module  # noqa: B018
    assert sch.undo() is sch
    assert q.module.weight is sch.original.model.layers[0].self_attn.q_proj.weight


def test_steps_elsewhere_go_on() -> None:
    """A later step may trace again what is around: the graph without the removed children must not stand in the way."""
    sch = fused("llama")
    sch["model.layers.0.self_attn.fused_linear_0"].checkpoint()
    sch["model.layers.0"].trace()
    sch["model.layers.1.mlp"].trace()
    sch["model.layers.0.input_layernorm"].configure(variance_epsilon=1e-6)
    sch["model.layers.1"].checkpoint()
    close(sch, sch.module)


def test_what_would_bypass_a_rewritten_graph_is_refused() -> None:
    sch = fused("llama")
    with pytest.raises(
        TraceError, match="has rewritten the graph of 'self_attn', and flattening would bypass that; keep"
    ):
        sch["model.layers.0"].trace(flatten=True)
    sch["model.layers.0"].trace(flatten=True, leaves=["self_attn", "self_attn.*"])
    close(sch, sch.module)


def test_a_call_that_the_graph_does_not_cover_is_refused_while_recording_too() -> None:
    """The original can't stand in: its projections are gone."""

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Own(), nn.Linear(3, 3)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return self.last(self.inner(x if scale is None else x * scale, scale))

    x = torch.randn(2, 3)
    sch = slapo.create_schedule(Optional(), [{"x": x}, {"x": x, "scale": x}])
    sch["inner"].trace().replace(Down, down, params=DOWN)
    sch.module(x=x)
    with pytest.raises(GuardError, match="scale is None does not hold, and a step on its graph is not bit-exact"):
        sch.module(x=x, scale=x)
    with pytest.raises(
        TraceError, match="does not run on the example inputs: GuardError: .*scale is None does not hold"
    ):
        sch["inner.down_0"].trace()


# What a module can be, and where its parameters come from


class Own(nn.Module):
    """Its own weights, two groups of operations, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 3))
        self.b = nn.Parameter(torch.randn(4, 3))
        self.down = nn.Linear(4, 3)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.a) * F.linear(x, self.b) + self.shift
        return self.down(F.gelu(y))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.empty(8, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = F.linear(x, self.both).chunk(2, -1)
        return one, other


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(F.gelu(x))


def pair(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, a), F.linear(x, b)


def own() -> Schedule:
    torch.manual_seed(0)
    x = torch.randn(2, 3)
    return slapo.create_schedule(Own(), {"x": x}).trace()


def check(sch: Schedule) -> None:
    x = {"x": torch.randn(2, 3)}
    for module in (sch.module, slapo.build(sch)):
        torch.testing.assert_close(module(**x), sch.original(**x))
        assert list(module.state_dict()) == list(sch.original.state_dict())
        module.load_state_dict(sch.original.state_dict(), strict=True)


class Product(nn.Module):
    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, a) * F.linear(x, b)


class Fused(nn.Module):
    """`Product` with the weights in it."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.empty(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.linear(x, self.both).chunk(2, -1)
        return one * other


def product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, a) * F.linear(x, b)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(F.gelu(x))


def down(y: Tensor) -> Any:
    return slapo.call("down", F.gelu(y))


DOWN = {"wide.weight": "down.weight", "wide.bias": "down.bias"}


def test_a_renamed_parameter_is_the_very_object() -> None:
    sch = own()
    sch.replace(Down, down, params=DOWN)
    assert sch.module.down_0.wide.weight is sch.original.down.weight
    assert "down" not in sch
    check(sch)


def test_a_module_without_parameters_is_given_weights() -> None:
    sch = own()
    sch.replace(Product, product)
    assert "self.product_0(x" in sch.graph.python_code("self").src
    assert sch.module.a is sch.original.a
    check(sch)


def test_parameters_of_the_traced_module_itself_and_two_maps_at_one_place() -> None:
    sch = own()
    sch.replace(Down, down, params=DOWN)
    sch.replace(Fused, product, params={"both": cat("a", "b")})
    assert not hasattr(sch.module, "a") and not hasattr(sch.module, "b")
    check(sch)
    sch.undo()
    check(sch)


def test_a_module_that_takes_what_an_earlier_step_made() -> None:
    """The state is the original's through both maps, whichever was made first."""
    sch = own()
    sch.replace(Down, down, params=DOWN)
    again = {"wide.weight": "down_0.wide.weight", "wide.bias": "down_0.wide.bias"}
    with pytest.raises(NoMatchError, match="does not match"):
        sch.replace(Down, down, params=again)
    sch.replace(Wide, lambda y: slapo.call("down_0", y), params=again)
    assert "down_0" not in sch
    assert sch.module.wide_0.wide.weight is sch.original.down.weight
    check(sch)


def test_each_of_several_matches_gets_a_module_of_its_own() -> None:
    sch = slapo.create_schedule(tiny_gpt2(), {"input_ids": ids(2, 4)})
    block = sch["transformer.h.0"].trace()
    block.replace(Add, lambda x, y: x + y)
    assert str(block).count(" = self.add_") == 2
    assert block["add_0"].module is not block["add_1"].module
    for train in (True, False):
        results = [record(one, {"input_ids": ids(2, 4)}, train) for one in (sch.module, sch.original)]
        assert differences(*results) == []


def test_training_flags_of_the_new_module_are_those_of_the_place() -> None:
    model = Own().eval()
    sch = slapo.create_schedule(model, {"x": torch.randn(2, 3)}).trace()
    sch.replace(Down, down, params=DOWN)
    assert not any(one.training for one in sch.module.modules())


def test_the_module_given_stays_the_users() -> None:
    mine = Down()
    before = mine.wide.weight
    sch = own().replace(mine, down, params=DOWN)
    assert mine.wide.weight is before and sch.module.down_0 is not mine
    assert sch.module.down_0.wide.weight is sch.original.down.weight
    sch.undo().replace(mine, down, params=DOWN)
    check(sch)


def test_a_module_made_of_the_old_ones_takes_their_parameters_along() -> None:
    """A factory that wraps what it finds needs no params: the parameters are the same objects."""

    def wrapped(match: Match) -> nn.Module:
        return nn.Sequential(nn.GELU(), match.place.module.down)

    sch = own().replace(wrapped, down, params={})
    assert sch.module.wrapped_0[1].weight is sch.original.down.weight and "down" not in sch
    check(sch)


def test_annotations_move_on() -> None:
    sch = own()
    sch["down"].annotate("weight", "lr", 0.1)
    sch.replace(Down, down, params=DOWN)
    assert sch.annotations == {"down_0.wide.weight": {"lr": 0.1}}


def test_an_engine_of_the_original_goes_on(tmp_path: Path) -> None:
    data = [{"input_ids": ids(4, 5) + index} for index in range(6)]
    options: dict[str, Any] = {
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "loss": lambda output, batch: F.cross_entropy(
            output.logits.flatten(0, 1), batch["input_ids"].flatten(), reduction="sum"
        ),
        "count": lambda batch: batch["input_ids"].numel(),
    }
    one = slapo.build(fused("llama"), target="torch", **options)
    other = slapo.build(slapo.create_schedule(llama()), target="torch", **options)
    for batch in data[:3]:
        one.train_step(batch)
    one.save(tmp_path / "run")
    other.load(tmp_path / "run")
    for batch in data[3:]:
        torch.testing.assert_close(one.train_step(batch), other.train_step(batch), rtol=1e-5, atol=0)
    fresh = llama()
    fresh.load_state_dict(one.state_dict(), strict=True)
    assert one.misses == {}


# What is refused


class Two(nn.Module):
    """A linear that is called twice, one that is there twice, and one that is looked at from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.same = self.c

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x)) * torch.relu(self.a(x)) + torch.sigmoid(self.b(x)) + torch.sin(self.c(x))


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(3, 3)), nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(F.linear(x, self.weight, self.bias))


def two(change: Any = None) -> Schedule:
    model = Two()
    if change is not None:
        change(model)
    return slapo.create_schedule(model, {"x": torch.randn(2, 3)}).trace()


def of(name: str) -> dict[str, str]:
    return {"weight": f"{name}.weight", "bias": f"{name}.bias"}


def sigmoid(x: Tensor) -> Any:
    return torch.sigmoid(slapo.call("b", x))


def test_the_example_of_what_is_refused_works() -> None:
    check(two().replace(Linear, sigmoid, params=of("b")))


def not_a_module(match: Match) -> int:
    return 3


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no params": (
        lambda sch: sch.replace(Linear, sigmoid),
        ArgumentError,
        r"parameter 'weight' \(3, 3\) of the new module is not one .* params={\"weight\": ",
    ),
    "lost": (
        lambda sch: sch.replace(nn.Sigmoid, sigmoid),
        ArgumentError,
        "Sigmoid would stand for operations that use 'b.bias', 'b.weight', and takes nothing of them, so they would",
    ),
    "one lost": (
        lambda sch: sch.replace(nn.Linear(3, 3, bias=False), sigmoid, params={"weight": "b.weight"}),
        ArgumentError,
        "Linear would stand for operations that use 'b.bias', and takes nothing",
    ),
    "still called": (
        lambda sch: sch.replace(Linear, lambda x: torch.tanh(slapo.call("a", x)), params=of("a")),
        StepError,
        "the graph still uses 'a' at 'a_1', and params takes its parameters. Match all of its uses",
    ),
    "at two places": (
        lambda sch: sch.replace(Linear, lambda x: torch.sin(slapo.call("c", x)), params=of("c")),
        StepError,
        "'c' is at more than one place of the model, and would lose its parameters",
    ),
    "another one's": (
        lambda sch: sch.replace(Linear, sigmoid, params=of("a")),
        StepError,
        "the graph still uses 'a'",
    ),
    "unknown source": (
        lambda sch: sch.replace(Linear, sigmoid, params=of("d")),
        ArgumentError,
        "uses 'd.weight', and there is no such parameter here",
    ),
    "unknown parameter": (
        lambda sch: sch.replace(Linear, sigmoid, params={**of("b"), "w": "a.weight"}),
        ArgumentError,
        "params names 'w', and the new module has no such parameter",
    ),
    "shape": (
        lambda sch: sch.replace(Linear, sigmoid, params={"weight": cat("b.weight", "a.weight"), "bias": "b.bias"}),
        ArgumentError,
        r"parameter 'weight' of the new module has shape \(3, 3\), and .* has \(6, 3\)",
    ),
    "one for all": (
        lambda sch: sch.replace(Linear(), lambda x: slapo.call("a", x), params=of("a")),
        ArgumentError,
        "one module would stand for 2 matches, and they would share its parameters",
    ),
    "params for two": (
        lambda sch: sch.replace(Linear, lambda x: slapo.call("a", x), params=of("a")),
        ArgumentError,
        "params says where the parameters of one module come from, and there are 2 matches",
    ),
    "no module": (
        lambda sch: sch.replace(not_a_module, sigmoid, params=of("b")),
        ArgumentError,
        "not_a_module makes a module for each match, and it returned int",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(case: str) -> None:
    step, kind, message = REFUSED[case]
    sch = two()
    before, hooks = str(sch), len(sch.module._state_dict_hooks)
    tensors = {name: id(one) for name, one in sch.module.named_parameters(remove_duplicate=False)}
    with pytest.raises(kind, match=message):
        step(sch)
    assert str(sch) == before and len(sch.module._state_dict_hooks) == hooks
    assert {name: id(one) for name, one in sch.module.named_parameters(remove_duplicate=False)} == tensors
    check(sch)


def test_hooks_steps_and_references_at_what_a_match_takes_are_refused() -> None:
    sch = two(lambda model: model.b.register_state_dict_post_hook(lambda *_: None))
    with pytest.raises(StepError, match=r"there are hooks on 'b' \(state_dict_hooks\), which would be removed, since"):
        sch.replace(Linear, sigmoid, params=of("b"))

    sch = slapo.create_schedule(Two(), {"x": torch.randn(2, 3)})
    sch["b"].replace(Renamed, params={"w": "weight", "b": "bias"})
    sch.trace()
    renamed = {"weight": "b.w", "bias": "b.b"}
    with pytest.raises(StepError, match=r"steps at or below 'b' would be lost: sch\[\"b\"\].replace\("):
        sch.replace(Linear, sigmoid, params=renamed)

    # a schedule of what was built has no such step, and yet the map
    sch = slapo.create_schedule(slapo.build(sch.undo()), {"x": torch.randn(2, 3)}).trace()
    with pytest.raises(StepError, match="the parameters of 'b' were mapped when the model was built"):
        sch.replace(Linear, sigmoid, params=renamed)

    sch = two(lambda model: setattr(model, "list", [model.b]))
    with pytest.raises(StepError, match="'list' refers to 'b' other than as a child"):
        sch.replace(Linear, sigmoid, params=of("b"))


class Renamed(nn.Module):
    def __init__(self, old: nn.Linear) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.empty(3, 3)), nn.Parameter(torch.empty(3))

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.w, self.b)


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y
