"""Seven families, split by hand and completed by auto_sync, on 2 and 4 simulated ranks against the whole."""

from collections import Counter

import pytest
import torch
from torch import Tensor

import slapo_py as slapo
from slapo_py.layouts.check import checked
from slapo_py.layouts.record import record
from slapo_py.layouts.simulate import Simulated, reduce, simulate
from slapo_py.layouts.state import Typing
from tests.fingerprint import changes, fingerprint
from tests.layouts.plans import PLANS, Plan


def first_output(value: object) -> Tensor:
    return next(one for one in torch.utils._pytree.tree_leaves(tuple(value.values())) if isinstance(one, Tensor))  # type: ignore[attr-defined]


def compare(sch: slapo.Schedule, plan: Plan, ranks: int, dtype: torch.dtype) -> tuple[Typing, Simulated, float]:
    """The placements, what the ranks sent, and the largest error of outputs and all gradients, relative."""
    typing, faults = checked(sch, record(sch), "tp", ranks)
    assert [str(one.message) for one in faults] == []
    model = sch.original.to(dtype).train()
    inputs = plan.inputs()
    torch.manual_seed(5)
    expected = first_output(model(**inputs))
    seed = torch.randn_like(expected)
    expected.backward(seed)
    torch.manual_seed(5)
    found = simulate(typing, model, inputs, dtype)
    torch.autograd.backward(found.outputs[0], [seed] * ranks)
    reduce(found, typing)
    errors = [(one - expected).abs().max() / expected.abs().max() for one in found.outputs[0]]
    named = dict(model.named_parameters(remove_duplicate=False))
    top = max(one.grad.abs().max() for one in model.parameters() if one.grad is not None)
    assert len({id(named[name]) for name in found.parameters}) == sum(
        one.grad is not None for one in model.parameters()
    )
    for name in found.parameters:
        gradient = found.gradient(name)
        assert gradient is not None, name
        errors.append((gradient - named[name].grad).abs().max() / top)
    model.zero_grad()
    return typing, found, float(max(errors).detach())


def of_second_layer(found: Simulated, prefix: str) -> dict[tuple[str, str], int]:
    """The collectives inside the second of two layers, but for the sums of parameters' gradients."""
    counts = Counter(one[:2] for one in found.sent if f"{one[2]}.".startswith(f"{prefix}1.") and one[0] != "parameter")
    return dict(counts)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PLANS)
def test_tensor_parallel(name: str, ranks: int) -> None:
    plan = PLANS[name]
    sch = plan.schedule()
    before = fingerprint(sch.original)
    sch.auto_sync("tp", ranks=ranks)
    assert changes(before, fingerprint(sch.original)) == []
    dtype = torch.float32 if name == "gemma2" else torch.float64  # Gemma casts to float32 by itself
    _, found, error = compare(sch, plan, ranks, dtype)
    assert error <= (1e-5 if name == "gemma2" else 1e-12)
    for prefix, count in plan.layer.items():
        expected = {("forward", "all_reduce"): count, ("backward", "all_reduce"): count}
        assert of_second_layer(found, prefix) == expected
    steps = len(sch.history)
    sch.auto_sync("tp", ranks=ranks)
    assert len(sch.history) == steps, "auto_sync is idempotent"


@pytest.mark.parametrize("name", [name for name in PLANS if name not in ("gemma2", "t5", "opt")])
def test_sequence_parallel(name: str) -> None:
    plan = PLANS[name]
    sch = plan.schedule().auto_sync("tp", pins=plan.sequence())
    _, found, error = compare(sch, plan, 2, torch.float64)
    assert error <= 1e-12
    for prefix, count in plan.layer.items():
        assert of_second_layer(found, prefix) == {
            ("forward", "all_gather"): count, ("forward", "reduce_scatter"): count,
            ("backward", "all_gather"): count, ("backward", "reduce_scatter"): count,
        }  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_steps_replay(name: str) -> None:
    plan = PLANS[name]
    sch = plan.schedule().auto_sync("tp")
    again = slapo.create_schedule(sch.original, plan.inputs())
    sch.history.replay(again)
    assert again.history == sch.history and again.check() == []
    again.undo()
    assert len(again.check()) == 1


def test_tracing_and_checkpoints_commute() -> None:
    plan = PLANS["llama"]
    one, other = plan.schedule(), plan.schedule()
    one.auto_sync("tp")
    for layer in other.select("model.layers.*"):
        layer.checkpoint()
    other.auto_sync("tp")
    synced = [str(step) for step in one.history if step.primitive == "sync"]
    assert synced and synced == [str(step) for step in other.history if step.primitive == "sync"]
