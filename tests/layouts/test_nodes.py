"""What is asked of the nodes of a recording again and again is answered once, and only when it is finished."""

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.layouts.checking.check import checked
from slapo_py.layouts.checking.faults import Look
from slapo_py.layouts.recording.nodes import carries, operation_of, readers
from slapo_py.layouts.recording.record import record
from tests.layouts.plans import PLANS


class Parts(nn.Module):
    """Several results that are taken as one, and one that is packed: recorded, then put in order."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.stack(x.unbind(0)).view(x.shape) * torch.cat((b, a), -1)


@pytest.mark.parametrize("training", [False, True])
def test_a_recording_is_finished_before_anything_is_asked(training: bool) -> None:
    sch = slapo.create_schedule(Parts(), (torch.ones(3, 4),))
    nodes = list(record(sch, training).graph.nodes)
    assert not [key for node in nodes for key in node.meta if key.startswith("kept")]
    stack = next(node for node in nodes if getattr(node.target, "__name__", "") == "stack")
    assert operation_of(stack) is operation_of(stack)
    assert [one.name for one in readers(stack)] == [one.name for one in stack.users]
    assert carries(next(iter(stack.users)))
    assert {key for key in stack.meta if key.startswith("kept")} == {"kept operation_of", "kept readers"}


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_right_schedule_takes_one_look(name: str, sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gathered along the sequence asks for no other split of the weight that it is gathered for."""
    plan = PLANS[name]
    sch = plan.schedule().auto_sync("tp", pins=plan.pins if sequence else None)
    looks, at = [], Look.at
    monkeypatch.setattr(Look, "at", lambda self, asked: looks.append(asked) or at(self, asked))
    assert checked(sch, record(sch), "tp", 2)[1] == []
    assert len(looks) == 1
