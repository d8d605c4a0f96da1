"""What was found by using verify: false alarms, and modules that were wrongly named."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import VerificationError
from tests.verify.lab import HEADS, WIDTH, Attention, inputs, lab


class Fused(nn.Module):
    """Lab's attention with one weight for q, k and v."""

    def __init__(self, old: Attention) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.drop, self.scale = nn.Linear(WIDTH, WIDTH), nn.Dropout(old.drop.p), old.scale

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        def heads(one: Tensor) -> Tensor:
            return one.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)

        q, k, v = (heads(one) for one in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.out((self.drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(x.shape))


class WronglyFused(Fused):
    """Forgets the scale."""

    def __init__(self, old: Attention) -> None:
        super().__init__(old)
        self.scale = 0.35


MAP: dict[str, Any] = {
    f"qkv.{kind}": slapo.params.cat(*(f"{one}.{kind}" for one in "qkv"), dim=0) for kind in ("weight", "bias")
}


def test_a_replacement_without_the_old_children_is_right() -> None:
    sch = slapo.create_schedule(lab(), inputs())
    sch["layers.0.attn"].replace(Fused, params=MAP)
    assert sch.verify().grade in ("equal", "rounding")


def test_a_wrong_replacement_with_a_map() -> None:
    sch = slapo.create_schedule(lab(), inputs())
    sch["layers.0.mix"].trace()
    sch["layers.1.attn"].replace(WronglyFused, params=MAP)
    with pytest.raises(VerificationError, match=r'"layers\.1\.attn" \(WronglyFused\).*step 2: ') as caught:
        sch.verify()
    assert (caught.value.report.module, caught.value.report.step) == ("layers.1.attn", 2)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def gelu_reordered(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))


def gelu_detached(x: Tensor) -> Tensor:
    return F.gelu(x.detach()) + 0 * x


def test_rounding_elsewhere_does_not_draw_the_blame() -> None:
    sch = slapo.create_schedule(lab(), inputs())
    for path in ("layers.0.mlp", "layers.1.mlp"):
        sch[path].trace()
    sch["layers.1.mlp"].replace(gelu_reordered, gelu)
    sch["layers.0.mlp"].replace(gelu_detached, gelu)
    with pytest.raises(VerificationError, match="step 4: ") as caught:
        sch.verify()
    assert (caught.value.report.module, caught.value.report.step) == ("layers.0.mlp", 4)


class Biased(nn.Module):
    """A bias per head before the softmax: its gradient is zero in exact arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias = nn.Parameter(torch.randn(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        return ((q @ k.transpose(-1, -2) * 0.5 + self.bias).softmax(-1) @ v).transpose(1, 2).reshape(x.shape)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * 0.5 + bias).softmax(-1) @ v


def attend_by_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, bias.expand(shape).to(q.dtype), scale=0.5)


def attend_by_hand(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = (q * 0.5) @ k.transpose(-1, -2) + bias
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return (powers / powers.sum(-1, keepdim=True)) @ v


@pytest.mark.parametrize("new", [attend_by_sdpa, attend_by_hand], ids=lambda one: one.__name__)
def test_gradients_that_are_zero_in_exact_arithmetic(new: Any) -> None:
    sch = slapo.create_schedule(Biased(), (torch.randn(3, 5, WIDTH),))
    sch.trace()
    sch.replace(new, attend)
    report = sch.verify()
    assert report.grade == "rounding"
    assert "autocast to bfloat16" in [row.scenario for row in report.rows]
