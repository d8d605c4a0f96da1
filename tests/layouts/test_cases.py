"""Public bug reports on split parameters and their collectives as inputs, each with the right result.

G04 slapo#15; G06 slapo#10, text-generation-inference#1036, gpt-neox#962; G07 pytorch#150336, pytorch#141335;
G08 slapo#46, DeepSpeed#3844; G09 transformers#44421; G10 slapo#98, slapo#6, Megatron-LM#559; G14 slapo#21, slapo#70.
The ranks are simulated: in one process, on the parts that each of them has.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.distributed.forks import fork
from slapo_py.errors import ShardError
from slapo_py.layouts.checking.check import checked
from slapo_py.layouts.placement import Shard, join, local_shape, split
from slapo_py.layouts.recording.record import record
from slapo_py.layouts.simulating.simulate import reduce, simulate
from tests.fingerprint import changes, fingerprint


def same_on_ranks(sch: slapo.Schedule, x: Tensor, ranks: int, name: str = "x") -> None:
    """Output, and gradients of input and parameters, of simulated ranks are the original's, in float64."""
    typing, faults = checked(sch, record(sch), "tp", ranks)
    assert [one.message for one in faults] == []
    model = copy.deepcopy(sch.original).double()
    x = x.double() if x.is_floating_point() else x
    given = x.clone().requires_grad_(x.is_floating_point())
    expected = model(given)
    seed = torch.randn_like(expected)
    leaves = [one for one in (given, *model.parameters()) if one.requires_grad]
    grads = dict(zip(map(id, leaves), torch.autograd.grad(expected, leaves, seed)))
    found = simulate(typing, model, {name: x.clone().requires_grad_(x.is_floating_point())})
    torch.autograd.backward(found.outputs[0], [seed] * ranks)
    reduce(found, typing)
    for one in found.outputs[0]:
        torch.testing.assert_close(one, expected, atol=1e-12, rtol=0)
    for part in found.inputs.get(name, ()):
        torch.testing.assert_close(part.grad, grads[id(given)], atol=1e-12, rtol=0)
    named = dict(model.named_parameters(remove_duplicate=False))
    for path in found.parameters:
        if named[path].requires_grad:
            torch.testing.assert_close(found.gradient(path), grads[id(named[path])], atol=1e-12, rtol=0)


class Tied(nn.Module):
    def __init__(self, vocabulary: int = 12, width: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", ["emb", "head"])
def test_g04_both_ends_of_a_tie_are_split(place: str) -> None:
    ids = torch.randint(12, (4, 6))
    sch = slapo.create_schedule(Tied(), (ids,))
    before = fingerprint(sch.original)
    sch[place].shard("weight", dim=0)
    assert sch["emb"].annotations == sch["head"].annotations != {}
    assert {path for path, one in slapo.plan(sch, {"tp": 2}).placements.items() if one == Shard(0)} == {"emb.weight"}
    for other in ("emb", "head"):
        with pytest.raises(ShardError, match=r"'weight' \('emb.weight'\) is S\(0\) on \"tp\" already"):
            sch[other].shard("weight", dim=0)
    sch.auto_sync("tp")
    same_on_ranks(sch, ids, 2, "ids")
    same_on_ranks(sch, ids, 4, "ids")
    assert sch.module.head.weight is sch.module.emb.weight  # type: ignore[union-attr]
    assert changes(before, fingerprint(sch.original)) == []


def test_g04_a_tie_that_is_cut_has_a_name_of_its_own() -> None:
    sch = slapo.create_schedule(Tied(), (torch.randint(12, (4, 6)),))
    sch["head"].shard("weight", dim=0)
    module: Any = sch.module
    module.emb.weight = nn.Parameter(torch.zeros(12, 8))  # by hand, past the schedule
    sch["head"].shard("weight", dim=0, axis="ep")
    assert [name for name, tags in sch.annotations.items() if "placement on ep" in tags] == ["head.weight"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["with bias", "without bias", "the bias alone is trained"])
def test_g06_the_bias_is_added_once(kind: str, ranks: int) -> None:
    x = torch.randn(3, 8)
    layer = nn.Linear(8, 4, bias=kind != "without bias")
    layer.weight.requires_grad_(kind != "the bias alone is trained")
    sch = slapo.create_schedule(nn.Sequential(layer), (x,))
    sch["0"].shard("weight", dim="in")
    sch["0"].sync("input", "split", grad="all_gather", dim=1)
    sch["0"].sync("output", "all_reduce")
    same_on_ranks(sch, x, ranks, "input")


def mlp(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, hidden), nn.GELU(), nn.Linear(hidden, 8))


