"""The model families that the tests run over: tiny, random, with dropout on wherever the family has one.

Sliding windows are smaller than any sequence the tests use, so that a window is really a window.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

Inputs = dict[str, Any]
P = 0.1  # every dropout probability
WINDOW = 6


@dataclass(frozen=True)
class Family:
    """One model family and where its parts are. The whole model is the path ``""``."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    """``inputs(batch, seq)`` -> keyword arguments; equal calls give equal tensors, and no random state is used up."""
    attn: str
    mlp: str
    layer: str
    note: str = ""
    """Where a family lacks a part: what stands in for it."""
    has_dropout: bool = True

    @property
    def paths(self) -> dict[str, str]:
        return {"attn": self.attn, "mlp": self.mlp, "layer": self.layer, "model": ""}


def _ids(batch: int, seq: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 100, (batch, seq), generator=torch.Generator().manual_seed(seed))


def _floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def decoder_inputs(batch: int, seq: int) -> Inputs:
    return {"input_ids": _ids(batch, seq), "use_cache": False}


def encoder_inputs(batch: int, seq: int) -> Inputs:
    return {"input_ids": _ids(batch, seq), "attention_mask": torch.ones(batch, seq, dtype=torch.long)}


def seq2seq_inputs(batch: int, seq: int) -> Inputs:
    # The two lengths differ, so that cross attention is not square.
    return {"input_ids": _ids(batch, seq), "decoder_input_ids": _ids(batch, seq // 2, seed=1), "use_cache": False}


def image_inputs(batch: int, seq: int) -> Inputs:
    return {"pixel_values": _floats(batch, 3, 32, 32)}


def whisper_inputs(batch: int, seq: int) -> Inputs:
    return {"input_features": _floats(batch, 16, 64), "decoder_input_ids": _ids(batch, seq), "use_cache": False}


def clip_inputs(batch: int, seq: int) -> Inputs:
    return {**encoder_inputs(batch, seq), **image_inputs(batch, seq)}


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` as people use it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=P, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src: Tensor) -> Tensor:
        return self.enc(src)


class WideBlock(nn.Module):
    """A residual block with dropout between its convolutions, and in-place operations."""

    def __init__(self, c_in: int, c_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(P)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.downsample: nn.Module | None = None
        if stride != 1 or c_in != c_out:
            self.downsample = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.dropout(self.relu(self.bn1(self.conv1(x))))
        y = self.bn2(self.conv2(y))
        y += identity
        return self.relu(y)


class WideResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.layer1 = nn.Sequential(WideBlock(16, 32), WideBlock(32, 32))
        self.layer2 = nn.Sequential(WideBlock(32, 64, 2), WideBlock(64, 64))
        self.fc = nn.Linear(64, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(pixel_values)))
        x = F.adaptive_avg_pool2d(x, 1)
        return self.fc(torch.flatten(x, 1))


_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DEC: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attention_dropout": P,
    **_TOKENS,
}
_ENC: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": P,
    "attention_probs_dropout_prob": P,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_CLIP_TOWER = {"attention_dropout": P}
_GPT_NEOX = {**{k: v for k, v in _DEC.items() if k != "num_key_value_heads"}, "hidden_dropout": P}
_BLOOM: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4, **_TOKENS}
_FALCON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **_TOKENS,
}
_T5: dict[str, Any] = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "dropout": P,
    "attention_dropout": P,
    "activation_dropout": P,
    "decoder_start_token_id": 1,
    **_TOKENS,
}


def gpt2() -> nn.Module:
    size = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    drop = {"resid_pdrop": P, "embd_pdrop": P, "attn_pdrop": P}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**size, **drop, **_TOKENS))


def gpt_neo() -> nn.Module:
    size = {"vocab_size": 128, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128}
    drop = {"resid_dropout": P, "embed_dropout": P, "attention_dropout": P}
    kinds = {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW}
    return hf.GPTNeoForCausalLM(hf.GPTNeoConfig(**size, **drop, **kinds, **_TOKENS))


def opt() -> nn.Module:
    size = {"vocab_size": 128, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    rest = {"max_position_embeddings": 128, "word_embed_proj_dim": 64, "dropout": P, "attention_dropout": P}
    return hf.OPTForCausalLM(hf.OPTConfig(**size, **rest, pad_token_id=1, bos_token_id=2, eos_token_id=2))


def deberta_v2() -> nn.Module:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    return hf.DebertaV2Model(hf.DebertaV2Config(**_ENC, **relative))


def clip() -> nn.Module:
    text = {k: v for k, v in _ENC.items() if "dropout" not in k} | _TOKENS | _CLIP_TOWER
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=_VISION | _CLIP_TOWER, projection_dim=32))


def whisper() -> nn.Module:
    rest = {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**_SEQ2SEQ, **rest))


def _layered(prefix: str, attn: str, mlp: str) -> dict[str, str]:
    return {"attn": f"{prefix}.{attn}", "mlp": f"{prefix}.{mlp}", "layer": prefix}


_LLAMA = _layered("model.layers.0", "self_attn", "mlp")
_GPT = _layered("transformer.h.0", "attn", "mlp")
_BLOOM_AT = _layered("transformer.h.0", "self_attention", "mlp")
_BERT = _layered("encoder.layer.0", "attention", "intermediate")
_HALF_MLP = "the MLP is spread over two modules: `intermediate` is its first half"
_NO_MLP = "no MLP module: the smallest module that holds the MLP, a whole layer other than `layer`"
_ALBERT_LAYER = "encoder.albert_layer_groups.0.albert_layers.0"

FAMILIES: tuple[Family, ...] = (
    Family("llama", lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_DEC)), decoder_inputs, **_LLAMA),
    Family(
        "mistral",
        lambda: hf.MistralForCausalLM(hf.MistralConfig(**_DEC, head_dim=16, sliding_window=WINDOW)),
        decoder_inputs,
        **_LLAMA,
    ),
    Family("qwen2", lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_DEC)), decoder_inputs, **_LLAMA),
    Family("qwen3", lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DEC, head_dim=16)), decoder_inputs, **_LLAMA),
    Family(
        "gemma2",
        lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**_DEC, head_dim=16, sliding_window=WINDOW)),
        decoder_inputs,
        **_LLAMA,
    ),
    Family(
        "gemma3",
        lambda: hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(
                **_DEC, head_dim=16, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
            )
        ),
        decoder_inputs,
        **_LLAMA,
    ),
    Family("gpt2", gpt2, decoder_inputs, **_GPT),
    Family("gpt_neo", gpt_neo, decoder_inputs, **_GPT),
    Family(
        "gpt_neox",
        lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_GPT_NEOX)),
        decoder_inputs,
        **_layered("gpt_neox.layers.0", "attention", "mlp"),
    ),
    Family(
        "opt",
        opt,
        decoder_inputs,
        attn="model.decoder.layers.0.self_attn",
        mlp="model.decoder.layers.1",
        layer="model.decoder.layers.0",
        note=_NO_MLP,
    ),
    Family(
        "bloom",
        lambda: hf.BloomForCausalLM(hf.BloomConfig(**_BLOOM, hidden_dropout=P, attention_dropout=P)),
        decoder_inputs,
        **_BLOOM_AT,
    ),
    Family(
        "phi3",
        lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_DEC, resid_pdrop=P, embd_pdrop=P)),
        decoder_inputs,
        **_LLAMA,
    ),
    Family(
        "falcon",
        lambda: hf.FalconForCausalLM(hf.FalconConfig(**_FALCON, hidden_dropout=P, attention_dropout=P)),
        decoder_inputs,
        **_BLOOM_AT,
    ),
    Family("bert", lambda: hf.BertModel(hf.BertConfig(**_ENC)), encoder_inputs, **_BERT, note=_HALF_MLP),
    Family("roberta", lambda: hf.RobertaModel(hf.RobertaConfig(**_ENC)), encoder_inputs, **_BERT, note=_HALF_MLP),
    Family(
        "albert",
        lambda: hf.AlbertModel(hf.AlbertConfig(**_ENC, embedding_size=32)),
        encoder_inputs,
        attn=f"{_ALBERT_LAYER}.attention",
        mlp="encoder.albert_layer_groups.0",
        layer=_ALBERT_LAYER,
        note="no MLP module: the layer group, which holds the one layer; it is shared, so it runs twice",
    ),
    Family(
        "electra",
        lambda: hf.ElectraModel(hf.ElectraConfig(**_ENC, embedding_size=32)),
        encoder_inputs,
        **_BERT,
        note=_HALF_MLP,
    ),
    Family("deberta_v2", deberta_v2, encoder_inputs, **_BERT, note=_HALF_MLP),
    Family(
        "t5",
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5, dropout_rate=P, decoder_start_token_id=0)),
        seq2seq_inputs,
        attn="encoder.block.0.layer.0.SelfAttention",
        mlp="encoder.block.0.layer.1",
        layer="decoder.block.0",
    ),
    Family(
        "bart",
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_SEQ2SEQ, max_position_embeddings=128)),
        seq2seq_inputs,
        attn="model.decoder.layers.0.encoder_attn",
        mlp="model.encoder.layers.0",
        layer="model.decoder.layers.0",
        note=_NO_MLP,
    ),
    Family(
        "whisper",
        whisper,
        whisper_inputs,
        attn="model.decoder.layers.0.self_attn",
        mlp="model.encoder.layers.0",
        layer="model.decoder.layers.0",
        note=_NO_MLP,
    ),
    Family(
        "vit",
        lambda: hf.ViTModel(hf.ViTConfig(**_VISION, hidden_dropout_prob=P, attention_probs_dropout_prob=P)),
        image_inputs,
        **_layered("layers.0", "attention", "mlp"),
    ),
    Family("clip", clip, clip_inputs, **_layered("text_model.encoder.layers.0", "self_attn", "mlp")),
    Family(
        "mixtral",
        # The default expert implementation can't run on fake tensors in float32.
        lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**_DEC, num_local_experts=4, experts_implementation="batched_mm")
        ),
        decoder_inputs,
        **_LLAMA,
    ),
    Family(
        "mamba",
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=128, hidden_size=64, state_size=8, num_hidden_layers=2, **_TOKENS)
        ),
        decoder_inputs,
        **_layered("backbone.layers.0", "mixer", "norm"),
        note="no attention and no MLP: the state-space mixer and the norm",
        has_dropout=False,
    ),
    Family(
        "wide_resnet",
        WideResNet,
        image_inputs,
        attn="layer1.1",
        mlp="layer1",
        layer="layer2.0",
        note="no attention and no MLP: a block without downsample, and a stage",
    ),
    Family(
        "transformer_encoder",
        Encoder,
        lambda batch, seq: {"src": _floats(batch, seq, 64)},
        attn="enc.layers.0.self_attn",
        mlp="enc.layers.1",
        layer="enc.layers.0",
        note=_NO_MLP,
    ),
)

BY_NAME: dict[str, Family] = {family.name: family for family in FAMILIES}


def make(name: str, seed: int = 0) -> nn.Module:
    """The family's model with weights drawn from `seed`, in train mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BY_NAME[name].build().train()
