# ruff: noqa: E501 - a row of the table is read as one line
"""Where patterns are found: each row is a pattern, a graph and the number of matches."""

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from slapo_py.patterns import Attribute, Occurrence, call, children, find, is_known, pattern, wild
from slapo_py.patterns.words import MODE

Function = Callable[..., Any]


class Leaves(fx.Tracer):
    """Calls of all submodules stay calls."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class Around(nn.Module):
    """A module whose forward is a function of the module and its arguments."""

    def __init__(self, function: Function, **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Any, y: Any, z: Any) -> Any:
        return self.function(self, x, y, z)


def matches(what: Any, function: Function, **children: nn.Module) -> list[Occurrence]:
    """The matches of a pattern in the graph of `lambda m, x, y, z: ...`."""
    module = Around(function, **children)
    return find(module, Leaves().trace(module), what)


def count(what: Any, function: Function, **children: nn.Module) -> int:
    return len(matches(what, function, **children))


Row = tuple[str, Function, Function, dict[str, nn.Module], int]


class Wider(nn.Linear):
    """Another class with the forward of its torch class."""


class Other(nn.GELU):
    """Another forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input) * 2


class Padded(nn.Module):
    """A child with defaults in its forward."""

    def forward(self, x: Tensor, mask: Any = None, *, scale: float = 1.0) -> Tensor:
        return x


twice: Any = torch.library.custom_op(
    "slapo_test::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
)

