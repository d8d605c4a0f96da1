"""Public bug reports on kernels as inputs, each with the right result. The number of a case is its number in our list.

G18 pocket-tts#278, mistral.rs#1867; G19 unsloth#10617, #10675; G20 Liger-Kernel#272, #343, #1251; G21 Liger-Kernel#950;
G22 Liger-Kernel#1296, pytorch#85786, flash-linear-attention#1080; G23 attention-gym#260, triton-ascend#984;
G24 pytorch#167308, #191126, sglang#32807; G28 mamba#1023, Megatron-LM#411.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo_py import kernels
from tests.kernels.lab import DEVICE, run_interpreted

both = pytest.mark.parametrize("by", ["plain", pytest.param("triton", marks=pytest.mark.triton)])
Function = Callable[..., Any]


def test_triton_in_the_interpreter() -> None:
    run_interpreted(Path(__file__))


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


@both
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_g18_each_form_of_gelu_is_exact(by: str, approximate: str) -> None:
    x, b = randn(1, 1000) * 3, randn(1000)
    exact = F.gelu(x.double() + b.double(), approximate=approximate)
    assert (kernels.bias_gelu(x, b, approximate).double() - exact).abs().max() <= 2e-6


OPS: dict[str, tuple[Function, Function]] = {
    "layer_norm": (
        lambda x: kernels.layer_norm(x, torch.ones(10, device=DEVICE), torch.zeros(10, device=DEVICE)),
        lambda x: F.layer_norm(x, (10,)),
    ),
    "rms_norm": (
        lambda x: kernels.rms_norm(x, torch.ones(10, device=DEVICE), 1e-6),
        lambda x: F.rms_norm(x, (10,), eps=1e-6),
    ),
    "masked_softmax": (lambda x: kernels.masked_softmax(x), lambda x: x.softmax(-1)),
    "swiglu": (lambda x: kernels.swiglu(x, x + 1), lambda x: F.silu(x) * (x + 1)),
    "cross_entropy": (
        lambda x: kernels.cross_entropy(x, torch.arange(4, device=DEVICE), reduction="none"),
        lambda x: F.cross_entropy(x, torch.arange(4, device=DEVICE), reduction="none"),
    ),
}
VIEWS: dict[str, Function] = {
    "sliced": lambda base: base[:, ::2],
    "transposed": lambda base: base[:, :10].contiguous().t().contiguous().t(),
    "expanded": lambda base: base[:1, :10].expand(4, 10),
}


@both
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", OPS)
def test_g19_strided_inputs_and_gradients(by: str, name: str, view: str) -> None:
    op, plain = OPS[name]
    found = []
    for function in (op, plain):
        torch.manual_seed(0)
        base = randn(4, 20).requires_grad_()
        x = VIEWS[view](base)
        y = function(x)
        grads = [randn(*y.shape, 2)[..., 0], torch.ones((), device=DEVICE).expand(y.shape)]  # strided, and as of a sum
        kept = [base.clone(), *(one.clone() for one in grads)]
        made = [y.detach()]
        for grad in grads:
            made += torch.autograd.grad(y, base, grad, retain_graph=True)
        for one, before in zip((base, *grads), kept):
            assert torch.equal(one, before)
        found.append(made)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@both
def test_g20_cross_entropy_leaves_its_input_as_it_was(by: str) -> None:
    z = randn(4, 7).requires_grad_()
    y = torch.randint(7, (4,)).to(DEVICE)
    (expected,) = torch.autograd.grad(F.cross_entropy(z.softmax(-1), y), z)
    p = z.softmax(-1)
    before = p.detach().clone()
    loss = kernels.cross_entropy(p, y)
    loss.backward(retain_graph=True)
    assert torch.equal(p, before)
    torch.testing.assert_close(z.grad, expected, rtol=0, atol=1e-6)
    loss.backward()
    torch.testing.assert_close(z.grad, 2 * expected, rtol=0, atol=2e-6)


@both
def test_g21_gradients_of_weights_are_summed_in_float32(by: str) -> None:
    rows = 4096 if by == "plain" or DEVICE == "cuda" else 512
    x, dy = randn(rows, 64, dtype=torch.bfloat16), randn(rows, 64, dtype=torch.bfloat16)
    weight = torch.ones(64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    kernels.rms_norm(x, weight, 1e-6).backward(dy)
    wide = weight.detach().double().requires_grad_()
    F.rms_norm(x.double(), (64,), wide, 1e-6).backward(dy.double())
    assert (weight.grad.double() - wide.grad).abs().max() / wide.grad.abs().max() <= 1e-2


def test_g21_so_are_those_of_a_loss_in_chunks() -> None:
    hidden, labels = randn(4096, 32, dtype=torch.bfloat16), torch.randint(50, (4096,)).to(DEVICE)
    weight = randn(50, 32, dtype=torch.bfloat16).requires_grad_()
    kernels.linear_cross_entropy(hidden, weight, labels, reduction="sum").backward()
    wide = weight.detach().double().requires_grad_()
    F.cross_entropy(F.linear(hidden.double(), wide), labels, reduction="sum").backward()
    assert (weight.grad.double() - wide.grad).abs().max() / wide.grad.abs().max() <= 1e-2


@both
def test_g22_rows_beyond_two_to_the_31(by: str) -> None:
    base = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)  # pages are only touched where written
    x = base.as_strided((3, 8), (2**30, 1))
    x.copy_(torch.arange(24).view(3, 8))
    near = x.clone(memory_format=torch.contiguous_format)
    weight, bias = torch.ones(8, dtype=torch.float16, device=DEVICE), torch.zeros(8, dtype=torch.float16, device=DEVICE)
    for op in (
        lambda x: kernels.bias_gelu(x, bias),
        lambda x: kernels.layer_norm(x, weight, bias),
        lambda x: kernels.rms_norm(x, weight),
        lambda x: kernels.masked_softmax(x),
        lambda x: kernels.swiglu(x, near),
        lambda x: kernels.cross_entropy(x, torch.arange(3, device=DEVICE), reduction="none"),
    ):
        assert torch.equal(op(x), op(near))


@both
@pytest.mark.parametrize("name", kernels.list_kernels())
def test_g23_no_rows(by: str, name: str) -> None:
    kernel = kernels.find_kernel(name)
    if kernel.example is None:  # one that another test has registered
        return
    args = kernel.example(0, 8, torch.float32, DEVICE)
    if name in ("masked_softmax", "rope"):  # rows are dims of their own there
        args = tuple(
            one[:0].detach().requires_grad_(one.requires_grad) if isinstance(one, Tensor) else one for one in args
        )
    made = kernel.op(*args)
    outputs = made if isinstance(made, tuple) else (made,)
    assert all(one.dtype == torch.float32 for one in outputs if one.is_floating_point())
    needed = [one for one in args if isinstance(one, Tensor) and one.requires_grad]
    found = torch.autograd.grad(outputs, needed, [torch.ones_like(one) for one in outputs])
    for one, grad in zip(needed, found, strict=True):
        assert grad.shape == one.shape and not grad.nan_to_num(0.0).any(), name


@both
def test_g23_a_loss_over_no_rows(by: str) -> None:
    logits, labels = randn(0, 5), torch.randint(5, (0,)).to(DEVICE)
    assert kernels.cross_entropy(logits, labels).isnan()
    assert kernels.cross_entropy(logits, labels, reduction="sum") == 0


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@both
@pytest.mark.parametrize("wide", [True, False])
def test_g24_dtypes_are_those_of_torch(by: str, wide: bool) -> None:
    norm = nn.RMSNorm(8, eps=1e-6, device=DEVICE)
    norm = norm if wide else norm.bfloat16()
    x = randn(2, 8, dtype=torch.bfloat16)
    expected = norm(x)
    found = kernels.rms_norm(x, norm.weight, 1e-6, casting="late")
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    (grad,) = torch.autograd.grad(found.float().sum(), norm.weight)
    assert grad.dtype == norm.weight.dtype


@both
def test_g28_train_eval_train(by: str) -> None:
    norm = nn.LayerNorm(64, device=DEVICE)
    x, residual = randn(8, 64).requires_grad_(), randn(8, 64)

    def run(training: bool) -> Tensor:
        torch.manual_seed(5)
        return kernels.dropout_add_layer_norm(  # type: ignore[no-any-return]
            x, residual, norm.weight, norm.bias, p=0.4, eps=norm.eps, training=training
        )[0]

    first, calm, again = run(True), run(False), run(True)
    torch.testing.assert_close(calm, norm(residual + x), rtol=1e-5, atol=1e-5)
    assert torch.equal(first, again) and not torch.equal(first, calm)
    (grad,) = torch.autograd.grad((first * randn(8, 64)).sum(), x)
    torch.manual_seed(5)
    _, summed = kernels.dropout_add_layer_norm(x, torch.zeros_like(x), norm.weight, norm.bias, p=0.4, training=True)
    assert torch.equal(grad != 0, summed != 0)
    if by == "plain":
        torch.manual_seed(5)
        F.dropout(x, 0.4)
        state = torch.get_rng_state()
        run(True)
        assert torch.equal(torch.get_rng_state(), state)  # it moves as with torch's own dropout
