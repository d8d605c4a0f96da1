"""Random states over a mesh: alike by default, apart where asked, and masks that don't depend on the mesh."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slapo_py.distributed import collectives
from slapo_py.distributed.collectives import Ranks as Axis
from slapo_py.distributed.forks import Forked, fork, forks_of
from slapo_py.distributed.masks import LogicalMasks, MaskedByIndex, Part, attention
from slapo_py.distributed.rng import differ, forked, seed_of
from slapo_py.errors import PlacementError
from slapo_py.layouts.placement import P, Placement, R, S, Shard, split
from slapo_py.scheduled import dress
from tests.ranks import Ranks

# Seeds and states.


def test_a_seed_for_each_place() -> None:
    places: list[dict[str, int]] = [{"dp": dp, "tp": tp} for dp in range(4) for tp in range(4)]
    found = {seed_of(7, place) for place in places}
    assert len(found) == 16 and all(0 <= one < 2**63 for one in found)
    assert seed_of(7, {}) == seed_of(7, {"dp": 0, "tp": 0}) == 7
    assert seed_of(7, {"dp": 1, "tp": 0}) == seed_of(7, {"dp": 1}) == 6379965227214099624
    assert seed_of(7, {"tp": 2, "dp": 1}) == seed_of(7, {"dp": 1, "tp": 2}) != seed_of(8, {"dp": 1, "tp": 2})


def draw(count: int = 3) -> list[float]:
    return torch.rand(count).tolist()


def test_ranks_with_other_data_draw_differently_from_then_on() -> None:
    def run(dp: int, seed: int = 0) -> list[float]:
        torch.manual_seed(seed)
        before = draw()
        differ({"dp": dp})
        return before + draw()

    alone = run(0)
    torch.manual_seed(0)
    assert alone == draw() + draw()
    assert run(1) == run(1) and run(1)[:3] == alone[:3]
    assert len({tuple(run(dp)[3:]) for dp in range(4)}) == 4
    assert run(1)[3:] != run(1, seed=1)[3:]


def test_apart_within_and_alike_after() -> None:
    def run(tp: int, count: int = 3) -> tuple[list[float], list[float], list[float]]:
        torch.manual_seed(0)
        with forked({"tp": tp}):
            first = draw(count)
        between = draw()
        with forked({"tp": tp}):
            second = draw(count)
        return first, second, between + draw()

    assert run(1) == run(1)
    within = [one for tp in range(4) for one in run(tp)[:2]]
    assert len(set(map(tuple, within))) == 8
    assert run(0)[2] == run(1)[2] == run(3, count=100)[2]


def test_the_state_comes_back_when_the_body_raises() -> None:
    def run(fails: bool) -> list[float]:
        torch.manual_seed(0)
        try:
            with forked({"tp": 1}):
                draw()
                if fails:
                    raise ValueError("within")
        except ValueError:
            pass
        return draw()

    assert run(True) == run(False)


def test_two_axes_within_each_other() -> None:
    def run(tp: int, ep: int) -> tuple[float, ...]:
        torch.manual_seed(0)
        with forked({"tp": tp}):
            outer = draw(1)
            with forked({"ep": ep}):
                inner = draw(1)
            return (*outer, *inner, *draw(1))

    found = [run(tp, ep) for tp in (0, 1) for ep in (0, 1)]
    assert len({one[1] for one in found}) == 4
    assert found[0][0] == found[1][0] != found[2][0]
    assert found[0][2] == found[1][2] != found[2][2]


@pytest.mark.gpu
def test_on_a_gpu_too() -> None:
    def run(tp: int) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        with forked({"tp": tp}):
            within = torch.rand(3, device="cuda").tolist()
        return within, torch.rand(3, device="cuda").tolist()

    torch.rand(1, device="cuda")
    assert run(1) == run(1)
    assert run(0)[0] != run(1)[0] != run(2)[0]
    assert run(0)[1] == run(1)[1]


# A module whose random operations are apart.


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(4, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.up(x).tanh())  # type: ignore[no-any-return]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Drop(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


def two(coordinates: Mapping[str, int]) -> Two:
    torch.manual_seed(1)
    model = Two()
    dress(model.first, Forked(("tp",)))
    fork(model, coordinates)
    return model


def trained(model: nn.Module, run: Callable[..., Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of the first weight, and what is drawn next."""
    torch.manual_seed(3)
    x = torch.randn(5, 4)
    y = run(x)
    y.square().sum().backward()
    grad = next(model.parameters()).grad
    assert grad is not None
    return y.detach(), grad, torch.rand(2)


