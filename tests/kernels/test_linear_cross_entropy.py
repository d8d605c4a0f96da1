"""linear_cross_entropy: values, gradients, bytes, and where fuse finds it."""

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import slapo_py as slapo
from slapo_py.errors import NoMatchError
from slapo_py.kernels.linear_cross_entropy import linear_cross_entropy
from tests.kernels.lab import DEVICE, DTYPES, Args, Draw, KernelTests, drawing

file = sys.modules[linear_cross_entropy.__module__]


def written(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """What a language model writes, the z term by hand."""
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits, target = logits.view(-1, len(weight)), labels.view(-1)
    loss = F.cross_entropy(logits, target, None, None, ignore_index, None, reduction, label_smoothing)
    if z_loss:
        counted = target != ignore_index
        extra = torch.where(counted, z_loss * logits.logsumexp(-1).square(), 0.0)
        loss = loss + {"none": extra, "sum": extra.sum(), "mean": extra.sum() / counted.sum()}[reduction]
    return loss.view(labels.shape) if reduction == "none" else loss


def coarse(x: Tensor) -> Tensor:
    """Few values, so that every logit is exact: else one bit of a logit decides about the error of the whole loss."""
    everything = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    everything.copy_(((everything - everything.mean().round()) * 4).round().clamp(-4, 4) / 4)
    return x


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that came to be and still are, beyond those of the inputs.

    A mode is off inside an operation of torch.library. So where one of ours would run, its function is called with the
    mode on: what the operation does is counted, tensor by tensor, like what torch does.
    """

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.sizes = {one.untyped_storage()._cdata: 0 for one in inputs}
        self.live = self.peak = self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "slapo":
            self.inside += 1
            with self:
                made = OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        else:
            made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self.note(one.untyped_storage())
        return made

    def note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.gone, key)

    def gone(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


def peak_bytes(function: Callable[..., Tensor], rows: int, classes: int, width: int, fake: bool) -> tuple[int, int]:
    """(peak bytes beyond the inputs of forward and backward, those that live on: loss and gradients)."""
    with FakeTensorMode() if fake else contextlib.nullcontext():
        hidden, weight = torch.randn(rows, width).requires_grad_(), torch.randn(classes, width).requires_grad_()
        labels = torch.zeros(rows, dtype=torch.long)
        with LiveBytes(hidden, weight, labels) as count:
            loss = function(hidden, weight, labels)
            loss.backward()
    assert count.inside == (2 if function is linear_cross_entropy else 0)
    assert count.live == (rows + classes) * width * 4 + 4, "loss and gradients, and nothing else"
    return count.peak, count.live


def test_less_than_a_quarter_of_the_bytes() -> None:
    """At 8192 tokens and 32000 classes, on tensors without data: each operation makes the same tensors as with data."""
    sizes = (8192, 32000, 512)
    ours, _ = peak_bytes(linear_cross_entropy, *sizes, fake=True)
    plain, lasting = peak_bytes(written, *sizes, fake=True)
    assert plain >= 3 * 4 * sizes[0] * sizes[1]
    assert lasting < ours < plain / 4, f"{ours / 1e6:.0f} MB of {plain / 1e6:.0f} MB"


def test_tensors_without_data_count_as_those_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "chunk_bytes", lambda weight: 2**17)
    for function in (linear_cross_entropy, written):
        counts = [peak_bytes(function, 300, 500, 16, fake) for fake in (True, False)]
        assert counts[0] == counts[1]


@pytest.mark.slow
def test_less_than_a_quarter_of_the_bytes_with_data() -> None:
    fake, _ = peak_bytes(linear_cross_entropy, 8192, 32000, 512, fake=True)
    real, _ = peak_bytes(linear_cross_entropy, 8192, 32000, 512, fake=False)
    assert real == fake


class TestLinearCrossEntropy(KernelTests):
    name = "linear_cross_entropy"
    conditioned = True

    def inputs(self, draw: Draw) -> Args:
        least = 8 if draw.dtype == torch.float32 else 2  # sums of two or three terms have no rounding error by luck
        width, classes = max(draw.size(40), least - 1), max(draw.size(150), least)
        hidden = coarse(draw.tensor(draw.shape(width)[-3:]))
        weight = coarse(draw.tensor((classes, width), width**-0.5))
        bias = coarse(draw.tensor((classes,))) if draw.one_of(True, False) else None
        lead = hidden.shape[:-1]
        ignored = draw.one_of(-100, 0)
        labels = torch.randint(classes, lead, generator=draw.generator)
        labels = labels.masked_fill(torch.rand(lead, generator=draw.generator) < draw.one_of(0.0, 0.3), ignored)
        smoothing, z_loss, softcap = draw.one_of(0.0, 0.1), draw.one_of(0.0, 1e-2), draw.one_of(None, None, 30.0)
        reduction = draw.one_of("mean", "sum", "none")
        return hidden, weight, labels.to(draw.device), bias, ignored, reduction, smoothing, z_loss, softcap

    def oracle(self, *args: Any) -> Tensor:
        return written(*args)

    test_the_plain_form_is_the_reference_bit_by_bit = None  # sums are in another order; instead:
    test_under_autocast = None

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @drawing
    @given(data=st.data())
    def test_the_plain_form_is_as_exact_as_the_reference(self, dtype: torch.dtype, data: st.DataObject) -> None:
        as_exact: Any = KernelTests.test_triton_is_as_exact_as_the_reference
        as_exact.hypothesis.inner_test(self, dtype, data)

    @pytest.fixture(autouse=True)
    def several_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(file, "chunk_bytes", lambda weight: 1024)


# Values that are rare


def tensors(rows: int = 5, classes: int = 7, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=DEVICE, requires_grad=True)
    weight = torch.randn(classes, width, device=DEVICE, requires_grad=True)
    return hidden, weight, torch.randint(classes, (rows,), device=DEVICE)


def test_no_gradient_is_made_that_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = tensors()
    calls: list[Any] = []
    real = file.slice_gradient  # type: ignore[attr-defined]
    monkeypatch.setattr(file, "slice_gradient", lambda *args, **options: calls.append(1) or real(*args, **options))
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels)
    linear_cross_entropy(hidden.detach(), weight.detach(), labels)
    linear_cross_entropy(hidden, weight, labels, reduction="none")
    assert not calls
    loss = linear_cross_entropy(hidden, weight.detach(), labels)
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 1 and weight.grad is None and hidden.grad is not None


def test_gradients_that_nobody_foresaw() -> None:
    """An operation that was recorded without grad mode, and runs with it."""
    hidden, weight, labels = tensors()
    op = torch.ops.slapo.linear_cross_entropy
    for wanted in ([False, False, False], [True, False, False], [True, True, True]):
        loss = op(hidden, weight, labels, None, -100, "mean", 0.1, 0.0, None, wanted)[0]
        found = torch.autograd.grad(2 * loss, (hidden, weight))
        expected = torch.autograd.grad(2 * written(hidden, weight, labels, None, -100, "mean", 0.1), (hidden, weight))
        torch.testing.assert_close(found, expected)


def test_backward_twice() -> None:
    hidden, weight, labels = tensors()
    loss = linear_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(3 * loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(3 * loss, (hidden, weight))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_labels_ignored(reduction: str) -> None:
    hidden, weight, labels = tensors()
    loss = linear_cross_entropy(hidden, weight, labels.fill_(-100), reduction=reduction, z_loss=0.1)
    assert loss.isnan().all() if reduction == "mean" else not loss.any()
    assert not any(one.any() for one in torch.autograd.grad(loss.sum(), (hidden, weight)))


def test_float16_keeps_the_gradients_of_a_mean_over_many_rows() -> None:
    rows, classes = 4096, 600
    hidden = torch.ones(rows, 2, dtype=torch.float16, device=DEVICE, requires_grad=True)
    weight = torch.zeros(classes, 2, dtype=torch.float16, device=DEVICE, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.long, device=DEVICE)
    loss = linear_cross_entropy(hidden, weight, labels) * 2.0**14  # as a scaler of gradients does
    _, d_weight = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(
        d_weight[1:].double(), torch.full_like(d_weight[1:], 2.0**14 / classes).double(), rtol=2e-3, atol=0
    )


@pytest.mark.parametrize("label", [7, -1])
def test_a_label_out_of_range(label: int) -> None:
    hidden, weight, labels = tensors()
    labels[3] = label
    if DEVICE != "cpu":  # a kernel can't raise: it makes the loss nan
        assert linear_cross_entropy(hidden, weight, labels).isnan()
        return
    with pytest.raises(IndexError, match="linear_cross_entropy: a label is out of bounds: classes are 0 to 6"):
        linear_cross_entropy(hidden, weight, labels)
    linear_cross_entropy(hidden, weight, labels, ignore_index=label)


def test_shapes_of_models() -> None:
    hidden, weight, labels = tensors(6)
    loss = linear_cross_entropy(hidden.view(2, 3, 4), weight, labels)  # labels already flat
    torch.testing.assert_close(loss, written(hidden, weight, labels))
    rows = linear_cross_entropy(hidden.view(2, 3, 4), weight, labels.view(2, 3), reduction="none")
    torch.testing.assert_close(rows, written(hidden, weight, labels, None, -100, "none").view(2, 3))
    torch.testing.assert_close(
        linear_cross_entropy(hidden[0], weight, labels[0]), written(hidden[:1], weight, labels[:1])
    )


def test_autocast_rounds_like_linear() -> None:
    hidden, weight, labels = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        made = [function(hidden, weight, labels) for function in (linear_cross_entropy, written)]
    assert made[0].dtype == made[1].dtype == torch.float32
    torch.testing.assert_close(*made)
    grads = [torch.autograd.grad(one, (hidden, weight)) for one in made]
    assert grads[0][0].dtype == torch.float32
    torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": torch.ones(7, 5)}, r"hidden \(..., H\) and weight \(V, H\), found \(5, 4\) and \(7, 5\)"),
        ({"bias": torch.ones(6)}, r"bias must be \(7,\), one for each class, found \(6,\)"),
        ({"bias": torch.ones(7).double()}, "weight and bias must have the dtype of hidden, torch.float32"),
        ({"labels": torch.zeros(4).long()}, r"labels must be one for each row of hidden \(5, 4\), found \(4,\)"),
        ({"labels": torch.rand(5)}, "linear_cross_entropy: labels must be classes"),
        ({"softcap": 0.0}, "softcap must be positive, found 0.0"),
        ({"reduction": "max"}, "linear_cross_entropy: reduction must be .* found 'max'"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(
            **{"hidden": torch.ones(5, 4), "weight": torch.ones(7, 4), "labels": torch.zeros(5).long(), **options}
        )


# In models


class Head(nn.Module):
    """From the last hidden states to the loss."""

    def __init__(self, loss: Callable[..., Any], bias: bool = False) -> None:
        super().__init__()
        self.lm_head, self.loss = nn.Linear(4, 7, bias=bias), loss

    def forward(self, hidden: Tensor, labels: Tensor) -> Any:
        return self.loss(self.lm_head(hidden), labels)


def shifted(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)


def causal(logits: Tensor, labels: Tensor) -> Tensor:
    """GPT-2, T5, Llama, Qwen3: ForCausalLMLoss."""
    return F.cross_entropy(logits.float().view(-1, 7), shifted(labels), ignore_index=-100, reduction="mean")


def opt(logits: Tensor, labels: Tensor) -> Tensor:
    return causal(logits.contiguous(), labels)


def gemma2(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits / 30.0
    logits = torch.tanh(logits)
    return causal(logits * 30.0, labels)


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    """BERT: not in float32."""
    return nn.CrossEntropyLoss()(logits.view(-1, 7), labels.view(-1))


def pooled(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.mean(1), labels[:, 0], label_smoothing=0.1)


def fused(loss: Callable[..., Any], bias: bool = False) -> slapo.Schedule:
    sch = slapo.create_schedule(Head(loss, bias), example_inputs=(torch.randn(2, 5, 4), torch.randint(7, (2, 5))))
    sch.fuse("linear_cross_entropy")
    return sch


def of_classes(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x.view(-1, 7), y.view(-1), label_smoothing=0.1, reduction="sum")


@pytest.mark.parametrize(
    ("loss", "bias"),
    [
        (causal, False),
        (causal, True),
        (opt, False),
        (gemma2, False),
        (masked, True),
        (masked, False),
        (of_classes, False),
    ],
)
def test_fuse_finds_the_losses_of_language_models(loss: Callable[..., Any], bias: bool) -> None:
    sch = fused(loss, bias)
    graph = str(sch.graph)
    assert "linear_cross_entropy" in graph and "F.linear" not in graph and "call_module" not in graph, graph
    assert sch.verify().grade in ("equal", "rounding")


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (
            lambda x, y: (causal(x, y), x),
            "all 4 operations are there, but the inner value 'lm_head' .* is used outside",
        ),
        (pooled, "'mean' .* is mean where the pattern has linear"),
        (
            lambda x, y: F.cross_entropy(x.view(-1, 7), y.view(-1), weight=torch.ones(7)),
            "has 'ones' .* where the pattern has None",
        ),
    ],
)
def test_fuse_says_why_not(loss: Callable[..., Any], reason: str) -> None:
    with pytest.raises(NoMatchError, match=reason):
        fused(loss)
