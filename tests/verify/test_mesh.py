"""`verify(mesh=..., simulate=True)`: a schedule's own collectives, right or wrong, on simulated ranks."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import ArgumentError, VerificationError
from slapo_py.layouts.placement import Shard
from slapo_py.layouts.simulating.as_written import Exchange
from slapo_py.tracing.recorder import normalize_inputs
from slapo_py.verify.blame_on_mesh import aligned, diverging_border
from slapo_py.verify.borders import Borders
from slapo_py.verify.on_mesh import OnMesh
from slapo_py.verify.scenarios import scenarios
from slapo_py.verify.trial import Trial
from tests.fingerprint import changes, fingerprint
from tests.layouts.plans import PLANS
from tests.slow import slow_but
from tests.verify.lab import altering
from tests.verify.mesh_faults import MESH_FAULTS, MeshFault

FAMILIES = ("llama", "gpt2", "t5")
TP2 = {"tp": 2}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.drop(F.gelu(self.up(x)))))


def mlp() -> slapo.Schedule:
    """Split by hand, with both collectives, and dropout of what is split."""
    torch.manual_seed(0)
    sch = slapo.create_schedule(Mlp(), (torch.randn(4, 6, 16),))
    sch["up"].shard("weight", "bias", dim="out").sync("input", None, grad="all_reduce")
    sch["down"].shard("weight", dim="in").sync("output", "all_reduce", grad=None)
    sch["drop"].fork_rng()
    return sch


def family(name: str, ranks: int, sequence: bool) -> slapo.Schedule:
    plan = PLANS[name]
    return plan.schedule().auto_sync("tp", pins=plan.pins if sequence else None, ranks=ranks)


# What is right


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("ranks", slow_but([2], [2, 4]))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_right_schedule_diverges_nowhere(name: str, ranks: int, sequence: bool) -> None:
    """One scenario: outputs and all gradients, and the value and the gradient at every border of a module."""
    sch = family(name, ranks, sequence)
    side = OnMesh(sch, {"tp": ranks})
    scenario = next(iter(scenarios(normalize_inputs(sch.root.example_inputs), 1, torch.float32, False)))
    trial = Trial(sch.original, scenario, 0, torch.float32)
    row = side.row(trial)
    assert row is not None and row.grade == "rounding"  # sums in another order: "equal" would mean nothing was split
    probed = trial.with_probes(Borders)
    assert probed.old.error is None
    run = side.run(probed)
    assert len(aligned(run.crossings, probed.old.probed)) > 0.9 * len(run.crossings) > 100
    assert diverging_border(probed, run) is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_in_all_scenarios(name: str, ranks: int, sequence: bool) -> None:
    report = family(name, ranks, sequence).verify(mesh={"tp": ranks}, simulate=True)
    assert report.grade == "rounding" and len(report.rows) >= 11 and report.notes == []


@pytest.mark.slow
def test_wide_resnet_in_all_scenarios() -> None:
    report = family("wide_resnet", 2, False).verify(mesh=TP2, simulate=True)
    assert report.grade == "rounding" and report.notes == []


def test_all_scenarios_in_small() -> None:
    sch = mlp()
    before = fingerprint(sch.original)
    report = sch.verify(mesh={"tp": 2, "dp": 1}, simulate=True)
    assert changes(before, fingerprint(sch.original)) == []
    assert report.grade == "rounding" and report.notes == []
    assert str(report).startswith("verify on 2 simulated ranks of 'tp': rounding")
    names = [row.scenario for row in report.rows]
    assert {"train", "eval", "gradients of inputs", "batch of 1", "1 optimizer step"} <= set(names)
    assert not any("float" in name for name in names)


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


def statistics() -> slapo.Schedule:
    """The norm is split, and so are its running mean and variance."""
    torch.manual_seed(0)
    sch = slapo.create_schedule(Statistics(), (torch.randn(4, 8),))
    sch["up"].shard("weight", "bias", dim="out")
    sch["norm"].shard("weight", "bias", dim=0)
    sch["down"].shard("weight", dim="in")
    return sch.auto_sync("tp")


def test_running_statistics_are_split_and_joined() -> None:
    report = statistics().verify(mesh=TP2, simulate=True)
    assert report.grade == "rounding"
    compared = {one.key.name for row in report.rows for one in row.differences if one.key.kind == "buffer"}
    assert compared == {"norm.running_mean", "norm.running_var"}


def test_without_a_mesh_the_report_says_what_was_not_run() -> None:
    report = mlp().verify()
    assert report.notes == [
        """One device: what the schedule says of 'tp' was not run. verify(mesh={"tp": 2}) runs it."""
    ]
    assert slapo.create_schedule(Mlp(), (torch.randn(4, 6, 16),)).verify().notes == []


@pytest.mark.parametrize("mesh", [{"tp": 1}, {"dp": 2}])
def test_without_a_word_on_the_axis_it_is_the_plain_one(mesh: dict[str, int]) -> None:
    report = mlp().verify(mesh=mesh, simulate=True)
    assert report.what == "verify" and report.grade == "equal"
    assert "model in bfloat16" in [row.scenario for row in report.rows]


class Pairs(nn.Module):
    """Two neighbouring tokens become one: a part of the sequence must have an even length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(12, 8), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.mix(x.view(x.shape[0], -1, 16))


