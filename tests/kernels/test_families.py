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
- Gemma 2 caps its attention scores before the mask. Eager attentions have one softmax; cross attention makes it two in
  T5's decoder. The others go through SDPA: none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import slapo_py as slapo
from slapo_py.errors import NoMatchError
from slapo_py.kernels import find_kernel
from tests.families import bert, decoder, gemma2, gpt2, llama, opt, padded, pair, qwen3, t5
from tests.slow import slow_but

Counts = dict[str, int]


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
        bert, padded, "bert.encoder.layer.*",
        {"bias_gelu": 1, "bias_dropout_add": 2, "layer_norm": 2, "add_layer_norm": 2, "dropout_add_layer_norm": 2,
             "masked_softmax": 1},
        {"bias_gelu": 1, "masked_softmax": 1, "dropout_add_layer_norm": 2},
    ),
    "gpt2": Family(
        gpt2, decoder, "transformer.h.*",
        {"bias_gelu": 1, "bias_dropout_add": 2, "layer_norm": 2, "add_layer_norm": 1, "dropout_add_layer_norm": 1,
             "masked_softmax": 1},
        {"bias_gelu": 1, "masked_softmax": 1, "dropout_add_layer_norm": 1, "bias_dropout_add": 1, "layer_norm": 1},
    ),
    "opt": Family(
        opt, decoder, "model.decoder.layers.*",
        {"bias_dropout_add": 2, "layer_norm": 2, "add_layer_norm": 1, "dropout_add_layer_norm": 1, "masked_softmax": 1},
        {"masked_softmax": 1, "dropout_add_layer_norm": 1, "bias_dropout_add": 1, "layer_norm": 1},
    ),
    "t5 encoder": Family(
        t5, pair, "encoder.block.*",
        {"geglu": 1, "rms_norm": 2, "add_rms_norm": 1, "masked_softmax": 1},
        {"geglu": 1, "masked_softmax": 1, "add_rms_norm": 1, "rms_norm": 1},
    ),
    "t5 decoder": Family(
        t5, pair, "decoder.block.*",
        {"geglu": 1, "rms_norm": 3, "add_rms_norm": 2, "masked_softmax": 2},
        {"geglu": 1, "masked_softmax": 2, "add_rms_norm": 2, "rms_norm": 1},
    ),
    "llama": Family(
        llama, decoder, "model.layers.*",
        {"swiglu": 1, "rms_norm": 2, "add_rms_norm": 1, "rope": 1, "masked_softmax": 1},
        {"swiglu": 1, "rope": 1, "masked_softmax": 1, "add_rms_norm": 1, "rms_norm": 1},
    ),
    "qwen3": Family(
        qwen3, decoder, "model.layers.*",
        {"swiglu": 1, "rms_norm": 4, "add_rms_norm": 1, "rope": 1, "masked_softmax": 1},
        {"swiglu": 1, "rope": 1, "masked_softmax": 1, "add_rms_norm": 1, "rms_norm": 3},
    ),
    "gemma2": Family(
        gemma2, decoder, "model.layers.*",
        {"geglu": 1, "rms_norm": 4, "add_rms_norm": 1, "rope": 1, "masked_softmax": 1, "softcap": 1},
        {"geglu": 1, "rope": 1, "softcap": 1, "masked_softmax": 1, "add_rms_norm": 1, "rms_norm": 3},
    ),
}  # fmt: skip


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
    for kernel in sorted({kernel for one in FAMILIES.values() for kernel in one.alone}):
        for place in sch.select(family.layers):
            if not family.alone.get(kernel):
                with pytest.raises(NoMatchError, match=f"fuse\\('{kernel}'\\) at"):
                    place.fuse(kernel)
                continue
            place.fuse(kernel)
            assert count(place, kernel) == family.alone[kernel], (kernel, place.path)
            sch.undo()


@pytest.mark.parametrize("name", slow_but(["bert", "gpt2", "llama", "t5 decoder"], FAMILIES))
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
    with pytest.raises(NoMatchError, match="does not match: the graph has no"):
        place.fuse("masked_softmax")
