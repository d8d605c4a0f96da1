"""Placements: splitting and joining, uneven and in blocks, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slapo_py.errors import PlacementError
from slapo_py.layouts.placement import (
    P,
    Partial,
    R,
    Replicate,
    S,
    Shard,
    balanced,
    is_even,
    join,
    local_shape,
    local_size,
    split,
)


@pytest.mark.parametrize(
    "size, ranks, sizes",
    [(6, 4, [2, 2, 1, 1]), (8, 4, [2, 2, 2, 2]), (3, 4, [1, 1, 1, 0]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_balanced_has_larger_shares_first(size: int, ranks: int, sizes: list[int]) -> None:
    assert balanced(size, ranks) == sizes


@pytest.mark.parametrize(
    "shard, ranks, expected",
    [
        (S(0), 2, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        (S(0), 5, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9], [10, 11]]),
        (S(0, 3), 2, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]),
        (S(0, (6, 3, 3)), 3, [[0, 1, 6, 9], [2, 3, 7, 10], [4, 5, 8, 11]]),
        (S(0, (7, 5)), 2, [[0, 1, 2, 3, 7, 8, 9], [4, 5, 6, 10, 11]]),
    ],
    ids=str,
)
def test_split_gives_each_rank_its_elements(shard: Shard, ranks: int, expected: list[list[int]]) -> None:
    whole = torch.arange(12)
    parts = split(whole, shard, ranks)
    assert [part.tolist() for part in parts] == expected
    assert [len(part) for part in parts] == [local_size(12, shard, 0, ranks, rank) for rank in range(ranks)]
    assert torch.equal(join(parts, shard, 12), whole)


@st.composite
def shards(draw: st.DrawFn) -> tuple[list[int], Shard, int]:
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    blocks: int | tuple[int, ...] = draw(
        st.one_of(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1).map(tuple))
    )
    shape[dim] = sum(blocks) if isinstance(blocks, tuple) else blocks * draw(st.integers(1, 5))
    return shape, S(dim, blocks), draw(st.integers(1, 5))


@given(shards())
def test_join_undoes_split(drawn: tuple[list[int], Shard, int]) -> None:
    shape, shard, ranks = drawn
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = split(whole, shard, ranks)
    assert torch.equal(join(parts, shard, shape[shard.dim]), whole)
    assert [tuple(part.shape) for part in parts] == [local_shape(shape, shard, ranks, rank) for rank in range(ranks)]
    assert is_even(shape, shard, ranks) == all(block % ranks == 0 for block in shard.block_sizes(shape[shard.dim]))


def test_a_part_of_one_block_is_a_view() -> None:
    whole = torch.zeros(4, 6)
    split(whole, S(1), 2)[1].fill_(1)
    assert whole.sum() == 12
    split(whole, S(1, 3), 2)[1].fill_(5)
    assert whole.sum() == 12


def test_whole_and_partial_values_have_the_whole_shape() -> None:
    for placement in (R, P, Partial("max")):
        assert local_shape((4, 6), placement, 4, 3) == (4, 6)
        assert is_even((5, 7), placement, 4)
    assert not is_even((5, 8), S(0), 4) and is_even((5, 8), S(1, 2), 4) and not is_even((5, 8), S(1, (6, 2)), 4)


def test_placements_are_values() -> None:
    assert S(1) == Shard(1) and S(1) != S(0) and len({S(1), Shard(1), R, Replicate(), P, Partial("sum")}) == 3
    assert S(1, (4, 4, 4)) == S(1, 3)
    assert [str(one) for one in (R, P, Partial("max"), S(2), S(0, 3), S(0, (4, 2)))] == [
        "R",
        "P",
        "P(max)",
        "S(2)",
        "S(0, blocks=3)",
        "S(0, blocks=(4, 2))",
    ]


def test_no_such_reduction() -> None:
    with pytest.raises(PlacementError, match='op must be "sum", "max" or "min", found \'mean\''):
        Partial("mean")


@pytest.mark.parametrize("dim", [-1, True, "0", 1.0], ids=repr)
def test_no_such_dim(dim: object) -> None:
    with pytest.raises(PlacementError, match="dim must be an int of at least 0, found"):
        Shard(dim)  # type: ignore[arg-type]


@pytest.mark.parametrize("blocks", [0, -1, True, (), (2, 0), (2, True), [2, 2], "2"], ids=repr)
def test_no_such_blocks(blocks: object) -> None:
    with pytest.raises(PlacementError, match="blocks must be a positive int, or a tuple of positive sizes, found"):
        Shard(0, blocks)  # type: ignore[arg-type]


def test_blocks_must_fill_the_dim() -> None:
    with pytest.raises(PlacementError, match=r"the blocks have 6 elements in all, the dim has 8"):
        split(torch.zeros(8), S(0, (4, 2)), 2)
    with pytest.raises(PlacementError, match=r"S\(0, blocks=3\): 8 elements don't divide into 3 equal blocks"):
        split(torch.zeros(8), S(0, 3), 2)


def test_the_dim_must_be_there() -> None:
    with pytest.raises(PlacementError, match=r"S\(2\) of a tensor of 2 dims \(4, 6\): it has no dim 2"):
        split(torch.zeros(4, 6), S(2), 2)
