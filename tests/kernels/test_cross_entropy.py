"""cross_entropy: values, gradients, parts over slices of the classes, and where fuse finds it."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import NoMatchError
from slapo_py.kernels.cross_entropy import at_top, cross_entropy, row_losses, slice_gradient, slice_parts
from tests.kernels.lab import DEVICE, DTYPES, Args, Draw, KernelTests, close, drawing, same

quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter, at -inf and nan
triton = pytest.mark.triton


def written(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """What a model writes, the z term by hand."""
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if not z_loss:
        return F.cross_entropy(logits, labels, reduction=reduction, **options)
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    lse = torch.logsumexp(wide, 0 if logits.dim() == 1 else 1)
    extra = torch.where(labels == ignore_index, torch.zeros_like(lse), z_loss * lse * lse)
    if reduction == "mean":
        extra = extra.sum() / (labels != ignore_index).sum()
    elif reduction == "sum":
        extra = extra.sum()
    return (F.cross_entropy(logits, labels, reduction=reduction, **options) + extra).to(logits.dtype)


def drawn(draw: Draw, logits: Tensor, classes: int) -> Args:
    """Labels and options for logits of this many classes."""
    lead = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else torch.Size()
    ignored = draw.one_of(-100, 0, classes - 1)
    labels = torch.randint(classes, lead, generator=draw.generator)
    dropped = torch.rand(lead, generator=draw.generator) < draw.one_of(0.0, 0.3, 0.3, 1.0)
    smoothing, z_loss = draw.one_of(0.0, 0.0, 0.1, 1.0), draw.one_of(0.0, 0.0, 1e-2)
    labels = labels.masked_fill(dropped, ignored).to(draw.device)
    return logits, labels, ignored, draw.one_of("mean", "sum", "none"), smoothing, z_loss


class TestCrossEntropy(KernelTests):
    name = "cross_entropy"

    def inputs(self, draw: Draw) -> Args:
        classes = max(draw.size(300), 1)
        lead = draw.shape(classes)[:-1] if draw.one_of(True, True, True, False) else ()
        logits = draw.tensor((*lead, classes), 3.0)
        if len(lead) > 1:
            logits = logits.detach().movedim(-1, 1).requires_grad_()  # (N, classes, ...)
        return drawn(draw, logits, classes)

    def oracle(self, *args: Any) -> Tensor:
        return written(*args)


class TestManyClasses(TestCrossEntropy):
    """Rows of several blocks."""

    def inputs(self, draw: Draw) -> Args:
        classes = draw.one_of(4095, 4096, 4097, 8192, 9001)
        logits = draw.tensor((draw.one_of(1, 2), classes), 3.0).detach()
        if draw.one_of(True, False):  # the largest comes late: what was summed before is scaled anew
            logits = (logits + torch.linspace(-60, 20, classes, device=logits.device)).to(draw.dtype)
        if draw.one_of(True, False, False):
            logits = logits.index_fill(1, torch.arange(4100 % classes, device=logits.device), -math.inf)
        args = drawn(draw, logits.requires_grad_(), classes)
        if torch.isinf(logits).any():  # with smoothing such a loss is infinite and has no gradient
            args = (logits, args[1].masked_fill(args[1] >= 0, classes - 1), -100, args[3], 0.0, args[5])
        if draw.dtype == torch.float16:  # torch's sum of the logarithms overflows
            args = (*args[:4], 0.0, args[5])
        return args


# Values that are rare


@triton
@quiet
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_logits(dtype: torch.dtype, smoothing: float) -> None:
    inf = math.inf
    rows = [[1, -inf, 2, 0], [-inf, 1, 2, 0], [-inf] * 4, [inf, 1, 2, 0], [1, math.nan, 2, 0], [-inf, -inf, -inf, 3]]
    logits = torch.tensor(rows, dtype=dtype, device=DEVICE, requires_grad=True)
    labels = torch.tensor([0, 0, 1, 1, 0, 3], device=DEVICE)
    found, expected = (f(logits, labels, reduction="none", label_smoothing=smoothing) for f in (cross_entropy, written))
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())
    fine = [0, 5] if not smoothing else []
    torch.testing.assert_close(found[fine], expected[fine])
    grads = [torch.autograd.grad(one[:2].sum(), logits)[0][:2] for one in (found, expected)]
    if not smoothing:
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("where", [pytest.param("triton", marks=triton), "plain"])
def test_all_labels_ignored(where: str) -> None:
    logits = torch.randn(3, 5, device=DEVICE, requires_grad=True)
    labels = torch.full((3,), -100, device=DEVICE)
    for reduction, expected in (("mean", math.nan), ("sum", 0.0), ("none", 0.0)):
        for z_loss in (0.0, 0.1):
            loss = cross_entropy(logits, labels, reduction=reduction, z_loss=z_loss)
            torch.testing.assert_close(loss, torch.full_like(loss, expected), equal_nan=True)
            (found,) = torch.autograd.grad(loss.sum(), logits)
            if where == "triton":
                assert torch.equal(found, torch.zeros_like(found))
            else:
                (expected_grad,) = torch.autograd.grad(
                    written(logits, labels, -100, reduction, 0.0, z_loss).sum(), logits
                )
                same([found], [expected_grad])


@triton
def test_a_row_that_is_ignored_is_not_read() -> None:
    logits = torch.full((2, 5), math.nan, device=DEVICE, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([-100, -100], device=DEVICE), reduction="sum", z_loss=0.1)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss == 0 and torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("label", [-1, 5, 2**40])
@pytest.mark.parametrize("where", [pytest.param("triton", marks=triton), "plain"])
def test_a_label_out_of_range(where: str, label: int) -> None:
    logits, labels = torch.randn(2, 5, device=DEVICE), torch.tensor([0, label], device=DEVICE)
    if where == "plain":
        with pytest.raises(IndexError, match="out of bounds"):
            cross_entropy(logits, labels)
    else:
        assert cross_entropy(logits, labels, reduction="none").isnan().tolist() == [False, True]
        assert cross_entropy(logits, labels).isnan()


@triton
def test_256k_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    file = sys.modules[cross_entropy.__module__]
    launch = file.launch  # type: ignore[attr-defined]
    monkeypatch.setattr(file, "launch", lambda *args, **options: launched.append(args[0]) or launch(*args, **options))
    classes = 2**18 + 3
    logits = torch.randn(1, classes, device=DEVICE, requires_grad=True)
    labels = torch.tensor([classes - 1], device=DEVICE)
    found = cross_entropy(logits, labels)
    expected = written(logits, labels)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(one, logits)[0] for one in (found, expected)]
    torch.testing.assert_close(*grads)
    assert len(launched) == 2  # not the plain form


@pytest.mark.parametrize("where", [pytest.param("triton", marks=triton), "plain"])
def test_the_logits_stay_as_they_are(where: str) -> None:
    """Case G20: a kernel that writes its gradient into its input spoils the softmax before it."""
    z = torch.randn(4, 7, device=DEVICE, requires_grad=True)
    labels = torch.randint(7, (4,), device=DEVICE)
    p, q = z.softmax(-1), z.softmax(-1)
    before = p.detach().clone()
    (found,) = torch.autograd.grad(cross_entropy(p, labels), z)
    (expected,) = torch.autograd.grad(F.cross_entropy(q, labels), z)
    assert torch.equal(p, before)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_no_rows() -> None:
    for logits, labels in (
        (torch.randn(0, 5), torch.zeros(0).long()),
        (torch.randn(2, 5, 0), torch.zeros(2, 0).long()),
    ):
        for reduction in ("mean", "sum", "none"):
            same([cross_entropy(logits, labels, reduction=reduction)], [written(logits, labels, reduction=reduction)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((5,), (6, 5), (3, 5, 4)):
        logits = torch.randn(shape, dtype=dtype, requires_grad=True)
        labels = torch.randint(5, (shape[0], *shape[2:]) if len(shape) > 1 else ())
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.1):
                args = (logits, labels, 2, reduction, smoothing)
                made = [function(*args) for function in (cross_entropy, written)]
                grads = [torch.autograd.grad(one.sum(), logits)[0] for one in made]
                same([made[0], grads[0]], [made[1], grads[1]])


def test_autocast_makes_it_float32() -> None:
    logits, labels = torch.randn(4, 7, dtype=torch.bfloat16, requires_grad=True), torch.randint(7, (4,))
    with torch.autocast("cpu", torch.bfloat16):
        made = [function(logits, labels) for function in (cross_entropy, written)]
    assert made[0].dtype == torch.float32
    grads = [torch.autograd.grad(one, logits)[0] for one in made]
    same([made[0], grads[0]], [made[1], grads[1]])


# Slices of the classes


def by_slices(cuts: list[int], args: Args, grad: Tensor) -> tuple[Tensor, Tensor]:
    """What devices do that hold the classes between the cuts: (losses, gradient of the logits)."""
    logits, labels, ignored, smoothing, z_loss = args
    classes = logits.shape[-1]
    slices = list(zip(cuts, cuts[1:], strict=False))
    parts = [slice_parts(logits[..., a:b], labels, a, ignored, smoothing) for a, b in slices]
    top = torch.stack([one[0] for one in parts]).amax(0)  # an all-reduce by maximum
    sums = torch.stack([at_top(one, top, b - a) for one, (a, b) in zip(parts, slices)]).sum(0)  # an all-reduce by sum
    losses = row_losses(top, sums, labels, classes, ignored, smoothing, z_loss)
    gradients = [
        slice_gradient(grad, logits[..., a:b], labels, top, sums[0], a, classes, ignored, smoothing, z_loss)
        for a, b in slices
    ]
    return losses, torch.cat(gradients, -1)


def slices_are_exact(draw: Draw) -> None:
    classes = max(draw.size(300), 2)
    logits = draw.tensor((draw.one_of(1, 4), classes), 3.0).detach()
    if draw.one_of(True, False, False):
        logits = logits.index_fill(1, torch.arange(classes // 2, device=logits.device), -math.inf)
    ignored, smoothing, z_loss = -100, draw.one_of(0.0, 0.1), draw.one_of(0.0, 1e-2)
    smoothing = 0.0 if logits.isinf().any() else smoothing
    labels = torch.randint(classes // 2, classes, (len(logits),), generator=draw.generator).to(draw.device)
    labels[0] = draw.one_of(-100, int(labels[0]))
    count = draw.one_of(1, 2, 3)
    cuts = sorted({0, classes, *(draw.data.draw(st.integers(1, classes - 1)) for _ in range(count - 1))})
    grad = torch.randn(len(logits), generator=draw.generator).to(draw.device)
    found = by_slices(cuts, (logits, labels, ignored, smoothing, z_loss), grad)
    assert found[0].dtype == torch.float32 and found[1].dtype == logits.dtype

    def whole(given: Tensor) -> tuple[Tensor, Tensor]:
        given = given.requires_grad_()
        loss = written(given, labels, ignored, "none", smoothing, z_loss)
        return loss.detach(), torch.autograd.grad(loss, given, grad.to(loss.dtype))[0]

    exact, usual = whole(logits.double()), whole(logits.float())
    close(found[0], exact[0], usual[0], "losses")
    close(found[1], exact[1], usual[1].to(logits.dtype), "gradient")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@drawing
@given(data=st.data())
def test_slices_in_plain_torch(dtype: torch.dtype, data: st.DataObject) -> None:
    slices_are_exact(Draw(data, dtype))


@triton
@quiet
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@drawing
@given(data=st.data())
def test_slices_by_triton(dtype: torch.dtype, data: st.DataObject) -> None:
    slices_are_exact(Draw(data, dtype))


@pytest.mark.parametrize("where", [pytest.param("triton", marks=[triton, quiet]), "plain"])
def test_a_label_that_no_slice_has(where: str) -> None:
    args = (torch.randn(4, 6, device=DEVICE), torch.tensor([6, -1, -100, 5], device=DEVICE), -100, 0.1, 0.1)
    losses, _ = by_slices([0, 2, 6], args, torch.ones(4, device=DEVICE))
    assert losses.isnan().tolist() == [True, True, False, False] and losses[2] == 0


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": torch.ones(5)}, "cross_entropy: weight: class weights are not supported; F.cross_entropy takes"),
        ({"ignore_index": torch.ones(5)}, "ignore_index must be an int, found Tensor; class weights are not supported"),
        ({"labels": torch.rand(3, 5)}, "labels must be classes .* found torch.float32; probabilities are not"),
        ({"reduction": "max"}, "reduction must be .* found 'max'"),
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1, found 1.5"),
        ({"z_loss": -1.0}, "z_loss must not be negative, found -1.0"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cross_entropy(**{"logits": torch.randn(3, 5), "labels": torch.zeros(3).long(), **options})


# In models


class Classifier(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(4, 7), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(x), labels)


class Causal(nn.Module):
    """The loss of a language model, as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 7, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm_head(x)
        labels = nn.functional.pad(labels, (0, 1), value=-100)
        shift_labels = labels[..., 1:].contiguous().view(-1)
        flat = logits.float().view(-1, 7)
        return nn.functional.cross_entropy(flat, shift_labels, ignore_index=-100, reduction="mean"), logits


