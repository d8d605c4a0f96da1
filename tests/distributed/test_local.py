"""What a rank computes by itself: a lookup in its rows, a loss over its classes, a bias that is added once."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.distributed import collectives
from slapo_py.distributed.collectives import Ranks as Axis
from slapo_py.distributed.cross_entropy import PLAIN, Slice, cross_entropy
from slapo_py.distributed.embedding import embedding
from slapo_py.distributed.once import added_once
from slapo_py.distributed.traffic import counted
from slapo_py.errors import PlacementError
from slapo_py.kernels import find_kernel
from slapo_py.layouts.placement import balanced
from tests.ranks import Ranks

FOUR = Axis("none", 4, 1)
OF_KERNEL = find_kernel("cross_entropy").classes
assert OF_KERNEL is not None
FUSED = Slice(OF_KERNEL.parts, OF_KERNEL.gradient)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """world(p): p ranks, started when they are first asked for."""
    started: dict[int, Ranks] = {}

    def get(size: int) -> Ranks:
        if size not in started:
            started[size] = Ranks(size, tmp_path_factory.mktemp("ranks"))
        return started[size]

    yield get
    for ranks in started.values():
        ranks.close()


def own(whole: Tensor, dim: int) -> Tensor:
    """This rank's part of a balanced split, as a leaf."""
    axis = Axis.of()
    part = whole.detach().split(balanced(whole.shape[dim], axis.size), dim)[axis.rank]
    return part.clone().requires_grad_(whole.requires_grad)


# Embeddings.


def look_up(total: int, padding: int | None) -> tuple[bool, bool, dict[str, int]]:
    """Whether the summed lookup and the gradient of the rows are those of the whole table."""
    table = torch.randn(total, 3, dtype=torch.float64)
    table[0] = torch.inf  # what other ranks look up in its stead must not show
    ids = torch.randint(1, total, (4, 5)) if total > 1 else torch.zeros(4, 5, dtype=torch.long)
    grad = torch.randn(4, 5, 3, dtype=torch.float64)
    table.requires_grad_()
    expected = F.embedding(ids, table, padding)
    expected.backward(grad)
    rows = own(table, 0)
    with counted() as traffic:
        term = embedding(ids, rows, padding, total=total, ranks=Axis.of())
        found = collectives.all_reduce(term, gradient="identity")
        found.backward(grad)
    assert table.grad is not None and rows.grad is not None
    return torch.equal(found, expected), torch.equal(rows.grad, own(table.grad, 0)), dict(traffic.calls)


@pytest.mark.parametrize("padding", [None, 0, 4, -1])
@pytest.mark.parametrize("total", [8, 7, 5])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_embedding_in_parts(world: Callable[[int], Ranks], ranks: int, total: int, padding: int | None) -> None:
    assert world(ranks).run(look_up, total, padding) == [(True, True, {"all_reduce": 1})] * ranks


def test_embedding_where_ranks_have_no_rows(world: Callable[[int], Ranks]) -> None:
    assert world(4).run(look_up, 2, 1) == [(True, True, {"all_reduce": 1})] * 4


@pytest.mark.parametrize("wrong", [7, -1, 400])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_an_id_that_the_table_has_not_is_refused_on_every_rank(rank: int, wrong: int) -> None:
    with pytest.raises(IndexError, match="out of range"):
        embedding(torch.tensor([0, wrong]), torch.ones(balanced(7, 4)[rank], 2), total=7, ranks=Axis("none", 4, rank))
    with pytest.raises(IndexError, match="out of range"):
        embedding(torch.tensor([2]), torch.ones(0, 2), total=2, ranks=Axis("none", 4, 3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_norm": 1.0}, "max_norm=1.0 is not supported where the rows are split.*Keep the table whole"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq=True is not supported"),
        ({"sparse": True}, "sparse=True is not supported"),
        ({"total": 8}, "rank 1 of 4 holds 3 rows; of 8 in all it should hold 2"),
    ],
    ids=["max_norm", "scale_grad_by_freq", "sparse", "rows"],
)
def test_embedding_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        embedding(torch.zeros(1, dtype=torch.long), torch.ones(3, 2), **{"total": 12, "ranks": FOUR, **given})


