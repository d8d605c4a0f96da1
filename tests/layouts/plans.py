"""How each family is split over "tp", as its user would write it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import slapo_py as slapo
from slapo_py.layouts.placement import Placement, Shard
from tests import families


def _llama(sch: slapo.Schedule) -> None:
    for layer in sch.select("model.layers.*"):
        for name in ("q", "k", "v"):
            layer[f"self_attn.{name}_proj"].shard("weight", dim="out")
        layer["self_attn.o_proj"].shard("weight", dim="in")
        for name in ("gate", "up"):
            layer[f"mlp.{name}_proj"].shard("weight", dim="out")
        layer["mlp.down_proj"].shard("weight", dim="in")
    sch["model.embed_tokens"].shard("weight", dim=0)
    if sch.module.lm_head.weight is not sch.module.model.embed_tokens.weight:
        sch["lm_head"].shard("weight", dim="out")


def _gpt2(sch: slapo.Schedule) -> None:
    for block in sch.select("transformer.h.*"):
        block["attn.c_attn"].shard("weight", "bias", dim="out", parts=3)
        block["attn.c_proj"].shard("weight", dim="in")
        block["mlp.c_fc"].shard("weight", "bias", dim="out")
        block["mlp.c_proj"].shard("weight", dim="in")
    sch["transformer.wte"].shard("weight", dim=0)


def _bert(sch: slapo.Schedule) -> None:
    for layer in sch.select("bert.encoder.layer.*"):
        for name in ("query", "key", "value"):
            layer[f"attention.self.{name}"].shard("weight", "bias", dim="out")
        layer["attention.output.dense"].shard("weight", dim="in")
        layer["intermediate.dense"].shard("weight", "bias", dim="out")
        layer["output.dense"].shard("weight", dim="in")
    sch["bert.embeddings.word_embeddings"].shard("weight", dim=0)
    sch["cls.predictions"].shard("decoder.bias", dim=0)


def _opt(sch: slapo.Schedule) -> None:
    for layer in sch.select("model.decoder.layers.*"):
        for name in ("q", "k", "v"):
            layer[f"self_attn.{name}_proj"].shard("weight", "bias", dim="out")
        layer["self_attn.out_proj"].shard("weight", dim="in")
        layer["fc1"].shard("weight", "bias", dim="out")
        layer["fc2"].shard("weight", dim="in")
    sch["model.decoder.embed_tokens"].shard("weight", dim=0)


def _t5(sch: slapo.Schedule) -> None:
    for name in ("q", "k", "v", "wi_0", "wi_1"):
        for place in sch.select(f"**.{name}"):
            place.shard("weight", dim="out")
    for name in ("o", "wo"):
        for place in sch.select(f"**.{name}"):
            place.shard("weight", dim="in")
    for place in sch.select("**.relative_attention_bias"):
        place.shard("weight", dim=1)
    sch["shared"].shard("weight", dim=0)
    if sch.module.lm_head.weight is not sch.module.shared.weight:
        sch["lm_head"].shard("weight", dim="out")


@dataclass(frozen=True)
class Plan:
    """split: the steps. pins: the place whose input is split along the sequence, for sequence parallelism.

    layers: how many layers there are of how many collectives in each direction; divided: attributes of each layer that
    build divides.
    """

    build: Callable[[str], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    split: Callable[[slapo.Schedule], None]
    pins: tuple[str, ...]
    layer: dict[str, int]
    attention: str = "sdpa"

    def schedule(self) -> slapo.Schedule:
        torch.manual_seed(0)
        model = self.build(self.attention)
        with torch.no_grad():
            for parameter in model.parameters():  # biases start at 0 and norms at 1: make faults visible
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        sch = slapo.create_schedule(model, self.inputs())
        self.split(sch)
        return sch

    def sequence(self) -> dict[str, Placement]:
        return {path: Shard(1) for path in self.pins}


PLANS = {
    "llama": Plan(families.llama, families.decoder, _llama, ("model.layers.0",), {"model.layers.": 2}),
    "qwen3": Plan(families.qwen3, families.decoder, _llama, ("model.layers.0",), {"model.layers.": 2}),
    "gemma2": Plan(families.gemma2, families.decoder, _llama, ("model.layers.0",), {"model.layers.": 2}, "eager"),
    "gpt2": Plan(families.gpt2, families.decoder, _gpt2, ("transformer.h.0",), {"transformer.h.": 2}),
    "bert": Plan(families.bert, families.padded, _bert, ("bert.encoder",), {"bert.encoder.layer.": 2}),
    "opt": Plan(families.opt, families.decoder, _opt, ("model.decoder.layers.0",), {"model.decoder.layers.": 2}),
    "t5": Plan(
        families.t5, families.pair, _t5, ("encoder.block.0", "decoder.block.0"),
        {"encoder.block.": 2, "decoder.block.": 3},
    ),
}  # fmt: skip
