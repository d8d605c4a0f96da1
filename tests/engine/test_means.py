"""A mean where a sum is needed would be divided twice: it is refused where it can be seen."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.backends.means import is_mean
from slapo_py.errors import EngineError

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("loss", "mean"),
    [
        (lambda x: F.cross_entropy(x, Y), True),
        (lambda x: F.cross_entropy(x, Y).reshape(()), True),
        (lambda x: F.mse_loss(x, X), True),
        (lambda x: F.binary_cross_entropy_with_logits(x, X), True),
        (lambda x: x.square().mean(), True),
        (lambda x: x.square().mean(0).mean(), True),
        (lambda x: x.bfloat16().mean().float(), True),
        (lambda x: F.cross_entropy(x, Y, reduction="sum"), False),
        (lambda x: F.mse_loss(x, X, reduction="sum"), False),
        (lambda x: x.square().mean() * len(x), False),
        (lambda x: x.mean(-1).sum(), False),
        (lambda x: x.mean().detach(), False),
    ],
)
def test_what_is_a_mean(loss: Callable[[Tensor], Tensor], mean: bool) -> None:
    assert is_mean(loss(X.clone().requires_grad_())) is mean


def _engine(count: Callable[[Any], int], parts: int = 1) -> Any:
    torch.manual_seed(0)
    return slapo.build(
        slapo.create_schedule(nn.Linear(5, 4), (X,)),
        target="torch",
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=lambda output, batch: F.cross_entropy(output, Y[: len(output)]),
        count=count,
        micro_batches=parts,
    )


def test_a_mean_that_would_be_divided_again_is_refused() -> None:
    engine = _engine(len)
    before = engine.module.weight.clone()
    with pytest.raises(EngineError, match=r"returned a mean, and it is divided by the count, 4,"):
        engine.train_step(X)
    assert torch.equal(engine.module.weight, before) and engine.module.weight.grad is None


@pytest.mark.parametrize("parts", [1, 2])
def test_a_mean_over_equal_parts_may_count_one(parts: int) -> None:
    engine = _engine(lambda batch: 1, parts)
    expected = F.cross_entropy(engine.module(X), Y) if parts == 1 else None
    loss = engine.train_step(X)
    assert expected is None or torch.equal(loss, expected)
