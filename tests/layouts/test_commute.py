"""Splitting a model commutes with rewriting it: the same syncs in any order, and the numbers of the whole."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slapo_py as slapo
from slapo_py.errors import PlacementError, StepError
from tests.layouts.plans import PLANS
from tests.layouts.test_families import compare
from tests.slow import slow_but

Rewrite = Callable[[slapo.Schedule], None]
RECORDED = ("sync", "reduce_grad", "configure")


def scaled_gelu(h: Tensor, scale: float = 1.0) -> Tensor:
    """What stands for silu here: other operations, whose arithmetic is the same."""
    return h * torch.sigmoid(h) * scale


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def each(glob: str, step: Callable[[slapo.Schedule], object]) -> Rewrite:
    def rewrite(sch: slapo.Schedule) -> None:
        for place in sch.select(glob):
            step(place)

    return rewrite


def sdpa(sch: slapo.Schedule) -> None:
    sch.attention("sdpa")


LLAMA: dict[str, Rewrite] = {
    "trace layers": each("model.layers.*", lambda place: place.trace()),
    "trace mlp": each("model.layers.*.mlp", lambda place: place.trace()),
    "trace attention": each("model.layers.*.self_attn", lambda place: place.trace()),
    "trace flat": each("model.layers.*.mlp", lambda place: place.trace(flatten=True)),
    "checkpoint": each("model.layers.*", lambda place: place.checkpoint()),
    "swiglu": each("model.layers.*.mlp", lambda place: place.fuse("swiglu")),
    "rms_norm": each("model.layers.*.*_layernorm", lambda place: place.fuse("rms_norm")),
    "rms_norm in the layer": each("model.layers.*", lambda place: place.fuse("rms_norm")),
    "add_rms_norm": each("model.layers.*", lambda place: place.fuse("add_rms_norm")),
    "rope": each("model.layers.*.self_attn", lambda place: place.fuse("rope")),
    "sdpa": sdpa,
    "replace": each(
        "model.layers.*.mlp", lambda place: place.trace(flatten=True, leaves=["*_proj"]).replace(scaled_gelu, F.silu)
    ),
    "group": each(
        "model.layers.*.mlp",
        lambda place: place.trace(flatten=True, leaves=["*_proj"]).group(gated, "gated"),
    ),
}
GPT2: dict[str, Rewrite] = {
    "trace layers": each("transformer.h.*", lambda place: place.trace()),
    "trace mlp": each("transformer.h.*.mlp", lambda place: place.trace()),
    "trace attention": each("transformer.h.*.attn", lambda place: place.trace()),
    "trace flat": each("transformer.h.*.mlp", lambda place: place.trace(flatten=True)),
    "checkpoint": each("transformer.h.*", lambda place: place.checkpoint()),
    "decompose": each("transformer.h.*.mlp.c_fc", lambda place: place.decompose()),
    "bias_gelu": each("transformer.h.*.mlp", lambda place: place.fuse("bias_gelu")),
    "layer_norm": each("transformer.h.*", lambda place: place.fuse("layer_norm")),
    "masked_softmax": each("transformer.h.*.attn", lambda place: place.fuse("masked_softmax")),
    "sdpa": sdpa,
}
CASES = [("llama", name) for name in LLAMA] + [("gpt2", name) for name in GPT2]


def recorded(sch: slapo.Schedule) -> set[str]:
    """The steps of auto_sync. Conv1D in its parts doesn't read `nf` any more, so that it need not be divided."""
    steps = {str(step) for step in sch.history if step.primitive in RECORDED}
    return {step for step in steps if 'c_fc"].configure(nf=' not in step}


@functools.cache
def plain(family: str) -> set[str]:
    """What auto_sync finds in the model as it is."""
    return recorded(PLANS[family].schedule().auto_sync("tp"))


