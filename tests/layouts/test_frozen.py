"""Families of which only some parameters are trained: right gradients, and no collective where none flows."""

from collections.abc import Callable

import pytest
import torch

import slapo_py as slapo
from tests.layouts.frozen import train_only, with_low_rank
from tests.layouts.plans import PLANS
from tests.layouts.test_families import compare, of_second_layer

Which = Callable[[str], bool]
NORMS: Which = lambda name: any(word in name.lower() for word in ("norm", "ln_", "bn"))
HEAD: Which = lambda name: name.partition(".")[0] in ("lm_head", "classifier", "cls", "fc")
LAST: Which = lambda name: name.endswith(
    ("1.mlp.down_proj.weight", "1.mlp.c_proj.weight", "1.mlp.fc2.weight", "1.mlp.experts.down_proj", "2.1.conv2.weight")
)
BUT_EMBEDDINGS: Which = lambda name: not any(word in name for word in ("embed", "wte", "wpe", "shared"))


def run(name: str, which: Which, sequence: bool) -> tuple[list[dict[tuple[str, str], int]], list[tuple[str, str, str]]]:
    """The collectives of the second layers, and all."""
    plan = PLANS[name]
    sch = plan.schedule(train_only(plan.model(), which)).auto_sync("tp", pins=plan.pins if sequence else None)
    _, found, error = compare(sch, plan, 2, torch.float64)
    assert error <= 1e-12
    return [of_second_layer(found, prefix) for prefix in plan.layer], found.sent


@pytest.mark.parametrize("name", PLANS)
def test_only_norms_are_trained(name: str) -> None:
    plan = PLANS[name]
    layers, _ = run(name, NORMS, sequence=bool(plan.pins))
    for found, (forward, _) in zip(layers, plan.layer.values(), strict=True):
        kind = "all_gather" if plan.pins else "all_reduce"
        assert found["forward", kind] == forward + plan.more.get(("forward", kind), 0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_all_but_embeddings_are_trained(name: str) -> None:
    layers, sent = run(name, BUT_EMBEDDINGS, sequence=False)
    assert layers == [{("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}]
    assert all(name != "parameter" for name, _, _ in sent)


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_only_the_head_is_trained(name: str, sequence: bool) -> None:
    (found,), _ = run(name, HEAD, sequence)
    kinds = ("all_gather", "reduce_scatter") if sequence else ("all_reduce",)
    assert found == {("forward", kind): 2 for kind in kinds}


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "wide_resnet"])
def test_nothing_is_sent_below_the_last_trained_weight(name: str) -> None:
    layers, sent = run(name, LAST, sequence=False)
    assert all(direction == "forward" for found in layers for direction, _ in found)
    tops = {where.partition(".")[0] for direction, _, where in sent if direction == "backward"}
    assert tops <= {"lm_head", ""}


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("names", [("o_proj",), ("down_proj",), ("q_proj",)])
def test_updates_of_low_rank(names: tuple[str, ...], sequence: bool) -> None:
    plan = PLANS["llama"]
    model = with_low_rank(plan.model(), *names)
    sch = slapo.create_schedule(model, plan.inputs())
    for layer in sch.select("model.layers.*"):
        for path, dim in (("self_attn.q_proj", "out"), ("self_attn.k_proj", "out"), ("self_attn.v_proj", "out"),
                          ("self_attn.o_proj", "in"), ("mlp.gate_proj", "out"), ("mlp.up_proj", "out"),
                          ("mlp.down_proj", "in")):  # fmt: skip
            low = path.partition(".")[2] in names
            layer[f"{path}.linear" if low else path].shard("weight", dim=dim)
            if low:
                layer[f"{path}.{'up' if dim == 'out' else 'down'}"].shard("weight", dim=dim)
    # The update's input has fewer columns than the layer's: what it sees would else be gathered, not the layer's.
    pins = {**plan.pins, **{f"model.layers.{i}.self_attn": slapo.Replicate() for i in (0, 1)}}
    sch.auto_sync("tp", pins=pins if sequence else None)
    _, found, error = compare(sch, plan, 2, torch.float64)
    assert error <= 1e-12
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert trained and all(".up." in name or ".down." in name for name in trained)
    (second,) = [of_second_layer(found, prefix) for prefix in plan.layer]
    kinds = ("all_gather", "reduce_scatter") if sequence else ("all_reduce",)
    assert second == {(way, kind): 2 for way in ("forward", "backward") for kind in kinds}
