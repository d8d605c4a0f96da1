"""A schedule that is wrong, mended by doing what the messages say and nothing else, step by step."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import PlacementError, ShardError, StepError
from slapo_py.history import History
from slapo_py.layouts.checking.check import checked
from slapo_py.layouts.recording.record import record
from slapo_py.layouts.simulating.simulate import simulate
from tests.layouts.plans import PLANS

Split = Callable[[slapo.Schedule], object]


class Attention(nn.Module):
    """Queries, keys and values of one product. cut: how the code takes them apart."""

    def __init__(self, cut: str, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.cut, self.size = cut, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        made = self.qkv(x)
        if self.cut == "chunk":
            parts = made.chunk(3, -1)
        elif self.cut == "split":
            parts = made.split(made.shape[-1] // 3, -1)
        elif self.cut == "permute":
            parts = made.view(batch, length, 3, -1, self.size).permute(2, 0, 1, 3, 4)
        else:
            parts = made.view(batch, length, 3, -1, self.size).unbind(2)
        q, k, v = (one.reshape(batch, length, -1, self.size).transpose(1, 2) for one in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, cut: str) -> None:
        super().__init__()
        self.n1, self.attn, self.n2 = nn.LayerNorm(32), Attention(cut), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Decoder(nn.Module):
    def __init__(self, cut: str) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList([Block(cut), Block(cut)])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


IDS = torch.arange(24).reshape(3, 8)


def decoder(split: Split, cut: str = "chunk") -> slapo.Schedule:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Decoder(cut), (IDS,))
    split(sch)
    return sch


def attention(parts: int | None = 3) -> Split:
    def split(sch: slapo.Schedule) -> None:
        for block in sch.select("blocks.*"):
            block["attn.qkv"].shard("weight", "bias", dim="out", parts=parts)
            block["attn.proj"].shard("weight", dim="in")

    return split


def mlp(sch: slapo.Schedule) -> None:
    sch["blocks.0.up"].shard("weight", "bias", dim="out")
    sch["blocks.0.down"].shard("weight", dim="in")


def synced(path: str, *args: str, dim: int | None = None) -> Split:
    """A layer that is split, with one more sync."""

    def split(sch: slapo.Schedule) -> None:
        mlp(sch)
        sch["blocks.0.up"].sync("input", None, grad="all_reduce")
        if path != "blocks.0.down":
            sch["blocks.0.down"].sync("output", "all_reduce")
        sch[path].sync(*args, dim=dim)

    return split


def obeyed(sch: slapo.Schedule) -> slapo.Schedule:
    """What the first message says is done, as long as there is one; a step that it names goes, its line comes."""
    for _ in range(40):
        found = sch.check()
        if not found:
            return sch
        fault = found[0]
        named = re.match(r"(Replace|Leave out) step (\d+), (.*?\))(?: and step (\d+), .*?\))?: ", fault.message)
        steps = list(sch.history)
        if named is not None:
            number = int(named[2])
            assert str(steps[number - 1]) == named[3]
            assert (named[1] == "Replace") == bool(fault.line)
            gone = {number, int(named[4] or number)}
            steps = [one for index, one in enumerate(steps, 1) if index not in gone]
        else:
            assert fault.line, fault.message
        again = slapo.create_schedule(sch.original, (IDS,))
        History(steps).replay(again)
        for line in filter(None, fault.line.split("; ")):
            eval(line, {"sch": again, "slapo": slapo})
        sch = again
    raise AssertionError([one.message for one in sch.check()])


WRONG: dict[str, tuple[Split, str]] = {
    "parts forgotten": (
        attention(None),
        'Replace step 1, sch["blocks.0.attn.qkv"].shard("weight", "bias", dim="out"): the parameter '
        '"blocks.0.attn.qkv.weight" is S(0), and what is done with it, and the syncs around it, need S(0, blocks=3). '
        'Write instead: sch["blocks.0.attn.qkv"].shard("weight", "bias", dim="out", parts=3)',
    ),
    "the other dim": (
        lambda sch: sch["blocks.0.up"].shard("weight", "bias", dim="out").root.cursor("blocks.0.down").shard(
            "weight", dim="out"
        ),
        'Replace step 2, sch["blocks.0.down"].shard("weight", dim="out"): ',
    ),
    "weight and bias in two steps": (
        lambda sch: sch["blocks.0.up"].shard("weight", "bias", dim="out").root.cursor("blocks.0.down").shard(
            "weight", dim="out"
        ).shard("bias", dim=0),
        'Replace step 2, sch["blocks.0.down"].shard("weight", dim="out") and step 3, '
        'sch["blocks.0.down"].shard("bias", dim=0): ',
    ),
    "a bias forgotten": (
        lambda sch: sch["blocks.0.up"].shard("weight", dim="out").root.cursor("blocks.0.down").shard(
            "weight", dim="in"
        ),
        'output 0 of "blocks.0.down" is P and is needed R: all_reduce is missing. ',
    ),
    "norm split": (
        lambda sch: sch["blocks.0.n1"].shard("weight", "bias", dim=0),
        'Leave out step 1, sch["blocks.0.n1"].shard("weight", "bias", dim=0): layer_norm in "blocks.0.n1" takes no '
        'such placements: input 0 of "blocks.0.n1" R, the parameter "blocks.0.n1.weight" S(0), the parameter '
        '"blocks.0.n1.bias" S(0). Leave it out.',
    ),
    "summed again": (
        synced("blocks.0", "output", "all_reduce"),
        'Leave out step 5, sch["blocks.0"].sync("output", value="all_reduce"): all_reduce at output 0 of "blocks.0": ',
    ),
    "gathered instead": (
        synced("blocks.0.down", "output", "all_gather", dim=2),
        'Replace step 4, sch["blocks.0.down"].sync("output", value="all_gather", dim=2): ',
    ),
    "columns of the table": (
        lambda sch: sch["tok"].shard("weight", dim=1),
        'output 0 of "tok" is S(2) and is needed R: all_gather is missing. '
        'Write: sch["tok"].sync("output", "all_gather", dim=2)',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_the_messages_say_leads_home(name: str) -> None:
    split, text = WRONG[name]
    sch = decoder(split)
    assert text in sch.check()[0].message
    simulates(obeyed(sch))


def simulates(sch: slapo.Schedule) -> None:
    """Two ranks give what the model gives, outputs and gradients."""
    typing, faults = checked(sch, record(sch), "tp", 2)
    assert faults == []
    found, model = simulate(typing, sch.original, {"ids": IDS}), sch.original
    expected = model(IDS)
    seed = torch.randn_like(expected)
    model.zero_grad()
    expected.backward(seed)
    torch.autograd.backward(found.outputs[0], [seed] * 2)
    for one in found.outputs[0]:
        torch.testing.assert_close(one, expected)
    for name in ("tok.weight", "blocks.0.attn.qkv.weight", "blocks.0.n1.bias"):
        torch.testing.assert_close(found.gradient(name), model.get_parameter(name).grad)


@pytest.mark.parametrize("cut", ["chunk", "split", "permute", "unbind"])
def test_forgotten_parts_however_the_code_cuts(cut: str) -> None:
    line = re.escape('Write instead: sch["blocks.0.attn.qkv"].shard("weight", "bias", dim="out", parts=3)')
    sch = decoder(attention(None), cut)
    assert [one.kind for one in sch.check()][:3] == ["wrong split", "wrong split", "missing in forward"]
    with pytest.raises(PlacementError, match=f"Replace step 1, .*{line}$"):
        sch.auto_sync("tp")


def test_heads_that_lie_side_by_side_need_no_parts() -> None:
    """(heads, q k v, size): a rank's part of the product is whole heads."""

    class SideBySide(Attention):
        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            q, k, v = self.qkv(x).view(batch, length, -1, 3, self.size).unbind(3)
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            return self.proj(y.transpose(1, 2).flatten(2))

    sch = slapo.create_schedule(nn.Sequential(SideBySide("")), (torch.randn(2, 4, 32),))
    sch["0.qkv"].shard("weight", "bias", dim="out")
    sch["0.proj"].shard("weight", dim="in")
    assert sch.auto_sync("tp").check() == []


