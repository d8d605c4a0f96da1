"""Globs: whole components, model order, all or nothing."""

import pytest
import torch
from torch import nn

import slapo_py as slapo
from slapo_py import Schedule
from slapo_py.errors import NoMatchError
from tests.models import net


def deep() -> nn.Module:
    def layer() -> nn.Module:
        attn = nn.ModuleDict({"q_proj": nn.Linear(2, 2), "k_proj": nn.Linear(2, 2), "o": nn.Linear(2, 2)})
        return nn.ModuleDict({"attn": attn, "mlp": nn.ModuleDict({"up": nn.Linear(2, 2)})})

    return nn.ModuleDict(
        {"h": nn.ModuleList([layer() for _ in range(11)]), "mlp": nn.Linear(2, 2), "mlp2": nn.Linear(2, 2)}
    )


GLOBS = {
    "mlp": ["mlp"],
    "h.1": ["h.1"],
    "h.*": [f"h.{i}" for i in range(11)],
    "h.1?": ["h.10"],
    "h.[0-2]": ["h.0", "h.1", "h.2"],
    "h.[!0-8]": ["h.9"],
    "*.1": ["h.1"],
    "h.0.attn.?_proj": ["h.0.attn.q_proj", "h.0.attn.k_proj"],
    "h.0.attn.[qk]_*": ["h.0.attn.q_proj", "h.0.attn.k_proj"],
    "h.0.**": ["h.0", "h.0.attn", "h.0.attn.q_proj", "h.0.attn.k_proj", "h.0.attn.o", "h.0.mlp", "h.0.mlp.up"],
    "**.mlp": [*[f"h.{i}.mlp" for i in range(11)], "mlp"],
    "**.h.1.**.o": ["h.1.attn.o"],
    "h.**.1.**.up": ["h.1.mlp.up"],
    "**.**.mlp2": ["mlp2"],
    "m*": ["mlp", "mlp2"],
}


@pytest.mark.parametrize(("glob", "paths"), GLOBS.items(), ids=GLOBS)
def test_globs(glob: str, paths: list[str]) -> None:
    assert slapo.create_schedule(deep()).select(glob).paths == paths


def test_everything() -> None:
    model = deep()
    assert slapo.create_schedule(model).select("**").paths == [name for name, _ in model.named_modules() if name]


def test_from_a_place_below() -> None:
    sch = slapo.create_schedule(deep())
    assert sch["h.3"].select("*").paths == ["h.3.attn", "h.3.mlp"]


def test_a_shared_module_is_selected_once_by_its_first_name() -> None:
    shared = nn.Linear(2, 2)
    sch = slapo.create_schedule(nn.ModuleDict({"a": nn.ModuleList([shared]), "b": nn.ModuleList([shared, shared])}))
    assert sch.select("b.*").paths == ["a.0"]


MISSES = {
    "h.*.mpl": r"matches. 'h.\*' has matches, 'mpl' below it has none. Did .*select\(\"h.\*.mlp\"\)",
    "attn": r'Did you mean select\("h.\*.attn"\)',
    "h.99": "'h' has matches, '99' below it has none",
    "h.*0*1": "has none",
    "zzz.*": r"print\(sch\) shows all paths",
    "h.1.": "needs a glob of whole path components",
    "": "needs a glob of whole path components",
    "h.[": "has none",
    "h.[]": "has none",
}


@pytest.mark.parametrize(("glob", "message"), MISSES.items(), ids=MISSES)
def test_no_hit_is_refused(glob: str, message: str) -> None:
    with pytest.raises(NoMatchError, match=message):
        slapo.create_schedule(deep()).select(glob)


def test_no_hit_below_a_place() -> None:
    with pytest.raises(NoMatchError, match="no module below 'h.0' matches"):
        slapo.create_schedule(deep())["h.0"].select("h.*")


@pytest.fixture
def sch() -> Schedule:
    return slapo.create_schedule(net())


def test_a_selection_is_a_sequence_of_places(sch: Schedule) -> None:
    chosen = sch.select("blocks.*")
    assert list(chosen) == [sch["blocks.0"], sch["blocks.1"]]
    assert len(chosen) == 2
    assert chosen[1] == sch["blocks.1"]
    assert chosen[1:].paths == ["blocks.1"]
    assert sch["blocks.0"] in chosen
    assert repr(chosen) == '<Selection "blocks.*" of 2 places>'
    assert str(chosen) == 'select("blocks.*"): 2 places\n  "blocks.0"  Block\n  "blocks.1"  Block'


def test_a_selection_is_a_snapshot(sch: Schedule) -> None:
    chosen = sch.select("blocks.*")
    sch.module.blocks.append(nn.Identity())
    assert chosen.paths == ["blocks.0", "blocks.1"]
    assert sch.select("blocks.*").paths == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_primitive_goes_to_each_place(sch: Schedule) -> None:
    chosen = sch.select("blocks.*")
    assert chosen.checkpoint(policy=["aten.addmm"]) is chosen
    assert [str(step) for step in sch.history] == [
        'sch["blocks.0"].checkpoint(policy=["aten.addmm"])',
        'sch["blocks.1"].checkpoint(policy=["aten.addmm"])',
    ]
    assert torch.is_tensor(sch.module(torch.zeros(2, 3, dtype=torch.long)))


def test_what_is_no_primitive_is_asked_of_each_place() -> None:
    selection = slapo.create_schedule(net()).select("blocks.*")
    with pytest.raises(AttributeError, match=r"a selection has no 'find': .* for place in selection: place.find"):
        selection.find(lambda x, y: x + y)
    assert not hasattr(selection, "graph")
