"""Patterns of what one would fuse or replace, in traced modules of transformers."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import slapo_py as slapo
from slapo_py import Schedule
from tests.models import ids, net, tiny_gpt2


def gpt2() -> Schedule:
    return slapo.create_schedule(tiny_gpt2(), {"input_ids": ids(2, 6)})


def llama() -> Schedule:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=31, rms_norm_eps=1e-6,
    )  # fmt: skip
    return slapo.create_schedule(LlamaForCausalLM(config), {"input_ids": ids(2, 6), "use_cache": False})


def bert() -> Schedule:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=31)
    return slapo.create_schedule(BertModel(config), {"input_ids": ids(2, 6)})


def inputs(match: Any) -> dict[str, str]:
    return dict(match.inputs)


def test_gpt2s_residual_additions() -> None:
    block = gpt2()["transformer.h.0"].trace()
    first, second = block.find(lambda x, y: x + y)
    assert (first.nodes, second.nodes) == (("add",), ("add_1",))
    (mlp,) = block.find(lambda x, w, b: x + slapo.call("mlp", F.layer_norm(x, (16,), w, b)))
    assert mlp.nodes == ("ln_2", "mlp", "add_1")
    assert inputs(mlp) == {"x": "add", "w": "ln_2.weight", "b": "ln_2.bias"}


def test_gpt2s_mlp_by_the_names_of_its_children() -> None:
    mlp = gpt2()["transformer.h.0.mlp"].trace()
    (match,) = mlp.find(lambda x: slapo.call("dropout", slapo.call("c_proj", slapo.call("act", slapo.call("c_fc", x)))))
    assert match.modules == ("c_fc", "act", "c_proj", "dropout")


def new_gelu(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def new_gelu_said_differently(x: Any) -> Any:
    inner = (x.pow(3) * 0.044715 + x) * math.sqrt(2 / math.pi)
    return (inner.tanh() + 1) * (x * 0.5)


def test_the_parts_of_a_gelu_after_flatten() -> None:
    mlp = gpt2()["transformer.h.0.mlp"].trace(flatten=True, leaves=["c_fc", "c_proj"])
    for what in (new_gelu, new_gelu_said_differently):
        (match,) = mlp.find(what)
        assert (len(match.nodes), inputs(match)) == (8, {"x": "c_fc"})
    (across,) = mlp.find(
        lambda x: F.dropout(slapo.call("c_proj", new_gelu(slapo.call("c_fc", x))), slapo.wild("p"), slapo.wild())
    )
    assert (across.values, len(across.nodes)) == ({"p": 0.1}, 11)
    assert mlp.find(lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))) == []


def test_a_dropout_in_gpt2s_attention_has_another_p_in_eval() -> None:
    attention = gpt2()["transformer.h.0.attn"].trace()

    def sdpa(p: Any) -> Any:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=p, scale=slapo.wild(), is_causal=True)

    assert attention.find(sdpa(0.1)) == []
    assert "For a value that is computed write slapo.wild()" in attention.why_not(sdpa(0.1))
    (match,) = attention.find(sdpa(slapo.wild("p")))
    assert str(match.values["p"]).startswith("getitem")


def rms_norm(x: Any, w: Any, eps: float = 1e-6) -> Any:
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def test_llamas_rms_norm() -> None:
    norm = llama()["model.layers.0.input_layernorm"].trace()
    (match,) = norm.find(rms_norm)
    assert inputs(match) == {"x": "hidden_states", "w": "weight"}
    assert len(match.nodes) == 9
    assert norm.find(lambda x, w: rms_norm(x, w, 1e-5)) == []


def rotate_half(x: Any) -> Any:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def test_llamas_rotation() -> None:
    attention = llama()["model.layers.0.self_attn"].trace()
    assert len(attention.find(rotate_half)) == 2
    query, key = attention.find(lambda x, cos, sin: x * cos + rotate_half(x) * sin)
    assert inputs(query) == {"x": "transpose", "cos": "unsqueeze", "sin": "unsqueeze_1"}
    assert inputs(key) == {"x": "transpose_1", "cos": "unsqueeze", "sin": "unsqueeze_1"}

    def both(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    (match,) = attention.find(both)
    assert set(match.nodes) >= {*query.nodes, *key.nodes}
    assert match.outputs == (*query.outputs, *key.outputs)


def test_llamas_projections_share_an_input() -> None:
    attention = llama()["model.layers.0.self_attn"].trace()
    (match,) = attention.find(lambda x: tuple(slapo.call(name, x) for name in ("q_proj", "k_proj", "v_proj")))
    assert match.outputs == ("q_proj", "k_proj", "v_proj")
    (weights,) = attention.find(lambda x, q, k, v: (F.linear(x, q), F.linear(x, k), F.linear(x, v)))
    assert inputs(weights)["x"] == "hidden_states"


def test_berts_output() -> None:
    output = bert()["encoder.layer.0.output"].trace()
    (match,) = output.find(
        lambda x, residual, w, b, weight, bias: F.layer_norm(
            nn.Dropout(0.1)(F.linear(x, w, b)) + residual, (16,), weight, bias, 1e-12
        )
    )
    assert match.modules == ("dense", "dropout", "LayerNorm")
    assert inputs(match) == {
        "x": "hidden_states", "residual": "input_tensor", "w": "dense.weight", "b": "dense.bias",
        "weight": "LayerNorm.weight", "bias": "LayerNorm.bias",
    }  # fmt: skip
    assert output.find(lambda x, r, w, b: F.layer_norm(nn.Dropout(0.1)(x) + r, (16,), w, b)) == []


def test_patterns_span_children_after_flatten() -> None:
    sch = slapo.create_schedule(net(), {"ids": ids()})
    sch.trace(flatten=True)
    first, second = sch.find(lambda x, w, b: F.gelu(F.linear(x, w, b)))
    assert inputs(first)["w"] != inputs(second)["w"]
    assert sch.find(lambda x: nn.GELU("tanh")(x)) == []


def test_dropout_after_flatten_follows_the_mode_where_both_modes_are_one_graph() -> None:
    def dropped(x: Any) -> Any:
        return nn.Dropout(0.3)(x) * 0.5

    sch = slapo.create_schedule(net(), {"ids": ids()})
    (one,) = sch["blocks.0"].trace(flatten=True).find(dropped)
    assert len(one.nodes) == 2
    sch = slapo.create_schedule(net(), {"ids": ids()})
    sch.trace(flatten=True)  # its batch norm has other operations in train than in eval: the graph is that of train
    assert sch.find(dropped) == []
    assert "has True for training" in sch.why_not(dropped)
    assert len(sch.find(lambda x: F.dropout(x, 0.3, training=True) * 0.5)) == 2
