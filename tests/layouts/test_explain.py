"""The checker in whole models: one wrong step gives one message, and its line mends the schedule."""

import functools
import random
from collections.abc import Callable

import pytest

import slapo_py as slapo
from slapo_py.history import History, Step
from slapo_py.layouts.inference.state import Fault
from slapo_py.layouts.placement import S
from slapo_py.layouts.syncs import COLLECTIVES
from tests.layouts.plans import PLANS
from tests.slow import slow_but

MODELS = ("llama", "gpt2", "bert")
LAYER = {"llama": "model.layers.1.", "gpt2": "transformer.h.1.", "bert": "bert.encoder.layer.1."}
NORM = {"llama": "post_attention_layernorm", "gpt2": "ln_2", "bert": "output.LayerNorm"}
PROJECTION = {"llama": "self_attn.k_proj", "gpt2": "mlp.c_fc", "bert": "intermediate.dense"}

Steps = list[Step]
Plant = Callable[[str, Steps], tuple[Steps, Step | None]]
"""The steps of a schedule -> the same with a fault, and the step of it that is wrong, if there is one."""


@functools.cache
def right(name: str, sequence: bool) -> slapo.Schedule:
    plan = PLANS[name]
    return plan.schedule().auto_sync("tp", pins=plan.pins if sequence else None)


def replayed(name: str, sequence: bool, steps: Steps) -> slapo.Schedule:
    sch = slapo.create_schedule(right(name, sequence).original, PLANS[name].inputs())
    History(steps).replay(sch)
    return sch


def made(line: str, name: str, sequence: bool) -> Step:
    """The step that a line makes."""
    sch = slapo.create_schedule(right(name, sequence).original, PLANS[name].inputs())
    eval(line, {"sch": sch, "slapo": slapo})
    return sch.history[-1]


def of_layer(name: str, steps: Steps, primitive: str, side: str) -> Step:
    """The last sync of the layer at this side."""
    return [one for one in steps if one.primitive == "sync" and one.path.startswith(LAYER[name]) and side in one.args][
        -1
    ]


def missing_forward(name: str, steps: Steps) -> tuple[Steps, Step | None]:
    gone = of_layer(name, steps, "sync", "output")
    return [one for one in steps if one is not gone], None


def missing_backward(name: str, steps: Steps) -> tuple[Steps, Step | None]:
    gone = of_layer(name, steps, "sync", "input")
    return [one for one in steps if one is not gone], None


def doubled(value: str | None, grad: str | None) -> Plant:
    def plant(name: str, steps: Steps) -> tuple[Steps, Step | None]:
        more = made(f'sch["{LAYER[name]}{NORM[name]}"].sync("input", {value!r}, grad={grad!r})', name, False)
        return [*steps, more], more

    return plant


def wrong_split(name: str, steps: Steps) -> tuple[Steps, Step | None]:
    path = LAYER[name] + PROJECTION[name]
    old = next(one for one in steps if one.primitive == "shard" and one.path == path)
    new = made(f'sch["{path}"].shard("weight", dim="in")', name, False)
    return [new if one is old else one for one in steps], new


def wrong_dim_of_sync(name: str, steps: Steps) -> tuple[Steps, Step | None]:
    old = of_layer(name, steps, "sync", "output")
    new = made(f'sch["{old.path}"].sync("output", "reduce_scatter", dim=2)', name, True)
    return [new if one is old else one for one in steps], new


def scattered(name: str, steps: Steps) -> tuple[Steps, Step | None]:
    old = of_layer(name, steps, "sync", "output")
    new = made(f'sch["{old.path}"].sync("output", "reduce_scatter", dim=1)', name, True)
    return [new if one is old else one for one in steps], new


PLANTS: dict[str, tuple[Plant, bool | None]] = {
    "missing forward": (missing_forward, None),
    "missing backward": (missing_backward, None),
    "doubled forward": (doubled("all_reduce", "auto"), None),
    "doubled backward": (doubled(None, "all_reduce"), None),
    "wrong dim of a split": (wrong_split, None),
    "wrong dim of a reduce-scatter": (wrong_dim_of_sync, True),
    "reduce-scatter for an all-reduce": (scattered, False),
}
"""Faults, and whether they are of sequence parallelism (None: of both)."""


