# ruff: noqa: E501
"""How a pattern is said, what is refused, and that one can be saved."""

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py import History, codec
from slapo_py.errors import PatternError
from slapo_py.patterns import Pattern, as_pattern, call, find, pattern, wild
from slapo_py.patterns.pattern import body_of
from slapo_py.patterns.words import MODE
from tests.models import ids, net
from tests.patterns import functions
from tests.patterns.test_matcher import count, matches

Function = Callable[..., Any]
WEIGHT = torch.ones(2)


def branches(x: Tensor) -> Tensor:
    return x.relu() if x.sum() > 0 else x


def loops(x: Tensor) -> Tensor:
    total = x.relu()
    for row in x:
        total = total + row
    return total


def mapping(x: Any) -> Tensor:
    return functions.residual(**x)


def numpy_like(x: Tensor) -> Tensor:
    return x.relu() + len(x)


REFUSED: list[tuple[Any, str]] = [
    (3, r"a pattern is a function over torch operations, found 3\. Write, for example, slapo.pattern\(lambda x, y: x"),
    (nn.GELU(), "a pattern is a function over torch operations, found GELU"),
    (lambda *x: x[0] + 1, r"^the pattern at .*test_pattern.py:\d+ takes any number of arguments \(\*x\)"),
    (lambda x, **more: x + 1, r"takes any number of arguments \(\*more\). Name each input"),
    (lambda: 1, "has no input. Take the values that it computes with as parameters without a default"),
    (lambda x: 1, "must return a value of the graph or a tuple of such"),
    (lambda x: (x + 1, 1), "must return a value of the graph or a tuple of such"),
    (lambda x: (), "must return a value of the graph or a tuple of such"),
    (lambda x: x, "returns its input 'x', which is no operation"),
    (lambda x, y: (x + y, y), "returns its input 'y', which is no operation"),
    (lambda x: ((y := x + 1), (y, y))[1], "returns the same value twice"),
    (lambda x, y: x + 1, "does not use its input 'y'. Take it out, or give it a default"),
    (lambda x: x * WEIGHT, r"uses a tensor of its own, of shape \(2,\), which no graph holds. Take it as a parameter"),
    (lambda x: nn.Linear(2, 2)(x), r"calls a Linear, whose 'weight' is no value of the graph.*slapo.call\(\"path\", x\)"),
    (lambda x: nn.BatchNorm1d(2, affine=False)(x), "calls a BatchNorm1d, whose 'running_mean' is no value of the graph"),
    (branches, r"^the pattern branches \(.*test_pattern.py:\d+\) branches on 'gt', a value that only exists when the model"),
    (loops, r"iterates over 'x', whose length only is known when the model runs"),
    (mapping, "uses 'x' as a mapping. Take its items by key"),
    (numpy_like, r"can't be run over placeholders: RuntimeError: .*Use torch operations"),
    (lambda x: x.add_(1), "writes in place \\('add_'\\), and operations that do so never match"),
    (lambda x: F.relu(x, inplace=True), "writes in place \\('relu'\\)"),
    (lambda x, y: torch.exp(x, out=y), "writes in place \\('exp'\\)"),
    (lambda x, y: (x.relu(), y.relu()), "computes 'relu_1' from other values than 'relu': they share neither an operation"),
    (lambda x: x * wild("a b"), r"slapo.wild\('a b'\): the name must be a Python identifier"),
    (lambda x: call("a(", x), r"slapo.call\('a\(', ...\): needs a regular expression for paths"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_what_is_refused(index: int) -> None:
    given, message = REFUSED[index]
    with pytest.raises(PatternError, match=message):
        find(nn.Module(), torch.fx.Graph(), given)


def test_a_pattern_has_functions() -> None:
    with pytest.raises(PatternError, match=r"slapo.pattern\(\): needs at least one function"):
        Pattern(())
    with pytest.raises(PatternError, match="a pattern is a function over torch operations, found 'x'"):
        pattern(functions.residual, "x")


def test_call_means_something_in_a_pattern_only() -> None:
    with pytest.raises(PatternError, match=r"slapo.call\('fc', ...\): this word only has a meaning inside a pattern"):
        call("fc", 1)


def test_alternatives_have_the_same_inputs_and_as_many_outputs() -> None:
    with pytest.raises(PatternError, match=r"has the inputs \(x, y\), and .* to which it is an alternative, \(x, b\)"):
        pattern(lambda x, b: x + b, lambda x, y: x + y)
    with pytest.raises(PatternError, match=r"has the inputs \(b, x\)"):
        pattern(lambda x, b: x + b) | (lambda b, x: x + b)
    both = pattern(lambda x: x.relu(), lambda x: (x.relu(), x.tanh()))
    with pytest.raises(PatternError, match="gives 2 values, and .*, to which it is an alternative, 1. Return as many"):
        find(nn.Module(), torch.fx.Graph(), both)


def test_alternatives_are_put_together_in_each_way() -> None:
    f, g, h = functions.residual, functions.my_add, functions.wrong_add
    assert pattern(f, g, h) == pattern(f) | g | h == f | pattern(g) | pattern(h) == pattern(pattern(f, g), h)  # type: ignore[operator]
    assert as_pattern(f) == pattern(f)
    assert as_pattern(pattern(f)) == pattern(f)
    assert hash(pattern(f)) == hash(pattern(f))
    assert pattern(f) != pattern(g)


def test_parameters_with_defaults_are_literals_and_keyword_only_ones_are_inputs() -> None:
    def what(x: Any, *, b: Any, scale: float = 2.0) -> Any:
        return x * scale + b

    (one,) = matches(what, lambda m, x, y, z: x * 2.0 + y)
    assert {name: str(value) for name, value in one.inputs.items()} == {"x": "x", "b": "y"}
    assert count(what, lambda m, x, y, z: x * 3.0 + y) == 0


def test_what_is_computed_for_nothing_does_not_count() -> None:
    assert count(lambda x: (x.exp(), x.relu())[1], lambda m, x, y, z: x.relu()) == 1


def test_a_function_is_read_once_and_not_kept_alive() -> None:
    runs = []

    def what(x: Any) -> Any:
        runs.append(1)
        return x.relu()

    for _ in range(3):
        assert count(what, lambda m, x, y, z: x.relu()) == 1
    assert len(runs) == 1
    gone = weakref.ref(what)
    del what
    gc.collect()
    assert gone() is None


def test_a_module_in_a_pattern_is_left_as_it_was() -> None:
    drop = nn.Dropout(0.1).eval()
    inner = nn.Sequential(drop, nn.GELU())
    body = body_of(lambda x: inner(x))
    assert [body.terms.head(node) for node in body.nodes] == ["dropout", "gelu"]
    assert (drop.training, inner.training, inner[1].training) == (False, True, True)
    with pytest.raises(PatternError):
        body_of(lambda x: nn.Linear(1, 1)(inner(x)))
    assert (drop.training, inner.training, inner[1].training) == (False, True, True)


@pytest.mark.parametrize(
    ("function", "training"),
    [
        (lambda x: F.dropout(x, 0.1), True),
        (lambda x: F.dropout(x, 0.1, False), False),
        (lambda x: nn.Dropout(0.1)(x), MODE),
        (lambda x: nn.Sequential(nn.Dropout(0.1))(x), MODE),
    ],
)
def test_a_dropout_follows_the_mode_only_as_a_module(function: Function, training: Any) -> None:
    body = body_of(function)
    assert body.terms.term(body.outputs[0]).operands["training"] is training


def test_patterns_are_read_in_threads_at_once() -> None:
    failed = []

    def work(index: int) -> None:
        for number in range(20):
            text = f"lambda x: call('fc{index}', x) * {number}"
            body = body_of(eval(text, {"call": call}))
            if [node.args[-1] for node in body.nodes[1:]] != [number] or body.nodes[0].target.regex != f"fc{index}":  # type: ignore[union-attr]
                failed.append(text)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@pattern
def decorated(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y)


def test_a_pattern_is_a_value_that_a_history_can_save() -> None:
    for one in (pattern(functions.residual), pattern(functions.residual, functions.my_add), decorated):
        given = codec.encode(one)
        codec.verify(given, ("tests",))
        assert codec.decode(given) == one
        assert codec.key(codec.decode(given)) == codec.key(one)
    with pytest.raises(codec.LiveObject):
        codec.encode(pattern(lambda x, y: x + y))
    source = codec.Source()
    assert source.write(decorated) == "slapo.pattern(tests.patterns.test_pattern.decorated)"
    assert list(source.imports) == ["import slapo_py as slapo", "import tests.patterns.test_pattern"]
    scope = {"slapo": slapo, "tests": __import__("tests.patterns.test_pattern")}
    assert eval(source.write(decorated), scope) == decorated


def test_a_decorated_pattern_is_found_in_a_loaded_history(tmp_path: Path) -> None:
    def schedule() -> slapo.Schedule:
        sch = slapo.create_schedule(net(), {"ids": ids()})
        sch["blocks.0"].trace()
        return sch

    sch = schedule()
    sch["blocks.0"].replace(functions.scaled_add, pattern(functions.scaled))
    sch.history.save(tmp_path / "h.json")
    assert str(History.load(tmp_path / "h.json", allow="tests").replay(schedule().undo(1))) == str(sch)