QUICK = [
    ("llama", "trace layers"), ("llama", "swiglu"), ("llama", "add_rms_norm"), ("llama", "group"),
    ("gpt2", "trace flat"), ("gpt2", "decompose"), ("gpt2", "bias_gelu"), ("gpt2", "checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize("family, name", slow_but(QUICK, CASES))
def test_a_rewrite_commutes(family: str, name: str, tmp_path: Path) -> None:
    plan, rewrite = PLANS[family], (LLAMA if family == "llama" else GPT2)[name]
    if name == "masked_softmax":
        plan = replace(plan, attention="eager")
    first, last = plan.schedule(), plan.schedule()
    rewrite(first)
    first.auto_sync("tp")
    last.auto_sync("tp")
    rewrite(last)
    assert recorded(first) == recorded(last) == plain(family) != set()
    assert [one.message for one in last.check()] == []
    _, _, error = compare(first, plan, 2, torch.float64)
    assert error <= (1e-6 if "rms_norm" in name else 1e-12)  # the kernel's sums are in float32
    last.history.save(tmp_path / "history.json")
    again = slapo.create_schedule(last.original, plan.inputs())
    loaded = slapo.History.load(tmp_path / "history.json", allow=("tests", "torch"))
    loaded.replay(again)
    assert again.history == last.history and recorded(again) == plain(family)


ALL = ("swiglu", "rms_norm", "rope", "trace layers", "checkpoint")


@pytest.mark.parametrize("sequence", [False, True])
def test_all_at_once(sequence: bool) -> None:
    plan = PLANS["llama"]
    sch, plain = plan.schedule(), plan.schedule()
    pins = plan.pins if sequence else None
    for name in ALL:
        LLAMA[name](sch)
    written = len(sch.history)
    sch.auto_sync("tp", pins=pins)
    plain.auto_sync("tp", pins=pins)
    assert recorded(sch) == recorded(plain)
    found, expected = (slapo.plan(one, mesh={"tp": 2}) for one in (sch, plain))
    assert found.faults == [] and found.traffic == expected.traffic and found.held == expected.held
    _, _, error = compare(sch, plan, 2, torch.float64)
    assert error <= 1e-6
    assert sch.undo(len(sch.history) - written).check() != []  # the syncs are gone, the rest is there
    assert [step.primitive for step in sch.history if step.primitive in RECORDED] == []


def test_a_step_that_would_bury_a_sync_is_refused() -> None:
    """The all-reduce after the second product of GPT-2's layers lies before the addition of the bias, or after it."""
    sch = PLANS["gpt2"].schedule().auto_sync("tp")
    block, steps = sch["transformer.h.0"], len(sch.history)
    with pytest.raises(StepError, match=r'output 0 of "transformer.h.0.attn.c_proj", where a sync is \(sch'):
        block.fuse("bias_dropout_add")
    block["mlp"].trace()
    with pytest.raises(StepError, match=r'output 0 of "transformer.h.0.mlp.c_proj", where a sync is \(sch'):
        block["mlp"].replace(F.gelu, what=lambda x: slapo.call("c_proj", x))
    assert len(sch.history) == steps + 1 and sch.check() == []


def test_a_kernel_that_needs_a_whole_value_within_a_module_is_a_fault() -> None:
    sch = PLANS["gpt2"].schedule()
    sch["transformer.h.0"].fuse("bias_dropout_add")
    with pytest.raises(PlacementError, match="kernel bias_dropout_add in .* needs it R .* at no border of a module"):
        sch.auto_sync("tp")


def test_a_sync_where_no_tensor_goes_by_is_a_fault() -> None:
    sch = PLANS["gpt2"].schedule().auto_sync("tp")
    sch["transformer.h.1.mlp"].fuse("bias_gelu")
    sch["transformer.h.1.mlp.c_fc"].sync("output", None, grad="all_reduce")
    (fault,) = sch.check()
    assert fault.kind == "sync nowhere"
    assert fault.message.startswith('sync at output 0 of "transformer.h.1.mlp.c_fc" takes effect nowhere')
    sch.undo()
    assert sch.check() == []
    sch["transformer.h.1.mlp"].sync("input", None, grad="all_reduce", index=3)
    assert [one.kind for one in sch.check()] == ["sync nowhere"]
