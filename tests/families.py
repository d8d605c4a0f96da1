"""Model families, tiny and from config, as their schedules are written: BERT to a wide residual network."""

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests import zoo


def token_ids(batch: int = 2, length: int = 8) -> Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(0))


def padded(batch: int = 2, length: int = 8) -> dict[str, Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1, length // 2 :] = 0  # without padding an encoder makes no mask
    return {"input_ids": token_ids(batch, length), "attention_mask": mask}


def decoder(batch: int = 2, length: int = 8) -> dict[str, Any]:
    return {"input_ids": token_ids(batch, length), "use_cache": False}


def pair(batch: int = 2, length: int = 8) -> dict[str, Any]:
    return {**padded(batch, length), "decoder_input_ids": token_ids(batch, length - 2), "use_cache": False}


def image(batch: int = 2, length: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, length, length, generator=torch.Generator().manual_seed(0))}


_LLAMA = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip


def bert(attention: str) -> nn.Module:
    config = hf.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, attn_implementation=attention,
    )  # fmt: skip
    return hf.BertForMaskedLM(config)


def gpt2(attention: str) -> nn.Module:
    config = hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_implementation=attention)
    return hf.GPT2LMHeadModel(config)


def opt(attention: str) -> nn.Module:
    config = hf.OPTConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
        max_position_embeddings=32, word_embed_proj_dim=32, attn_implementation=attention,
    )  # fmt: skip
    return hf.OPTForCausalLM(config)


def t5(attention: str) -> nn.Module:
    config = hf.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def llama(attention: str) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA, attn_implementation=attention))


def qwen3(attention: str) -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_LLAMA, attn_implementation=attention))


def gemma2(attention: str) -> nn.Module:
    config = hf.Gemma2Config(**_LLAMA, sliding_window=4, query_pre_attn_scalar=8, attn_implementation=attention)
    return hf.Gemma2ForCausalLM(config)


def mixtral(attention: str) -> nn.Module:
    # Other implementations of the experts look at the routing: what they compute depends on data.
    experts = {"num_local_experts": 4, "experts_implementation": "batched_mm"}
    config = hf.MixtralConfig(**_LLAMA, **experts, attention_dropout=0.1, attn_implementation=attention)
    return hf.MixtralForCausalLM(config)


def vit(attention: str) -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
        num_labels=8, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, attn_implementation=attention,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def wide_resnet(attention: str) -> nn.Module:
    return zoo.WideResNet()