def columns_and_rows(sch: slapo.Schedule) -> slapo.Schedule:
    sch["0"].shard("weight", "bias", dim="out")
    sch["2"].shard("weight", dim="in")
    return sch


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_g07_five_rows_over_two_ranks(ranks: int) -> None:
    x = torch.randn(2, 8)
    sch = columns_and_rows(slapo.create_schedule(mlp(5), (x,))).auto_sync("tp", ranks=ranks)
    same_on_ranks(sch, x, ranks, "input")
    weight = sch.original[0].weight  # type: ignore[index]
    parts = split(weight, Shard(0), ranks)
    sizes = [len(one) for one in parts]
    assert sum(sizes) == 5 and max(sizes) - min(sizes) <= 1
    assert torch.equal(join(parts, Shard(0)), weight)


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (one.view(batch, length, -1, width // self.heads).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(h.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [2, 4])
def test_g08_fused_weights_are_split_in_their_parts(ranks: int) -> None:
    x = torch.randn(2, 5, 16)
    sch = slapo.create_schedule(Attention(), (x,))
    sch["qkv"].shard("weight", "bias", dim="out", parts=3)
    sch["o"].shard("weight", dim="in")
    sch.auto_sync("tp", ranks=ranks)
    same_on_ranks(sch, x, ranks)
    rows = torch.arange(48)
    width = 16 // ranks
    first = [one for part in range(3) for one in range(16 * part, 16 * part + width)]
    assert split(rows, Shard(0, 3), ranks)[0].tolist() == first
    assert torch.equal(join(split(rows, Shard(0, 3), ranks), Shard(0, 3)), rows)


@pytest.mark.parametrize("ranks", [2, 4])
def test_g08_parts_that_are_not_declared_are_asked_for(ranks: int) -> None:
    """By contiguous rows the first rank would have all of q, and k in part."""
    sch = slapo.create_schedule(Attention(), (torch.randn(2, 5, 16),))
    sch["qkv"].shard("weight", "bias", dim="out")
    sch["o"].shard("weight", dim="in")
    sch["o"].sync("output", "all_reduce")
    sch["qkv"].sync("input", None, grad="all_reduce")
    assert any("parts=3" in one.message for one in sch.check(ranks=ranks))


def test_g09_attributes_say_the_whole_sizes() -> None:
    """The schedule's module is the whole: its attributes, its weights and its text say the same, split or not."""
    table, layer = nn.Embedding(12, 8), nn.Linear(8, 12)
    sch = slapo.create_schedule(nn.Sequential(table, layer), (torch.randint(12, (3,)),))
    before = str(sch.module)
    sch["0"].shard("weight", dim=0)
    sch["1"].shard("weight", "bias", dim="out")
    sch.auto_sync("tp")
    module: Any = sch.module
    assert module[0].num_embeddings == len(module[0].weight) == 12
    assert module[1].out_features == len(module[1].weight) == 12
    assert str(module) == before
    assert local_shape((12, 8), slapo.plan(sch, {"tp": 2}).placements["1.weight"], 2, 0) == (6, 8)
    sch.undo(len(sch.history))
    assert str(sch.module) == before and slapo.plan(sch, {"tp": 2}).placements["1.weight"] == slapo.Replicate()


@pytest.mark.parametrize("ranks", [2, 4])
def test_g10_both_all_reduces_are_needed(ranks: int) -> None:
    x = torch.randn(3, 8)
    sch = columns_and_rows(slapo.create_schedule(mlp(12), (x,)))
    sch["2"].sync("output", "all_reduce")
    (fault,) = sch.check(ranks=ranks)
    assert fault.kind == "missing in backward"
    assert fault.message.startswith('the gradient of input 0 of "0" is P and is needed R: all_reduce is missing.')
    exec(fault.message.split("Write: ")[1], {"sch": sch})
    same_on_ranks(sch, x, ranks, "input")


class Dropped(nn.Module):
    """Dropout on what is split, and on what every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.whole = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.split(x), self.whole(x)


@pytest.mark.parametrize("recompute", [False, True])
def test_g14_ranks_draw_apart_where_they_hold_parts(recompute: bool) -> None:
    x = torch.ones(4, 64)
    sch = slapo.create_schedule(nn.Sequential(Dropped()), (x,))
    sch["0.split"].fork_rng("tp")
    if recompute:
        sch["0"].checkpoint()

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        built = slapo.build(sch)
        fork(built, {"tp": rank})
        torch.manual_seed(0)
        given = x.clone().requires_grad_()
        parted, whole = built(given)
        (parted.sum() + 2 * whole.sum()).backward()
        assert given.grad is not None
        return parted.detach(), whole.detach(), given.grad

    first, second, again = run(0), run(1), run(0)
    assert ((first[0] == 0) == (second[0] == 0)).float().mean() < 0.6
    assert torch.equal(first[1], second[1])
    assert all(torch.equal(one, other) for one, other in zip(first, again))
    for parted, whole, gradient in (first, second):
        assert torch.equal(gradient, parted + 2 * whole)  # x is 1: what was dropped has no gradient


def test_g14_simulated_ranks_drop_what_the_whole_drops() -> None:
    x = torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8), nn.Dropout(0.5))
    sch = slapo.create_schedule(model, (x,))
    sch["0"].shard("weight", "bias", dim="out")
    sch["2"].shard("weight", dim="in")
    sch.auto_sync("tp")
    typing, _ = checked(sch, record(sch), "tp", 2)
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    for one in simulate(typing, model, {"input": x}).outputs[0]:
        torch.testing.assert_close(one, expected, atol=1e-5, rtol=0)
