"""fork_rng: recorded on the schedule without an effect there, undone and replayed as any step, in effect on ranks."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.distributed.forks import fork, forks_of
from slapo_py.errors import ArgumentError, StepError
from slapo_py.scheduled import layers
from tests.fingerprint import changes, fingerprint
from tests.models import Block, ids, net, tiny_gpt2
from tests.patterns import functions
from tests.running import equal, record

GIVEN = {"ids": ids()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)


def forked() -> slapo.Schedule:
    sch = slapo.create_schedule(net(), GIVEN)
    sch["blocks.0.drop"].fork_rng()
    sch["blocks.1"].fork_rng("ep")
    return sch


@pytest.mark.parametrize("train", [True, False])
def test_on_the_schedule_nothing_changes(train: bool) -> None:
    model = net()
    before = fingerprint(model)
    sch = slapo.create_schedule(model, GIVEN)
    sch["blocks.0.drop"].fork_rng()
    sch["blocks.1"].fork_rng("ep").fork_rng()
    sch["blocks.1"].trace()
    assert same(record(sch.module, GIVEN, train), record(model, GIVEN, train))
    assert same(record(slapo.build(sch), GIVEN, train), record(model, GIVEN, train))
    assert changes(before, fingerprint(model)) == [] or train  # batch norm counts
    assert forks_of(sch.module) == {"blocks.0.drop": ("tp",), "blocks.1": ("ep", "tp")}


def test_it_is_a_step_like_any_other(tmp_path: Path) -> None:
    sch = forked()
    assert 'drop  Dropout  <- fork_rng("tp")\n' in str(sch)
    assert 'Block  296 parameters  <- fork_rng("ep")\n' in str(sch)
    assert str(sch.history).split("\n")[1:] == [
        '    sch["blocks.0.drop"].fork_rng()',
        '    sch["blocks.1"].fork_rng(axis="ep")',
    ]
    sch.history.save(tmp_path / "history.json")
    loaded = slapo.History.load(tmp_path / "history.json")
    other = loaded.replay(slapo.create_schedule(net(), GIVEN))
    assert loaded == sch.history and forks_of(other.module) == forks_of(sch.module)
    assert forks_of(sch.undo().module) == {"blocks.0.drop": ("tp",)}
    assert forks_of(sch.undo().module) == {}
    assert type(sch["blocks.0.drop"].module) is nn.Dropout


def test_one_axis_is_undone_and_the_other_stays() -> None:
    sch = slapo.create_schedule(net())
    sch["blocks.1"].fork_rng("ep").fork_rng("tp")
    assert forks_of(sch.undo().module) == {"blocks.1": ("ep",)}


def test_built_ranks_draw_differently_there_and_alike_elsewhere() -> None:
    def ranks(place: str) -> list[dict[str, Tensor]]:
        sch = slapo.create_schedule(net(), GIVEN)
        sch[place].fork_rng()
        found = []
        for tp in (0, 1):
            built = slapo.build(sch)
            fork(built, {"tp": tp})
            found.append(record(built, GIVEN))
        return found

    first, second = ranks("blocks.0.drop")
    assert not equal(first["output 0"], second["output 0"])
    assert equal(first["random state"], second["random state"])
    first, second = ranks("head")  # draws nothing
    assert equal(first["output 0"], second["output 0"])
    assert equal(first["random state"], second["random state"])


@pytest.mark.parametrize("policy", [None, ["aten.addmm", "aten.mm"]], ids=["all", "policy"])
@pytest.mark.parametrize("at", ["blocks.1", "blocks.1.drop"])
@pytest.mark.parametrize("tp", [0, 1])
def test_a_checkpoint_around_it_recomputes_the_same(at: str, policy: Any, tp: int) -> None:
    def built(again: bool) -> nn.Module:
        sch = slapo.create_schedule(net(), GIVEN)
        if again:
            sch["blocks.1"].checkpoint(policy=policy)
        sch[at].fork_rng()
        model = slapo.build(sch)
        fork(model, {"tp": tp})
        return model

    assert same(record(built(True), GIVEN), record(built(False), GIVEN))


def test_the_order_of_steps_means_nothing() -> None:
    kinds = []
    for order in (("trace", "fork_rng", "checkpoint", "compile"), ("compile", "checkpoint", "fork_rng", "trace")):
        sch = slapo.create_schedule(net(), GIVEN)
        for name in order:
            getattr(sch["blocks.0"], name)(**({"backend": "eager"} if name == "compile" else {}))
        kinds.append([type(one).__name__ for one in layers(sch["blocks.0"].module)])
    assert kinds == [["Trace", "Compiled", "Forked", "Checkpointed"]] * 2


def test_places_beside_each_other_and_a_selection_all_or_nothing() -> None:
    sch = slapo.create_schedule(tiny_gpt2())
    sch.select("transformer.h.*.attn").fork_rng()
    sch.select("transformer.h.*.mlp").fork_rng()
    before = (str(sch), str(sch.history))
    with pytest.raises(StepError, match="differ over"):
        sch.select("transformer.h.1.*").fork_rng()
    assert (str(sch), str(sch.history)) == before


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("blocks.1", r'at "blocks.1": random operations at and below sch\["blocks.1"\] differ over "ep" .*Leave this'),
        ("blocks.1.drop", r'at and below sch\["blocks.1"\] differ over "ep" already. Leave this step out\.'),
        ("", r'at "": random operations at and below sch\["blocks.1"\] differ .* Take that step back first'),
    ],
    ids=["here", "below", "above"],
)
def test_twice_is_refused(at: str, message: str) -> None:
    sch = forked()
    with pytest.raises(StepError, match=message):
        sch[at].fork_rng("ep")
    sch["head"].fork_rng("ep")


def test_twice_by_another_name_is_refused() -> None:
    model = nn.ModuleDict({"first": nn.Dropout(), "second": Block()})
    model["second"].drop = model["first"]
    sch = slapo.create_schedule(model)
    sch["second"].fork_rng()
    with pytest.raises(StepError, match=r'fork_rng at "first": random operations at and below sch\["second"\] differ'):
        sch["first"].fork_rng()
    whole = slapo.create_schedule(net())
    whole.fork_rng()
    with pytest.raises(StepError, match="at and below the whole model differ"):
        whole["head"].fork_rng()


def test_what_can_not_be_forked_is_refused() -> None:
    sch = slapo.create_schedule(net(), GIVEN)
    for axis in ("", "t p", 1):
        with pytest.raises(ArgumentError, match=f'fork_rng at "head": axis must be the name of a mesh axis.*{axis!r}'):
            sch["head"].fork_rng(axis)
    with pytest.raises(ArgumentError, match='ModuleList is a container.*sch.select\\("blocks.*"\\).fork_rng'):
        sch["blocks"].fork_rng()
    sch["blocks.0"].trace(flatten=True)
    with pytest.raises(StepError, match='is part of the flattened graph of "blocks.0"'):
        sch["blocks.0.drop"].fork_rng()


def test_it_is_never_bypassed() -> None:
    sch = forked()
    with pytest.raises(StepError, match="flattening would bypass what was done at 'drop'"):
        sch["blocks.0"].trace(flatten=True)
    with pytest.raises(StepError, match="fork_rng"):
        sch["blocks.0.drop"].replace(nn.Dropout(0.3))


@pytest.mark.parametrize("name", ["fork_rng", "trace", "checkpoint", "compile", "decompose"])
def test_a_module_whose_call_was_replaced_is_refused(name: str) -> None:
    """Nothing around it would run: the graph above has its parameters, and calls it no more."""
    sch = slapo.create_schedule(net(), GIVEN)
    sch["blocks.0"].trace().replace(functions.block_mlp_parts, what=functions.block_mlp)
    with pytest.raises(StepError, match=f'{name} at "blocks.0.up": a step on the graph of "blocks.0" has taken in'):
        getattr(sch["blocks.0.up"], name)()
    sch["blocks.0.up"].annotate("weight", "lr", 0.1)  # of the parameter, not of the call
    record(sch.module, GIVEN)
