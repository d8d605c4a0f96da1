"""The checker: every planted fault gives exactly one message, with the place, the placements and the line to write."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import ArgumentError, PlacementError, ShardError, StepError
from slapo_py.layouts.checking.check import checked
from slapo_py.layouts.recording.record import record
from slapo_py.layouts.simulating.simulate import simulate
from tests.layouts.plans import PLANS


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.drop(F.gelu(self.up(x)))))


class AddsOne(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(F.gelu(self.up(x))) + 1)


class Literal(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(x.shape[0], x.shape[1], 4, 8)
        return self.down(F.gelu(heads).flatten(2))


class Thirds(Mlp):
    """Three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).view(*x.shape[:2], 3, 8).softmax(-1).flatten(2))


class Grouped(nn.Dropout):
    """A size of its own, of values that no rank has a part of."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.size = 4

    def forward(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.size, -1).softmax(-1).flatten(2)


class Owner(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.drop = Grouped()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(x) + self.down(F.gelu(self.up(x))))


class DropsPartial(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.down(F.gelu(self.up(x)))))


def mlp(kind: type[Mlp] = Mlp, *, up: bool = True, down: bool = True) -> slapo.Schedule:
    """Split by hand; up, down: whether the two collectives are there."""
    torch.manual_seed(0)
    sch = slapo.create_schedule(kind(), (torch.randn(4, 6, 16),))
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")
    if kind is Mlp:
        sch["drop"].fork_rng()  # of what is split
    if up:
        sch["up"].sync("input", None, grad="all_reduce")
    if down:
        sch["down"].sync("output", "all_reduce")
    return sch


def in_sequence(
    change: Callable[[slapo.Schedule], None] = lambda sch: None, grad: str = "reduce_scatter"
) -> slapo.Schedule:
    """Sequence parallelism by hand, right if `grad` is."""
    sch = mlp(up=False, down=False)
    sch.sync("input", "split", dim=1)
    sch["up"].sync("input", "all_gather", grad=grad, dim=1)
    sch["down"].sync("output", "reduce_scatter", dim=1)
    sch["norm"].reduce_grad("bias")
    sch.sync("output", "all_gather", dim=1)
    change(sch)
    return sch


def summed(sch: slapo.Schedule) -> None:
    sch["norm"].reduce_grad("weight")


def gathered(grad: str) -> slapo.Schedule:
    """Only the first product is split, and gathered at once."""
    sch = slapo.create_schedule(Mlp(), (torch.randn(4, 6, 16),))
    sch["up"].shard("weight", "bias", dim="out")
    sch["up"].sync("input", None, grad="all_reduce")
    sch["up"].sync("output", "all_gather", grad=grad, dim=2)
    return sch


class Product(Mlp):
    """The second product with a weight and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(self.up(x)), self.weight, self.bias)


class BiasApart(Product):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(self.up(x)), self.weight) + self.bias


def product(kind: type[Product]) -> slapo.Schedule:
    """The sum over the ranks comes after the bias."""
    torch.manual_seed(0)
    sch = slapo.create_schedule(kind(), (torch.randn(4, 6, 16),))
    sch["up"].shard("weight", "bias", dim="out").sync("input", None, grad="all_reduce")
    sch.shard("weight", dim=1).sync("output", "all_reduce")
    return sch


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x))))


def images() -> slapo.Schedule:
    """Data parallelism, written with syncs."""
    sch = slapo.create_schedule(Images(), (torch.randn(4, 3, 8, 8),))
    sch.sync("input", "split", dim=0)
    sch.sync("output", "all_gather", dim=0)
    sch.select("*").reduce_grad("weight", "bias")
    return sch


def replanned(
    name: str, path: str, change: Callable[[slapo.Schedule], None], primitive: str = "shard"
) -> slapo.Schedule:
    """A right schedule of a family with the steps of a primitive at a path replaced."""
    sch = PLANS[name].schedule().auto_sync("tp")
    again = slapo.create_schedule(sch.original, PLANS[name].inputs())
    steps = [one for one in sch.history if (one.primitive, one.path) != (primitive, path)]
    slapo.History(steps).replay(again)
    change(again[path])
    return again


