# ruff: noqa: E501 - a row of the table is read as one line
"""Why a pattern does not match: how far it came, where, and what stopped it."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_py as slapo
from slapo_py.patterns import call, pattern, why_not, wild
from tests.models import ids, net
from tests.patterns.test_matcher import Around, Leaves, Other, Padded

Function = Callable[..., Any]


def hooked() -> nn.Module:
    child = nn.GELU()
    child.register_forward_hook(lambda *_: None)
    return child


def why(what: Any, function: Function, **children: nn.Module) -> str:
    module = Around(function, **children)
    return why_not(module, Leaves().trace(module), what)


REASONS: list[tuple[str, Function, Function, dict[str, nn.Module], str]] = [
    ("absent", lambda a: F.gelu(a), lambda m, x, y, z: x + y, {}, "the graph has no gelu; it has add."),
    ("absent attribute", lambda a: a.mT @ a, lambda m, x, y, z: x.transpose(-1, -2) @ x, {}, "the graph has no .mT; it has matmul, transpose."),
    ("in place", lambda a: F.relu(a), lambda m, x, y, z: x.relu_(), {}, "the graph has no relu except 'relu_', which writes in place."),
    ("by a flag", lambda a: F.relu(a), lambda m, x, y, z: F.relu(x, inplace=True), {}, "'relu' writes in place."),
    ("a hook", lambda a: F.gelu(a), lambda m, x, y, z: m.act(x), {"act": hooked()}, "the call of 'act' is more than the operation: it has a hook."),
    ("another forward", lambda a: F.gelu(a), lambda m, x, y, z: m.act(x), {"act": Other()}, "the graph has no gelu except 'act', and Other has a forward of its own."),
    ("parametrized", lambda a, w, b: F.linear(a, w, b), lambda m, x, y, z: m.fc(x), {"fc": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))}, "the call of 'fc' is more than the operation: it is parametrized."),
    ("padding", lambda a, w, b: F.conv1d(a, w, b, padding=1), lambda m, x, y, z: m.c(x), {"c": nn.Conv1d(2, 2, 3, padding=1, padding_mode="reflect")}, "its padding_mode is 'reflect'."),
    ("max_norm", lambda a, w: F.embedding(a, w), lambda m, x, y, z: m.e(x), {"e": nn.Embedding(2, 2, max_norm=1.0)}, "its max_norm makes it write into its weight."),
    ("another operation", lambda a: a.relu().softmax(-1), lambda m, x, y, z: y.tanh().softmax(-1) + z.relu(), {}, "1 of 2 operations are there, but 'tanh' is tanh where the pattern has relu."),
    ("a call in its place", lambda a: a.relu().softmax(-1), lambda m, x, y, z: m.fc(x).softmax(-1) + z.relu(), {"fc": nn.Linear(2, 2)}, "1 of 2 operations are there, but 'fc' is a call of Linear where the pattern has relu."),
    ("an argument in its place", lambda a: a.relu().softmax(-1), lambda m, x, y, z: x.softmax(-1) + z.relu(), {}, "1 of 2 operations are there, but 'softmax' is given 'x' where the pattern has relu."),
    ("the best of several", lambda a: a.relu().tanh().exp(), lambda m, x, y, z: x.exp() + z.tanh().exp() + y.relu(), {}, "2 of 3 operations are there, but 'tanh' is given 'z' where the pattern has relu."),
    ("a literal in its place", lambda a: a.relu() + a, lambda m, x, y, z: (1 + x, z.relu()), {}, "'add' has 1 where the pattern has relu."),
    ("a literal", lambda a: a.relu() * 2, lambda m, x, y, z: x.relu() * 8, {}, "1 of 2 operations are there, but 'mul' has 8 where the pattern has 2."),
    ("a child's literal", lambda a: F.gelu(a), lambda m, x, y, z: m.act(x), {"act": nn.GELU("tanh")}, "'act' has 'tanh' where the pattern has 'none'."),
    ("a value for a literal", lambda a: a + 1.0, lambda m, x, y, z: x + y, {}, "'add' has 'y' where the pattern has 1.0. For a value that is computed write slapo.wild()."),
    ("a literal for an input", lambda a, b: a + b, lambda m, x, y, z: x + 1.0, {}, "'add' has 1.0 where the pattern has its input 'b'. Inputs stand for values of the graph; for a literal write slapo.wild('b')."),
    ("the mode", lambda a: nn.Dropout(0.5)(a), lambda m, x, y, z: F.dropout(x, 0.5, True), {}, "'dropout' has True for training, where the pattern has a module, which follows the mode. Write the function with training=True, or training=slapo.wild()."),
    ("always", lambda a: F.dropout(a, 0.5), lambda m, x, y, z: m.d(x), {"d": nn.Dropout(0.5)}, "where the pattern has True: it drops in train mode only. Make the mode an input of the pattern, as in lambda x, training: F.dropout(x, 0.1, training)."),
    ("another signature", lambda a: a.max(), lambda m, x, y, z: x.max(1), {}, "'max_1' and the pattern's max differ in dim, keepdim."),
    ("used outside", lambda a: (a + 1).tanh(), lambda m, x, y, z: ((s := x + 1), s.tanh() * s)[1], {}, "all 2 operations are there, but the inner value 'add' is used outside, by 'mul'."),
    ("given back", lambda a: (a + 1).tanh(), lambda m, x, y, z: ((s := x + 1), s.tanh()), {}, "all 2 operations are there, but the inner value 'add' is used outside, by 'output'."),
    ("used outside by the same", lambda a: (a + 1).tanh(), lambda m, x, y, z: ((s := x + 1), s.tanh() * s.tanh())[1], {}, "all 2 operations are there, but the inner value 'add' is used outside, by 'tanh', 'tanh_1'."),
    ("its size is read outside", lambda a: a.tanh().relu(), lambda m, x, y, z: ((s := x.tanh()), s.relu().view(s.shape[0]))[1], {}, "all 2 operations are there, up to 'relu', but the inner value 'tanh' is used outside by 'getattr_1'."),
    ("two values", lambda a: a.relu() * a, lambda m, x, y, z: x.relu() * y, {}, "all 2 operations are there, up to 'mul', but the input 'a' would be 'x' and 'y'."),
    ("two weights", lambda a, w, b: F.linear(F.linear(a, w, b), w, b), lambda m, x, y, z: m.a(m.b(x)), {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}, "all 2 operations are there, up to 'a', but the input 'w' would be b.weight and a.weight."),
    ("two nodes", lambda a: ((r := a.relu()), r + r.tanh())[1], lambda m, x, y, z: x.relu().tanh() + x.relu(), {}, "all 3 operations are there, up to 'add', but the operation 'relu' would be 'relu_1' and 'relu'."),
    ("two wilds", lambda a: a * wild("s") + wild("s"), lambda m, x, y, z: x * 2 + 3, {}, "all 2 operations are there, up to 'add', but slapo.wild('s') would be 2 and 3."),
    ("one node", lambda a: a.relu() + a.relu(), lambda m, x, y, z: ((r := x.relu()), r + r)[1], {}, "all 3 operations are there, up to 'add', but 'relu' would be two operations of the pattern at once."),
    ("another output", lambda a: (a.relu(), a.tanh()), lambda m, x, y, z: x.relu() + y.tanh(), {}, "what its first output needs is there, up to 'relu', but no tanh that fits takes 'x'."),
    ("a cycle", lambda a, b: ((r := a.relu()), (r, r * b))[1], lambda m, x, y, z: ((r := x.relu()), r * r.exp())[1], {}, "all 2 operations are there, up to 'relu', but 'exp' needs one of the outputs and is needed for another."),
    ("an input inside", lambda a, b: (a + 1) * b, lambda m, x, y, z: ((s := x + 1), s * s)[1], {}, "all 2 operations are there, up to 'mul', but 'add' would be an input and computed inside."),
    ("no such child", lambda a: call("fc", a), lambda m, x, y, z: m.fcs(x), {"fcs": nn.Linear(2, 2)}, "'fcs' is a call of Linear where the pattern has slapo.call('fc', ...)."),
    ("no child", lambda a: call("fc", a), lambda m, x, y, z: x + y, {}, "the graph calls no submodule."),
    ("no child there", lambda a: call("fc", a).relu(), lambda m, x, y, z: m.fc(x) + (x + y).relu(), {"fc": nn.Linear(2, 2)}, "1 of 2 operations are there, but 'add' is add where the pattern has slapo.call('fc', ...)."),
    ("no such argument", lambda a: call("p", a, other=1), lambda m, x, y, z: m.p(x), {"p": Padded()}, "the forward of 'p' does not take the arguments of slapo.call('p', ...)."),
    ("another argument", lambda a: call("p", a), lambda m, x, y, z: m.p(x, scale=2.0), {"p": Padded()}, "'p' has 2.0 where the pattern has 1.0."),
    ("nested", lambda a: torch.cat([a.relu(), a], 1), lambda m, x, y, z: torch.cat([x.relu(), x, x], 1), {}, "'cat' has (relu, x, x) where the pattern has (relu, a)."),
]  # fmt: skip


@pytest.mark.parametrize("row", REASONS, ids=[row[0] for row in REASONS])
def test_reasons(row: tuple[str, Function, Function, dict[str, nn.Module], str]) -> None:
    _, what, function, children, expected = row
    said = why(what, function, **children)
    assert re.fullmatch(r"The pattern at .*test_why_not\.py:\d+ does not match: " + f".*{re.escape(expected)}", said)


def test_it_says_how_often_it_matches() -> None:
    def gelu_of_sum(a: Any, b: Any) -> Any:
        return F.gelu(a + b)

    said = why(gelu_of_sum, lambda m, x, y, z: F.gelu(x + y) + F.gelu(y + z))
    assert re.fullmatch(r"The pattern gelu_of_sum \(.*:\d+\) matches 2 times\.", said)
    assert why(gelu_of_sum, lambda m, x, y, z: F.gelu(x + y)).endswith(" matches 1 time.")


def test_each_alternative_has_its_sentence() -> None:
    def twice(a: Any) -> Any:
        return a.relu().relu()

    def once(a: Any) -> Any:
        return a.relu()

    said = why(pattern(once, twice), lambda m, x, y, z: x.relu().relu())
    assert re.fullmatch(
        r"The pattern once \(.*\) matches 2 times\. The pattern twice \(.*\) does not match: all 2 operations are "
        r"there, up to 'relu_1', but an earlier match has taken some of them\.",
        said,
    )


def test_it_names_the_line_of_the_model_where_that_is_known() -> None:
    sch = slapo.create_schedule(net(), {"ids": ids()})
    sch["blocks.0"].trace()
    said = sch["blocks.0"].why_not(lambda x: x * 0.25)
    assert re.search(r"'mul' \(.*models\.py:\d+\) has 0\.5 where the pattern has 0\.25", said)


def test_a_step_at_a_child_makes_it_more_than_the_operation() -> None:
    sch = slapo.create_schedule(net(), {"ids": ids()})
    sch["blocks.0.up"].checkpoint()
    sch["blocks.0"].trace()
    up = sch["blocks.0"].why_not(lambda x, w, b: F.gelu(F.linear(x, w, b)))
    assert re.search("the call of 'up' is more than the operation: a step was done at it", up)
    assert len(sch["blocks.0"].find(lambda x: F.gelu(call("up", x)))) == 1
