"""Redistribution on real ranks: every pair of placements, exact in value and gradient, and the bytes that it costs."""

import dataclasses
import functools
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_py.distributed import agreement, collectives
from slapo_py.distributed.collectives import Ranks as Axis
from slapo_py.distributed.traffic import counted
from slapo_py.errors import PlacementError
from slapo_py.layouts import conversions
from slapo_py.layouts.conversions import Layout, cheapest, cost, how, steps_from, total
from slapo_py.layouts.placement import P, Partial, Placement, R, S, Shard, join, split
from slapo_py.layouts.redistribute import gradients, layouts, over, redistribute, whole_shape
from tests.ranks import RankError, Ranks

PLACEMENTS: tuple[Placement, ...] = (R, P, Partial("max"), Partial("min"), S(0), S(1), S(0, blocks=2))
SHAPES = ((24, 12), (7, 5), (10, 5), (3, 2))
"""Even on 2, 3 and 4 ranks, in two blocks too; uneven; uneven in two blocks; with empty parts."""
MESH = (R, P, S(0), S(1))
MESH_LAYOUTS: tuple[Layout, ...] = tuple(itertools.product(MESH, MESH))
ODD_LAYOUTS: tuple[Layout, ...] = (
    (Partial("max"), P),
    (P, Partial("max")),
    (Partial("min"), Partial("min")),
    (S(0), Partial("max")),
    (Partial("max"), S(1)),
    (S(0, blocks=2), S(0)),
    (S(0), S(0, blocks=2)),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """world(p): p ranks, started when they are first asked for."""
    with Worlds(tmp_path_factory) as worlds:
        yield worlds.get


class Worlds:
    """A world of each size, started once."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.folders, self.started = folders, dict[int, Ranks]()

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(self, *_: object) -> None:
        for ranks in self.started.values():
            ranks.close()

    def get(self, size: int) -> Ranks:
        """Its ranks."""
        if size not in self.started:
            self.started[size] = Ranks(size, self.folders.mktemp("ranks"))
        return self.started[size]


# What is on each rank, from a whole tensor, and back.


def laid(whole: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    """What each rank holds: terms are whole numbers, and a maximum is held by several ranks here and there."""
    if isinstance(placement, Shard):
        return [part.contiguous() for part in split(whole, placement, ranks)]
    if not isinstance(placement, Partial):
        return [whole.clone() for _ in range(ranks)]
    draw = torch.Generator().manual_seed(whole.numel() + ranks)
    if placement.op == "sum":
        terms = [torch.randint(-9, 9, whole.shape, generator=draw).to(whole.dtype) for _ in range(ranks - 1)]
        return [*terms, whole - sum(terms)]
    owner = torch.randint(0, ranks, whole.shape, generator=draw)
    off = [torch.randint(0, 3, whole.shape, generator=draw) * (owner != rank) for rank in range(ranks)]
    return [whole - one if placement.op == "max" else whole + one for one in off]


def assembled(parts: Sequence[Tensor], placement: Placement, size: int | None = None) -> Tensor:
    """The whole tensor of what the ranks hold."""
    if isinstance(placement, Shard):
        return join(parts, placement, size)
    if isinstance(placement, Partial):
        stack = torch.stack(list(parts))
        return {"sum": stack.sum, "max": stack.amax, "min": stack.amin}[placement.op](0)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def laid_on_mesh(whole: Tensor, layout: Layout, sizes: tuple[int, int]) -> list[Tensor]:
    """By rank: the outer axis first."""
    return [part for outer in laid(whole, layout[0], sizes[0]) for part in laid(outer, layout[1], sizes[1])]


def assembled_on_mesh(parts: Sequence[Tensor], layout: Layout, sizes: tuple[int, int]) -> Tensor:
    rows = [parts[at * sizes[1] : (at + 1) * sizes[1]] for at in range(sizes[0])]
    return assembled([assembled(row, layout[1]) for row in rows], layout[0])


def numbers(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randint(-50, 50, tuple(shape), generator=torch.Generator().manual_seed(seed)).float()


def fits(shape: Sequence[int], *placements: Placement) -> bool:
    return all(not isinstance(one, Shard) or one.blocks == 1 or shape[one.dim] % 2 == 0 for one in placements)


@dataclasses.dataclass
class Outcome:
    """What a rank had after a redistribution and its backward, and the bytes that it sent in each."""

    value: Tensor
    grad: Tensor
    sent: int
    sent_back: int
    calls: int


Case = tuple[tuple[int, ...], Placement, Placement, Placement, Placement]


def cases(shape: tuple[int, ...]) -> list[Case]:
    """Every pair of placements with every pair of gradient placements that it can have."""
    return [
        (shape, source, target, grad_source, grad_target)
        for source, target in itertools.product(PLACEMENTS, PLACEMENTS)
        if fits(shape, source, target)
        for grad_source, grad_target in itertools.product(gradients(target), gradients(source))
    ]


def run_cases(shapes: Sequence[tuple[int, ...]]) -> dict[Case, Outcome]:
    """On a rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for case in itertools.chain.from_iterable(map(cases, shapes)):
        shape, source, target, grad_source, grad_target = case
        x = laid(numbers(shape, 1), source, ranks)[rank].requires_grad_()
        grad = laid(numbers(shape, 2), grad_source, ranks)[rank]
        with counted() as forward:
            y = redistribute(x, source, target, grad_source, grad_target, shape=shape)
        with counted() as backward:
            y.backward(grad)
        assert x.grad is not None
        calls = forward.calls.total() + backward.calls.total()
        found[case] = Outcome(y.detach(), x.grad, forward.bytes, backward.bytes, calls)
    return found


@pytest.fixture(scope="module")
def outcomes(world: Callable[[int], Ranks]) -> Callable[[int], list[dict[Case, Outcome]]]:
    """outcomes(p): of every case on p ranks, by rank."""
    return functools.cache(lambda size: world(size).run(run_cases, SHAPES, timeout=120))


PAIRS = [
    pytest.param(size, source, target, id=f"{size}-{source}-{target}")
    for size in (2, 3, 4)
    for source, target in itertools.product(PLACEMENTS, PLACEMENTS)
]


@pytest.mark.parametrize(("size", "source", "target"), PAIRS)
def test_every_pair_is_exact(
    outcomes: Callable[[int], list[dict[Case, Outcome]]], size: int, source: Placement, target: Placement
) -> None:
    by_rank, seen = outcomes(size), 0
    for case in by_rank[0]:
        shape, *placements, grad_source, grad_target = case
        if placements != [source, target]:
            continue
        values, grads = [one[case].value for one in by_rank], [one[case].grad for one in by_rank]
        assert torch.equal(assembled(values, target, None), numbers(shape, 1)), case
        assert torch.equal(assembled(grads, grad_target), numbers(shape, 2)), case
        seen += 1
    assert seen >= 2


@pytest.mark.parametrize(("size", "source", "target"), PAIRS)
def test_bytes_are_those_of_the_table(
    outcomes: Callable[[int], list[dict[Case, Outcome]]], size: int, source: Placement, target: Placement
) -> None:
    by_rank, (shape, *_) = outcomes(size), SHAPES
    nbytes = numbers(shape, 1).nbytes
    for case in [one for one in cases(shape) if one[1:3] == (source, target)]:
        _, _, _, grad_source, grad_target = case
        sent, back = (sum(getattr(one[case], name) for one in by_rank) for name in ("sent", "sent_back"))
        assert sent == cost(source, target, size, nbytes, (0, 1)), case
        expected = cost(grad_source, grad_target, size, nbytes, (0, 1))
        if source != target and isinstance(source, Partial) and source.op != "sum":
            # To the parts of the maximum, or to the whole of it; from there shares go to those that hold it.
            after = S(0) if isinstance(target, Partial) else gradients(target)[0]
            expected = cost(grad_source, after, size, nbytes, (0, 1)) + (size - 1) * nbytes
        assert back == expected, case
        if sent == back == 0:
            assert all(one[case].calls == 0 for one in by_rank)


def test_the_table_of_the_design() -> None:
    mib, ranks = 2**20, 4
    table = {
        (P, R): 2 * 3,
        (R, P): 0,
        (P, S(0)): 3,
        (S(0), R): 3,
        (R, S(0)): 0,
        (S(0), S(1)): Fraction(3, 4),
        (S(0), S(0, blocks=2)): Fraction(3, 4),
        (S(0), P): 0,
        (S(0), Partial("max")): 0,
        (R, Partial("max")): 0,
        (Partial("max"), P): 3,
        (R, R): 0,
    }
    assert {pair: cost(*pair, ranks, mib, (0,)) / mib for pair in table} == table
    assert cost(P, Partial("max"), ranks, mib) == 6 * mib  # No dim to go over: by an all-reduce.
    assert how(P, Partial("max")) is None


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("target", [R, S(0), S(1)], ids=str)
def test_the_gradient_of_a_maximum_goes_to_one_that_holds_it(
    outcomes: Callable[[int], list[dict[Case, Outcome]]], size: int, op: str, target: Placement
) -> None:
    by_rank, shape = outcomes(size), (7, 5)
    case = (shape, Partial(op), target, gradients(target)[0], P)
    terms, best = laid(numbers(shape, 1), Partial(op), size), numbers(shape, 1)
    ties = torch.stack([term == best for term in terms]).sum(0)
    assert (ties > 1).any()
    for rank, term in enumerate(terms):
        grad = by_rank[rank][case].grad
        assert not grad[term != best].any()
        first = torch.stack([earlier != best for earlier in terms[:rank]]).all(0) if rank else term == term
        assert torch.equal(grad, numbers(shape, 2) * ((term == best) & first))


def without_gradient() -> list[Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for dtype, op in itertools.product((torch.int64, torch.bfloat16, torch.bool), ("sum", "max", "min")):
        whole = numbers((8, 6), 3).to(dtype)
        if dtype == torch.bool and op == "sum":
            continue
        x = split(whole, S(0), ranks)[rank]
        with torch.no_grad(), counted() as traffic:
            term = redistribute(x, S(0), Partial(op))
            y = redistribute(term.to(torch.uint8) if dtype == torch.bool else term, Partial(op), R)
        found.append((torch.equal(y.to(dtype), whole), dict(traffic.calls)))
    return found


def test_other_dtypes_and_no_gradient(world: Callable[[int], Ranks]) -> None:
    for found in world(2).run(without_gradient):
        assert found == [(True, {"all_reduce": 1})] * 8


def test_a_scalar_and_a_tensor_that_is_not_contiguous(world: Callable[[int], Ranks]) -> None:
    def run() -> tuple[Any, ...]:
        rank = dist.get_rank()
        scalar = torch.tensor(float(rank), requires_grad=True)
        best = redistribute(scalar, Partial("max"), R)
        best.backward()
        turned = (torch.arange(6.0).reshape(2, 3) + rank).t()
        whole = redistribute(turned, S(0), R)
        return best.item(), scalar.grad.item(), whole.tolist(), redistribute(scalar.detach(), P, R).item()

    whole = [[0, 3], [1, 4], [2, 5], [1, 4], [2, 5], [3, 6]]
    assert world(2).run(run) == [(1.0, 0.0, whole, 1.0), (1.0, 1.0, whole, 1.0)]


# Meshes.


def run_mesh(pairs: Sequence[tuple[Layout, Layout]], shapes: Sequence[tuple[int, ...]]) -> dict[Any, Outcome]:
    """On a rank of a 2 x 2 mesh."""
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    found = {}
    for shape, (source, target) in itertools.product(shapes, pairs):
        x = laid_on_mesh(numbers(shape, 1), source, (2, 2))[rank].requires_grad_()
        grads = tuple(gradients(one)[0] for one in target)
        grad = laid_on_mesh(numbers(shape, 2), grads, (2, 2))[rank]
        with counted() as forward:
            y = redistribute(x, source, target, group=mesh, shape=shape)
        with counted() as backward:
            y.backward(grad)
        assert x.grad is not None
        calls = forward.calls.total() + backward.calls.total()
        found[shape, source, target] = Outcome(y.detach(), x.grad, forward.bytes, backward.bytes, calls)
    return found


@pytest.mark.parametrize("shape", [(8, 12), (7, 5)], ids=str)
def test_every_pair_on_a_mesh(world: Callable[[int], Ranks], shape: tuple[int, int]) -> None:
    pairs = list(itertools.product(MESH_LAYOUTS, MESH_LAYOUTS))
    by_rank = world(4).run(run_mesh, pairs, [shape], timeout=200)
    for source, target in pairs:
        of_all = [one[shape, source, target] for one in by_rank]
        shown = f"{tuple(map(str, source))} -> {tuple(map(str, target))}"
        assert torch.equal(assembled_on_mesh([one.value for one in of_all], target, (2, 2)), numbers(shape, 1)), shown
        back = tuple(gradients(one)[0] for one in source)
        assert torch.equal(assembled_on_mesh([one.grad for one in of_all], back, (2, 2)), numbers(shape, 2)), shown
        if shape == (8, 12):
            expected = cost(source, target, (2, 2), numbers(shape, 1).nbytes, (0, 1))
            assert sum(one.sent for one in of_all) == expected, shown


def test_maxima_and_blocks_on_a_mesh(world: Callable[[int], Ranks]) -> None:
    others = (*ODD_LAYOUTS, (R, R), (P, P), (S(0), S(1)), (S(0), S(0)), (R, S(0)))
    pairs = [pair for pair in itertools.product(others, others) if set(pair) & set(ODD_LAYOUTS)]
    by_rank = world(4).run(run_mesh, pairs, [(8, 12)], timeout=200)
    for source, target in pairs:
        of_all = [one[(8, 12), source, target] for one in by_rank]
        shown = f"{tuple(map(str, source))} -> {tuple(map(str, target))}"
        value = assembled_on_mesh([one.value for one in of_all], target, (2, 2))
        assert torch.equal(value, numbers((8, 12), 1)), shown
        back = tuple(gradients(one)[0] for one in source)
        grad = assembled_on_mesh([one.grad for one in of_all], back, (2, 2))
        assert torch.equal(grad, numbers((8, 12), 2)), shown


# The cheapest way.


def exhaustive(source: Layout, sizes: tuple[int, ...], length: int) -> dict[Layout, Fraction]:
    """The least cost to every layout that at most `length` steps lead to."""
    found, front = {source: Fraction(0)}, {source: Fraction(0)}
    for _ in range(length):
        reached: dict[Layout, Fraction] = {}
        for layout, spent in front.items():
            for step in steps_from(layout, sizes, [MESH] * len(sizes)):
                now = spent + step.cost(sizes)
                reached[step.after] = min(now, reached.get(step.after, now))
        front = reached
        for layout, spent in reached.items():
            found[layout] = min(spent, found.get(layout, spent))
    return found


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (2, 4), (4, 2), (1, 3)], ids=str)
def test_no_way_of_three_steps_is_cheaper(sizes: tuple[int, ...]) -> None:
    ends = list(itertools.product(MESH, repeat=len(sizes)))
    compared = 0
    for source in ends:
        best = exhaustive(source, sizes, 3)
        for target in ends:
            steps = cheapest(source, target, sizes, (0, 1))
            assert [step.after for step in steps[-1:]] == [target] * bool(steps)
            assert all(step.is_legal(sizes) for step in steps)
            if target in best:
                compared += 1
                assert total(steps, sizes) <= best[target]
    assert compared == len(ends) ** 2 or len(sizes) > 1


