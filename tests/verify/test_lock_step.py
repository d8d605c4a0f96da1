"""`verify(mesh=..., simulate=True)` gives no false alarm and drops no bug: masks, modes, results, other sizes."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import ArgumentError, VerificationError
from slapo_py.tracing.recorder import normalize_inputs
from slapo_py.verify.on_mesh import OnMesh
from slapo_py.verify.scenarios import scenarios
from slapo_py.verify.trial import Trial

TP2 = {"tp": 2}


class Split(nn.Module):
    """Two Linears that are split, and what a case does with them; `extra` is another module of the case."""

    def __init__(self, run: Callable[[Any, Tensor], Any], extra: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.extra, self.run = extra, run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)

    def core(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def split(run: Callable[[Any, Tensor], Any], extra: nn.Module | None = None) -> slapo.Schedule:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Split(run, extra), (torch.randn(4, 6, 16),))
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")
    return sch.auto_sync("tp")


def grades(sch: slapo.Schedule, count: int = 2) -> list[str]:
    """Of train and eval on simulated ranks."""
    side, found = OnMesh(sch, TP2), []
    for scenario, _ in zip(scenarios(normalize_inputs(sch.root.example_inputs), 1, torch.float32, False), range(count)):
        row = side.row(Trial(sch.original, scenario, 0, torch.float32))
        assert row is not None
        found.append(row.grade)
    return found


# Masks


def _attended(module: Any, x: Tensor, **keywords: Any) -> Tensor:
    out: Tensor = module.extra(x, x, x, **keywords)[0]
    return module.core(F.dropout(out, 0.2, module.training) + x)  # type: ignore[no-any-return]


def _written(module: Any, x: Tensor) -> Tensor:
    h = F.gelu(module.up(x))
    return module.down(module.extra(h) + h)  # type: ignore[no-any-return]


def _written_by_torch(module: Any, x: Tensor) -> Tensor:
    h = F.gelu(module.up(x))
    return module.down(torch.dropout_(h, 0.2, module.training) + h)  # type: ignore[no-any-return]


DROPOUTS: dict[str, tuple[Callable[[Any, Tensor], Any], nn.Module | None]] = {
    "whole, transposed": (lambda m, x: m.core(F.dropout(x.transpose(1, 2), 0.2, m.training).transpose(1, 2)), None),
    "split, transposed": (
        lambda m, x: m.down(F.dropout(F.gelu(m.up(x)).transpose(1, 2), 0.2, m.training).transpose(1, 2)), None,
    ),
    "every second": (lambda m, x: m.core(x)[..., ::2] + F.dropout(x.transpose(0, 1)[..., ::2]).transpose(0, 1), None),
    "expanded": (lambda m, x: m.core(x + F.dropout(x[:, :1].expand_as(x), 0.3, m.training)), None),
    "after attention": (_attended, nn.MultiheadAttention(16, 2, batch_first=True)),
    "after attention, sequence first": (_attended, nn.MultiheadAttention(16, 2, dropout=0.1)),
    "in place": (_written, nn.Dropout(0.2, inplace=True)),
    "in place, by torch": (_written_by_torch, None),
    "by torch": (lambda m, x: m.down(torch.dropout(F.gelu(m.up(x)), p=0.2, train=m.training)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPOUTS)
def test_the_mask_is_that_of_one_process(name: str) -> None:
    assert grades(split(*DROPOUTS[name])) == ["rounding", "rounding"]


class Attention(nn.Module):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, 8)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.o(self.run(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "run",
    [
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.2),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.2),
    ],
    ids=["by keyword", "by position"],
)
def test_the_mask_of_attention_is_that_of_one_process(run: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Attention(run), (torch.randn(4, 6, 16),))
    for name in "qkv":
        sch[name].shard("weight", "bias", dim="out")
    sch["o"].shard("weight", dim="in")
    assert grades(sch.auto_sync("tp")) == ["rounding", "rounding"]


class Values(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(F.scaled_dot_product_attention(x, x, self.v(x), dropout_p=0.2))  # type: ignore[no-any-return]


def test_where_the_values_alone_are_split_every_rank_has_all_weights() -> None:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Values(), (torch.randn(4, 16, 16),))
    sch["v"].shard("weight", "bias", dim="out")
    sch["o"].shard("weight", dim="in")
    assert grades(sch.auto_sync("tp")) == ["rounding", "rounding"]


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).transpose(1, 2)  # type: ignore[no-any-return]


class Reduced(nn.Module):
    """What comes from the collective lies in another order than what went in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), Turned(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.up(x)))  # type: ignore[no-any-return]


def reduced() -> slapo.Schedule:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Reduced(), (torch.randn(4, 6, 16),))
    sch["up"].shard("weight", "bias", dim="out").sync("input", None, grad="all_reduce")
    sch["down.linear"].shard("weight", dim="in")
    sch["down"].sync("output", "all_reduce", grad=None)
    return sch


