"""A compiled module is compiled in every scenario, and what verify compiled is gone afterwards."""

from typing import Any

import pytest
import torch

import slapo_py as slapo
from slapo_py.errors import VerificationError
from tests.models import ids, net
from tests.patterns.functions import block_mlp

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at it

SEEN: list[torch.dtype] = []


def counted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    SEEN.append(inputs[0].dtype)
    return graph.forward


def wrong_in_float16(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    if not any(one.dtype is torch.float16 for one in inputs if isinstance(one, torch.Tensor)):
        return graph.forward
    return lambda *args: [one * 1.05 for one in graph.forward(*args)]


@pytest.fixture(autouse=True)
def compiler() -> Any:
    torch._dynamo.reset()
    SEEN.clear()
    yield
    torch._dynamo.reset()


def test_what_is_wrong_when_compiled_for_the_last_scenarios() -> None:
    sch = slapo.create_schedule(net(), (ids(),))
    sch["blocks.0.up"].compile(backend=wrong_in_float16)
    sch["blocks.1.up"].compile(backend=wrong_in_float16)
    with pytest.raises(VerificationError, match='in the scenario "model in float16"') as caught:
        sch.verify()
    assert (caught.value.report.module, caught.value.report.step) == ("blocks.0.up", 1)


def test_the_limit_of_the_users_modules_is_not_used_up() -> None:
    sch = slapo.create_schedule(net(), (ids(),))
    sch["blocks.0"].compile(backend=counted)
    assert sch.verify().grade in ("equal", "rounding")
    assert {torch.float32, torch.bfloat16, torch.float16} <= set(SEEN)
    limit = torch._dynamo.config.recompile_limit
    before = len(SEEN)
    sch.module(ids())
    assert len(SEEN) == before + 1
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("fused", [True, False])
def test_inductor_draws_the_masks_of_the_original_and_is_rounding(fused: bool) -> None:
    sch = slapo.create_schedule(net(), {"ids": ids()})
    if fused:
        sch.select("blocks.*").trace().fuse(block_mlp, compiler="inductor")
    else:
        sch.select("blocks.*").compile()
    report = sch.verify()
    assert report.grade == "rounding"
    assert "compiled modules drew their random numbers as uncompiled ones do" in str(report)
