"""Ten families, split by hand and completed by auto_sync, on 2 and 4 simulated ranks against the whole."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import TypeGuard

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import slapo_py as slapo
from slapo_py.layouts.checking.check import checked
from slapo_py.layouts.inference.state import Typing
from slapo_py.layouts.recording.record import record
from slapo_py.layouts.simulating.simulate import Simulated, reduce, simulate
from slapo_py.verify.noise import Exact
from tests.fingerprint import changes, fingerprint
from tests.layouts.plans import PLANS, Plan
from tests.slow import slow_but


def first_output(value: object) -> Tensor:
    if isinstance(value, dict):
        value = tuple(value.values())
    return next(one for one in tree_leaves(value) if isinstance(one, Tensor))


def compare(sch: slapo.Schedule, plan: Plan, ranks: int, dtype: torch.dtype) -> tuple[Typing, Simulated, float]:
    """The placements, what the ranks sent, and the largest error of outputs and all gradients, relative.

    In `dtype` throughout: casts to float32 that a model writes down are lifted.
    """
    typing, faults = checked(sch, record(sch), "tp", ranks)
    assert [str(one.message) for one in faults] == []
    model = sch.original.to(dtype).train()
    inputs = {name: one.to(dtype) if is_real(one) else one for name, one in plan.inputs().items()}
    with Exact(dtype):
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
    with_gradient = {id(named[name]) for name in found.parameters if found.gradient(name) is not None}
    assert with_gradient == {id(one) for one in model.parameters() if one.grad is not None}
    for name in found.parameters:
        gradient, whole = found.gradient(name), named[name].grad
        if gradient is not None and whole is not None:
            errors.append((gradient - whole).abs().max() / top)
    model.zero_grad()
    return typing, found, float(max(errors).detach())


def is_real(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point()


def of_second_layer(found: Simulated, prefix: str) -> dict[tuple[str, str], int]:
    """The collectives inside the second of two layers, but for the sums of parameters' gradients."""
    counts = Counter(one[:2] for one in found.sent if f"{one[2]}.".startswith(f"{prefix}1.") and one[0] != "parameter")
    return dict(counts)


@pytest.mark.parametrize("ranks", slow_but([2], [2, 4]))
@pytest.mark.parametrize("name", PLANS)
def test_tensor_parallel(name: str, ranks: int) -> None:
    plan = PLANS[name]
    sch = plan.schedule()
    before = fingerprint(sch.original)
    sch.auto_sync("tp", ranks=ranks)
    assert changes(before, fingerprint(sch.original)) == []
    _, found, error = compare(sch, plan, ranks, torch.float64)
    assert error <= 1e-12
    for prefix, (forward, backward) in plan.layer.items():
        expected = {("forward", "all_reduce"): forward, ("backward", "all_reduce"): backward}
        assert of_second_layer(found, prefix) == expected
    steps = len(sch.history)
    sch.auto_sync("tp", ranks=ranks)
    assert len(sch.history) == steps, "auto_sync is idempotent"


@pytest.mark.parametrize("ranks", slow_but([2], [2, 4]))
@pytest.mark.parametrize("name", [name for name, plan in PLANS.items() if plan.pins])
def test_sequence_parallel(name: str, ranks: int) -> None:
    plan = PLANS[name]
    sch = plan.schedule().auto_sync("tp", pins=plan.pins, ranks=ranks)
    _, found, error = compare(sch, plan, ranks, torch.float64)
    assert error <= 1e-12
    for prefix, (count, _) in plan.layer.items():
        pairs = Counter(product(("forward", "backward"), ("all_gather", "reduce_scatter")))
        expected = Counter(dict.fromkeys(pairs, count)) + Counter(plan.more)
        assert of_second_layer(found, prefix) == expected


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", slow_but(["gpt2", "opt", "wide_resnet"], PLANS))
def test_the_steps_are_the_same_for_any_batch(name: str, sequence: bool) -> None:
    plan = PLANS[name]
    if sequence and not plan.pins:
        assert name == "wide_resnet"  # it has no sequence
        return
    written = []
    for batch, length in zip((2, 3), plan.lengths):
        sch = plan.schedule(inputs=plan.inputs(batch, length)).auto_sync("tp", pins=plan.pins if sequence else None)
        written.append(str(sch.history))
    assert written[0] == written[1]


@pytest.mark.parametrize("name", ["opt", "mixtral"])
def test_blocks_follow_the_batch(name: str) -> None:
    plan = PLANS[name]
    sch = plan.schedule().auto_sync("tp", pins=plan.pins)
    other = plan.inputs(3, 12)
    again = slapo.create_schedule(sch.original, other)
    sch.history.replay(again)
    assert 'dim=0, parts="batch"' in str(again.history)
    _, _, error = compare(again, replace(plan, inputs=lambda: other), 2, torch.float64)
    assert error <= 1e-12


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