def options_of(loss: slapo.Schedule) -> dict[str, Any]:
    (node,) = [node for node in loss.graph.nodes if node.target is cross_entropy]
    return dict(node.kwargs)


x, labels = torch.randn(5, 4), torch.tensor([1, 6, 2, 0, 2])


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (nn.CrossEntropyLoss(), (-100, "mean", 0.0)),
        (nn.CrossEntropyLoss(ignore_index=2, reduction="sum", label_smoothing=0.1), (2, "sum", 0.1)),
        (F.cross_entropy, (-100, "mean", 0.0)),
        (lambda x, y: F.cross_entropy(x, y, None, ignore_index=2, reduction="none").square().mean(), (2, "none", 0.0)),
    ],
)
def test_fuse_finds_a_loss(loss: Callable[..., Tensor], options: tuple[Any, ...]) -> None:
    sch = slapo.create_schedule(Classifier(loss), example_inputs=(x, labels))
    sch.fuse("cross_entropy")
    assert tuple(options_of(sch).values()) == options
    assert sch.verify().grade == "equal"


def test_fuse_finds_the_loss_of_a_language_model() -> None:
    sch = slapo.create_schedule(Causal(), example_inputs=(torch.randn(2, 5, 4), torch.randint(7, (2, 5))))
    sch.fuse("cross_entropy")
    assert options_of(sch) == {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    assert sch.verify().grade == "equal"


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (nn.CrossEntropyLoss(weight=torch.ones(7)), "has 'loss_weight' where the pattern has None"),
        (lambda x, y: F.nll_loss(F.softmax(x, -1).log(), y), "has no cross_entropy"),
    ],
)
def test_fuse_says_why_not(loss: Callable[..., Tensor], reason: str) -> None:
    sch = slapo.create_schedule(Classifier(loss), example_inputs=(x, labels))
    with pytest.raises(NoMatchError, match=reason):
        sch.fuse("cross_entropy")
