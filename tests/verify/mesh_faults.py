"""Faults in how a right schedule of GPT-2 is spread over ranks: each drops, changes or adds one step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import slapo_py as slapo
from slapo_py.history import Step
from tests.layouts.plans import PLANS

Edit = Callable[[list[Step]], list[Step]]
H0, H1 = "transformer.h.0", "transformer.h.1"
GATHER = '.sync("input", value="all_gather", grad="reduce_scatter", dim=1)'
SCATTER = '.sync("output", value="reduce_scatter", grad="all_gather", dim=1)'


def drop(source: str) -> Edit:
    """Leave out the one step that is written so."""

    def edit(steps: list[Step]) -> list[Step]:
        assert [str(one) for one in steps].count(source) == 1
        return [one for one in steps if str(one) != source]

    return edit


def change(source: str, **changed: Any) -> Edit:
    """Other keyword arguments for the one step that is written so; None takes one away."""

    def edit(steps: list[Step]) -> list[Step]:
        (at,) = [index for index, one in enumerate(steps) if str(one) == source]
        old = steps[at]
        given = {**old.kwargs, **changed}
        kept = {name: value for name, value in given.items() if value is not None or name not in changed}
        return [*steps[:at], Step(old.primitive, old.path, old.args, kept), *steps[at + 1 :]]

    return edit


def add(primitive: str, path: str, *args: Any, **kwargs: Any) -> Edit:
    """One step more, at the end."""
    return lambda steps: [*steps, Step(primitive, path, args, kwargs)]


@dataclass(frozen=True)
class MeshFault:
    """edit: of the history of a right schedule. module, step: what is to be named; step None where there is none."""

    name: str
    sequence: bool
    edit: Edit
    module: str
    step: str | None

    def schedule(self) -> slapo.Schedule:
        """The schedule with the fault."""
        plan = PLANS["gpt2"]
        right = plan.schedule().auto_sync("tp", pins=plan.pins if self.sequence else None)
        sch = slapo.create_schedule(right.original, plan.inputs())
        slapo.History(self.edit(list(right.history))).replay(sch)
        return sch


def _tensor(name: str, edit: Edit, module: str, step: str | None) -> MeshFault:
    return MeshFault(name, False, edit, module, step)


def _sequence(name: str, edit: Edit, module: str, step: str | None) -> MeshFault:
    return MeshFault(name, True, edit, module, step)


MESH_FAULTS = (
    _tensor(
        "missing forward all-reduce", drop(f'sch["{H1}.mlp.c_proj"].sync("output", value="all_reduce", grad=None)'),
        f"{H1}.mlp.c_proj", f'sch["{H1}.mlp.c_proj"].shard("weight", dim="in")',
    ),
    _tensor(
        "missing backward all-reduce", drop(f'sch["{H1}.attn.c_attn"].sync("input", grad="all_reduce")'),
        f"{H1}.attn.c_attn", f'sch["{H1}.attn.c_attn"].shard("weight", "bias", dim="out", parts=3)',
    ),
    _tensor(
        "doubled forward all-reduce", add("sync", f"{H1}.ln_2", "input", value="all_reduce", grad=None),
        f"{H1}.ln_2", f'sch["{H1}.ln_2"].sync("input", value="all_reduce", grad=None)',
    ),
    _tensor(
        "doubled backward all-reduce", add("sync", f"{H1}.ln_2", "input", grad="all_reduce"),
        f"{H1}.ln_2", f'sch["{H1}.ln_2"].sync("input", grad="all_reduce")',
    ),
    _tensor(
        "all-reduce both ways", change(f'sch["{H0}.mlp.c_fc"].sync("input", grad="all_reduce")', value="all_reduce"),
        f"{H0}.mlp.c_fc", f'sch["{H0}.mlp.c_fc"].sync("input", value="all_reduce", grad="all_reduce")',
    ),
    _tensor(
        "gradient summed twice", add("reduce_grad", "transformer.ln_f", "weight"),
        "transformer.ln_f", 'sch["transformer.ln_f"].reduce_grad("weight")',
    ),
    _tensor(
        "fused weight without parts",
        change(f'sch["{H0}.attn.c_attn"].shard("weight", "bias", dim="out", parts=3)', parts=None),
        f"{H0}.attn.c_attn", f'sch["{H0}.attn.c_attn"].shard("weight", "bias", dim="out")',
    ),
    _tensor(
        "wrong dim", change(f'sch["{H0}.mlp.c_proj"].shard("weight", dim="in")', dim="out"),
        f"{H0}.mlp.c_proj", f'sch["{H0}.mlp.c_proj"].shard("weight", dim="out")',
    ),
    _tensor(
        "size not divided", drop(f'sch["{H1}.attn"].configure(split_size=slapo.per_rank("tp"))'),
        f"{H1}.attn", f'sch["{H1}.attn.c_proj"].shard("weight", dim="in")',
    ),
    _tensor(
        "logits not gathered", drop('sch.sync("output", value="all_gather", grad="split", dim=2)'),
        "", 'sch["transformer.wte"].shard("weight", dim=0)',
    ),
    _sequence(
        "gradient of a norm not summed", drop(f'sch["{H1}.ln_1"].reduce_grad("weight")'),
        f"{H1}.ln_1", f'sch["{H0}"].sync("input", value="split", grad="all_gather", dim=1)',
    ),
    _sequence(
        "gradient split where it is a sum",
        change(f'sch["{H0}.attn.c_attn"]{GATHER}', grad="split"),
        f"{H0}.attn.c_attn", f'sch["{H0}.attn.c_attn"].sync("input", value="all_gather", grad="split", dim=1)',
    ),
    _sequence(
        "gradient left whole after an all-gather",
        change(f'sch["{H0}.mlp.c_fc"]{GATHER}', grad="all_reduce"),
        f"{H0}.mlp.c_fc", f'sch["{H0}.mlp.c_fc"].sync("input", value="all_gather", grad="all_reduce", dim=1)',
    ),
    _sequence(
        "reduce-scatter along another dim",
        change(f'sch["{H1}.attn.c_proj"]{SCATTER}', dim=2),
        f"{H1}.attn", f'sch["{H1}.attn.c_proj"].sync("output", value="reduce_scatter", grad="all_gather", dim=2)',
    ),
    _sequence(
        "missing all-gather", drop(f'sch["{H1}.mlp.c_fc"]{GATHER}'),
        f"{H1}.mlp.c_fc", f'sch["{H1}.mlp.c_fc"].shard("weight", "bias", dim="out")',
    ),
    _sequence(
        "all-reduce where reduce-scatter is due",
        change(
            f'sch["{H1}.mlp.c_proj"]{SCATTER}',
            value="all_reduce", grad="auto", dim=None,
        ),
        f"{H1}.mlp", f'sch["{H1}.mlp.c_proj"].shard("weight", dim="in")',
    ),
)  # fmt: skip
