"""fuse by name on real models: how often each kernel is found.

The numbers were derived by reading the models' source before any matcher was run, and are not fitted to it:

- No model writes `x + bias`: bias_gelu and bias_dropout_add need a bias that fuse takes out of its Linear or Conv1D.
- BERT is post-norm: two times norm(dropout(dense(x)) + input) a layer, one gelu. GPT-2 and OPT are pre-norm: the sum
  that a layer ends with meets its norm only in the next layer, so one of the two sums is fused with its norm. OPT's
  default activation is relu. OPT reshapes between sum and norm; its norm is on rows of two dims.
- T5 has no bias and no LayerNorm. A decoder block has three norms and two sums that meet one inside the block. Its
  gated activation writes gelu out. Scores of self attention have a position bias, in the decoder a mask as well.
- Llama, Qwen3, Gemma2: one gated activation, one rotation of q and k, one sum inside the layer that meets a norm; norms
  2, 4 (with those of q and k), 4 (with those behind attention and MLP).
- Eager attentions have one softmax; cross attention makes it two in T5's decoder. The others go through SDPA: none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import NoMatchError
from slapo_py.kernels import find_kernel, list_kernels

Counts = dict[str, int]


def _ids(batch: int = 2, length: int = 6) -> Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(0))


def _padded() -> dict[str, Tensor]:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0  # without padding an encoder makes no mask
    return {"input_ids": _ids(), "attention_mask": mask}


def _decoder() -> dict[str, Any]:
    return {"input_ids": _ids(), "use_cache": False}


def _pair() -> dict[str, Any]:
    return {**_padded(), "decoder_input_ids": _ids(2, 5), "use_cache": False}


_LLAMA = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip


def _bert(attention: str) -> nn.Module:
    config = hf.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, attn_implementation=attention,
    )  # fmt: skip
    return hf.BertForMaskedLM(config)


def _gpt2(attention: str) -> nn.Module:
    config = hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_implementation=attention)
    return hf.GPT2LMHeadModel(config)


def _opt(attention: str) -> nn.Module:
    config = hf.OPTConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
        max_position_embeddings=32, word_embed_proj_dim=32, attn_implementation=attention,
    )  # fmt: skip
    return hf.OPTForCausalLM(config)


def _t5(attention: str) -> nn.Module:
    config = hf.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def _llama(attention: str) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA, attn_implementation=attention))


def _qwen3(attention: str) -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_LLAMA, attn_implementation=attention))


def _gemma2(attention: str) -> nn.Module:
    config = hf.Gemma2Config(**_LLAMA, sliding_window=4, query_pre_attn_scalar=8, attn_implementation=attention)
    return hf.Gemma2ForCausalLM(config)


@dataclass(frozen=True)
class Family:
    """alone: a kernel on an untouched layer; together: all of them, one after the other, in the order given."""

    build: Callable[[str], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    layers: str
    alone: Counts
    together: Counts


FAMILIES = {
    "bert": Family(
        _bert, _padded, "bert.encoder.layer.*",
        {"bias_gelu": 1, "bias_dropout_add": 2, "layer_norm": 2, "add_layer_norm": 2, "dropout_add_layer_norm": 2,
             "masked_softmax": 1},
        {"bias_gelu": 1, "masked_softmax": 1, "dropout_add_layer_norm": 2},
    ),
    "gpt2": Family(
        _gpt2, _decoder, "transformer.h.*",
        {"bias_gelu": 1, "bias_dropout_add": 2, "layer_norm": 2, "add_layer_norm": 1, "dropout_add_layer_norm": 1,
             "masked_softmax": 1},
        {"bias_gelu": 1, "masked_softmax": 1, "dropout_add_layer_norm": 1, "bias_dropout_add": 1, "layer_norm": 1},
    ),
    "opt": Family(
        _opt, _decoder, "model.decoder.layers.*",
        {"bias_dropout_add": 2, "layer_norm": 2, "add_layer_norm": 1, "dropout_add_layer_norm": 1, "masked_softmax": 1},
        {"masked_softmax": 1, "dropout_add_layer_norm": 1, "bias_dropout_add": 1, "layer_norm": 1},
    ),
    "t5 encoder": Family(
        _t5, _pair, "encoder.block.*",
        {"geglu": 1, "rms_norm": 2, "add_rms_norm": 1, "masked_softmax": 1},
        {"geglu": 1, "masked_softmax": 1, "add_rms_norm": 1, "rms_norm": 1},
    ),
    "t5 decoder": Family(
        _t5, _pair, "decoder.block.*",
        {"geglu": 1, "rms_norm": 3, "add_rms_norm": 2, "masked_softmax": 2},
        {"geglu": 1, "masked_softmax": 2, "add_rms_norm": 2, "rms_norm": 1},
    ),
    "llama": Family(
        _llama, _decoder, "model.layers.*",
        {"swiglu": 1, "rms_norm": 2, "add_rms_norm": 1, "rope": 1, "masked_softmax": 1},
        {"swiglu": 1, "rope": 1, "masked_softmax": 1, "add_rms_norm": 1, "rms_norm": 1},
    ),
    "qwen3": Family(
        _qwen3, _decoder, "model.layers.*",
        {"swiglu": 1, "rms_norm": 4, "add_rms_norm": 1, "rope": 1, "masked_softmax": 1},
        {"swiglu": 1, "rope": 1, "masked_softmax": 1, "add_rms_norm": 1, "rms_norm": 3},
    ),
    "gemma2": Family(
        _gemma2, _decoder, "model.layers.*",
        {"geglu": 1, "rms_norm": 4, "add_rms_norm": 1, "rope": 1, "masked_softmax": 1},
        {"geglu": 1, "rope": 1, "masked_softmax": 1, "add_rms_norm": 1, "rms_norm": 3},
    ),
}  # fmt: skip
WHOLE = {"cross_entropy", "linear_cross_entropy"}  # of a loss, not of a layer


def count(place: slapo.Schedule, name: str) -> int:
    """How often a kernel is called in the graph of a place."""
    ops = {form.op for form in find_kernel(name).forms}
    return sum(node.target in ops for node in place.graph.nodes)


def schedule(family: Family, attention: str = "eager") -> slapo.Schedule:
    torch.manual_seed(0)
    return slapo.create_schedule(family.build(attention), family.inputs())


@pytest.mark.parametrize("name", FAMILIES)
def test_each_kernel_alone(name: str) -> None:
    family = FAMILIES[name]
    sch = schedule(family)
    for kernel in sorted(set(list_kernels()) - WHOLE):
        for place in sch.select(family.layers):
            if not family.alone.get(kernel):
                with pytest.raises(NoMatchError, match=f"fuse\\('{kernel}'\\) at"):
                    place.fuse(kernel)
                continue
            place.fuse(kernel)
            assert count(place, kernel) == family.alone[kernel], (kernel, place.path)
            sch.undo()


@pytest.mark.parametrize("name", FAMILIES)
def test_all_kernels_together(name: str) -> None:
    family = FAMILIES[name]
    sch = schedule(family)
    for place in sch.select(family.layers):
        for kernel in family.together:
            place.fuse(kernel)
        assert {kernel: count(place, kernel) for kernel in family.together} == family.together, place.path
    assert sch.verify().grade in ("equal", "rounding")
    assert slapo.misses(sch.module) == {}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma2"])  # Gemma2 has no SDPA
def test_sdpa_leaves_no_softmax(name: str) -> None:
    family = FAMILIES[name]
    place = next(iter(schedule(family, "sdpa").select(family.layers)))
    with pytest.raises(NoMatchError, match="the graph has no softmax"):
        place.fuse("masked_softmax")
