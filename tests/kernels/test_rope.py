"""rope: values, gradients, and where fuse finds it."""

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import NoMatchError
from slapo_py.kernels.rope import rope, rope_by_broadcast
from tests.kernels.lab import DEVICE, Args, Draw, KernelTests
from tests.kernels.test_swiglu import times_called


class TestRope(KernelTests):
    name = "rope"
    angles_too = False

    def example(self, dtype: torch.dtype = torch.float32, rows: int = 6, width: int = 16) -> Args:
        q, k, cos, sin = super().example(dtype, rows, width)
        return q, k, cos.requires_grad_(self.angles_too), sin.requires_grad_(self.angles_too)

    def test_second_derivatives_are_the_references(self) -> None:
        self.angles_too = True  # the gradients of q and k depend on no other input
        super().test_second_derivatives_are_the_references()

    def test_gradients_of_cos_and_sin_are_the_references(self) -> None:
        self.angles_too = True
        self.test_the_plain_form_is_the_reference_bit_by_bit(torch.float32)

    def inputs(self, draw: Draw) -> Args:
        batch, length, heads, fewer = draw.one_of(1, 2, 3), draw.one_of(0, 1, 2, 5), draw.size(33), draw.one_of(1, 2, 3)
        width = draw.one_of(2, 6, 7, 8, 16, 34, 64, 66, 127)
        part = draw.one_of(width // 2 * 2, width // 2 * 2, 2, width // 4 * 2)
        q, k = (
            draw.tensor((batch, length, count, width)).detach().transpose(1, 2).requires_grad_()
            if draw.one_of(True, False)
            else draw.tensor((batch, count, length, width))
            for count in (heads, fewer)
        )
        dtype = draw.one_of(draw.dtype, draw.dtype, draw.dtype, torch.float32)
        lead = draw.one_of((batch, length), (1, length), (batch, 1, length), (1, 1, length))
        cos, sin = (draw.tensor((*lead, part), dtype=dtype).requires_grad_(False) for _ in range(2))
        for one in draw.one_of((), (), (), (q,), (k,)):
            one.requires_grad_(False)
        for one in draw.one_of((), (), (), (), (cos,), (cos, sin)):
            one.requires_grad_()
        return q, k, cos, sin, draw.one_of(False, True)

    def oracle(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        """With the pairs as columns of their own."""
        if cos.dim() == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return self.turned(q, cos, sin, interleaved), self.turned(k, cos, sin, interleaved)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        width = cos.shape[-1]
        order = torch.arange(width, device=x.device)
        order = (
            order.view(width // 2, 2).T.reshape(-1) if interleaved else order
        )  # first those called a, then those called b
        (a, b), (ca, cb), (sa, sb) = (one[..., order].chunk(2, dim=-1) for one in (x[..., :width], cos, sin))
        pairs = torch.cat((a * ca + -b * sa, b * cb + a * sb), dim=-1)
        made = torch.cat((pairs, x[..., width:]), dim=-1) if width < x.shape[-1] else pairs
        return made[..., torch.cat((order.argsort(), torch.arange(width, x.shape[-1], device=x.device)))]

    @pytest.mark.triton
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_it_rounds_where_torch_does(self, interleaved: bool) -> None:
        torch.manual_seed(2)
        shapes = (1, 37, 2, 100), (1, 35, 2, 100), (1, 2, 96), (1, 2, 96)  # more heads than one step of a program takes
        q, k, cos, sin = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for shape in shapes)
        q, k = q.requires_grad_(), k.requires_grad_()
        found, plain = (
            [*(y := f(q, k, cos, sin, interleaved)), *torch.autograd.grad(y, (q, k), (q.detach(), k.detach()))]
            for f in (rope, self.oracle)
        )
        for one, other in zip(found, plain):
            assert torch.equal(one, other)

    @pytest.mark.triton
    @pytest.mark.parametrize("shape", [(8,), (5, 8), (1, 5, 8), (2, 1, 1, 8), (1, 3, 5, 8), (2, 3, 1, 8)])
    def test_what_broadcasts_otherwise_is_left_to_torch(self, shape: tuple[int, ...]) -> None:
        q, k = torch.randn(2, 3, 5, 8, device=DEVICE), torch.randn(2, 3, 5, 8, device=DEVICE)
        cos, sin = torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE)
        for one, x in zip(rope_by_broadcast(q, k, cos, sin), (q, k)):
            assert torch.equal(one, x * cos + rotate_half(x) * sin)


def rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class Attention(nn.Module):
    """As Llama, Qwen3 and Gemma2 write it."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(24, 32), nn.Linear(24, 16)

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        shape = (*x.shape[:-1], -1, 8)
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        q, k = self.rotate(q, k, *position_embeddings)
        return q @ k.repeat_interleave(2, dim=1).transpose(2, 3)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos = cos.unsqueeze(1)
        sin = sin.unsqueeze(1)
        q_embed = (q * cos) + (rotate_half(q) * sin)
        k_embed = (k * cos) + (rotate_half(k) * sin)
        return q_embed, k_embed


class WithHeads(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Backwards(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        turned = torch.cat((q[..., q.shape[-1] // 2 :], -q[..., : q.shape[-1] // 2]), dim=-1)
        return q * cos + turned * sin, k * cos + rotate_half(k) * sin


class OneOfTwo(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + rotate_half(q) * sin, k


class TwoAngles(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + rotate_half(q) * sin, k * sin + rotate_half(k) * cos


def inputs(*lead: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    return torch.randn(2, 5, 24), (torch.randn(*lead, 8), torch.randn(*lead, 8))


@pytest.mark.parametrize(("make", "lead", "name"), [
    (Attention, (1, 5), "rope"),
    (Attention, (2, 5), "rope"),
    (Attention, (1, 1), "rope"),
    (WithHeads, (2, 1, 5), "rope_by_broadcast"),
    (WithHeads, (1, 5), "rope_by_broadcast"),
    (WithHeads, (5,), "rope_by_broadcast"),
])  # fmt: skip
@pytest.mark.parametrize("train", [True, False])
def test_fuse_finds_what_the_models_write(make: type[Attention], lead: tuple[int, ...], name: str, train: bool) -> None:
    sch = slapo.create_schedule(make().train(train), inputs(*lead))
    sch.fuse("rope")
    assert times_called(sch, name) == 1
    assert not times_called(sch, "cat")
    assert sch.verify().grade in ("equal", "rounding")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Backwards, "up to 'add_3' .* but no mul that fits takes 'unsqueeze_1'"),
        (OneOfTwo, "what its first output needs is there, up to 'add_2' .* but no mul that fits takes 'unsqueeze'"),
        (TwoAngles, "does not match: what its first output needs is there"),
    ],
)
def test_fuse_leaves_what_is_something_else(make: type[Attention], reason: str) -> None:
    sch = slapo.create_schedule(make(), inputs(1, 5))
    with pytest.raises(NoMatchError, match=reason):
        sch.fuse("rope")


@pytest.mark.parametrize(("shapes", "reason"), [
    (((2, 5, 8), (2, 3, 5, 8), (1, 5, 8)), r"rope: q must have the dims \(batch, heads, length, width\), found 3"),
    (((2, 3, 5, 8), (5, 8), (1, 5, 8)), r"rope: k must have the dims \(batch, heads, length, width\), found 2"),
    (((2, 3, 5, 8), (2, 3, 4, 8), (1, 5, 8)), r"k must have the shape of q but .* \(2, 3, 4, 8\) and \(2, 3, 5, 8\)"),
    (((2, 3, 5, 8), (1, 3, 5, 8), (1, 5, 8)), r"k must have the shape of q but .* \(1, 3, 5, 8\) and \(2, 3, 5, 8\)"),
    (((2, 3, 5, 8), (2, 1, 5, 8), (3, 5, 8)), r"cos must have the shape \(2 or 1, 5, R\), .* found, .* \(3, 1, 5, 8\)"),
    (((2, 3, 5, 8), (2, 1, 5, 8), (1, 3, 5, 8)), r"cos must have the shape .* found, .* \(1, 3, 5, 8\)"),
    (((2, 3, 5, 8), (2, 1, 5, 8), (5, 8)), r"cos must have the shape .* found, .* \(5, 8\)"),
    (((2, 3, 5, 8), (2, 1, 5, 8), (1, 4, 8)), r"cos must have the shape .* found, .* \(1, 1, 4, 8\)"),
    (((2, 3, 5, 8), (2, 1, 5, 8), (1, 5, 3)), r"an even number of columns, at most the 8 that q has, found 3"),
    (((2, 3, 5, 8), (2, 1, 5, 8), (1, 5, 10)), r"an even number of columns, at most the 8 that q has, found 10"),
])  # fmt: skip
def test_shapes_that_dont_fit_are_refused(shapes: tuple[tuple[int, ...], ...], reason: str) -> None:
    q, k, cos = (torch.ones(shape) for shape in shapes)
    with pytest.raises(ValueError, match=reason):
        rope(q, k, cos, cos)


def test_cos_and_sin_of_two_shapes_are_refused() -> None:
    x = torch.ones(2, 3, 5, 8)
    with pytest.raises(ValueError, match=r"cos and sin must have one shape, found \(1, 1, 5, 8\) and \(2, 1, 5, 8\)"):
        rope(x, x, torch.ones(1, 5, 8), torch.ones(2, 5, 8))
