"""precision="bf16": a bfloat16 module with float32 masters."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from slapo_py.errors import BuildError
from tests.engine.models import TinyLM, batches, count, engine_of, loss, same_state


def test_parameters_are_cast_and_masters_are_not() -> None:
    model = TinyLM()
    model.up.weight.tag = "kept"
    engine = engine_of(model, precision="bf16")
    assert all(parameter.dtype is torch.bfloat16 for parameter in engine.module.parameters())
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert engine.module.scale.dtype is torch.float32 and engine.module.calls.dtype is torch.long
    assert engine.module.embed.weight is engine.module.head.weight
    held = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(list(model.parameters()))  # the tie has one master
    assert all(parameter.dtype is torch.float32 for parameter in held)
    assert any(getattr(parameter, "tag", None) == "kept" for parameter in held)
    assert same_state(engine.state_dict(), model)  # nothing was rounded before the first step


def test_follows_fp32_closely() -> None:
    model, data = TinyLM(dropout=0.0), batches(3, rows=8) * 10
    gentle = partial(torch.optim.AdamW, lr=3e-3)
    exact = engine_of(model, optimizer=gentle)
    low = engine_of(model, optimizer=gentle, precision="bf16", micro_batches=2)
    losses = [(exact.train_step(batch).item(), low.train_step(batch).item()) for batch in data]
    assert losses[-1][0] < 0.8 * losses[0][0]
    assert max(abs(a - b) / a for a, b in losses) < 0.05
    assert low.grad_norm is not None and low.grad_norm.dtype is torch.float32
    state = low.state_dict()
    for name, parameter in low.module.named_parameters():
        assert state[name].dtype is torch.float32
        assert torch.equal(parameter, state[name].to(torch.bfloat16))
    TinyLM().load_state_dict(state, strict=True)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def test_small_updates_add_up() -> None:
    # one step changes 1.0 by 2**-12, which bfloat16 (8 bits) rounds away; 64 steps change it by 2**-6
    sgd = partial(torch.optim.SGD, lr=2.0**-12)
    options: dict[str, Any] = {
        "optimizer": sgd,
        "loss": lambda output, batch: output.sum(),
        "count": lambda batch: 1,
        "precision": "bf16",
    }
    engine = engine_of(One(), **options)
    batch = {"x": torch.ones(4)}
    engine.train_step(batch)
    assert torch.equal(engine.module.w.float(), torch.ones(4))
    for _ in range(63):
        engine.train_step(batch)
    assert torch.equal(engine.state_dict()["w"], torch.full((4,), 1 - 2.0**-6))
    assert torch.equal(engine.module.w.float(), torch.full((4,), 1 - 2.0**-6))


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    # 256 + 1 is 256 in bfloat16
    options: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=1.0),
        "loss": lambda output, batch: output.sum(),
        "count": lambda batch: len(batch["x"]),
        "precision": "bf16",
        "micro_batches": 4,
    }
    engine = engine_of(One(), **options)
    engine.train_step({"x": torch.tensor([[1024.0], [4.0], [4.0], [4.0]]).expand(4, 4)})
    assert torch.equal(engine.state_dict()["w"], torch.full((4,), 1.0 - 259.0))


def test_frozen_parameters_are_not_rounded_in_the_state() -> None:
    model = TinyLM()
    model.up.requires_grad_(False)
    engine = engine_of(model, precision="bf16")
    engine.train_step(batches(1)[0])
    assert engine.module.up.weight.dtype is torch.bfloat16
    assert torch.equal(engine.state_dict()["up.weight"], model.up.weight)


def test_outputs_reach_the_loss_in_float32_and_inputs_are_cast() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4
        )
    )
    seen = []

    def image_loss(output: Any, batch: Any) -> torch.Tensor:
        seen.append((output.logits.dtype, batch["pixel_values"].dtype))
        return output.logits.square().sum()

    engine = engine_of(model, precision="bf16", loss=image_loss, count=lambda batch: len(batch["pixel_values"]))
    engine.train_step({"pixel_values": torch.randn(2, 3, 8, 8)})
    assert seen == [(torch.float32, torch.float32)]  # the loss sees the batch as it was given


def test_rotary_tables_keep_float32() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=23,
        )
    )
    engine = engine_of(
        model,
        precision="bf16",
        inputs=lambda batch: {"input_ids": batch["ids"]},
        loss=lambda output, batch: loss(output.logits, batch),
    )
    assert torch.equal(engine.module.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    exact = copy.deepcopy(model)
    (batch,) = batches(1)
    mean = loss(exact(batch["ids"]).logits, batch) / count(batch)
    torch.testing.assert_close(engine.train_step(batch), mean.detach(), rtol=1e-2, atol=0)


def test_batch_norm_keeps_float32_beside_its_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    engine = engine_of(
        model,
        precision="bf16",
        loss=lambda output, batch: output.square().sum(),
        count=lambda batch: len(batch),
    )
    engine.train_step(torch.randn(4, 3, 4, 4))
    assert engine.module[0].weight.dtype is torch.bfloat16
    assert engine.module[1].weight.dtype is torch.float32
    assert engine.module[1].running_mean.any() and not model[1].running_mean.any()
    assert not torch.equal(engine.module[1].bias, model[1].bias)  # it is trained all the same


def test_refuses_overlapping_windows() -> None:
    model = nn.Module()
    flat = torch.arange(6.0)
    model.a, model.b = nn.Parameter(flat[:4]), nn.Parameter(flat[3:])
    with pytest.raises(BuildError, match=r"at 'b': it shares memory with 'a'.*Write precision=\"fp32\""):
        engine_of(model, precision="bf16")
    model.b = nn.Parameter(flat[4:])
    engine_of(model, precision="bf16")