def test_a_way_around_is_cheaper_than_axis_by_axis() -> None:
    source, target, sizes = (S(0), R), (R, S(0)), (4, 4)
    first = conversions.Step(source, 0, R)
    axis_by_axis = (first, conversions.Step(first.after, 1, S(0)))
    assert total(axis_by_axis, sizes) == 12
    assert [step.kind for step in cheapest(source, target, sizes, (0, 1))] == ["split", "all_gather", "all_to_all"]
    assert cost(source, target, sizes, 1, (0, 1)) == 6


def test_the_inner_axis_makes_way() -> None:
    assert not conversions.Step((S(0), S(0)), 0, R).is_legal((2, 2))
    assert conversions.Step((S(0), S(0)), 0, R).is_legal((2, 1))
    assert conversions.Step((S(0), S(0)), 1, R).is_legal((2, 2))
    assert not conversions.Step((Partial("max"), P), 0, R).is_legal((2, 2))
    assert conversions.Step((P, P), 0, R).is_legal((2, 2))


# The collectives by themselves.


class Pairs(nn.Module):
    """Each function of `collectives`, with each rule for its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        for rule in ("identity", "all_reduce"):
            x = collectives.identity(x, group, gradient=rule)  # type: ignore[arg-type]
            x = collectives.all_reduce(x, group, gradient=rule)  # type: ignore[arg-type]
        for rule in ("all_gather", "pad"):
            x = collectives.split(x, S(1), group, gradient=rule)  # type: ignore[arg-type]
            x = collectives.all_gather(x, S(1), group, size=5, gradient="split")
            x = collectives.reduce_scatter(x, S(0), group, gradient=rule)  # type: ignore[arg-type]
            x = collectives.all_gather(x, S(0), group, size=7, gradient="reduce_scatter")
        x = collectives.split(x, S(1), group, gradient="all_gather")
        x = collectives.all_to_all(x, S(1), S(0), group, size=5)
        x = collectives.all_to_all(x, S(0), S(1), group, size=7)
        x = redistribute(x, S(1), Partial("max"), group=group, shape=(7, 5))
        x = redistribute(x, Partial("max"), R, grad_source=P, group=group)
        x = redistribute(x, R, P, group=group)
        return redistribute(x, P, S(0), group=group)


def run_pairs(compiled: bool) -> tuple[Tensor, Tensor, dict[str, int]]:
    module: Any = Pairs()
    if compiled:
        torch._dynamo.reset()
        module = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = (numbers((7, 5), 4) + dist.get_rank()).requires_grad_()
    with warnings.catch_warnings():
        # torch's own, of each autograd.Function that it compiles.
        warnings.filterwarnings("ignore", "<class 'torch.autograd.function.Function'> should not be instantiated")
        with counted() as traffic:
            y = module(x)
            y.backward(torch.full_like(y, dist.get_rank() + 1))
    assert x.grad is not None
    return y.detach(), x.grad, dict(traffic.sent)


def test_compiled_as_one_graph(world: Callable[[int], Ranks]) -> None:
    plain, compiled = world(2).run(run_pairs, False), world(2).run(run_pairs, True, timeout=200)
    for (y, grad, sent), (y_compiled, grad_compiled, sent_compiled) in zip(plain, compiled):
        assert torch.equal(y, y_compiled)
        assert torch.equal(grad, grad_compiled)
        assert sent == sent_compiled
        assert set(sent) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


def gradient_rules() -> list[list[float]]:
    """What arrives as the gradient of [1, 2] (rank 0) and [3, 4] (rank 1), where [1, 1] and [2, 2] is handed in."""
    rank, found = dist.get_rank(), []
    for call in (
        lambda x: collectives.identity(x, gradient="identity"),
        lambda x: collectives.identity(x, gradient="all_reduce"),
        lambda x: collectives.all_reduce(x, gradient="identity"),
        lambda x: collectives.all_reduce(x, gradient="all_reduce"),
        lambda x: collectives.split(x, S(0), gradient="all_gather"),
        lambda x: collectives.split(x, S(0), gradient="pad"),
        lambda x: collectives.reduce_scatter(x, S(0), gradient="all_gather"),
        lambda x: collectives.reduce_scatter(x, S(0), gradient="pad"),
        lambda x: collectives.all_gather(x, S(0), gradient="split"),
        lambda x: collectives.all_gather(x, S(0), gradient="reduce_scatter"),
    ):
        x = torch.tensor([1.0, 2.0]).add(2 * rank).requires_grad_()
        y = call(x)
        y.backward(torch.full_like(y, rank + 1))
        found.append([*y.tolist(), *x.grad.tolist()])
    return found


def test_each_gradient_rule(world: Callable[[int], Ranks]) -> None:
    assert list(zip(*world(2).run(gradient_rules))) == [
        ([1, 2, 1, 1], [3, 4, 2, 2]),
        ([1, 2, 3, 3], [3, 4, 3, 3]),
        ([4, 6, 1, 1], [4, 6, 2, 2]),
        ([4, 6, 3, 3], [4, 6, 3, 3]),
        ([1, 1, 2], [4, 1, 2]),
        ([1, 1, 0], [4, 0, 2]),
        ([4, 1, 2], [6, 1, 2]),
        ([4, 1, 0], [6, 0, 2]),
        ([1, 2, 3, 4, 1, 1], [1, 2, 3, 4, 2, 2]),
        ([1, 2, 3, 4, 3, 3], [1, 2, 3, 4, 3, 3]),
    ]


def test_traffic_nests_and_adds_up_over_the_ranks(world: Callable[[int], Ranks]) -> None:
    def run() -> tuple[Any, ...]:
        x = torch.ones(6)
        with counted() as outer:
            collectives.all_reduce(x, gradient="identity")
            with counted() as inner:
                collectives.all_gather(x, S(0), gradient="split")
        collectives.all_gather(x, S(0), gradient="split")
        return dict(outer.sent), dict(inner.sent), dict(outer.in_all().sent), dict(outer.in_all().calls)

    # The ring's 2 * 2/3 of 24 bytes; the own 24 bytes to two others.
    sent, calls = {"all_reduce": 32, "all_gather": 48}, {"all_reduce": 3, "all_gather": 3}
    assert world(3).run(run) == [(sent, {"all_gather": 48}, {"all_reduce": 96, "all_gather": 144}, calls)] * 3


# Refusals.

FOUR = (Axis("none", 4, 1),)


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(PlacementError, match="no process group: call torch.distributed.init_process_group"):
        redistribute(torch.ones(2), P, R)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((S(0), R, S(0), None), r"grad_source=S\(0\), where the value is R. The gradient of R is R or P"),
        ((S(0), R, R, P), r"grad_target=P, where the value is S\(0\). The gradient of S\(0\) is S\(0\)\."),
        ((Partial("max"), R, R, R), r"grad_target=R, where the value is P\(max\). The gradient of P\(max\) is P\."),
        ((R, R, Partial("max"), None), r"grad_source=P\(max\), where the value is R"),
        (((R, R), R, None, None), r"source must be one placement for each of 1 mesh axis, found \(R, R\)"),
        ((R, "R", None, None), r"target must be one placement for each of 1 mesh axis, found \(R\)"),
    ],
    ids=["gradient_of_R", "gradient_of_S", "gradient_of_max", "max_as_gradient", "two_axes", "no_placement"],
)
def test_placements_that_do_not_fit(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        over(torch.ones(2, 2), *arguments, FOUR)


def test_a_gradient_that_does_not_fit_on_a_mesh_names_the_axis() -> None:
    with pytest.raises(PlacementError, match=r"grad_target=R on axis 1, where the value is S\(0\)"):
        layouts((R, S(0)), (R, R), None, (R, R), 2)


def test_a_part_that_is_not_this_ranks() -> None:
    message = r"rank \(1\) holds \(1, 5\); of \(7, 5\) in S\(0\) it should hold \(2, 5\). Give shape="
    with pytest.raises(PlacementError, match=message):
        over(torch.ones(1, 5), S(0), R, None, None, FOUR, shape=(7, 5))
    with pytest.raises(PlacementError, match=r"P of a|holds \(2, 5\)"):
        over(torch.ones(2, 5), P, R, None, None, FOUR, shape=(7, 5))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (R, S(2), r"S\(2\) of a tensor of 2 dims"),
        (S(2), R, r"S\(2\) of a tensor of 2 dims"),
        (R, S(0, blocks=2), r"7 elements don't divide into 2 equal blocks"),
        (R, S(0, blocks=(4, 2)), r"blocks have 6 elements in all, the dim has 7"),
    ],
    ids=["target_dim", "source_dim", "blocks", "sizes"],
)
def test_a_tensor_that_cannot_lie_so(source: Placement, target: Placement, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        over(torch.ones(7, 5), source, target, None, None, FOUR)


@pytest.mark.parametrize("name", ["identity", "all_reduce", "all_gather", "reduce_scatter", "split"])
def test_an_unknown_gradient_rule(name: str) -> None:
    arguments = () if name in ("identity", "all_reduce") else (S(0),)
    with pytest.raises(PlacementError, match=f"{name}: gradient must be .* or .*, found 'sum'"):
        getattr(collectives, name)(torch.ones(2), *arguments, gradient="sum")


def test_a_maximum_with_a_gradient_by_all_reduce() -> None:
    with pytest.raises(PlacementError, match=r"Write redistribute\(x, Partial\(\"max\"\), R\)"):
        collectives.all_reduce(torch.ones(2, requires_grad=True), op="max", gradient="identity")


def test_ranks_that_differ() -> None:
    with pytest.raises(PlacementError, match=r"don't do the same.*\n  rank 0: a\n  rank 1: b"):
        agreement.compare(["a", "b"])
    agreement.compare(["a", "a"])


def differing(mesh: bool) -> str:
    rank = dist.get_rank()
    groups: Any = dist.init_device_mesh("cpu", (2, 2)).get_all_groups() if mesh else None
    places: Any = ((R, S(0)), (R, R)) if mesh else (S(0), R)
    same = torch.ones(2, 3)
    with agreement.checked():
        redistribute(same, *places, group=groups)
        try:
            # Rank 1 has one row less; without a check the others would wait for it, or take what isn't theirs.
            redistribute(torch.ones(1 if rank == 1 else 2, 3), *places, group=groups)
        except PlacementError as error:
            first = str(error)
        try:
            redistribute(same, *places, group=groups, shape=(4, 3) if rank == 1 else (8, 3))
        except PlacementError as error:
            return first + str(error)
    return "nothing was found"


@pytest.mark.parametrize("mesh", [False, True], ids=["axis", "mesh"])
def test_all_ranks_raise_where_one_differs(world: Callable[[int], Ranks], mesh: bool) -> None:
    for said in world(4 if mesh else 2).run(differing, mesh, timeout=30):
        assert "rank 1: redistribute" in said
        assert "of (2, 3)" in said and "of (4, 3)" in said
        assert "it should hold" in said


def test_whole_shape_is_taken_from_even_parts() -> None:
    assert whole_shape((2, 3), (S(0),), (R,), FOUR, None) == (8, 3)
    assert whole_shape((2, 3), (S(1), S(1)), (R, R), (Axis("a", 2, 0), Axis("b", 3, 1)), None) == (2, 18)


# The ranks that these tests run on.


def test_a_rank_that_raises_does_not_hang_the_others(tmp_path: Any) -> None:
    def run() -> None:
        x = redistribute(torch.ones(2), P, R)
        if dist.get_rank() == 1:
            raise ValueError("in the middle")
        redistribute(x, P, R)

    with Ranks(3, tmp_path) as ranks:
        processes = list(ranks._processes)
        start = time.monotonic()
        with pytest.raises(RankError, match="(?s)Rank 1 of 3: .*in the middle") as caught:
            ranks.run(run)
        assert caught.value.rank == 1
        assert time.monotonic() - start < ranks.timeout / 2
        assert not ranks.alive
        assert all(process.ended(0) is not None for process in processes)
        with pytest.raises(RankError, match="have ended"):
            ranks.run(run)


def test_a_rank_that_ends_and_one_that_never_answers(tmp_path: Any) -> None:
    with Ranks(2, tmp_path) as ranks, pytest.raises(RankError, match="Rank 1 of 2: the process ended"):
        ranks.run(lambda: os._exit(3) if dist.get_rank() == 1 else dist.barrier())
    with Ranks(2, tmp_path) as ranks, pytest.raises(RankError, match=r"Ranks \[0\] of 2 gave no answer in time"):
        ranks.run(lambda: dist.get_rank() == 1 or time.sleep(60), timeout=1)


def test_ranks_that_all_raise_go_on(tmp_path: Any) -> None:
    def fail() -> None:
        raise ValueError("everywhere")

    with Ranks(2, tmp_path) as ranks:
        with pytest.raises(RankError, match="(?s)Rank 0 of 2: .*everywhere"):
            ranks.run(fail)
        assert ranks.run(dist.get_rank) == [0, 1]
