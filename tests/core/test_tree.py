"""What print(sch) shows."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import slapo_py as slapo
from slapo_py.report import tree
from tests.core import steps
from tests.models import net, tiny_gpt2


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    with steps.registered(freeze=steps.Freeze):
        yield


def test_a_schedule(golden: Callable[[str, str], None]) -> None:
    sch = slapo.create_schedule(tiny_gpt2(n_layer=4))
    golden("gpt2_plain", str(sch))
    sch.select("transformer.h.[0-2]").checkpoint()
    sch["transformer.h.3.mlp"].checkpoint(policy=["aten.addmm"]).compile(backend="eager")
    sch["transformer.ln_f"].configure(eps=1e-3).freeze("it's")
    sch["lm_head"].annotate("weight", "lr", 0.1)
    golden("gpt2_scheduled", str(sch))
    golden("gpt2_place", str(sch["transformer.h.0.mlp"]))


def test_numbered_siblings_that_look_the_same_are_shown_once() -> None:
    sch = slapo.create_schedule(nn.Sequential(*[nn.Linear(2, 2) for _ in range(12)], nn.ReLU()))
    lines = str(sch).splitlines()
    assert len(lines) == 3
    assert "0..11  (12 x Linear)" in lines[1]
    sch["3"].checkpoint()
    assert [line.split()[1] for line in str(sch).splitlines()[1:]] == ["0..2", "3", "4..11", "12"]


def test_named_siblings_are_all_shown() -> None:
    model = nn.ModuleDict({"q": nn.Linear(2, 2), "k": nn.Linear(2, 2)})
    assert len(str(slapo.create_schedule(model)).splitlines()) == 3


def test_it_is_plain_text_of_one_width_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    sch = slapo.create_schedule(net())
    plain = str(sch)
    for name, value in {"COLUMNS": "20", "TERM": "dumb", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
        assert str(sch) == plain
    assert "\x1b" not in plain


def test_printing_first_of_all_draws_nothing() -> None:
    """In a fresh process, where rich is not imported yet."""
    source = """
import random, slapo_py as slapo
from tests.models import net
sch = slapo.create_schedule(net())
before = random.getstate()
str(sch)
assert random.getstate() == before
"""
    subprocess.run([sys.executable, "-c", source], check=True, cwd=Path(__file__).parents[2], timeout=120)


def test_rich_shows_it_too() -> None:
    console = Console(width=200)
    with console.capture() as shown:
        console.print(slapo.create_schedule(net()))
    assert [line.split() for line in shown.get().splitlines()] == [
        line.split() for line in str(slapo.create_schedule(net())).splitlines()
    ]


def test_a_long_line_is_not_broken() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)))
    sch["0"].annotate("weight", "note", "x" * 300)
    assert "x" * 300 in str(sch)


def test_brackets_are_not_markup() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)))
    sch["0"].annotate("weight", "note", "[bold]")
    console = Console(width=200)
    with console.capture() as shown:
        console.print(sch)
    assert '"[bold]"' in shown.get()
    assert '"[bold]"' in str(sch)


def test_a_traced_place_shows_its_graph_guards_and_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        graph = torch.fx.symbolic_trace(nn.ReLU()).graph
        guards = ["isinstance(x, Tensor)"]
        notes = ["one mode only"]

        @staticmethod
        def misses(module: nn.Module) -> int:
            return 3

    sch = slapo.create_schedule(nn.Sequential(nn.ReLU(), nn.ReLU()))
    place = sch["0"].module
    real = tree._trace_of
    monkeypatch.setattr(tree, "_trace_of", lambda module: Fake if module is place else real(module))
    assert "<- 3 misses" in str(sch)
    assert "0..1" not in str(sch)
    text = str(sch["0"])
    assert "relu" in text
    assert "guards:\n  isinstance(x, Tensor)" in text
    assert "notes:\n  one mode only" in text


def test_meta_parameters_and_none() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3, bias=False, device="meta"), nn.BatchNorm1d(2, affine=False))
    assert "weight [3, 3]" in str(slapo.create_schedule(model))
