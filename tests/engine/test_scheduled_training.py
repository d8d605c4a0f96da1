"""Scheduled models in training: the schedule is really taken, and the losses are the original's to the bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slapo_py.schedule import Schedule, create_schedule
from slapo_py.tracing import trace_of
from tests.engine.models import adamw, batches, count, engine_of, fingerprint, same_state


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=23, n_positions=8, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=23,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def schedule(model: nn.Module) -> Schedule:
    """All layers traced, half of them checkpointed."""
    sch = create_schedule(model, {"input_ids": batches(1)[0]["ids"]})
    for index, layer in enumerate(sch.select("transformer.h.*" if hasattr(model, "transformer") else "model.layers.*")):
        layer.trace()
        if index % 2:
            layer.checkpoint()
    return sch


OPTIONS: dict[str, Any] = {
    "inputs": lambda batch: {"input_ids": batch["ids"]},
    "loss": lambda output, batch: F.cross_entropy(
        output.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    ),
}


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("donate", [False, True])
def test_losses_are_the_originals_to_the_bit(make: Any, donate: bool) -> None:
    model = make()
    plain = copy.deepcopy(model).train()
    sch = schedule(model)
    before = fingerprint(model)
    engine = engine_of(sch, donate=donate, **OPTIONS)
    if not donate:
        assert fingerprint(model) == before
    optimizer = adamw(plain.parameters())
    data = batches(5, rows=4) + batches(5, rows=6)
    torch.manual_seed(3)
    expected = []
    for batch in data:
        mean = OPTIONS["loss"](plain(input_ids=batch["ids"]), batch) / count(batch)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(mean.item())
    torch.manual_seed(3)
    assert [engine.train_step(batch).item() for batch in data] == expected
    assert same_state(engine.state_dict(), plain)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_traces_are_taken(make: Any, precision: str) -> None:
    engine = engine_of(schedule(make()), precision=precision, **OPTIONS)
    engine.train_step(batches(1)[0])
    engine.eval_step(batches(1)[0])
    traced = {path: one for path, one in engine.module.named_modules() if trace_of(one)}
    assert len(traced) == 2
    assert {path: dict(trace_of(one).missed_guards(one)) for path, one in traced.items()} == {
        path: {} for path in traced
    }


def test_modes_of_the_copy_are_kept() -> None:
    sch = schedule(gpt2())
    sch.module.transformer.drop.eval()
    engine = engine_of(sch, **OPTIONS)
    assert engine.module.training and not engine.module.transformer.drop.training


def test_saved_scheduled_loads_into_plain(tmp_path: Path) -> None:
    model = gpt2()
    engine = engine_of(schedule(model), **OPTIONS)
    engine.train_step(batches(1)[0])
    engine.save(tmp_path / "run")
    other = engine_of(model, **OPTIONS)
    other.load(tmp_path / "run")
    assert same_state(other.module, engine.module)
    gpt2().load_state_dict(engine.state_dict(), strict=True)