def mends(fault: Fault, name: str, sequence: bool, steps: Steps, wrong: Step | None) -> bool:
    """Whether the schedule is right with the fault's line in place of the step that is wrong."""
    left = [one for one in steps if one is not wrong]
    more = [made(fault.line, name, sequence)] if fault.line else []
    return replayed(name, sequence, [*left, *more]).check() == []


CASES = [(plant, one) for plant, (_, only) in PLANTS.items() for one in (False, True) if only in (None, one)]


@pytest.mark.parametrize(("plant", "sequence"), CASES, ids=[f"{a}-{'sequence' if b else 'plain'}" for a, b in CASES])
@pytest.mark.parametrize("name", slow_but(["gpt2"], MODELS))
def test_one_fault_in_a_model(name: str, plant: str, sequence: bool) -> None:
    fault, _ = PLANTS[plant]
    steps, wrong = fault(name, list(right(name, sequence).history))
    found = replayed(name, sequence, steps).check()
    assert len(found) == 1, [one.message for one in found]
    assert LAYER[name] in found[0].message
    assert mends(found[0], name, sequence, steps, wrong), found[0].message


def changed(step: Step, rng: random.Random) -> str:
    """Another collective, another gradient or another dim at the same border."""
    given = {**dict(zip(("at", "value", "grad", "dim"), step.args)), **step.kwargs}
    what = rng.choice(["value", "grad", *(["dim"] if given.get("dim") is not None else [])])
    if what == "dim":
        given["dim"] = rng.choice([dim for dim in (0, 1, 2) if dim != given["dim"]])
    else:
        given[what] = rng.choice([one for one in (*COLLECTIVES, None) if one != given.get(what)])
    if given.get("value") in COLLECTIVES[1:]:
        given.setdefault("dim", 1)
    if given.get("value") is None and given.get("grad") is None:
        given["grad"] = "all_gather"
    if given.get("value") in (None, "all_reduce"):
        given.pop("dim", None)
    place = f'sch["{step.path}"]' if step.path else "sch"
    return f"{place}.sync({', '.join(f'{key}={value!r}' for key, value in given.items())})"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("name", slow_but(["llama"], MODELS))
def test_a_random_step_left_out_or_changed(name: str, sequence: bool, seed: int) -> None:
    rng = random.Random(f"{name} {sequence} {seed}")
    steps = list(right(name, sequence).history)
    gone = rng.choice([one for one in steps if one.primitive != "shard"])
    wrong = None
    if gone.primitive == "sync" and rng.random() < 0.7:
        wrong = made(changed(gone, rng), name, sequence)
    steps = [wrong if one is gone else one for one in steps if one is not gone or wrong is not None]
    found = replayed(name, sequence, steps).check()
    assert len(found) == 1, (gone, wrong, [one.message for one in found])
    assert mends(found[0], name, sequence, steps, wrong), (gone, wrong, found[0].message)


@pytest.mark.parametrize("name", slow_but(["llama", "opt", "vit", "wide_resnet"], PLANS))
def test_what_is_right_is_silent(name: str) -> None:
    assert right(name, False).check() == []
    if PLANS[name].pins:
        assert right(name, True).check() == []


def test_two_faults_give_two_messages() -> None:
    steps = list(right("llama", True).history)
    steps, wrong = wrong_dim_of_sync("llama", steps)
    steps = [one for one in steps if (one.primitive, one.path) != ("reduce_grad", "model.norm")]
    found = replayed("llama", True, steps).check()
    assert [one.kind for one in found] == ["wrong in forward", "gradient not summed"]


def test_a_pin_that_is_missing() -> None:
    """All the rest of sequence parallelism is there: only its first step is missing."""
    pin = next(iter(PLANS["gpt2"].pins))
    steps = [one for one in right("gpt2", True).history if one.path != pin]
    found = replayed("gpt2", True, steps).check()
    assert [one.kind for one in found] == ["missing in forward"]
    assert f'input 0 of "{pin}" is R and is needed {S(1)}' in found[0].message
    assert mends(found[0], "gpt2", True, steps, None)
