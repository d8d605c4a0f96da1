"""slapo.plan: bytes by hand, and the same collectives as the simulated ranks send."""

import resource
import time
from collections import Counter

import pytest
import torch
import transformers as hf

import slapo_py as slapo
from slapo_py.errors import PlacementError
from slapo_py.layouts.checking.check import checked
from slapo_py.layouts.recording.record import record
from slapo_py.layouts.simulating.simulate import reduce, simulate
from tests.layouts.plans import PLANS


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_counts_what_the_ranks_send(name: str) -> None:
    plan = PLANS[name]
    sch = plan.schedule().auto_sync("tp", pins=plan.pins)
    found = slapo.plan(sch, mesh={"dp": 2, "tp": 2})
    assert found.faults == []
    typing, _ = checked(sch, record(sch), "tp", 2)
    ranks = simulate(typing, sch.original, plan.inputs())
    outputs = ranks.outputs[0]
    torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    reduce(ranks, typing)
    planned: Counter[tuple[str, str]] = Counter()
    for one in found.traffic:
        planned[one.direction, one.kind] += one.count
    assert planned == Counter(one[:2] for one in ranks.sent)


def test_bytes_by_hand() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    sch = slapo.create_schedule(model, (torch.randn(4, 8),))
    sch["0"].shard("weight", "bias", dim="out")
    sch["2"].shard("weight", dim="in")
    sch.auto_sync("tp")
    found = slapo.plan(sch, mesh={"tp": 4})
    held = 8 * 16 // 4 + 16 // 4 + 16 * 8 // 4 + 8  # the last bias is whole
    assert (found.parameters, found.gradients, found.optimizer) == (4 * held, 4 * held, 8 * held)
    (forward,) = [one for one in found.traffic if one.direction == "forward"]
    assert (forward.kind, forward.count, forward.bytes) == ("all_reduce", 1, 2 * 3 * 4 * 8 * 4)
    assert str(found.placements["0.weight"]) == "S(0)" and str(found.placements["2.bias"]) == "R"
    assert "forward: all_reduce" in str(found) and "768 B" in str(found)


def test_a_mesh_without_the_axis_is_refused() -> None:
    sch = slapo.create_schedule(torch.nn.Linear(2, 2), (torch.randn(1, 2),))
    with pytest.raises(PlacementError, match='the mesh needs a positive size of "tp"'):
        slapo.plan(sch, mesh={"dp": 2})


@pytest.mark.slow
def test_the_406_b_llama() -> None:
    with torch.device("meta"):
        config = hf.LlamaConfig(
            hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
            num_key_value_heads=8, vocab_size=128256,
        )  # fmt: skip
        model = hf.LlamaForCausalLM(config)
    ids = torch.zeros(1, 128, dtype=torch.long, device="meta")
    sch = slapo.create_schedule(model, {"input_ids": ids, "use_cache": False})
    PLANS["llama"].split(sch)
    began = time.monotonic()
    found = slapo.plan(sch, mesh={"dp": 8, "tp": 8})
    print(f"{time.monotonic() - began:.0f} s, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    print(str(found)[:2000])
    assert sum(one.count for one in found.traffic if one.where.startswith("model.layers")) == 4 * 126
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2e6
