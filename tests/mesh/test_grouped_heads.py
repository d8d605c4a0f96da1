"""Fewer heads for keys and values than ranks: each rank makes as many copies of them as its queries need."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_py as slapo
from slapo_py.distributed.mesh import Mesh
from tests.mesh.conftest import Run
from tests.mesh.whole import compare_built


def model(heads: int, groups: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=groups, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def schedule(heads: int, groups: int) -> slapo.Schedule:
    ids = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # padded, so that keys and values are repeated as tensors, and not by the kernel
    return slapo.create_schedule(model(heads, groups), {"input_ids": ids, "attention_mask": mask, "use_cache": False})


def _one_axis(ranks: int, groups: int) -> float:
    """Keys and values whole on each rank; the queries of every group are split."""
    sch = schedule(8, groups)
    for layer in sch.select("model.layers.*"):
        layer["self_attn.q_proj"].shard("weight", dim="out", parts=groups)
        layer["self_attn.o_proj"].shard("weight", dim="in", parts=groups)
    sch.auto_sync("tp", ranks=ranks)
    assert 'configure(num_key_value_groups=slapo.per_rank("tp"))' in str(sch.history)
    mesh = Mesh.of({"tp": ranks})
    return compare_built(sch, slapo.build(sch, mesh=mesh.sizes), mesh).error


@pytest.mark.parametrize("groups", [1, 2])
def test_keys_and_values_that_every_rank_has_whole(groups: int, on_ranks: Run) -> None:
    for error in on_ranks(2, _one_axis, 2, groups):
        assert error <= 1e-12


@pytest.mark.slow
def test_more_ranks_than_heads_of_keys(on_ranks: Run) -> None:
    for error in on_ranks(4, _one_axis, 4, 1):
        assert error <= 1e-12


def _two_axes() -> float:
    """Heads of keys over one axis, the queries of each over another."""
    sch = schedule(8, 2)
    for layer in sch.select("model.layers.*"):
        for name in ("q", "k", "v"):
            layer[f"self_attn.{name}_proj"].shard("weight", dim="out")
        layer["self_attn.o_proj"].shard("weight", dim="in")
        layer["self_attn.q_proj"].shard("weight", dim="out", axis="tq", parts=2)
        layer["self_attn.o_proj"].shard("weight", dim="in", axis="tq", parts=2)
        for axis in ("tp", "tq"):
            for name in ("gate", "up"):
                layer[f"mlp.{name}_proj"].shard("weight", dim="out", axis=axis)
            layer["mlp.down_proj"].shard("weight", dim="in", axis=axis)
    sch.auto_sync("tp", ranks=2)
    sch.auto_sync("tq", ranks=2)
    mesh = Mesh.of({"tp": 2, "tq": 2})
    return compare_built(sch, slapo.build(sch, mesh=mesh.sizes), mesh).error


@pytest.mark.slow
def test_heads_of_keys_and_queries_on_two_axes(on_ranks: Run) -> None:
    for error in on_ranks(4, _two_axes):
        assert error <= 1e-12
