"""Forms of python and torch that a forward may take: each is traced and bit-equal, the traced path really taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tracing.modules import assert_same, linear, misses, module, traced

SMALL, LARGE = (torch.randn(3, 8),), (torch.randn(5, 8),)
SCALE = 2.0
OFFSETS = torch.arange(8.0)


class Straight(torch.autograd.Function):
    """Rounds, and passes the gradient on times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return grad * ctx.factor, None


def in_place(self, x):
    y = self.a(x)
    y += 1
    y.mul_(2)
    y[:, 0] = 0
    return F.relu(y, inplace=True)


def no_grad_block(self, x):
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True)
    return self.a(x / scale) * scale.detach()


def autocast_blocks(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = self.a(x)
    with torch.autocast("cpu", enabled=False):
        return self.a(y.float())


def random_draws(self, x):
    return x + torch.rand_like(x) * torch.bernoulli(torch.full_like(x, 0.5)) + torch.randn(x.shape[0], 1)


def batch_norm_by_hand(self, x):
    return F.batch_norm(x, self.mean, self.var, training=self.training)


def nested_result(self, x):
    return {"a": self.a(x), "none": None, "list": [x, x * 2], "number": 3, "tuple": (x.mean(), None)}


def plain_dropout(self, x):
    return F.dropout(x, p=0.5 if self.training else 0.1, training=self.training)


def several_results(self, x):
    values, indices = x.max(-1)
    left, right = x.chunk(2, -1)
    return values + indices, left * right


FORMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "in place": (in_place, {"a": linear()}),
    "returns its input": (lambda self, x: x, {}),
    "child twice": (lambda self, x: self.a(self.a(x)) + self.a(x), {"a": linear()}),
    "autograd.Function": (lambda self, x: Straight.apply(self.a(x) * 3, 0.5), {"a": linear()}),
    "no_grad block": (no_grad_block, {"a": linear()}),
    "autocast blocks": (autocast_blocks, {"a": linear()}),
    "random draws": (random_draws, {}),
    "batch norm": (batch_norm_by_hand, {"mean": torch.zeros(8), "var": torch.ones(8)}),
    "dropout literals": (plain_dropout, {}),
    "nested result": (nested_result, {"a": linear()}),
    "several results": (several_results, {}),
    "dtype and device of the input": (lambda self, x: x + torch.arange(8, device=x.device, dtype=x.dtype), {}),
    "cast there and back": (lambda self, x: (x.to(torch.float32) * 2).to(x.dtype), {}),
    "grad mode": (lambda self, x: x * 2 if torch.is_grad_enabled() else x * 3, {}),
    "contiguous": (lambda self, x: x * 2 if x.is_contiguous() else x * 3, {}),
    "requires_grad of a parameter": (lambda self, x: x * 2 if self.a.weight.requires_grad else x, {"a": linear()}),
    "size arithmetic": (lambda self, x: x.repeat(2, 1).expand(x.shape[0] * 2, x.size(-1)) / x.numel(), {}),
    "size compared": (lambda self, x: x * 2 if x.shape[0] > 1 else x * 3, {}),
    "powers": (lambda self, x: x**2 + (x * x + 1) ** 0.5 + 2**x + x % 3, {}),
    "a size that is halved": (lambda self, x: x[: x.shape[0] // 2], {}),
    "factories": (lambda self, x: x.new_zeros(x.shape[0], 8) + x + torch.tensor([1.0, 2.0])[0], {}),
    "einsum": (lambda self, x: torch.einsum("ij,kj->ik", x, self.a.weight), {"a": linear()}),
    "transposes": (lambda self, x: x.T @ x + x.mT @ x, {}),
    "data": (lambda self, x: x.data * 2 + x, {}),
    "module made in the forward": (lambda self, x: nn.Softmax(dim=-1)(x), {}),
    "a global number": (lambda self, x: x * SCALE, {}),
    "a global tensor": (lambda self, x: x + OFFSETS, {}),
    "a dict attribute": (lambda self, x: x * self.table["k"], {"table": {"k": 2.0}}),
    "sequential with batch norm": (
        lambda self, x: self.s(x),
        {"s": nn.Sequential(linear(), nn.ReLU(inplace=True), nn.BatchNorm1d(8), nn.Dropout(0.2))},
    ),
    "child named self": (lambda s, x: getattr(s, "self")(x) * 2, {"self": linear()}),  # noqa: B009
    "parameters named as builtins": (lambda self, input: self.a(input) + input, {"a": linear()}),
    "swapped operators": (lambda self, x: 1 - x + 2 / (x * x + 1) + 2**x, {}),
    "iteration over a fixed dim": (lambda self, x: sum(row for row in x.T), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_form_is_bit_equal(form: str) -> None:
    forward, attributes = FORMS[form]
    model = module(forward, **attributes)
    copy = traced(model, SMALL, LARGE).module
    assert_same(model, copy, SMALL, LARGE, (torch.randn(7, 8),))
    assert misses(copy) == 0


def test_variadic_arguments() -> None:
    model = module(lambda self, *xs, **more: sum(xs) * more.get("scale", 1.0))
    copy = traced(model, (*SMALL, *SMALL), (*LARGE, *LARGE)).module
    assert_same(model, copy, (*SMALL, torch.randn(3, 8)), (*LARGE, *LARGE))
    assert misses(copy) == 0  # made with one tensor twice, but nothing depends on that
    assert torch.equal(copy(*SMALL, *SMALL, *SMALL), model(*SMALL, *SMALL, *SMALL))
    assert torch.equal(copy(*SMALL, scale=3.0), model(*SMALL, scale=3.0))
    assert misses(copy) == 2


def test_a_device_is_read_from_the_tensor_each_time() -> None:
    model = module(lambda self, x, y: torch.zeros(8, device=x.device) + y.to(x.device) if x.is_cpu else y)
    sch = traced(model, (SMALL[0], SMALL[0]), (LARGE[0], LARGE[0]))
    assert "device(type=" not in sch.graph.python_code("self").src
    assert "x.device.type == 'cpu'" in sch.guards
    meta = torch.empty(3, 8, device="meta")
    assert sch.module(meta, meta).device.type == "meta"
    assert sch.misses == 1


def test_train_only_update_runs_the_original_in_eval() -> None:
    def ema(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean

    model = module(ema, mean=torch.zeros(8))
    sch = traced(model, SMALL, LARGE)
    assert_same(model, sch.module, SMALL, LARGE)
    sch.module.train()
    before = misses(sch.module)
    sch.module(*SMALL)
    assert misses(sch.module) == before
    assert "eval mode runs the original" in sch.root.tracer.trace("").notes


def test_the_graph_is_a_torch_fx_graph_with_calls_of_children() -> None:
    sch = traced(module(in_place, a=linear()), SMALL, LARGE)
    assert isinstance(sch.graph, torch.fx.Graph)
    assert [str(node.target) for node in sch.graph.nodes if node.op == "call_module"] == ["a"]


def test_flatten_inlines_children_and_leaves_keep_some() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)), nn.GELU())
    flat = traced(model, SMALL, LARGE, flatten=True)
    assert not [node for node in flat.graph.nodes if node.op == "call_module"]
    assert_same(model, flat.module, SMALL, LARGE)
    assert misses(flat.module) == 0
    some = traced(model, SMALL, LARGE, flatten=True, leaves=("1.*",))
    assert [node.target for node in some.graph.nodes if node.op == "call_module"] == ["1.0", "1.1"]
    assert_same(model, some.module, SMALL, LARGE)


def test_an_exception_leaves_no_mode_switched() -> None:
    class Breaks(nn.Module):
        broken = False

        def forward(self, x: Any) -> Any:
            if self.broken:
                raise KeyError("planted")
            return x

    model = module(autocast_blocks, a=Breaks())
    model.forward  # noqa: B018
    copy = traced(model, SMALL, LARGE).module
    copy.a.broken = True
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            grad = torch.is_grad_enabled()
            with pytest.raises(KeyError):
                copy(*SMALL)
            assert torch.is_grad_enabled() is grad
            assert not torch.is_autocast_enabled("cpu")
    model = module(no_grad_block, a=Breaks())
    copy = traced(model, SMALL, LARGE).module
    copy.a.broken = True
    with pytest.raises(KeyError):
        copy(*SMALL)
    assert torch.is_grad_enabled()


class Lists(nn.Module):
    """Gives back a list."""

    def forward(self, x: Any) -> Any:
        return [x, x * 2]


def test_a_list_from_a_child_that_the_forward_changes() -> None:
    def forward(self, x):
        parts = self.a(x)
        parts.append(parts[0] * 3)
        parts[0] = parts[1]
        return parts, self.b(parts)

    model = module(forward, a=Lists(), b=module(lambda self, parts: sum(parts)))
    copy = traced(model, SMALL, LARGE).module
    assert_same(model, copy, SMALL, LARGE)
    assert misses(copy) == 0