def test_a_gate_and_more_of_other_sizes() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.down = nn.Linear(16, 24), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            wide, narrow = torch.split(self.both(x), [16, 8], -1)
            return self.down(wide) * narrow.sum()

    sch = slapo.create_schedule(nn.Sequential(Uneven()), (torch.randn(2, 4, 16),))
    sch["0.both"].shard("weight", "bias", dim="out")
    sch["0.down"].shard("weight", dim="in")
    assert sch.check()[0].line == 'sch["0.both"].shard("weight", "bias", dim="out", parts=(16, 8))'


def test_what_is_gathered_on_purpose_is_left_so() -> None:
    sch = decoder(attention(None))
    for block in sch.select("blocks.*"):
        block["attn.qkv"].sync("output", "all_gather", dim=2)
    assert sch.auto_sync("tp").check() == []


def test_columns_of_a_table_are_gathered_once() -> None:
    def split(sch: slapo.Schedule) -> None:
        attention()(sch)
        sch["tok"].shard("weight", dim=1)

    sch = decoder(split).auto_sync("tp")
    syncs = [one for one in sch.history if one.primitive in ("sync", "reduce_grad")]
    assert [str(one) for one in syncs if "all_reduce" not in str(one)] == [
        'sch["tok"].sync("output", value="all_gather", grad="split", dim=2)'
    ]
    simulates(sch)


