"""`install`: a new submodule of a traced module takes parameters of others, which leave. What forbids that."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import slapo_py as slapo
from slapo_py.errors import StepError
from slapo_py.params import cat, transpose
from slapo_py.replacing.installing import install, taken_children
from tests.fingerprint import changes, fingerprint
from tests.models import ids
from tests.replacing import FUSED, lm

QKV = {key.removeprefix("qkv."): value for key, value in FUSED.items()}


class Twice(nn.Module):
    """Parameters of its own, and a child that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.child = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(self.child(x)) * self.gain + self.shift


class Joint(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def without(graph: fx.Graph, *targets: str) -> fx.Graph:
    """The graph with nothing in the place of some nodes."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    for node in list(copied.nodes):
        if node.op in ("call_module", "get_attr") and node.target in targets:
            node.replace_all_uses_with(next(iter(copied.nodes)))
            copied.erase_node(node)
    return copied


def test_emptied_children_leave_and_the_state_has_their_names() -> None:
    sch = slapo.create_schedule(lm().eval(), {"ids": ids()})
    place = sch["blocks.0.attn"].trace()
    place.annotate("q.weight", "lr", 1)
    place.annotate("k.weight", "lr", 1)
    place.annotate("v.weight", "lr", 1)
    assert taken_children(place.module, QKV) == {"q", "k", "v"}
    keys = list(place.module.state_dict())
    install(place, "qkv", nn.Linear(8, 24), QKV, without(place.graph, "q", "k", "v"))
    assert [name for name, _ in place.module.named_children()] == ["drop", "o", "qkv"]
    assert not place.module.qkv.training
    assert list(place.module.state_dict()) == keys
    assert torch.equal(place.module.qkv.weight[8:16], sch.original.blocks[0].attn.k.weight)
    assert sch.annotations == {"blocks.0.attn.qkv.weight": {"lr": 1}}
    assert list(slapo.build(sch).state_dict()) == list(sch.original.state_dict())


def test_own_parameters_and_two_maps_at_one_place() -> None:
    model = Twice()
    with torch.no_grad():
        model.shift.add_(3)
    sch = slapo.create_schedule(model, torch.ones(2, 4))
    sch.trace()
    install(sch, "one", Joint(8), {"weight": cat("gain", "shift")}, without(sch.graph, "gain", "shift"))
    install(sch, "two", Joint(8), {"weight": "one.weight"}, without(sch.graph, "gain", "shift"))
    assert [name for name, _ in sch.module.named_parameters()] == ["child.weight", "child.bias", "two.weight"]
    built = slapo.build(sch)
    assert list(built.state_dict()) == list(model.state_dict())
    assert built.state_dict()["shift"].tolist() == [3] * 4
    other = {name: torch.full_like(one, 5) for name, one in model.state_dict().items()}
    built.load_state_dict(other)
    assert built.two.weight.tolist() == [5] * 8


class Turned(nn.Module):
    def __init__(self, old: nn.Linear) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.zeros(8, 8))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.turned + self.bias


def _turn(sch: slapo.Schedule) -> dict[str, Any]:
    return {**QKV, "weight": cat(transpose("q.turned", 0, 1), "k.weight", "v.weight")}


def _checkpoint(sch: slapo.Schedule) -> None:
    sch["blocks.0.attn.q"].checkpoint()


def _share(model: Any) -> None:
    model.blocks[1].attn.q = model.blocks[0].attn.q


@pytest.mark.parametrize(
    ("change", "steps", "left", "message"),
    [
        (lambda m: m.blocks[0].attn.q.register_forward_hook(print), None, (), "there are hooks on 'q'"),
        (_share, None, (), "'q' is at more than one place of the model"),
        (None, _checkpoint, (), r"would be lost: sch\[.blocks.0.attn.q.\].checkpoint"),
        (None, _turn, (), "the parameters of 'q' were mapped when the model was built"),
        (None, None, ("k",), "the graph still uses 'k' at 'k', and params takes its parameters"),
    ],
    ids=["hook", "shared", "step", "mapped", "used"],
)
def test_what_can_not_leave(change: Any, steps: Any, left: tuple[str, ...], message: str) -> None:
    model = lm()
    if change is not None:
        change(model)
    if steps is _turn:
        first = slapo.create_schedule(model)
        first["blocks.0.attn.q"].replace(Turned, params={"turned": transpose("weight", 0, 1)})
        model = slapo.build(first)
    sch = slapo.create_schedule(model, {"ids": ids()})
    params = QKV if steps is None else steps(sch) or QKV
    place = sch["blocks.0.attn"].trace()
    graph = without(place.graph, *({"q", "k", "v"} - set(left)))
    before = fingerprint(sch.module)
    with pytest.raises(StepError, match=message), sch.root.step(place.path):
        install(place, "qkv", nn.Linear(8, 24), params, graph)
    assert not changes(before, fingerprint(sch.module))