K_PROJ, C_ATTN = "model.layers.1.self_attn.k_proj", "transformer.h.1.attn.c_attn"


def llama(change: Callable[[slapo.Schedule], None] = lambda sch: None) -> slapo.Schedule:
    plan = PLANS["llama"]
    sch = plan.schedule().auto_sync("tp")
    change(sch)
    return sch


FAULTS: dict[str, tuple[Callable[[], slapo.Schedule], str, str]] = {
    "missing forward all-reduce": (
        lambda: mlp(down=False), "missing in forward",
        'output 0 of "down" is P and is needed R: all_reduce is missing. '
        'Write: sch["down"].sync("output", "all_reduce")',
    ),
    "missing backward all-reduce": (
        lambda: mlp(up=False), "missing in backward",
        'the gradient of input 0 of "up" is P and is needed R: all_reduce is missing. '
        'Write: sch["up"].sync("input", None, grad="all_reduce")',
    ),
    "doubled forward": (
        lambda: mlp()["norm"].sync("input", "all_reduce").root.cursor(""), "wrong in forward",
        'all_reduce at input 0 of "norm": the value is R, not a partial sum: it would be added up once for each rank',
    ),
    "doubled backward": (
        lambda: mlp()["norm"].sync("input", None, grad="all_reduce").root.cursor(""), "doubled in backward",
        'input 0 of "norm": all_reduce of a gradient that is R: it becomes 2 times too large. Leave it out.',
    ),
    "x + 1 on a partial sum": (
        lambda: mlp(AddsOne, down=False), "missing in forward", 'output 0 of "down" is P and is needed R',
    ),
    "dropout on a partial sum": (
        lambda: mlp(DropsPartial, down=False), "missing in forward", 'output 0 of "down" is P and is needed R',
    ),
    "a literal size that belongs to no attribute": (
        lambda: mlp(Literal), "literal size",
        "is given the literal size 4, and a rank needs 2. It comes from no attribute",
    ),
    "gradient of a whole parameter": (
        lambda: llama(lambda sch: sch["model.norm"].reduce_grad("weight")), "gradient summed twice",
        'the gradient of the parameter "model.norm.weight" is no partial sum: summed over the ranks it',
    ),
    "doubled gradient after an all-gather": (
        lambda: gathered("reduce_scatter"), "wrong in backward",
        'output 0 of "up": the value goes through all_gather, so the gradient arrives as R and must leave as S(2): '
        'that is split, not reduce_scatter. Write instead: sch["up"].sync("output", "all_gather", grad="split", dim=2)',
    ),
    "summed gradient after an all-gather": (
        lambda: in_sequence(summed, grad="all_reduce"), "wrong in backward",
        "the gradient arrives as P and must leave as S(1): that is reduce_scatter, not all_reduce. Write instead: "
        'sch["up"].sync("input", "all_gather", grad="reduce_scatter", dim=1)',
    ),
    "split gradient where reduce-scatter is due": (
        lambda: in_sequence(summed, grad="split"), "wrong in backward",
        "the gradient arrives as P and must leave as S(1): that is reduce_scatter, not split. Write instead: "
        'sch["up"].sync("input", "all_gather", grad="reduce_scatter", dim=1)',
    ),
    "norm gradient under sequence parallelism": (
        in_sequence, "gradient not summed",
        'the parameter "norm.weight" is whole on each rank (R) and its gradient is a partial sum (P). '
        'Write: sch["norm"].reduce_grad("weight")',
    ),
    "bias added p times": (
        lambda: product(BiasApart), "added by each rank",
        'adds the parameter "bias", which is R, to a value that is P: it would be added 2 times, once by each rank. '
        "Give it to the product, as in F.linear(x, weight, bias)",
    ),
    "split bias of a product that is summed": (
        lambda: mlp()["down"].shard("bias", dim=0).root.cursor(""), "wrong split",
        'the parameter "down.bias" is S(0), and what is done with it, and the syncs around it, need R. '
        'Write instead: sch["down"].shard("weight", dim="in")',
    ),
    "wrong shard dim": (
        lambda: replanned("llama", K_PROJ, lambda place: place.shard("weight", dim="in")), "wrong split",
        f'the parameter "{K_PROJ}.weight" is S(1), and what is done with it, and the syncs around it, need S(0). '
        f'Write instead: sch["{K_PROJ}"].shard("weight", dim="out")',
    ),
    "a shard that is missing": (
        lambda: replanned("llama", K_PROJ, lambda place: None), "wrong split",
        f'the parameter "{K_PROJ}.weight" is R, and what is done with it, and the syncs around it, need S(0). '
        f'Write: sch["{K_PROJ}"].shard("weight", dim="out")',
    ),
    "fused weight without parts": (
        lambda: replanned("gpt2", C_ATTN, lambda place: place.shard("weight", "bias", dim="out")), "wrong split",
        f'the parameter "{C_ATTN}.weight" is S(1), and what is done with it, and the syncs around it, need '
        f'S(1, blocks=3). Write instead: sch["{C_ATTN}"].shard("weight", "bias", dim="out", parts=3)',
    ),
    "tied pair at one end": (  # the table is split for the embedding, and so is the head
        lambda: replanned("gpt2", "lm_head", lambda place: None, "sync"), "missing in backward",
        'the gradient of input 0 of "lm_head" is P and is needed R: all_reduce is missing. '
        'Write: sch["lm_head"].sync("input", None, grad="all_reduce")',
    ),
    "heads do not divide": (
        lambda: mlp(Thirds), "heads", '3 heads do not divide over axis "tp" of size 2. Legal sizes: 1, 3.',
    ),
    "batch norm split over the batch": (
        images, "batch norm",
        'batch_norm in "norm" is in training and takes the mean over the batch, and its input is S(0)',
    ),
    "divided and whole": (
        lambda: mlp(Owner)["drop"].configure(size=slapo.per_rank("tp")).root.cursor(""), "size divided",
        """is given the size 4 of the attribute 'size', which a rank needs whole, and which is divided over "tp".""",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_gives_one_message(name: str) -> None:
    make, kind, text = FAULTS[name]
    found = make().check()
    assert [one.kind for one in found] == [kind], [one.message for one in found]
    assert text in found[0].message


def test_what_is_right_is_silent() -> None:
    assert mlp().check() == []
    assert gathered("split").check() == [] and in_sequence(summed).check() == [] and product(Product).check() == []
    assert mlp(up=False, down=False).auto_sync("tp").check() == []


def test_the_line_of_a_message_mends_it() -> None:
    sch = mlp(up=False, down=False)
    for _ in range(2):
        line = sch.check()[0].message.partition("Write: ")[2]
        eval(line, {"sch": sch})
    assert sch.check() == []


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_fused_weights_need_parts(parts: int) -> None:
    """As many as the code cuts; before any sync is written, too."""
    plan = PLANS["gpt2"]
    torch.manual_seed(0)
    sch = slapo.create_schedule(plan.build("sdpa"), plan.inputs())
    sch["transformer.h.0.attn.c_attn"].shard("weight", "bias", dim="out", parts=parts)
    sch["transformer.h.0.attn.c_proj"].shard("weight", dim="in")
    found = sch.check()
    assert found[0].line == 'sch["transformer.h.0.attn.c_attn"].shard("weight", "bias", dim="out", parts=3)'
    assert [one.kind for one in found[1:]] == ["missing in forward", "missing in backward", *["size not divided"] * 2]


def test_shard_refuses() -> None:
    sch = slapo.create_schedule(Mlp(), (torch.randn(4, 6, 16),))
    with pytest.raises(ArgumentError, match="needs names of parameters"):
        sch["up"].shard(dim=0)
    with pytest.raises(ArgumentError, match="there is no parameter 'weigth' here. .* 'weight'"):
        sch["up"].shard("weigth", dim=0)
    with pytest.raises(ArgumentError, match="axis must be the name of a mesh axis"):
        sch["up"].shard("weight", dim=0, axis="t p")
    with pytest.raises(ArgumentError, match='dim must be a number, "out" or "in"'):
        sch["up"].shard("weight", dim="width")
    with pytest.raises(ShardError, match="has no dim 2"):
        sch["up"].shard("weight", dim=2)
    with pytest.raises(ShardError, match="is said of a Linear, Conv1D or convolution, and this is a LayerNorm"):
        sch["norm"].shard("weight", dim="out")
    with pytest.raises(ShardError, match='a bias has no "in" dim. Leave it whole'):
        sch["down"].shard("weight", "bias", dim="in")
    with pytest.raises(ShardError, match="parts=3 don't fill dim 0, which has 32 elements"):
        sch["up"].shard("weight", dim="out", parts=3)
    sch["up"].shard("weight", dim="out", parts=[8, 8, 16])
    with pytest.raises(ShardError, match=r"'weight' \('up.weight'\) is S\(0, blocks=\(8, 8, 16\)\) on \"tp\" already"):
        sch["up"].shard("weight", dim="in")
    sch["up"].shard("weight", dim="in", axis="ep")


def test_a_tie_is_split_at_both_ends() -> None:
    plan = PLANS["gpt2"]
    sch = plan.schedule()
    with pytest.raises(ShardError, match="already"):
        sch["lm_head"].shard("weight", dim="out")


def test_sync_and_reduce_grad_refuse() -> None:
    sch = slapo.create_schedule(Mlp(), (torch.randn(4, 6, 16),))
    with pytest.raises(ArgumentError, match='at must be "input" or "output"'):
        sch["up"].sync("before", "all_reduce")
    with pytest.raises(ArgumentError, match="value must be None or one of"):
        sch["up"].sync("output", "allreduce")
    with pytest.raises(ArgumentError, match="does nothing"):
        sch["up"].sync("output")
    with pytest.raises(ArgumentError, match="all_gather needs the dim"):
        sch["up"].sync("output", "all_gather")
    with pytest.raises(ArgumentError, match="axis must be the name of a mesh axis"):
        sch["up"].sync("output", "all_reduce", axis="")
    sch["up"].sync("output", "all_reduce")
    with pytest.raises(StepError, match='output 0 has a sync on "tp" already'):
        sch["up"].sync("output", "all_gather", dim=1)
    with pytest.raises(ArgumentError, match="needs names of parameters"):
        sch["norm"].reduce_grad()
    with pytest.raises(ArgumentError, match="there is no parameter 'wieght' here"):
        sch["norm"].reduce_grad("wieght")
    sch["norm"].reduce_grad("weight")
    with pytest.raises(StepError, match="the gradient of 'weight' is summed over \"tp\" already"):
        sch["norm"].reduce_grad("weight")


def test_auto_sync_refuses_what_has_no_place_and_changes_nothing() -> None:
    sch = mlp(Literal, up=False, down=False)
    before = (str(sch), str(sch.history))
    with pytest.raises(PlacementError, match="is given the literal size 4, and a rank needs 2"):
        sch.auto_sync("tp")
    with pytest.raises(PlacementError, match="pins has 'nothing', and no tensor enters"):
        sch.auto_sync("tp", pins={"nothing": slapo.Shard(1)})
    assert (str(sch), str(sch.history)) == before


class Flat(nn.Module):
    """Without submodules: there is no border between its products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 32))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down).softmax(-1)


def test_auto_sync_refuses_what_no_sync_can_mend() -> None:
    sch = slapo.create_schedule(Flat(), (torch.randn(4, 16),))
    sch.shard("up", dim=0).shard("down", dim=1)
    with pytest.raises(PlacementError, match="linear is P, and softmax needs it R .* at no border of a module"):
        sch.auto_sync("tp")
    wrong = mlp()
    wrong["norm"].sync("input", "all_reduce")
    with pytest.raises(PlacementError, match="it would be added up once for each rank. Leave it out"):
        wrong.auto_sync("tp")


class Heads(Mlp):
    """Two heads of 16."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(*x.shape[:2], -1, 16).softmax(-1)
        return self.down(heads.flatten(2))


def test_uneven_heads_are_said() -> None:
    assert mlp(Heads).check(ranks=2) == []
    found = mlp(Heads).check(ranks=4)
    assert [one.message for one in found] == [
        'shard("weight", dim="out") at "up": 2 heads do not divide over axis "tp" of size 4. Legal sizes: 1, 2.'
    ]
    with pytest.raises(ShardError, match='auto_sync at "": shard.*2 heads do not divide over axis "tp" of size 4'):
        mlp(Heads, up=False, down=False).auto_sync("tp", ranks=4)
    gathered = mlp(Heads, up=False, down=False)
    gathered["up"].sync("output", "all_gather", dim=2)  # by hand: every rank has all heads
    assert "heads" not in [one.kind for one in gathered.check(ranks=4)]


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "legal"),
    [(8, 2, 4, "1, 2"), (6, 6, 4, "1, 2, 3, 6"), (12, 6, 4, "1, 2, 3, 6"), (8, 4, 3, "1, 2, 4"), (8, 1, 2, "1")],
)
def test_heads_of_llama(heads: int, groups: int, ranks: int, legal: str) -> None:
    config = hf.LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=groups, head_dim=8, max_position_embeddings=32, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    sch = slapo.create_schedule(hf.LlamaForCausalLM(config), PLANS["llama"].inputs())
    PLANS["llama"].split(sch)
    odd = heads if heads % ranks else groups
    place = f'"model.layers.0.self_attn.{"q" if heads % ranks else "k"}_proj"'
    text = f'shard("weight", dim="out") at {place}: {odd} heads do not divide over axis "tp" of size {ranks}.'
    (found,) = sch.check(ranks=ranks)
    assert found.kind == "heads" and found.message.startswith(f"{text} Legal sizes: {legal}. The same at ")
    assert [int(one) for one in legal.split(", ")] == [
        size for size in range(1, 13) if heads % size == 0 and groups % size == 0
    ]
    with pytest.raises(ShardError, match=re.escape(text)):
        sch.auto_sync("tp", ranks=ranks)