def test_sizes_that_the_schedule_is_not_for_are_left_out_and_said() -> None:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Pairs(), (torch.randint(0, 12, (2, 8)),))
    sch["embed"].sync("output", "split", grad="all_gather", dim=1)
    sch["mix"].sync("output", "all_gather", grad="split", dim=1).reduce_grad("weight", "bias")
    report = sch.verify(mesh=TP2, simulate=True)
    (note,) = report.notes
    assert note.startswith('"batch of 7 at another length" was left out: the schedule is not for such sizes: ')
    assert "batch of 1" in [row.scenario for row in report.rows]


# What is wrong


def found(sch: slapo.Schedule) -> tuple[str, str | None, str]:
    """The module and the step that verify names, and its message."""
    with pytest.raises(VerificationError, match="on 2 simulated ranks of 'tp': in the scenario") as caught:
        sch.verify(mesh=TP2, simulate=True)
    report = caught.value.report
    assert report.grade == "bug"
    return report.module, str(sch.history[report.step - 1]) if report.step else None, str(caught.value)


@pytest.mark.parametrize("fault", MESH_FAULTS[::3], ids=lambda one: one.name)
def test_a_fault_is_found_and_named(fault: MeshFault) -> None:
    sch = fault.schedule()
    assert sch.verify().grade == "equal"  # on one device it makes no difference
    module, step, _ = found(sch)
    assert (module, step) == (fault.module, fault.step)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_faults_are_found_and_named() -> None:
    named = {one.name: found(one.schedule())[:2] for one in MESH_FAULTS}
    assert named == {one.name: (one.module, one.step) for one in MESH_FAULTS}


def _without(sch: slapo.Schedule, primitive: str, path: str) -> slapo.Schedule:
    other = slapo.create_schedule(sch.original, sch.root.example_inputs)
    slapo.History(one for one in sch.history if (one.primitive, one.path) != (primitive, path)).replay(other)
    return other


@pytest.mark.parametrize(
    ("change", "module", "text"),
    [
        (lambda sch: _without(sch, "sync", "down"), "down", 'There output 0 of "down" is not the original\'s.'),
        (lambda sch: _without(sch, "sync", "up"), "up", 'the gradient of input 0 of "up" is not the original\'s.'),
        (lambda sch: sch["norm"].sync("input", "all_reduce"), "norm", 'There input 0 of "norm" is not'),
        (lambda sch: sch["norm"].reduce_grad("bias"), "norm", "the gradient of the parameter norm.bias"),
    ],
    ids=["missing forward", "missing backward", "doubled forward", "doubled gradient"],
)
def test_faults_in_small(change: Callable[[slapo.Schedule], slapo.Schedule], module: str, text: str) -> None:
    sch = change(mlp()).root.cursor("")
    named, step, message = found(sch)
    assert named == module and text in message and f'sch["{module}"].' in str(step)
    assert f'The first module that diverges is "{module}" (' in message
    assert 'sch.check("tp", ranks=2) says which line is missing or wrong' in message


