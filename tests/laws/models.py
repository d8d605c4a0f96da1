"""The models that the laws are shown on, with the places and arguments that the actions need."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests import zoo


class OwnConfig:
    """A plain object with slots, as people write them."""

    __slots__ = ("names", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.names = {"a": [1, 2]}


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class OddBlock(nn.Module):
    def __init__(self, width: int, config: OwnConfig) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)
        self.scale = 0.5
        self.own_config = config
        self.tables = {"by name": [1.0, {"deep": (2, 3)}]}
        self.register_buffer("seen", torch.zeros((), dtype=torch.long), persistent=False)
        self.calls: list[str] = []
        self.parent: Any = None

    def note(self, module: nn.Module, args: Any) -> None:
        """A hook that is a method of the module that it is put on."""

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        y = self.drop(F.gelu(self.lin(x))) * self.scale
        return x + y if shift is None else x + y + shift


class Picky(nn.Module):
    """Branches on data, so it can't be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.abs().sum() >= 0 else -x


class Odd(nn.Module):
    """Hooks of each kind, ties, a parametrization, frozen parameters, and attributes that are no plain values."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        config = OwnConfig(width)
        self.embed = nn.Embedding(13, width)
        self.blocks = nn.ModuleDict({name: OddBlock(width, config) for name in ("a", "b", "c")})
        self.picky = Picky()
        self.norm = nn.LayerNorm(width)
        self.norm.requires_grad_(False)
        self.unused = nn.Linear(width, width)
        self.own = nn.Identity()
        self.own.forward = lambda x: x  # type: ignore[method-assign]
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.blocks["c"]  # a second name
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scratch", torch.ones(width), persistent=False)
        self.config = {"width": width, "nested": [1, {"x": 2}]}
        self.outside = [nn.Linear(width, width)]  # not registered
        self.lock = threading.Lock()
        self.generator = torch.Generator().manual_seed(3)
        parametrize.register_parametrization(self.blocks["b"].lin, "weight", Doubled())
        first = self.blocks["a"]
        first.parent = weakref.ref(self)
        first.register_forward_pre_hook(first.note)
        first.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
        first.register_forward_hook(lambda module, args, output: None, always_call=True)
        first.register_full_backward_hook(lambda module, gin, gout: None)
        first.register_state_dict_pre_hook(lambda module, prefix, keep: None)
        first.lin.register_load_state_dict_post_hook(lambda module, keys: None)
        first.lin.weight.register_hook(lambda grad: None)
        first.lin.bias.register_post_accumulate_grad_hook(lambda parameter: None)
        first.lin.weight.tag = "mine"  # type: ignore[attr-defined]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.outside[0](self.mean * self.scratch)
        for block in self.blocks.values():
            x = block(x)
        x = self.again(x, shift=x)
        return self.head(self.own(self.norm(self.picky(x))))


@dataclass(frozen=True)
class Case:
    """One model and where the actions take place."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Any]]
    glob: str
    """Several modules of one kind."""
    block: str
    """One of them: the base schedule traces it."""
    other: str
    """Another one: the base schedule checkpoints it. In a model of shared layers, a module around or below `block`."""
    part: str
    """A module with parameters that nothing was done to."""
    whole: str = ""
    """The largest module that can be traced."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Plain attributes that `part` has, with other values."""
    container: str = ""
    """A module without a forward, if there is one."""


def _zoo(name: str, glob: str, block: str, other: str, part: str, attributes: Any, container: str = "") -> Case:
    inputs = zoo.BY_NAME[name].inputs
    return Case(name, lambda: zoo.make(name), inputs, glob, block, other, part, "", attributes, container)


def odd() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Odd().train()


_ALBERT = "encoder.albert_layer_groups.0"

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _zoo(
            "gpt2", "transformer.h.*", "transformer.h.0", "transformer.h.1", "transformer.h.0.attn",
            {"split_size": 64, "scale_attn_weights": True}, "transformer.h",
        ),
        _zoo(
            "llama", "model.layers.*", "model.layers.0", "model.layers.1", "model.layers.0.self_attn",
            {"attention_dropout": 0.2, "scaling": 0.3}, "model.layers",
        ),
        _zoo(
            "albert", "encoder.**.albert_layers.*", f"{_ALBERT}.albert_layers.0", _ALBERT,
            f"{_ALBERT}.albert_layers.0.attention", {"scaling": 0.3}, "encoder.albert_layer_groups",
        ),
        _zoo(
            "t5", "decoder.block.*", "decoder.block.0", "decoder.block.1", "encoder.block.0.layer.0.SelfAttention",
            {"dropout": 0.2}, "decoder.block",
        ),
        _zoo("wide_resnet", "layer*.*", "layer1.0", "layer2.1", "layer1.0.bn1", {"eps": 1e-3, "momentum": 0.2}),
        _zoo(
            "transformer_encoder", "enc.layers.*", "enc.layers.0", "enc.layers.1", "enc.layers.0.self_attn",
            {"dropout": 0.2}, "enc.layers",
        ),
        Case(
            "odd", odd, lambda batch, seq: {"ids": zoo._ids(batch, seq) % 13}, "blocks.*", "blocks.a", "blocks.c",
            "blocks.b", "blocks.c", {"scale": 0.25}, "blocks",
        ),
    )
}  # fmt: skip


def original(case: Case) -> nn.Module:
    """The model as a user may have it: gradients from a step of training, mixed modes, a frozen parameter."""
    model = case.make()
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    if dropouts:
        dropouts[-1].eval()
    for index, parameter in enumerate(model.parameters()):
        if index % 3 == 0 and parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.5)
    return model
