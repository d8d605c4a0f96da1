"""Structural schedules of all model families verify as equal."""

import pytest

import slapo_py as slapo
from slapo_py.errors import TraceError
from tests import zoo
from tests.models import tiny_gpt2

QUICK = ("gpt2", "t5", "wide_resnet", "transformer_encoder")


def _verified(name: str) -> slapo.Schedule:
    family = zoo.BY_NAME[name]
    sch = slapo.create_schedule(zoo.make(name), family.inputs(2, 8))
    for path in dict.fromkeys((family.layer, family.attn)):
        try:
            sch[path].trace()
        except TraceError:
            pass  # what can be traced is not the question here
    sch[family.layer].checkpoint()
    report = sch.verify()
    assert report.grade == "equal", str(report)
    assert len(report.rows) >= 12
    assert {row.grade for row in report.rows} == {"equal"}
    return sch


@pytest.mark.parametrize("name", QUICK)
def test_structural_steps_are_equal(name: str) -> None:
    _verified(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(zoo.BY_NAME) - set(QUICK)))
def test_structural_steps_are_equal_on_the_rest(name: str) -> None:
    _verified(name)


def test_every_layer_traced_and_checkpointed() -> None:
    ids = zoo._ids(2, 8) % 31
    sch = slapo.create_schedule(tiny_gpt2(), {"input_ids": ids, "labels": ids})
    for block in sch.select("transformer.h.*"):
        block.trace().checkpoint()
    assert sch.verify(steps=2).grade == "equal"
    assert sch["transformer.h.1.mlp"].verify().grade == "equal"