def test_parts_that_do_not_fit_are_named_too() -> None:
    sch = mlp()
    sch["norm"].shard("weight", dim=0)
    module, step, message = found(sch)
    assert (module, step) == ("norm", 'sch["norm"].shard("weight", dim=0)')
    assert "the scheduled model raises RuntimeError" in message


def test_what_is_wrong_on_one_device_too_is_blamed_as_there() -> None:
    with altering():
        sch = mlp()
        sch["drop"].alter(_halved)
        module, step, message = found(sch)
    assert module == "drop" and str(step).startswith('sch["drop"].alter(')
    assert "the steps before it are right" in message


class Halved(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def _halved(module: nn.Module) -> nn.Module:
    return Halved(0.1)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"simulate": True}, r'simulate=True needs a mesh\. Write verify\(mesh=\{"tp": 2\}, simulate=True\)'),
        ({"mesh": {"tp": True}}, r"mesh must give the size of each axis, .* found \{'tp': True\}"),
        ({"mesh": {"tp": 0}, "simulate": True}, r"mesh must give the size of each axis, .* found \{'tp': 0\}"),
        ({"mesh": {}}, r"mesh must give the size of each axis, .* found \{\}"),
        ({"mesh": {"zz": 2}, "simulate": True}, '^verify: no step uses the mesh axis "zz"; the schedule uses "tp"'),
        ({"mesh": {"zz": 2}}, 'no step uses the mesh axis "zz"; the schedule uses "tp"'),
        ({"mesh": {"tp": 2, "zz": 2}}, 'no step uses the mesh axis "zz"; the schedule uses "tp"'),
        ({"mesh": 2, "simulate": True}, "mesh must give the size of each axis, .* found 2"),
        ({"mesh": {"dp": 2, "tp": 2}, "simulate": True}, r'Write verify\(mesh=\{"tp": 2\}, simulate=True\), or leave'),
        (
            {"mesh": {"tp": 2, "dp": 2}, "simulate": True},
            r"one axis of a mesh can be simulated at a time, and tp and dp have more than one rank\. "
            r'Write verify\(mesh=\{"tp": 2\}, simulate=True\), or leave simulate=True out',
        ),
    ],
)
def test_meshes_that_are_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        mlp().verify(**arguments)  # type: ignore[arg-type]


def test_a_place_below_is_refused() -> None:
    with pytest.raises(ArgumentError, match="is known for the whole model alone. Write sch.verify"):
        mlp()["up"].verify(mesh=TP2, simulate=True)


# As written


def test_exchanges_are_done_as_written() -> None:
    """Wrong ones, too: a whole value that is summed doubles, one that is gathered becomes twice as long."""
    whole, dim = torch.arange(8.0).view(2, 4), Shard(1)
    parts = list(whole.split(2, 1))

    def makes(kind: str, given: list[Tensor], before: Shard | None = None, after: Shard | None = None) -> list[Tensor]:
        return Exchange(kind, before, after)(given)

    def same(one: list[Tensor], *others: Tensor) -> bool:
        return len(one) == len(others) and all(map(torch.equal, one, others))

    assert same(makes("all_reduce", [whole, whole]), 2 * whole, 2 * whole)
    assert same(makes("all_gather", parts, dim), whole, whole)
    assert same(makes("all_gather", [whole, whole], dim), *[torch.cat([whole, whole], 1)] * 2)
    assert same(makes("reduce_scatter", [whole, 2 * whole], None, dim), *(3 * whole).split(2, 1))
    assert same(makes("split", [whole, 2 * whole], None, dim), parts[0], 2 * parts[1])
    assert same(makes("all_to_all", parts, dim, Shard(0)), whole[:1], whole[1:])
    assert same(makes("mask", [whole, whole]), whole, torch.zeros(2, 4))
    assert same(makes("none", parts), *parts)
