"""How each family is split over "tp", as its user would write it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import slapo_py as slapo
from slapo_py.layouts.placement import Placement, R, Shard
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


def _mixtral(sch: slapo.Schedule) -> None:
    for layer in sch.select("model.layers.*"):
        for name in ("q", "k", "v"):
            layer[f"self_attn.{name}_proj"].shard("weight", dim="out")
        layer["self_attn.o_proj"].shard("weight", dim="in")
        layer["mlp.experts"].shard("gate_up_proj", dim=1, parts=2)  # (experts, gate and up, hidden)
        layer["mlp.experts"].shard("down_proj", dim=2)  # (experts, hidden, intermediate)
    sch["model.embed_tokens"].shard("weight", dim=0)
    sch["lm_head"].shard("weight", dim="out")


def _vit(sch: slapo.Schedule) -> None:
    for layer in sch.select("vit.layers.*"):
        for name in ("q", "k", "v"):
            layer[f"attention.{name}_proj"].shard("weight", "bias", dim="out")
        layer["attention.o_proj"].shard("weight", dim="in")
        layer["mlp.fc1"].shard("weight", "bias", dim="out")
        layer["mlp.fc2"].shard("weight", dim="in")


def _wide_resnet(sch: slapo.Schedule) -> None:
    for block in [*sch.select("layer1.*"), *sch.select("layer2.*")]:
        block["conv1"].shard("weight", dim="out")
        block["bn1"].shard("weight", "bias", dim=0)
        block["conv2"].shard("weight", dim="in")


@dataclass(frozen=True)
class Plan:
    """One family. split: the steps. pins: what makes it sequence parallel, by the path of the module that is entered.

    inputs: of a batch and a length, which need not be given. layer: how many collectives a layer has, forward and
    backward, by what the names of such layers begin with. more: those of a layer that sequence parallelism adds.
    lengths: two that the model takes.
    """

    build: Callable[[str], nn.Module]
    inputs: Callable[..., dict[str, Any]]
    split: Callable[[slapo.Schedule], None]
    pins: dict[str, Placement]
    layer: dict[str, tuple[int, int]]
    attention: str = "sdpa"
    more: dict[tuple[str, str], int] = field(default_factory=dict)
    lengths: tuple[int, int] = (8, 12)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build(self.attention)
        with torch.no_grad():
            for parameter in model.parameters():  # biases start at 0 and norms at 1: make faults visible
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        for module in model.modules():
            for name, value in vars(module).items():
                if "dropout" in name and value == 0.0 and isinstance(value, float):
                    setattr(module, name, 0.1)
        return model

    def schedule(self, model: nn.Module | None = None, inputs: dict[str, Any] | None = None) -> slapo.Schedule:
        sch = slapo.create_schedule(model or self.model(), inputs or self.inputs())
        self.split(sch)
        return sch


SEQUENCE = Shard(1)
_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")

PLANS = {
    "llama": Plan(families.llama, families.decoder, _llama, {"model.layers.0": SEQUENCE}, {"model.layers.": (2, 2)}),
    "qwen3": Plan(families.qwen3, families.decoder, _llama, {"model.layers.0": SEQUENCE}, {"model.layers.": (2, 2)}),
    # The norm after a row-split layer: nothing but the pin says that it is to see a part of the sequence.
    "gemma2": Plan(
        families.gemma2, families.decoder, _llama,
        {"model.layers.0": SEQUENCE, **{f"model.layers.{i}.{norm}": SEQUENCE for i in (0, 1) for norm in _NORMS}},
        {"model.layers.": (2, 2)}, "eager",
    ),
    "gpt2": Plan(families.gpt2, families.decoder, _gpt2, {"transformer.h.0": SEQUENCE}, {"transformer.h.": (2, 2)}),
    "bert": Plan(families.bert, families.padded, _bert, {"bert.encoder": SEQUENCE}, {"bert.encoder.layer.": (2, 2)}),
    "opt": Plan(
        families.opt, families.decoder, _opt, {"model.decoder.layers.0": SEQUENCE}, {"model.decoder.layers.": (2, 2)}
    ),
    "t5": Plan(
        families.t5, families.pair, _t5, {"encoder.block.0": SEQUENCE, "decoder.block.0": SEQUENCE},
        {"encoder.block.": (2, 2), "decoder.block.": (3, 3)},
    ),
    # The third backward is of the routing weights, a number for each token and each of its experts. Under sequence
    # parallelism each rank routes its part, and the experts, which see all tokens, need what came of it: two more.
    "mixtral": Plan(
        families.mixtral, families.decoder, _mixtral, {"model.layers.0": SEQUENCE}, {"model.layers.": (2, 3)},
        more={("forward", "all_gather"): 2, ("backward", "reduce_scatter"): 1},
    ),
    # The classifier takes the first token: the sequence is gathered before the last norm.
    "vit": Plan(
        families.vit, families.image, _vit, {"vit.layers.0": SEQUENCE, "vit.layernorm": R}, {"vit.layers.": (2, 2)},
        lengths=(16, 16),
    ),
    "wide_resnet": Plan(
        families.wide_resnet, families.image, _wide_resnet, {}, {"layer1.": (1, 1), "layer2.": (1, 1)},
        lengths=(16, 24),
    ),
}  # fmt: skip