def test_forks_take_effect_on_the_axes_of_the_mesh() -> None:
    torch.manual_seed(1)
    plain, model = Two(), two({})
    assert forks_of(model) == {"first": ("tp",)} and forks_of(plain) == {}
    expected = trained(plain, plain)
    assert all(map(torch.equal, trained(model, model), expected))
    other_axis = two({"dp": 1})
    assert all(map(torch.equal, trained(other_axis, other_axis), expected))

    ranks = [two({"tp": tp, "dp": 1}) for tp in (0, 1)]
    assert [forks_of(one) for one in ranks] == [{"first": ("tp",)}] * 2
    torch.manual_seed(3)
    hidden = [one.first(torch.ones(5, 4)) != 0 for one in ranks]
    assert not torch.equal(*hidden)
    (first, _, next_first), (second, _, next_second) = [trained(one, one) for one in ranks]
    assert not torch.equal(first, second)
    assert torch.equal(next_first, next_second)


@pytest.mark.parametrize("tp", [0, 1])
def test_recomputing_draws_the_same(tp: int) -> None:
    model = two({"tp": tp})
    plain = trained(model, model)
    model.zero_grad()
    again = trained(model, lambda x: checkpoint(model, x, use_reentrant=False))
    assert all(map(torch.equal, plain, again))


# Torch's own, where a graph ends on a tensor that needs gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_around_a_fork_draws_the_same() -> None:
    """The compiler leaves the fork alone, and compiles what is within and around it."""
    model = two({"tp": 1})
    plain = trained(model, model)
    model.zero_grad()
    torch._dynamo.reset()
    assert all(map(torch.equal, plain, trained(model, torch.compile(model, backend="eager"))))


# Masks by logical index.


def parts_of(x: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    return split(x, placement, ranks) if isinstance(placement, Shard) else [x] * ranks


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("placement", "ranks", "size"),
    [
        (R, 2, None),
        (S(0), 2, None),
        (S(2), 3, None),
        (S(1), 3, 7),
        (S(1), 4, 7),
        (S(2, blocks=2), 3, 6),
        (S(2, blocks=(4, 2)), 2, None),
    ],
    ids=str,
)
def test_dropout_by_parts(placement: Placement, ranks: int, size: int | None, inplace: bool) -> None:
    x, y = torch.randn(4, 7, 6), torch.randn(4, 7, 6)
    if not isinstance(placement, Shard) or placement.blocks == 1:  # else a part is a copy, in an order of its own
        y = y.transpose(0, 2).contiguous().transpose(0, 2)
    torch.manual_seed(0)
    expected, transposed, after = F.dropout(x, 0.3), F.dropout(y, 0.3), draw()
    for rank in range(ranks):
        torch.manual_seed(0)
        with LogicalMasks(Part(placement, Axis("none", ranks, rank), size)):
            own = parts_of(x.clone(), placement, ranks)[rank]
            found = nn.Dropout(0.3, inplace=inplace)(own)
            found_transposed = F.dropout(parts_of(y, placement, ranks)[rank], 0.3)
        assert (found is own) is inplace
        assert torch.equal(found, parts_of(expected, placement, ranks)[rank])
        assert torch.equal(found_transposed, parts_of(transposed, placement, ranks)[rank])
        assert draw() == after


def test_dropout_on_a_mesh_and_the_inner_context_counts() -> None:
    x = torch.randn(6, 10)
    torch.manual_seed(0)
    expected = F.dropout(x, 0.4)
    for outer, inner in itertools.product(range(2), range(2)):
        first, second = Axis("outer", 2, outer), Axis("inner", 2, inner)
        halves = [one.chunk(2)[outer] for one in (x, expected)]
        columns = [one.chunk(2, 1)[outer] for one in (x, expected)]
        for parts, (own, found) in (
            ((Part(S(0), first), Part(S(0), second, 3)), [one.split([2, 1])[inner] for one in halves]),
            ((Part(S(1), first, 10), Part(S(1), second, 5)), [one.split([3, 2], 1)[inner] for one in columns]),
            ((Part(S(0), first), Part(S(1), second)), [one.chunk(2, 1)[inner] for one in halves]),
        ):
            torch.manual_seed(0)
            with LogicalMasks(Part(S(0), Axis("other", 7, 3))), LogicalMasks(*parts):
                assert torch.equal(F.dropout(own, 0.4), found)


def test_nothing_is_drawn_where_nothing_is_dropped() -> None:
    query = torch.randn(1, 2, 3, 4)
    state = torch.get_rng_state()
    with LogicalMasks(Part(S(1), Axis("none", 2, 0), 9)):  # a size that would be refused
        assert torch.equal(F.dropout(query, 0.5, training=False), query)
        assert torch.equal(F.dropout(query, 0.0), query)
        found = F.scaled_dot_product_attention(query, query, query)
    assert torch.equal(found, F.scaled_dot_product_attention(query, query, query))
    assert torch.equal(torch.get_rng_state(), state)


ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.7},
    "added": {"attn_mask": torch.linspace(-2, 2, 30, dtype=torch.float64).reshape(5, 6)},
    "masked": {"attn_mask": torch.arange(30).reshape(5, 6) % 3 != 1},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("placement", [R, S(0), S(1), S(3)], ids=str)