def test_a_mask_after_a_collective() -> None:
    assert grades(reduced()) == ["rounding", "rounding"]


@pytest.mark.usefixtures("lent_ranks")
def test_a_mask_after_a_collective_of_processes() -> None:
    assert reduced().verify(mesh=TP2).grade == "rounding"


# Modes


def _without_gradient(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        weight = module.extra(x).softmax(-1)
    return module.core(x * weight) + module.extra(x)  # type: ignore[no-any-return]


def _same_weight(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = F.linear(x, module.up.weight, module.up.bias).abs()
    return module.down(module.up(x) / (1 + size))  # type: ignore[no-any-return]


def _passed_on(module: Any, x: Tensor) -> Tensor:
    h = module.up(x)
    with torch.no_grad():
        same = module.extra(h)  # the tensor itself
    return module.down(same * h)  # type: ignore[no-any-return]


def _cast(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = module.core(x)
        with torch.autocast("cpu", enabled=False):
            z = module.extra(x)
    return y, z


@pytest.mark.parametrize(
    ("run", "extra"),
    [
        (_without_gradient, nn.Linear(16, 16)),
        (_same_weight, None),
        (_passed_on, nn.Identity()),
        (_cast, nn.Linear(16, 16)),
    ],
    ids=["no_grad", "a weight inside and outside", "passed on", "autocast"],
)
def test_parts_that_run_in_another_mode(run: Callable[[Any, Tensor], Any], extra: nn.Module | None) -> None:
    assert grades(split(run, extra)) == ["rounding", "rounding"]


# Results


class Pair(NamedTuple):
    first: Tensor
    more: Any


@dataclass
class Result:
    first: Tensor
    more: Any = None


@pytest.mark.parametrize(
    "packed",
    [
        lambda y: {"y": y, "more": [y + 1, {"z": y * 2}]},
        lambda y: [y, (y * 2, None, 3, "text")],
        lambda y: OrderedDict(y=y, more=[y + 1]),
        lambda y: Pair(y, [y + 1]),
        lambda y: Result(y, [y + 1, {"z": y}]),
    ],
    ids=["dict", "list", "OrderedDict", "named tuple", "dataclass"],
)
def test_results_of_all_kinds(packed: Callable[[Tensor], Any]) -> None:
    assert grades(split(lambda module, x: packed(module.core(x)))) == ["rounding", "rounding"]


# Other sizes


class Flat(nn.Module):
    """Batch, halves and sequence in one dim, in which the order of rows counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x.flatten(0, 2)).relu().cumsum(0))
        return y.unflatten(0, x.shape[:3]) + x


def flat() -> slapo.Schedule:
    """As many blocks as the examples have rows and halves: at another batch the rows get into another order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), Flat(), nn.LayerNorm(4))
    sch = slapo.create_schedule(model, (torch.randn(2, 2, 4, 4),))
    sch["1.up"].shard("weight", "bias", dim="out")
    sch["1.down"].shard("weight", dim="in")
    sch["1"].sync("input", "split", grad="all_gather", dim=2)
    sch["1.up"].sync("input", "all_gather", grad="reduce_scatter", dim=0, parts=4)
    sch["1.down"].sync("output", "reduce_scatter", grad="all_gather", dim=0, parts=4)
    sch["2"].sync("input", "all_gather", grad="split", dim=2)
    return sch.root.cursor("").auto_sync("tp")


@pytest.mark.usefixtures("lent_ranks")
@pytest.mark.parametrize("simulate", [True, False])
def test_a_bug_that_shows_at_another_size_alone(simulate: bool) -> None:
    sch = flat()
    assert sch.check() == []
    with pytest.raises(VerificationError, match='scenario "batch of 1", the output has other values') as caught:
        sch.verify(mesh=TP2, simulate=simulate)
    assert caught.value.report.module == "1.up" and caught.value.report.grade == "bug"


# Axes


def test_an_axis_of_random_numbers_alone() -> None:
    sch = slapo.create_schedule(Reduced(), (torch.randn(4, 6, 16),))
    sch["up"].fork_rng("sp")  # it draws nothing
    report = sch.verify(mesh={"sp": 2}, simulate=True)
    assert str(report).startswith("verify on 2 simulated ranks of 'sp': equal")
    sch["drop"].fork_rng("sp")
    with pytest.raises(VerificationError, match="no scenario shows a difference.* each rank would drop other elements"):
        sch.verify(mesh={"sp": 2}, simulate=True)


def test_where_no_axis_can_be_simulated_no_line_says_so() -> None:
    sch = slapo.create_schedule(Reduced(), (torch.randn(4, 6, 16),))
    with pytest.raises(ArgumentError, match=r"have more than one rank\. Leave simulate=True out, for processes"):
        sch.verify(mesh={"dp": 2, "tp": 2}, simulate=True)