def test_a_batch_that_nobody_split_stays_whole() -> None:
    """No border to gather at: the table is the model's own."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Parameter(torch.randn(64, 32)), nn.LayerNorm(32)

        def forward(self, ids: Tensor) -> Tensor:
            return self.norm(F.embedding(ids, self.table))

    sch = slapo.create_schedule(Own(), (IDS,))
    sch.shard("table", dim=1)
    sch.auto_sync("tp")
    assert [str(one) for one in sch.history[1:]] == [
        'sch["norm"].sync("input", value="all_gather", grad="split", dim=2)'
    ]


def test_a_step_that_is_there_is_named() -> None:
    sch = decoder(mlp)
    text = (
        'Leave this step out; to change it, edit the line of step 1, sch["blocks.0.up"].shard("weight", "bias", '
        'dim="out"), or take it and all after it back with sch.undo(2).'
    )
    with pytest.raises(ShardError, match=re.escape(text)):
        sch["blocks.0.up"].shard("bias", dim=0)
    sch["blocks.0.down"].sync("output", "all_reduce")
    text = (
        'Leave this step out; to change it, edit the line of step 3, sch["blocks.0.down"].sync("output", '
        'value="all_reduce"), or take it back with sch.undo().'
    )
    with pytest.raises(StepError, match=re.escape(text)):
        sch["blocks.0.down"].sync("output", "reduce_scatter", dim=1)


def test_a_step_of_several_modules_keeps_the_others() -> None:
    sch = decoder(lambda sch: sch["blocks.0"].shard("up.weight", "up.bias", "down.weight", dim=0))
    (fault, *_) = sch.check()
    assert fault.message.startswith('Take "down.weight" out of step 1, sch["blocks.0"].shard("up.weight", "up.bias", ')
    assert fault.line == 'sch["blocks.0.down"].shard("weight", dim="in")'


def test_a_sum_of_gradients_that_is_left_out() -> None:
    sch = decoder(mlp).auto_sync("tp")
    sch["norm"].reduce_grad("weight")
    (fault,) = sch.check()
    number = len(sch.history)
    assert fault.message.startswith(f'Leave out step {number}, sch["norm"].reduce_grad("weight"): the gradient of ')
    simulates(obeyed(sch))


def test_a_size_that_is_divided_and_should_not_be() -> None:
    """The step of the attribute is named."""
    plan = PLANS["gpt2"]
    sch = slapo.create_schedule(plan.model(), plan.inputs())
    sch["transformer.h.1.mlp.c_fc"].configure(nf=slapo.per_rank("tp"))
    (fault,) = sch.check()
    text = 'Leave out step 1, sch["transformer.h.1.mlp.c_fc"].configure(nf=slapo.per_rank("tp")): view in '
    assert fault.message.startswith(text)


def test_a_sync_that_takes_effect_nowhere_is_named() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),))
    sch["0"].sync("output", "all_reduce", index=1)
    (fault,) = sch.check()
    assert 'Leave step 1, sch["0"].sync("output", value="all_reduce", index=1) out, or that step; ' in fault.message


def test_auto_sync_says_that_its_line_comes_before_it() -> None:
    plan = PLANS["llama"]
    inputs = plan.inputs()
    inputs["labels"] = inputs["input_ids"].clone()
    sch = slapo.create_schedule(plan.model(), inputs)
    plan.split(sch)
    text = 'auto_sync at "": write the line at the end of this message before auto_sync: view ('
    with pytest.raises(PlacementError, match=re.escape(text)):
        sch.auto_sync("tp")