@pytest.mark.parametrize("padding", [None, -1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_table_of_seven_rows(ranks: int, padding: int | None) -> None:
    """An uneven split: each rank looks where its own rows begin."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=padding), nn.LayerNorm(4))
    ids = torch.arange(7)[None]
    sch = slapo.create_schedule(model, (ids,))
    sch["0"].shard("weight", dim=0)
    sch.auto_sync("tp", ranks=ranks)
    typing, faults = checked(sch, record(sch), "tp", ranks)
    assert faults == []
    found = simulate(typing, model, {"input": ids})
    expected = model(ids)
    seed = torch.randn_like(expected)
    expected.backward(seed)
    torch.autograd.backward(found.outputs[0], [seed] * ranks)
    for one in found.outputs[0]:
        torch.testing.assert_close(one, expected)
    torch.testing.assert_close(found.gradient("0.weight"), model[0].weight.grad)


def test_a_table_that_rescales_its_rows_is_refused() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)), (torch.arange(8)[None],))
    sch["0"].shard("weight", dim=0)
    with pytest.raises(PlacementError, match='embedding in "0" takes no such placements'):
        sch.auto_sync("tp")


def test_a_refused_selection_leaves_no_sync_behind() -> None:
    sch = mlp(up=False, down=False)
    sch["down"].sync("output", "all_reduce")
    before = [one.message for one in sch.check()]
    with pytest.raises(StepError, match="has a sync"):
        sch.select("[ud]*").sync("output", "all_reduce")  # up, down, drop: the second has one
    assert [one.message for one in sch.check()] == before and "up" not in sch.root.syncs


def test_what_is_split_is_not_replaced() -> None:
    sch = mlp()
    with pytest.raises(slapo.ScheduleError, match="shard"):
        sch["up"].replace(nn.Linear(16, 32))


def test_a_loss_with_a_literal_size_is_given_whole_logits() -> None:
    plan = PLANS["llama"]
    inputs = plan.inputs()
    inputs["labels"] = inputs["input_ids"].clone()  # transformers' loss views the logits as (-1, config.vocab_size)
    sch = slapo.create_schedule(plan.model(), inputs)
    plan.split(sch)
    line = 'sch["lm_head"].sync("output", "all_gather", dim=2)'
    with pytest.raises(PlacementError, match="is given the literal size 96, and a rank needs 48") as refused:
        sch.auto_sync("tp")
    assert str(refused.value).endswith(f"Or let each rank have it whole there. Write: {line}")
    eval(line, {"sch": sch})
    assert sch.auto_sync("tp").check() == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def block() -> slapo.Schedule:
    torch.manual_seed(0)
    return slapo.create_schedule(nn.Sequential(Block(), nn.LayerNorm(16)), (torch.randn(2, 4, 16),))


@pytest.mark.parametrize(
    ("path", "at", "value", "grad", "dim"),
    [
        ("0.down", "output", None, "all_gather", 1),
        ("0.down", "output", None, "all_gather", 2),
        ("0.up", "input", None, "reduce_scatter", 1),
        ("0.up", "input", None, "reduce_scatter", 2),
        ("0.up", "input", "all_to_all", "reduce_scatter", 1),
        ("0.up", "input", "all_to_all", "auto", 1),
    ],
)
def test_a_right_collective_on_the_gradient_hides_no_wrong_one(
    path: str, at: str, value: str | None, grad: str, dim: int
) -> None:
    right, sch = block(), block()
    right["0.up"].shard("weight", "bias", dim="out")
    right["0.down"].shard("weight", dim="in")
    right.auto_sync("tp", pins={"0": slapo.Shard(1)})
    assert right.check() == []
    for step in right.history:
        changed = step.primitive == "sync" and step.path == path
        kwargs = {"value": value, "grad": grad, "dim": dim} if changed else step.kwargs
        getattr(sch[step.path] if step.path else sch, step.primitive)(*step.args, **kwargs)
    (found,) = sch.check()
    good = "all_gather" if at == "input" else "reduce_scatter"
    line = f'sch["{path}"].sync("{at}", "{good}", dim=1)'
    assert found.kind == "wrong in forward" and found.line == line, found.message
    with pytest.raises(PlacementError, match=re.escape(line)):
        sch.auto_sync("tp")


def test_all_to_all_of_what_is_split_so_already() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.LayerNorm(16), nn.LayerNorm(16)), (torch.randn(2, 4, 16),))
    sch["0"].sync("input", "split", dim=1).reduce_grad("weight", "bias")
    sch["0"].sync("output", "all_to_all", dim=1)
    sch["1"].sync("output", "all_gather", dim=1).reduce_grad("weight", "bias")
    (found,) = sch.check()
    assert found.kind == "wrong in forward" and 'output 0 of "0"' in found.message


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, {"tp": 0}])
def test_numbers_of_ranks_that_are_refused(ranks: object) -> None:
    text = re.escape(f"ranks must be whole numbers from 1, as in ranks=2; found {ranks!r}.")
    with pytest.raises(ArgumentError, match=f"^check: {text}"):
        mlp().check(ranks=ranks)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=f'^auto_sync at "": {text}'):
        mlp().auto_sync(ranks=ranks)  # type: ignore[arg-type]