# Cross entropy.

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed_rows": {"reduction": "none", "label_smoothing": 0.7},
    "other_index": {"ignore_index": 3, "label_smoothing": 0.2},
    "only_smooth": {"label_smoothing": 1.0, "reduction": "sum"},
}


def whole_and_part(classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with large and far apart values and ones of -inf, this rank's part of them, and labels."""
    logits = torch.randn(9, classes, dtype=dtype) * 4
    logits[1] += 500
    logits[2, : classes // 2] -= 300
    labels = torch.randint(classes, (9,))
    labels[3] = -100
    logits.requires_grad_()
    return logits, own(logits, 1), labels


def losses(classes: int, dtype: torch.dtype, by: Slice) -> dict[str, tuple[float, float, int, int]]:
    """By case: the errors of loss and gradient, and the bytes that forward and backward sent."""
    found = {}
    for name, given in CASES.items():
        logits, part, labels = whole_and_part(classes, dtype)
        labels = labels.where(labels >= 0, given.get("ignore_index", -100))
        expected = F.cross_entropy(logits, labels, **given)
        grad = torch.randn_like(expected)
        expected.backward(grad)
        with counted() as sent:
            loss = cross_entropy(part, labels, classes=classes, ranks=Axis.of(), by=by, **given)
        with counted() as sent_back:
            loss.backward(grad)
        assert logits.grad is not None and part.grad is not None
        assert loss.dtype == dtype and part.grad.dtype == dtype and loss.shape == expected.shape
        assert sent.calls == {"all_gather": 1}
        far = (loss - expected).detach().abs() / expected.detach().abs().clamp(min=1)
        off = (part.grad - own(logits.grad, 1)).detach().abs()
        found[name] = (float(far.max()), float(off.max()) if off.numel() else 0.0, sent.bytes, sent_back.bytes)
    return found


@pytest.mark.parametrize("by", [PLAIN, FUSED], ids=["plain", "fused"])
@pytest.mark.parametrize("classes", [12, 13])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_cross_entropy_in_parts(world: Callable[[int], Ranks], ranks: int, classes: int, by: Slice) -> None:
    for rank in world(ranks).run(losses, classes, torch.float64, by):
        assert list(rank) == list(CASES)
        for name, (loss, grad, sent, sent_back) in rank.items():
            assert max(loss, grad) <= 1e-12, name
            # Three numbers of each of the nine rows to each of the others, four with label smoothing; no logits.
            assert sent == (4 if "label_smoothing" in CASES[name] else 3) * 9 * 8 * (ranks - 1)
            assert sent_back == 0


def test_cross_entropy_where_a_rank_has_no_classes(world: Callable[[int], Ranks]) -> None:
    for rank in world(4).run(losses, 3, torch.float64, PLAIN):
        assert all(max(loss, grad) <= 1e-12 for loss, grad, _, _ in rank.values())


def test_cross_entropy_of_bfloat16_is_summed_in_float32(world: Callable[[int], Ranks]) -> None:
    """As near to float64 as the rounding of the result itself."""

    def run() -> tuple[float, float, torch.dtype]:
        logits = torch.randn(40, 1001).bfloat16()
        labels = torch.randint(1001, (40,))
        exact = logits.double().requires_grad_()
        F.cross_entropy(exact, labels, reduction="none").backward(torch.ones(40, dtype=torch.float64))
        assert exact.grad is not None
        part = own(logits.requires_grad_(), 1)
        loss = cross_entropy(part, labels, reduction="none", classes=1001, ranks=Axis.of())
        loss.backward(torch.ones_like(loss))
        expected = F.cross_entropy(exact, labels, reduction="none")
        wanted = own(exact.grad, 1)
        assert part.grad is not None
        far = ((part.grad.double() - wanted) / wanted).detach().abs().max()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = cross_entropy(part.detach(), labels, classes=1001, ranks=Axis.of())
        return float(((loss.double() - expected) / expected).detach().abs().max()), float(far), cast.dtype

    for loss, grad, cast in world(2).run(run):
        assert max(loss, grad) <= 2.0**-8  # half a unit in the last place, and what float32 adds to it
        assert cast == torch.float32


def run_compiled(compiled: bool) -> list[Any]:
    def step(part: Tensor, ids: Tensor, rows: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        axis = Axis.of()
        hidden = embedding(ids, rows, 1, total=7, ranks=axis) + added_once(bias, axis)
        hidden = collectives.all_reduce(hidden, gradient="identity")
        scaled = part * hidden.sum()
        return cross_entropy(scaled, labels, label_smoothing=0.1, classes=13, ranks=axis)

    function: Any = step
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(step, fullgraph=True, backend="aot_eager")
    logits, part, labels = whole_and_part(13, torch.float64)
    rows, bias = own(torch.randn(7, 3, requires_grad=True), 0), torch.randn(3, requires_grad=True)
    with warnings.catch_warnings():
        # torch's own, of each autograd.Function that it compiles.
        warnings.filterwarnings("ignore", "<class 'torch.autograd.function.Function'> should not be instantiated")
        with counted() as traffic:
            loss = function(part, torch.tensor([1, 5, 0, 6]), rows, bias, labels)
            loss.backward()
    return [loss.detach(), part.grad, rows.grad, bias.grad, dict(traffic.sent)]


def test_compiled_as_one_graph(world: Callable[[int], Ranks]) -> None:
    plain, compiled = world(2).run(run_compiled, False), world(2).run(run_compiled, True, timeout=200)
    for (*tensors, sent), (*others, sent_compiled) in zip(plain, compiled):
        for one, other in zip(tensors, others):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
        assert sent == sent_compiled
        assert set(sent) == {"all_reduce", "all_gather"}


def test_labels_that_are_no_class_and_rows_that_are_all_ignored(world: Callable[[int], Ranks]) -> None:
    def run() -> list[bool]:
        part = own(torch.randn(2, 5, requires_grad=True), 1)
        more: dict[str, Any] = {"classes": 5, "ranks": Axis.of()}
        wrong = [
            cross_entropy(part, torch.tensor([0, one]), reduction="none", **more).isnan().tolist() == [False, True]
            for one in (5, -1)
        ]
        ignored = torch.tensor([-100, -100])
        total = cross_entropy(part, ignored, reduction="sum", **more)
        total.backward()
        assert part.grad is not None
        return [
            *wrong,
            bool(cross_entropy(part, ignored, **more).isnan()),
            float(total.detach()) == 0,
            not part.grad.any(),
        ]

    assert world(2).run(run) == [[True] * 5] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": torch.ones(2)}, r"labels must be numbers of classes \(int64\), found torch.float32"),
        ({"labels": torch.ones(3, dtype=torch.long)}, r"found \(2, 3\) and \(3,\). Flatten them"),
        ({"logits": torch.ones(2, 2, 3)}, r"found \(2, 2, 3\) and \(2,\). Flatten them"),
        ({"classes": 9}, "rank 1 of 4 holds the logits of 3 classes; of 9 in all it should hold 2"),
        ({"weight": torch.ones(12)}, "weight is not supported where the classes are split over ranks. Leave it out."),
        ({"size_average": True}, "size_average is not supported.*Leave it out, and say reduction="),
        ({"reduce": False}, "reduce is not supported"),
        ({"reduction": "max"}, 'reduction must be "mean", "sum" or "none", found \'max\''),
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1, found 1.5"),
    ],
    ids=["probabilities", "labels", "dims", "classes", "weight", "size_average", "reduce", "reduction", "smoothing"],
)
def test_cross_entropy_refuses(given: dict[str, Any], message: str) -> None:
    rest: dict[str, Any] = {
        "logits": torch.ones(2, 3), "labels": torch.zeros(2, dtype=torch.long), "classes": 12, "ranks": FOUR
    }  # fmt: skip
    with pytest.raises(PlacementError, match=message):
        cross_entropy(**{**rest, **given})


# A bias that is added once.


def test_added_once(world: Callable[[int], Ranks]) -> None:
    def run() -> tuple[list[float], list[float], int]:
        bias = torch.tensor([1.0, 2.0], requires_grad=True)
        with counted() as traffic:
            term = added_once(bias, Axis.of())
            term.backward(torch.tensor([3.0, 4.0]))
        assert bias.grad is not None
        return term.tolist(), bias.grad.tolist(), traffic.bytes

    first, *others = world(3).run(run)
    assert first == ([1, 2], [3, 4], 0)
    assert others == [([0, 0], [3, 4], 0)] * 2