SAME: list[Row] = [
    # operands of commutative operations, at any depth
    ("add", lambda a, b: a + b, lambda m, x, y, z: x + y, {}, 1),
    ("swapped", lambda a, b: torch.relu(a) + b, lambda m, x, y, z: y + torch.relu(x), {}, 1),
    ("swapped deep", lambda a, b, c: ((torch.relu(a) + b) * c).tanh(), lambda m, x, y, z: torch.tanh(z * (y + x.relu())), {}, 1),
    ("swapped at each depth", lambda a, b: (a.relu() * (a + 1) + b.tanh()) * 2, lambda m, x, y, z: 2 * (y.tanh() + (1 + x) * x.relu()), {}, 1),
    ("swapped with a shared input", lambda a, b: (a + b) * (b.relu() + a.tanh()), lambda m, x, y, z: (x.tanh() + y.relu()) * (y + x), {}, 1),
    ("alpha=1 commutes", lambda a, b: torch.add(a.relu(), b), lambda m, x, y, z: torch.add(y, x.relu(), alpha=1), {}, 1),
    ("not with alpha=2", lambda a, b: torch.add(a.relu(), b, alpha=2), lambda m, x, y, z: torch.add(y, x.relu(), alpha=2), {}, 0),
    ("alpha is an operand", lambda a, b: a + b, lambda m, x, y, z: torch.add(y, x, alpha=2), {}, 0),
    ("sub does not commute", lambda a, b: a.relu() - b, lambda m, x, y, z: y - x.relu(), {}, 0),
    ("maximum", lambda a, b: torch.maximum(a.relu(), b), lambda m, x, y, z: torch.maximum(y, x.relu()), {}, 1),
    ("eq", lambda a, b: a.relu() == b, lambda m, x, y, z: y == x.relu(), {}, 1),
    ("greater is less swapped", lambda a, b: a.relu() > b, lambda m, x, y, z: y < x.relu(), {}, 1),
    ("less is not greater", lambda a, b: a.relu() < b, lambda m, x, y, z: y < x.relu(), {}, 0),
    ("matmul does not commute", lambda a, b: a.relu() @ b, lambda m, x, y, z: y @ x.relu(), {}, 0),
    # modules, functions, methods and operators
    ("operator, function", lambda a, b: torch.add(a, b), lambda m, x, y, z: x + y, {}, 1),
    ("method, function", lambda a: a.softmax(-1), lambda m, x, y, z: F.softmax(x, dim=-1), {}, 1),
    ("function, method", lambda a: torch.softmax(a, dim=-1), lambda m, x, y, z: x.softmax(-1), {}, 1),
    ("softmax with a dtype", lambda a: torch.softmax(a, -1, torch.float32), lambda m, x, y, z: F.softmax(x, -1, dtype=torch.float32), {}, 1),
    ("module, function", lambda a: F.gelu(a), lambda m, x, y, z: m.act(x), {"act": nn.GELU()}, 1),
    ("module in the pattern", lambda a: nn.GELU()(a), lambda m, x, y, z: F.gelu(x), {}, 1),
    ("both modules", lambda a: nn.SiLU()(a), lambda m, x, y, z: m.act(x), {"act": nn.SiLU()}, 1),
    ("relu in each way", lambda a: torch.relu(a), lambda m, x, y, z: m.act(F.relu(x).relu()), {"act": nn.ReLU()}, 3),
    ("sigmoid in each way", lambda a: F.sigmoid(a), lambda m, x, y, z: m.act(torch.sigmoid(torch.special.expit(x))), {"act": nn.Sigmoid()}, 3),
    ("tanh", lambda a: torch.tanh(a), lambda m, x, y, z: m.act(F.tanh(x)), {"act": nn.Tanh()}, 2),
    ("softmax module", lambda a: a.softmax(1), lambda m, x, y, z: m.act(x), {"act": nn.Softmax(1)}, 1),
    ("log_softmax module", lambda a: a.log_softmax(1), lambda m, x, y, z: m.act(x), {"act": nn.LogSoftmax(1)}, 1),
    ("layer norm", lambda a, w, b: F.layer_norm(a, (4,), w, b), lambda m, x, y, z: m.n(x), {"n": nn.LayerNorm(4)}, 1),
    ("layer norm without weights", lambda a: F.layer_norm(a, [4]), lambda m, x, y, z: m.n(x), {"n": nn.LayerNorm(4, elementwise_affine=False)}, 1),
    ("rms norm", lambda a, w: F.rms_norm(a, (4,), w, 1e-6), lambda m, x, y, z: m.n(x), {"n": nn.RMSNorm(4, eps=1e-6)}, 1),
    ("linear", lambda a, w, b: F.linear(a, w, b), lambda m, x, y, z: m.fc(x), {"fc": nn.Linear(4, 4)}, 1),
    ("linear without bias", lambda a, w: F.linear(a, w), lambda m, x, y, z: m.fc(x), {"fc": nn.Linear(4, 4, bias=False)}, 1),
    ("a bias is an operand", lambda a, w: F.linear(a, w), lambda m, x, y, z: m.fc(x), {"fc": nn.Linear(4, 4)}, 0),
    ("no bias for an input", lambda a, w, b: F.linear(a, w, b), lambda m, x, y, z: m.fc(x), {"fc": nn.Linear(4, 4, bias=False)}, 0),
    ("a weight is one value", lambda a, w, b: F.linear(F.linear(a, w, b), w, b), lambda m, x, y, z: m.fc(m.fc(x)), {"fc": nn.Linear(4, 4)}, 1),
    ("two weights are two", lambda a, w, b: F.linear(F.linear(a, w, b), w, b), lambda m, x, y, z: m.fc(m.up(x)), {"fc": nn.Linear(4, 4), "up": nn.Linear(4, 4)}, 0),
    ("a weight read, and read by its module", lambda a, w, b: F.linear(a, w, b) + w, lambda m, x, y, z: m.fc(x) + m.fc.weight, {"fc": nn.Linear(4, 4)}, 1),
    ("another weight", lambda a, w, b: F.linear(a, w, b) + w, lambda m, x, y, z: m.fc(x) + m.fc.bias, {"fc": nn.Linear(4, 4)}, 0),
    ("conv1d", lambda a, w, b: F.conv1d(a, w, b, padding=1), lambda m, x, y, z: m.c(x), {"c": nn.Conv1d(2, 2, 3, padding=1)}, 1),
    ("conv2d", lambda a, w, b: F.conv2d(a, w, b, (2, 2)), lambda m, x, y, z: m.c(x), {"c": nn.Conv2d(2, 2, 3, stride=2)}, 1),
    ("conv2d, one number", lambda a, w, b: F.conv2d(a, w, b, stride=2), lambda m, x, y, z: m.c(x), {"c": nn.Conv2d(2, 2, 3, stride=2)}, 1),
    ("conv3d, another stride", lambda a, w, b: F.conv3d(a, w, b), lambda m, x, y, z: m.c(x), {"c": nn.Conv3d(2, 2, 3, stride=2)}, 0),
    ("circular padding", lambda a, w, b: F.conv1d(a, w, b, padding=1), lambda m, x, y, z: m.c(x), {"c": nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")}, 0),
    ("embedding", lambda i, w: F.embedding(i, w), lambda m, x, y, z: m.e(x), {"e": nn.Embedding(4, 4)}, 1),
    ("embedding that writes", lambda i, w: F.embedding(i, w, max_norm=1.0), lambda m, x, y, z: m.e(x), {"e": nn.Embedding(4, 4, max_norm=1.0)}, 0),
    ("dropout child", lambda a: nn.Dropout(0.1)(a), lambda m, x, y, z: m.d(x), {"d": nn.Dropout(0.1)}, 1),
    ("a subclass with the same forward", lambda a, w, b: F.linear(a, w, b), lambda m, x, y, z: m.fc(x), {"fc": Wider(4, 4)}, 1),
    ("a subclass with another", lambda a: F.gelu(a), lambda m, x, y, z: m.act(x), {"act": Other()}, 0),
    ("reflected operators", lambda a: 1 - a.relu(), lambda m, x, y, z: torch.rsub(x.relu(), 1), {}, 1),
    ("division", lambda a, b: torch.true_divide(a, b), lambda m, x, y, z: x / y, {}, 1),
    ("negation", lambda a: -a, lambda m, x, y, z: torch.neg(x).negative(), {}, 2),
    ("overloads of aten", lambda a, b: a + b, lambda m, x, y, z: torch.ops.aten.add.Tensor(x, torch.ops.aten.add(y, z)), {}, 2),
    # defaults, positions and keywords
    ("omitted, written", lambda a: F.gelu(a), lambda m, x, y, z: F.gelu(x, approximate="none"), {}, 1),
    ("written, omitted", lambda a: F.gelu(a, approximate="none"), lambda m, x, y, z: F.gelu(x), {}, 1),
    ("omitted eps", lambda a, w: F.layer_norm(a, (4,), w, eps=1e-5), lambda m, x, y, z: F.layer_norm(x, (4,), y), {}, 1),
    ("by keyword", lambda a, b: torch.add(input=a, other=b), lambda m, x, y, z: torch.add(x, y), {}, 1),
    ("by position", lambda a: a.transpose(1, 2), lambda m, x, y, z: torch.transpose(x, dim1=2, dim0=1), {}, 1),
    ("other position", lambda a: a.transpose(1, 2), lambda m, x, y, z: torch.transpose(x, dim1=1, dim0=2), {}, 0),
    ("numpy's words", lambda a: a.sum(dim=1, keepdim=True), lambda m, x, y, z: torch.sum(x, axis=1, keepdims=True), {}, 1),  # type: ignore[call-overload]
    ("a dim, a tuple of one", lambda a: a.mean(-1), lambda m, x, y, z: x.mean((-1,)), {}, 1),
    ("a tuple, a list", lambda a: a.permute(0, 2, 1), lambda m, x, y, z: torch.permute(x, [0, 2, 1]), {}, 1),
    ("view of sizes", lambda a: a.view(2, -1), lambda m, x, y, z: x.view((2, -1)), {}, 1),
    ("view of one size", lambda a: a.view(-1), lambda m, x, y, z: x.view([-1]), {}, 1),
    ("reshape is no view", lambda a: a.reshape(2, -1), lambda m, x, y, z: x.view(2, -1), {}, 0),
    ("view as a dtype", lambda a: a.view(torch.int32), lambda m, x, y, z: x.view(torch.int32), {}, 1),
    ("view as another dtype", lambda a: a.view(torch.int32), lambda m, x, y, z: x.view(torch.int16), {}, 0),
    ("split", lambda a: torch.split(a, 2, dim=1)[0], lambda m, x, y, z: x.split(2, 1)[0], {}, 1),
    ("cat of a list", lambda a, b: torch.cat([a, b], dim=1), lambda m, x, y, z: torch.concat((x, y), 1), {}, 1),
    ("cat in another order", lambda a, b: torch.cat([a.relu(), b], dim=1), lambda m, x, y, z: torch.cat((y, x.relu()), 1), {}, 0),
    ("cat of more", lambda a, b: torch.cat([a, b], dim=1), lambda m, x, y, z: torch.cat((x, y, z), 1), {}, 0),
    ("casts", lambda a: a.float(), lambda m, x, y, z: x.to(torch.float32).to(dtype=torch.float32).float(), {}, 3),
    ("another cast", lambda a: a.float(), lambda m, x, y, z: x.half().to(torch.bfloat16), {}, 0),
    ("to a value's dtype", lambda a, b: a.to(b.dtype), lambda m, x, y, z: x.to(dtype=y.dtype), {}, 1),
    ("to another value's dtype", lambda a: a.relu().to(a.dtype), lambda m, x, y, z: x.relu().to(y.dtype), {}, 0),
    ("to a device", lambda a: a.to("cpu"), lambda m, x, y, z: x.to(torch.device("cpu")).to(device="cpu"), {}, 2),
    ("to a device and dtype", lambda a: a.to("cpu", torch.half), lambda m, x, y, z: x.to(dtype=torch.half, device="cpu"), {}, 1),
    ("a dtype is no device and dtype", lambda a: a.to(torch.half), lambda m, x, y, z: x.to("cpu", torch.half), {}, 0),
    ("a copy", lambda a: a.to(torch.half), lambda m, x, y, z: x.to(torch.half, copy=True).to(torch.half, False, True), {}, 0),
    # sizes
    ("sizes in each way", lambda a: a.view(a.shape[0], -1), lambda m, x, y, z: (x.view(x.size(0), -1), y.view(y.size()[0], -1), z.view(z.shape[0], -1)), {}, 3),
    ("the size of another", lambda a: a.view(a.shape[0], -1), lambda m, x, y, z: x.view(y.size(0), -1), {}, 0),
    ("another size", lambda a: a.view(a.shape[0], -1), lambda m, x, y, z: x.view(x.size(1), -1), {}, 0),
    ("computed twice there", lambda a: ((h := a.shape[1] // 2), a[:, :h] + a[:, h:])[1], lambda m, x, y, z: x[:, : x.shape[1] // 2] + x[:, x.size(1) // 2 :], {}, 1),
    ("computed twice here", lambda a: a[:, : a.shape[1] // 2] + a[:, a.size(1) // 2 :], lambda m, x, y, z: ((h := x.shape[1] // 2), x[:, :h] + x[:, h:])[1], {}, 1),
    ("another bound", lambda a: a[:, : a.shape[1] // 2], lambda m, x, y, z: x[:, : x.shape[1] // 4], {}, 0),
    ("a size used outside too", lambda a: a.view(a.shape[0], -1).relu(), lambda m, x, y, z: ((n := x.shape[0]), x.view(n, -1).relu() + n)[1], {}, 1),
    # literals
    ("p of a dropout", lambda a: nn.Dropout(0.2)(a), lambda m, x, y, z: m.d(x), {"d": nn.Dropout(0.1)}, 0),
    ("eps of a norm", lambda a, w, b: F.layer_norm(a, (4,), w, b, 1e-6), lambda m, x, y, z: m.n(x), {"n": nn.LayerNorm(4)}, 0),
    ("shape of a norm", lambda a, w, b: F.layer_norm(a, (8,), w, b), lambda m, x, y, z: m.n(x), {"n": nn.LayerNorm(4)}, 0),
    ("dim of a softmax", lambda a: a.softmax(-1), lambda m, x, y, z: x.softmax(1), {}, 0),
    ("form of a gelu", lambda a: F.gelu(a), lambda m, x, y, z: F.gelu(x, approximate="tanh"), {}, 0),
    ("form of a gelu, G18", lambda a, b: nn.GELU()(a + b), lambda m, x, y, z: m.act(x + y), {"act": nn.GELU("tanh")}, 0),
    ("the same form", lambda a, b: nn.GELU("tanh")(a + b), lambda m, x, y, z: m.act(x + y), {"act": nn.GELU("tanh")}, 1),
    ("a constant", lambda a: a.relu() * 2.0, lambda m, x, y, z: x.relu() * 8.0, {}, 0),
    ("1 is 1.0", lambda a: a + 1, lambda m, x, y, z: x + 1.0, {}, 1),
    ("True is not 1", lambda a: a + 1, lambda m, x, y, z: x + True, {}, 0),
    ("the last bit", lambda a: a * 0.1, lambda m, x, y, z: x * math.nextafter(0.1, 1), {}, 0),
    ("minus zero", lambda a: a + 0.0, lambda m, x, y, z: x + -0.0, {}, 0),
    ("nan is nan", lambda a: a + math.nan, lambda m, x, y, z: x + math.nan, {}, 1),
    ("nan is no number", lambda a: a + math.nan, lambda m, x, y, z: x + 1.0, {}, 0),
    ("a literal for an input", lambda a, b: a + b, lambda m, x, y, z: x + 1.0, {}, 0),
    ("an input for a literal", lambda a: a + 1.0, lambda m, x, y, z: x + y, {}, 0),
    ("a square is no product", lambda a: a.square(), lambda m, x, y, z: (x * x) + y.pow(2), {}, 0),
    ("an index", lambda a: a[0], lambda m, x, y, z: x[1] + x[(0,)], {}, 0),
    ("an index by a list is none by a tuple", lambda a: a[[0, 1]], lambda m, x, y, z: x[0, 1], {}, 0),
    ("slices", lambda a: a[..., 1:], lambda m, x, y, z: x[..., 1:] + x[..., 1:2], {}, 1),
    # training
    ("the mode", lambda a: nn.Dropout(0.5)(a), lambda m, x, y, z: F.dropout(x, 0.5, True), {}, 0),
    ("written True", lambda a: F.dropout(a, 0.5, True), lambda m, x, y, z: F.dropout(x, 0.5, training=True), {}, 1),
    ("left out, the mode", lambda a: F.dropout(a, 0.5), lambda m, x, y, z: m.d(x), {"d": nn.Dropout(0.5)}, 0),
    ("left out, written True", lambda a: F.dropout(a, 0.5), lambda m, x, y, z: F.dropout(x, 0.5, True), {}, 1),
    ("written True, the mode", lambda a: F.dropout(a, 0.5, True), lambda m, x, y, z: m.d(x), {"d": nn.Dropout(0.5)}, 0),
    ("written False", lambda a: F.dropout(a, 0.5, training=False), lambda m, x, y, z: F.dropout(x, 0.5, False), {}, 1),
    ("module in the pattern", lambda a: nn.Dropout(0.5)(a), lambda m, x, y, z: m.d(x), {"d": nn.Dropout(0.5)}, 1),
    ("wild training", lambda a: F.dropout(a, 0.5, training=wild()), lambda m, x, y, z: m.d(F.dropout(x, 0.5)), {"d": nn.Dropout(0.5)}, 2),
    ("training as an input", lambda a, t: F.dropout(a, 0.5, training=t), lambda m, x, y, z: m.d(x), {"d": nn.Dropout(0.5)}, 1),
    # wild
    ("wild number", lambda a: a * wild(), lambda m, x, y, z: 2.0 * x, {}, 1),
    ("wild value", lambda a: a.relu() * wild(), lambda m, x, y, z: y * x.relu(), {}, 1),
    ("wild default", lambda a: F.gelu(a, approximate=wild()), lambda m, x, y, z: m.act(F.gelu(x)), {"act": nn.GELU("tanh")}, 2),
    ("wild tuple", lambda a: a.view(wild()), lambda m, x, y, z: x.view(2, 3), {}, 1),
    ("wild in a tuple", lambda a: a.view(wild(), 3), lambda m, x, y, z: x.view(x.shape[0], 3), {}, 1),
    ("wild p", lambda a: F.dropout(a, wild(), wild()), lambda m, x, y, z: m.d(x), {"d": nn.Dropout(0.3)}, 1),
    ("one name, equal values", lambda a: a * wild("s") + wild("s"), lambda m, x, y, z: x * 2 + 2, {}, 1),
    ("one name, two values", lambda a: a * wild("s") + wild("s"), lambda m, x, y, z: x * 2 + 3, {}, 0),
    ("one name, two tuples", lambda a: a.view(wild("s")).view(wild("s")), lambda m, x, y, z: x.view(2, 3).view(3, 2), {}, 0),
    ("one name, one tuple", lambda a: a.view(wild("s")).tanh().view(wild("s")), lambda m, x, y, z: x.view(x.shape[0], 3).tanh().view(x.size(0), 3), {}, 1),
    ("two wild dims", lambda a: a.view(a.shape[wild()], a.shape[wild()]), lambda m, x, y, z: x.view(x.shape[0], x.shape[1]), {}, 1),
    # values
    ("the same input twice", lambda a: a.relu() * a, lambda m, x, y, z: x.relu() * x, {}, 1),
    ("not the same value", lambda a: a.relu() * a, lambda m, x, y, z: x.relu() * y, {}, 0),
    ("two inputs, one value", lambda a, b: a + b, lambda m, x, y, z: x + x, {}, 1),
    ("two operations, one node", lambda a: a.relu() + a.relu(), lambda m, x, y, z: ((r := x.relu()), r + r)[1], {}, 0),
    ("one operation used twice", lambda a: ((r := a.relu()), r + r.tanh())[1], lambda m, x, y, z: ((r := x.relu()), r.tanh() + r)[1], {}, 1),
    ("one operation, two nodes", lambda a: ((r := a.relu()), r + r.tanh())[1], lambda m, x, y, z: x.relu().tanh() + x.relu(), {}, 0),
    ("used outside", lambda a: (a + 1).tanh(), lambda m, x, y, z: ((s := x + 1), s.tanh() * s)[1], {}, 0),
    ("the output is used inside and outside", lambda a: ((s := a + 1), (s, s.tanh()))[1], lambda m, x, y, z: ((s := x + 1), s.tanh() * s)[1], {}, 1),
    ("an input is used outside", lambda a: (a + 1).tanh(), lambda m, x, y, z: (x + 1).tanh() * x, {}, 1),
    ("unconnected look-alikes", lambda a: torch.relu(a) * 2, lambda m, x, y, z: (torch.relu(x), y * 2), {}, 0),
    ("unconnected, in the middle", lambda a: torch.relu(a).tanh() * 2, lambda m, x, y, z: (x.relu(), (x * 2).tanh(), y.tanh() * 2), {}, 0),
    ("back to back", lambda a: a.relu().relu(), lambda m, x, y, z: x.relu().relu().relu().relu(), {}, 2),
    ("overlapping", lambda a: a.relu().relu(), lambda m, x, y, z: x.relu().relu().relu(), {}, 1),
    ("overlapping operands", lambda a, b: a.relu() + b, lambda m, x, y, z: x.relu() + y.relu(), {}, 1),
    ("an input inside", lambda a, b: (a + 1) * b, lambda m, x, y, z: ((s := x + 1), s * s)[1], {}, 0),
    # several outputs
    ("two outputs of one value", lambda a: (a.relu(), a.tanh()), lambda m, x, y, z: x.relu() + x.tanh(), {}, 1),
    ("of two values", lambda a: (a.relu(), a.tanh()), lambda m, x, y, z: x.relu() + y.tanh(), {}, 0),
    ("of an inner value", lambda a: ((s := a + 1), (s.relu(), s.tanh()))[1], lambda m, x, y, z: ((s := x + 1), s.relu() * s.tanh())[1], {}, 1),
    ("three, twice", lambda a: (a.relu(), a.tanh(), a.exp()), lambda m, x, y, z: (x.relu(), x.tanh(), x.exp(), y.exp(), y.tanh(), y.relu()), {}, 2),
    ("of a shared second operand", lambda a, b, c: (a.relu() * c, b.tanh() * c), lambda m, x, y, z: (z * y.tanh()) + (x.relu() * z), {}, 1),
    ("equal ones in pairs", lambda a, c: (a * c, a * c), lambda m, x, y, z: (x * y, x * y, x * y, x * y), {}, 2),
    ("through the outside", lambda a: (a.relu(), a.tanh()), lambda m, x, y, z: (r := x.relu(), (r + 1).tanh()), {}, 0),
    ("a cycle through the outside", lambda a, b: ((r := a.relu()), (r, r * b))[1], lambda m, x, y, z: ((r := x.relu()), r * r.sin())[1], {}, 0),
    ("items of a tuple", lambda a: ((p := a.chunk(2, -1)), (p[0], p[1]))[1], lambda m, x, y, z: ((p := x.chunk(2, dim=-1)), p[1] * p[0])[1], {}, 1),
    # in place
    ("add_", lambda a, b: a + b, lambda m, x, y, z: x.add_(y), {}, 0),
    ("inplace=True", lambda a: F.relu(a), lambda m, x, y, z: F.relu(x, inplace=True), {}, 0),
    ("an in-place module", lambda a: F.relu(a), lambda m, x, y, z: m.act(x), {"act": nn.ReLU(inplace=True)}, 0),
    ("out=", lambda a, b: torch.add(a, b), lambda m, x, y, z: torch.add(x, y, out=z), {}, 0),
    ("out=None", lambda a: F.normalize(a), lambda m, x, y, z: F.normalize(x, dim=1), {}, 1),
    # unknown functions
    ("a custom operation", lambda a: twice(a), lambda m, x, y, z: twice(x), {}, 1),
    ("its arguments", lambda a: twice(a.relu()), lambda m, x, y, z: twice(x=x.relu()), {}, 1),
    ("its name is not enough", lambda a: twice(a), lambda m, x, y, z: x * 2, {}, 0),
    # calls
    ("a call", lambda a: call("fc", a), lambda m, x, y, z: m.fc(x) + m.fcs(y), {"fc": nn.Linear(4, 4), "fcs": nn.Linear(4, 4)}, 1),
    ("calls by regex", lambda a: call("fc.?", a), lambda m, x, y, z: m.fc(x) + m.fcs(y), {"fc": nn.Linear(4, 4), "fcs": nn.Linear(4, 4)}, 2),
    ("q, k and v", lambda a: (call("q", a), call("k", a)), lambda m, x, y, z: m.q(x) * m.k(x) + m.q(y) * m.k(z), {"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)}, 1),
    ("a call's defaults", lambda a: call("p", a, mask=None), lambda m, x, y, z: m.p(x), {"p": Padded()}, 1),
    ("a call's omitted defaults", lambda a: call("p", a), lambda m, x, y, z: m.p(x=x, mask=None, scale=1.0), {"p": Padded()}, 1),
    ("a call's other argument", lambda a: call("p", a), lambda m, x, y, z: m.p(x, y), {"p": Padded()}, 0),
    ("a call's other literal", lambda a: call("p", a, scale=2.0), lambda m, x, y, z: m.p(x), {"p": Padded()}, 0),
    ("a call's wild", lambda a: call("p", a, mask=wild(), scale=wild()), lambda m, x, y, z: m.p(x, y), {"p": Padded()}, 1),
    ("a call's unknown argument", lambda a: call("p", a, other=1), lambda m, x, y, z: m.p(x), {"p": Padded()}, 0),
    ("a call's operand", lambda a: call("p", a.relu()), lambda m, x, y, z: m.p(y, x.relu()) + m.p(x.relu()), {"p": Padded()}, 1),
    ("calls in a chain", lambda a: call("fc", call("p", a)).relu(), lambda m, x, y, z: m.fc(m.p(x)).relu(), {"p": Padded(), "fc": nn.Linear(4, 4)}, 1),
]  # fmt: skip


@pytest.mark.parametrize("row", SAME, ids=[f"{index}-{row[0]}" for index, row in enumerate(SAME)])
def test_number_of_matches(row: Row) -> None:
    _, what, function, children, expected = row
    found = matches(what, function, **children)
    assert len(found) == expected
    taken = [node for one in found for node in one.nodes]
    assert len(taken) == len(set(taken))


def test_g17_two_branches_with_swapped_operands() -> None:
    """awslabs/slapo#58: one of the two was found, and in fx none with swapped operands."""

    def tree(m: Any, x: Any, y: Any, z: Any) -> Any:
        return ((x + y) * (y - z)).relu() + (y - z) * (x + y)

    found = matches(lambda a, b, c: (a + b) * (b - c), tree)
    assert [[node.name for node in one.nodes] for one in found] == [["add", "sub", "mul"], ["sub_1", "add_1", "mul_1"]]
    assert [{name: str(node) for name, node in one.inputs.items()} for one in found] == [
        {"a": "x", "b": "y", "c": "z"},
        {"a": "x", "b": "y", "c": "z"},
    ]


def test_what_an_occurrence_says() -> None:
    def forward(m: Any, x: Any, y: Any, z: Any) -> Any:
        h = m.fc(x)
        return m.norm(m.drop(h) + y), h.shape

    children = {"fc": nn.Linear(4, 4), "drop": nn.Dropout(0.25), "norm": Norm(4)}
    (one,) = matches(
        lambda r, x, w, b: F.layer_norm(r + F.dropout(x, wild("p"), wild()), (4,), w, b, wild("eps")),
        forward,
        **children,
    )
    assert [node.name for node in one.nodes] == ["drop", "add", "norm"]
    assert list(one.inputs) == ["r", "x", "w", "b"]
    assert [str(value) for value in one.inputs.values()] == ["y", "fc", "norm.weight", "norm.bias"]
    assert one.inputs["w"] == Attribute("norm.weight")
    assert [node.name for node in one.outputs] == ["norm"]
    assert one.wilds == {"p": 0.25, "eps": 1e-5}
    assert one.modules == ("drop", "norm")
    assert one.reads == {
        ("drop", "p"): 0.25, ("drop", "inplace"): False, ("norm", "normalized_shape"): (4,), ("norm", "eps"): 1e-5,
    }  # fmt: skip
    assert one.kinds == {"drop": nn.Dropout, "norm": Norm}
    assert one.alternative == 0


class Norm(nn.LayerNorm):
    pass


def test_that_a_linear_has_no_bias_is_a_fact_that_a_match_rests_on() -> None:
    (one,) = matches(lambda x, w: F.linear(x, w), lambda m, x, y, z: m.fc(x), fc=nn.Linear(2, 2, bias=False))
    assert one.reads == {("fc", "bias"): None}


def test_a_called_submodule_is_consumed_and_nothing_of_it_is_read() -> None:
    (one,) = matches(lambda x: call("fc", x), lambda m, x, y, z: m.fc(x), fc=nn.Linear(2, 2))
    assert (one.modules, one.reads, one.kinds) == (("fc",), {}, {"fc": nn.Linear})


def test_sizes_that_others_use_stay() -> None:
    what = pattern(lambda a: a.view(a.shape[0], -1).relu())
    (one,) = matches(what, lambda m, x, y, z: x.view(x.shape[0], -1).relu())
    assert [node.name for node in one.nodes] == ["getattr_1", "getitem", "view", "relu"]
    (one,) = matches(what, lambda m, x, y, z: ((n := x.shape[0]), x.view(n, -1).relu() + n)[1])
    assert [node.name for node in one.nodes] == ["view", "relu"]
    (one,) = matches(what, lambda m, x, y, z: ((s := x.shape), x.view(s[0], -1).relu() + s[1])[1])
    assert [node.name for node in one.nodes] == ["getitem", "view", "relu"]


def test_a_size_of_an_inner_value_that_is_read_outside_is_an_outside_use() -> None:
    def forward(m: Any, x: Any, y: Any, z: Any) -> Any:
        inner = x + 1
        return inner.tanh().view(inner.shape[0], -1)

    assert count(lambda a: (a + 1).tanh(), forward) == 0
    assert count(lambda a: ((i := a + 1), i.tanh().view(i.shape[0], -1))[1], forward) == 1


def test_a_size_can_be_an_output_and_an_input() -> None:
    (one,) = matches(lambda a: (a.relu(), a.shape[1]), lambda m, x, y, z: y.view(x.shape[1], -1) + x.relu())
    assert [node.name for node in one.outputs] == ["relu", "getitem"]
    (one,) = matches(lambda a, n: a.view(n, -1), lambda m, x, y, z: y.view(x.shape[1], -1))
    assert {name: str(value) for name, value in one.inputs.items()} == {"a": "y", "n": "getitem"}
    assert [node.name for node in one.nodes] == ["view"]


def test_a_later_alternative_finds_what_the_earlier_have_left() -> None:
    what = pattern(lambda a, b: F.gelu(a + b), lambda a, b: F.silu(a * b)) | (lambda a, b: a + b)
    found = matches(what, lambda m, x, y, z: F.gelu(x + y) + F.silu(y * z) + F.gelu(y * z))
    assert [(one.alternative, [node.name for node in one.nodes]) for one in found] == [
        (0, ["add", "gelu"]),
        (1, ["mul", "silu"]),
        (2, ["add_1"]),
        (2, ["add_2"]),
    ]


def test_the_earlier_of_two_overlapping_matches_wins() -> None:
    (one,) = matches(lambda a: a.relu().relu(), lambda m, x, y, z: x.relu().relu().relu())
    assert [node.name for node in one.nodes] == ["relu", "relu_1"]


def test_another_way_is_found_where_the_first_is_taken_or_used_outside() -> None:
    def forward(m: Any, x: Any, y: Any, z: Any) -> Any:
        first = x.relu()
        return (first + y.relu()) * first

    (one,) = matches(lambda a, b: a.relu() + b, forward)
    assert {name: str(value) for name, value in one.inputs.items()} == {"a": "y", "b": "relu"}


def test_a_match_with_a_cycle_is_none_but_another_way_without_is() -> None:
    what = pattern(lambda a, b: ((r := a.relu()), (r, r * b))[1])
    (one,) = matches(what, lambda m, x, y, z: ((r := x.relu()), r * y)[1])
    assert [node.name for node in one.outputs] == ["relu", "mul"]
    assert count(what, lambda m, x, y, z: ((r := x.relu()), r * r.exp())[1]) == 0
    (one,) = matches(what, lambda m, x, y, z: ((r := x.relu()), r * r.exp(), r * z))
    assert [node.name for node in one.outputs] == ["relu", "mul_1"]


def test_operators_that_write_never_match() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(graph.call_function(operator.iadd, (x, y)))
    assert find(nn.Module(), graph, lambda a, b: a + b) == []


@pytest.mark.parametrize(
    ("child", "done"),
    [
        (nn.GELU(), lambda child: child.register_forward_hook(lambda *_: None)),
        (nn.GELU(), lambda child: child.register_forward_pre_hook(lambda *_: None)),
        (nn.GELU(), lambda child: child.register_full_backward_hook(lambda *_: None)),
        (nn.GELU(), lambda child: setattr(child, "forward", lambda x: x)),
    ],
    ids=["forward hook", "forward pre hook", "backward hook", "forward on the object"],
)
def test_a_child_with_more_to_it_is_no_operation(child: nn.Module, done: Function) -> None:
    assert count(lambda a: F.gelu(a), lambda m, x, y, z: m.act(x), act=child) == 1
    done(child)
    assert count(lambda a: F.gelu(a), lambda m, x, y, z: m.act(x), act=child) == 0
    assert count(lambda a: call("act", a), lambda m, x, y, z: m.act(x), act=child) == 1


def test_a_parametrized_child_is_no_operation() -> None:
    child = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert count(lambda a, w, b: F.linear(a, w, b), lambda m, x, y, z: m.fc(x), fc=child) == 0


def test_which_classes_are_known() -> None:
    known = [nn.GELU(), nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(), Wider(2, 2)]
    unknown = [Other(), nn.BatchNorm1d(2), nn.Sequential(), nn.MultiheadAttention(2, 1), Padded()]
    assert [is_known(one) for one in known + unknown] == [True] * 5 + [False] * 5


ARGUMENTS: dict[type[nn.Module], tuple[Any, ...]] = {
    nn.Linear: (3, 3), nn.LayerNorm: (3,), nn.RMSNorm: (3,), nn.GroupNorm: (1, 3), nn.Embedding: (3, 3),
    nn.Conv1d: (3, 3, 1), nn.Conv2d: (3, 3, 1), nn.Conv3d: (3, 3, 1), nn.Softmax: (-1,), nn.LogSoftmax: (-1,),
}  # fmt: skip


@pytest.mark.parametrize("kind", children.KNOWN, ids=lambda kind: kind.__name__)
def test_a_known_class_is_the_operation_that_its_forward_calls(kind: type[nn.Module]) -> None:
    """The table of classes against what they do: a copy of the forward, over weights that are inputs, finds the call."""
    module = kind(*ARGUMENTS.get(kind, ()))
    names = [name for name, _ in module.named_parameters()]

    class Held:
        """What the forward reads: weights from the inputs, the rest from the module."""

        def __init__(self, weights: dict[str, Any]) -> None:
            self.__dict__.update(weights)

        def __getattr__(self, name: str) -> Any:
            found = getattr(module, name)
            return getattr(kind, name).__get__(self) if callable(found) else found

    def forward(x: Any, *weights: Any) -> Any:
        return kind.forward(Held(dict(zip(names, weights, strict=True))), x)  # type: ignore[arg-type]

    arguments = ", ".join(["x", *names])
    what = eval(f"lambda {arguments}: forward({arguments})", {"forward": forward})
    if "training" in module.__dict__ and children.KNOWN[kind].mode:
        module.training = MODE  # type: ignore[assignment]
    (one,) = matches(what, lambda m, x, y, z: m.child(x), child=module)
    assert [str(value) for value in one.inputs.values()] == ["x", *(f"child.{name}" for name in names)]
