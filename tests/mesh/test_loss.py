"""A loss inside of the model, over classes that are split: no rank ever has the logits whole."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.build.facts import facts_of
from slapo_py.build.slicing import part_of
from slapo_py.distributed.mesh import Mesh
from slapo_py.distributed.traffic import counted
from tests.mesh.conftest import Run


class Language(nn.Module):
    def __init__(self, words: int, smoothing: float) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, 8), nn.Linear(8, words)
        self.smoothing = smoothing

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.table(ids)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), label_smoothing=self.smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("words", [12, 13])
def test_the_loss_of_split_classes(words: int, smoothing: float, on_ranks: Run) -> None:
    for error, gathered, planned in on_ranks(2, _loss, words, smoothing):
        assert error < 1e-14
        assert gathered == planned or words % 2, "uneven parts are padded"


def _loss(words: int, smoothing: float) -> tuple[float, int, int]:
    torch.manual_seed(0)
    model = Language(words, smoothing).double()
    ids, labels = torch.randint(words, (2, 5)), torch.randint(words, (2, 5))
    labels[0, 1] = -100
    sch = slapo.create_schedule(model, (ids, labels))
    sch["table"].shard("weight", dim=0)
    sch["head"].shard("weight", "bias", dim="out")
    sch.auto_sync("tp")
    sizes = {"tp": 2}
    built, mesh = slapo.build(sch, mesh=sizes), Mesh.of(sizes)
    expected = model(ids, labels)
    expected.backward()
    with counted() as traffic:
        found = built(ids, labels)
        found.backward()
    errors = [float((found - expected).detach().abs())]
    theirs = dict(model.named_parameters())
    for name, one in built.named_parameters():
        errors.append(
            float((one.grad - part_of(theirs[name].grad, facts_of(built)[name].placements, mesh)).abs().max())
        )
    every = [Counter[str]() for _ in range(2)]
    dist.all_gather_object(every, traffic.sent)
    plan = slapo.plan(sch, mesh=sizes).traffic
    planned = sum(one.bytes for one in plan if one.kind == "all_gather")
    return max(errors), sum(one["all_gather"] for one in every), planned