@pytest.mark.parametrize("name", list(ATTENTIONS))
def test_attention_by_parts(name: str, placement: Placement) -> None:
    given = {"dropout_p": 0.3, **ATTENTIONS[name]}
    heads = 2 if "enable_gqa" in given else 4
    q = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    k, v = (torch.randn(2, heads, 6, 8, dtype=torch.float64) for _ in range(2))
    torch.manual_seed(0)
    expected, after = F.scaled_dot_product_attention(q, k, v, **given), draw()
    of_value = placement == S(3)
    for rank, found in enumerate(parts_of(expected, placement, 2)):
        torch.manual_seed(0)
        whole = R if of_value else placement
        query, key = (parts_of(one, whole, 2)[rank] for one in (q, k))
        with LogicalMasks(Part(placement, Axis("none", 2, rank))):
            own = F.scaled_dot_product_attention(query, key, parts_of(v, placement, 2)[rank], **given)
        torch.testing.assert_close(own, found, rtol=1e-13, atol=1e-13)
        assert draw() == after


def test_attention_keeps_its_dtype_and_without_noise_is_torchs() -> None:
    q = torch.randn(2, 2, 5, 8, dtype=torch.bfloat16)
    with LogicalMasks(Part(R, Axis("none", 2, 0))):
        assert F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).dtype == torch.bfloat16
    q = q.double()
    torch.testing.assert_close(attention(q, q, q), F.scaled_dot_product_attention(q, q, q), rtol=1e-13, atol=1e-13)


class Attending(nn.Module):
    """Half of its heads on each of two ranks; dropout of the weights, of the inner activations, and of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
        self.inner, self.last = nn.Dropout(0.3), nn.Dropout(0.2)

    def heads(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (-1, 2)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(self.heads(x).transpose(1, 2).flatten(2))
        return self.last(x + self.out(inner))  # type: ignore[no-any-return]


class Half(Attending):
    """The same on one of two ranks."""

    def heads(self, x: Tensor) -> Tensor:
        with LogicalMasks(Part(S(1), Axis.of())):
            return super().heads(collectives.identity(x, gradient="all_reduce"))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(self.heads(x).transpose(1, 2).flatten(2))
        return self.last(x + collectives.all_reduce(self.out(inner), gradient="identity"))  # type: ignore[no-any-return]


def two_steps(kind: type[Attending], cut: Callable[[Attending], None], again: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = kind().double()
    cut(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for _ in range(2):
        x = torch.randn(2, 5, 8, dtype=torch.float64)
        y = checkpoint(model, x, use_reentrant=False) if again else model(x)
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(y.detach())
    return [*found, torch.rand(2)]


def cut_in_half(model: Attending) -> None:
    axis = Axis.of()
    rows = split(model.qkv.weight.detach(), S(0, blocks=3), 2)[axis.rank]
    columns = split(model.out.weight.detach(), S(1), 2)[axis.rank]
    model.qkv.weight, model.out.weight = nn.Parameter(rows.clone()), nn.Parameter(columns.clone())
    dress(model.inner, MaskedByIndex((Part(S(2), axis),)))


@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
def test_two_ranks_drop_what_one_process_drops(tmp_path: Any, again: bool) -> None:
    expected = two_steps(Attending, lambda model: None, False)
    with Ranks(2, tmp_path) as ranks:
        for rank in ranks.run(two_steps, Half, cut_in_half, again):
            for one, other in zip(rank, expected):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_layer_says_what_it_is() -> None:
    assert MaskedByIndex(()).describe() == "masks by logical index"


REFUSED: dict[str, Callable[[], Any]] = {
    "rand draws": lambda: torch.rand(2),
    "alpha_dropout draws": lambda: F.alpha_dropout(torch.ones(2), 0.5, True),
    "dropout2d draws": lambda: F.dropout2d(torch.ones(1, 2, 2, 2), 0.5),
    "bernoulli_ draws": lambda: torch.ones(2).bernoulli_(),
}


@pytest.mark.parametrize("message", list(REFUSED))
def test_what_draws_in_another_way_is_refused(message: str) -> None:
    with LogicalMasks(Part(S(0), Axis("none", 2, 0))):
        with pytest.raises(PlacementError, match=f"LogicalMasks: {message} random numbers; only F.dropout and"):
            REFUSED[message]()


@pytest.mark.parametrize(
    ("shape", "part", "message"),
    [
        ((3, 2), (S(0), 2, 7), r"is given \(3, 2\), and of a whole \(7, 2\).*S\(0\) on rank 0 of 2 has \(4, 2\).*size"),
        ((2,), (S(1), 2, None), r"S\(1\) of a tensor of 1 dims"),
    ],
    ids=["size", "dim"],
)
def test_what_is_no_part_is_refused(shape: Sequence[int], part: tuple[Any, ...], message: str) -> None:
    placement, ranks, size = part
    with LogicalMasks(Part(placement, Axis("none", ranks, 0), size)), pytest.raises(PlacementError, match=message):
        F.dropout(torch.ones(tuple(shape)), 0.5)


def test_terms_of_a_sum_are_refused() -> None:
    with pytest.raises(PlacementError, match="the result of a dropout can't be P: each rank would drop from its own"):
        Part(P, Axis("none", 2, 0))
