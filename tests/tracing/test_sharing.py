"""Modules that behave alike share one capture; whatever makes them differ tells them apart."""

import copy as copying
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import slapo_py as slapo
from slapo_py.tracing import trace_of

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def llama(**config: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SMALL, **config}))


def groups(model: nn.Module, glob: str, **inputs: Any) -> list[list[int]]:
    """Which of the selected places share a trace, by their number."""
    ids = torch.arange(32).reshape(2, 16)
    sch = slapo.create_schedule(model, example_inputs={"input_ids": ids, "use_cache": False, **inputs})
    found: dict[int, list[int]] = {}
    for number, place in enumerate(sch.select(glob)):
        place.trace()
        found.setdefault(id(trace_of(place.module)), []).append(number)
    return list(found.values())


def test_identical_layers_share() -> None:
    assert groups(llama(), "model.layers.*") == [[0, 1, 2, 3, 4, 5]]
    assert groups(llama(), "model.layers.*.self_attn") == [[0, 1, 2, 3, 4, 5]]
    assert groups(llama(), "model.layers.*.*layernorm") == [list(range(12))]


def test_sliding_and_full_layers_are_told_apart() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, head_dim=16, sliding_window=8, layer_types=kinds))
    assert groups(model, "model.layers.*.self_attn") == [[0, 2, 4], [1, 3, 5]]


def _one_eps(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-3


def _one_scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.5


def _one_eager(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.config = copying.copy(attention.config)
    attention.config._attn_implementation = "eager"


def _one_activation(model: Any) -> None:
    del model.model.layers[1].mlp.act_fn
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def _one_function(model: Any) -> None:
    del model.model.layers[1].mlp.act_fn
    model.model.layers[1].mlp.__dict__["act_fn"] = F.relu


def _one_dtype(model: Any) -> None:
    model.model.layers[1].mlp.to(torch.float64)
    model.model.layers[1].mlp.register_forward_pre_hook(lambda m, a: (a[0].double(),))


def _one_frozen(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "glob"),
    [
        (_one_eps, "model.layers.*.input_layernorm"),
        (_one_scaling, "model.layers.*.self_attn"),
        (_one_eager, "model.layers.*.self_attn"),
        (_one_activation, "model.layers.*.mlp"),
        (_one_function, "model.layers.*.mlp"),
        (_one_frozen, "model.layers.*.mlp"),
    ],
)
def test_one_that_differs_is_told_apart(change: Callable[[Any], None], glob: str) -> None:
    model = llama(num_hidden_layers=3)
    change(model)
    assert groups(model, glob) == [[0, 2], [1]]


def test_objects_and_references_tell_modules_apart() -> None:
    class Acts(nn.Module):
        def __init__(self, act: Any, first: bool) -> None:
            super().__init__()
            self.act, self.a, self.b = act, nn.Linear(8, 8), nn.Linear(8, 8)
            object.__setattr__(self, "chosen", self.a if first else self.b)

        def forward(self, x: Any) -> Any:
            return self.act(self.chosen(self.b(self.a(x))))

    class Double:
        def __call__(self, x: Any) -> Any:
            return x * 2

    class Triple(Double):
        def __call__(self, x: Any) -> Any:
            return x * 3

    model = nn.Sequential(Acts(Double(), True), Acts(Triple(), True), Acts(Double(), False), Acts(Double(), True))
    x = torch.randn(4, 8, requires_grad=True)
    sch = slapo.create_schedule(model, example_inputs=(x,))
    sch.select("*").trace()
    assert torch.equal(sch.module(x), model(x))
    assert len({id(trace_of(place.module)) for place in sch}) == 3
    sch["0"].configure(act=Triple())
    model[0].act = Triple()
    assert torch.equal(sch.module(x), model(x))


def test_shared_modules_of_albert() -> None:
    config = hf.AlbertConfig(
        vocab_size=128, hidden_size=64, embedding_size=32, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    model = hf.AlbertModel(config).eval()
    ids = torch.arange(32).reshape(2, 16)
    sch = slapo.create_schedule(model, example_inputs={"input_ids": ids})
    layer = sch["encoder.albert_layer_groups.0.albert_layers.0"].trace()
    assert torch.equal(sch.module(ids).last_hidden_state, model(ids).last_hidden_state)
    assert layer.misses == 0


def test_configure_traces_anew_and_keeps_the_others() -> None:
    sch = slapo.create_schedule(
        llama(), example_inputs={"input_ids": torch.arange(32).reshape(2, 16), "use_cache": False}
    )
    norms = sch.select("model.layers.*.input_layernorm")
    for place in norms:
        place.trace()
    before = trace_of(norms[0].module)
    norms[1].configure(variance_epsilon=1e-2)
    assert trace_of(norms[0].module) is before
    assert trace_of(norms[1].module) is not before
    x = torch.randn(2, 16, 64)
    weight = norms[1].module.weight
    expected = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2))
    assert torch.equal(norms[1].module(x), expected)
    assert norms[1].misses == 0


def test_a_large_model_on_meta_takes_a_handful_of_captures() -> None:
    with torch.device("meta"):
        model = llama(num_hidden_layers=126, hidden_size=256, intermediate_size=512)
    ids = torch.zeros(2, 16, dtype=torch.long)
    sch = slapo.create_schedule(model, example_inputs={"input_ids": ids, "use_cache": False})
    for glob in ("model.layers.*", "model.layers.*.self_attn", "model.layers.*.mlp", "model.layers.*.*layernorm"):
        sch.select(glob).trace()
    assert sch.root.tracer.captures == 4
    assert len(sch.history) == 126 * 5


def test_a_trace_made_on_meta_holds_on_real_tensors() -> None:
    """The fake run must see what a real run sees: the same masks, the same arguments."""
    with torch.device("meta"):
        model = llama(num_hidden_layers=2)
    ids = torch.arange(32).reshape(2, 16)
    sch = slapo.create_schedule(model, example_inputs={"input_ids": ids, "use_cache": False})
    places = [p for glob in ("model.layers.*", "model.layers.*.self_attn", "model.norm") for p in sch.select(glob)]
    for place in places:
        place.trace()
    torch.manual_seed(0)
    real = llama(num_hidden_layers=2)
    copy = sch.module
    for (name, parameter), (_, value) in zip(copy.named_parameters(), real.named_parameters(), strict=True):
        owner, _, leaf = name.rpartition(".")
        copy.get_submodule(owner)._parameters[leaf] = value
        del parameter
    for name, value in real.named_buffers():
        owner, _, leaf = name.rpartition(".")
        copy.get_submodule(owner)._buffers[leaf] = value
    assert torch.equal(copy(ids, use_cache=False).logits, real(ids, use_cache=False).logits)
    assert [place.misses for place in places] == [0] * len(places)
