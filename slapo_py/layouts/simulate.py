"""p ranks in lock step, in one process and one autograd graph: the oracle of the layouts.

Every node is computed rank by rank on the parts that its placement says, at the sizes that a rank really sees; a
conversion is one autograd function over the p parts, with exactly the collectives that inference names. Dropout draws
one mask at the whole shape and gives each rank its part of it, so that the ranks together drop what one process drops.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from slapo_py.layouts import local
from slapo_py.layouts.nodes import is_record, name_of, outputs_of, tensors_of
from slapo_py.layouts.placement import P, Partial, Placement, R, Shard, join, split
from slapo_py.layouts.state import OUTPUT, Conversion, Typing
from slapo_py.layouts.table import canonical

Parts = list[Any]


@dataclass
class Simulated:
    """What the ranks have computed.

    outputs: for each tensor of the result, its parts. parameters: the parts of each parameter by its name in the graph;
    `.grad` is theirs after `backward`. inputs: the same of the floating inputs. sent: the collectives in order, as
    (direction, name, where): "forward", "backward", or "parameter" for the summed gradient of a whole parameter.
    """

    outputs: list[Parts]
    parameters: dict[str, Parts]
    inputs: dict[str, Parts]
    placements: dict[str, Placement]
    sent: list[tuple[str, str, str]] = field(default_factory=list)

    def gradient(self, name: str) -> Tensor | None:
        """The whole gradient of a parameter, after `reduce`."""
        parts = [one.grad for one in self.parameters[name]]
        if any(one is None for one in parts):
            return None
        placement = self.placements[name]
        return join(parts, placement) if isinstance(placement, Shard) else parts[0]


def whole(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """One tensor of its parts."""
    if isinstance(placement, Shard):
        return join(parts, placement)
    if isinstance(placement, Partial):
        stacked = torch.stack(list(parts))
        return {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[placement.op]
    return parts[0].clone()


def parts_of(tensor: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    """The parts of one tensor; of a partial sum, the first rank has it all."""
    if isinstance(placement, Shard):
        return [one.clone() for one in split(tensor, placement, ranks)]
    if isinstance(placement, Partial) and placement.op == "sum":
        return [tensor.clone(), *(torch.zeros_like(tensor) for _ in range(ranks - 1))]
    return [tensor.clone() for _ in range(ranks)]


def converted(parts: Sequence[Tensor], source: Placement, target: Placement) -> list[Tensor]:
    """What the collective between two placements makes of the parts."""
    if source == target:
        return [one.clone() for one in parts]
    return parts_of(whole(parts, source), target, len(parts))


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, conversion: Conversion, log: Any, *parts: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.conversion, ctx.log = conversion, log
        log("forward", conversion.forward, conversion)
        return tuple(converted(parts, conversion.source, conversion.target))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        one = ctx.conversion
        if one.grad_source is None or one.grad_target is None or one.grad_source == one.grad_target:
            return (None, None, *grads)
        ctx.log("backward", one.backward, one)
        return (None, None, *converted(grads, one.grad_source, one.grad_target))


def simulate(
    typing: Typing, module: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype | None = None
) -> Simulated:
    """Run a typed graph on the whole parameters of `module` and on whole inputs, by the names of its arguments."""
    return _Run(typing, module, inputs, dtype).run()


def reduce(found: Simulated, typing: Typing) -> None:
    """Sum the gradients of the parameters whose gradient is a partial sum."""
    for node in typing.reduced:
        parts = found.parameters[str(node.target)]
        grads = [one.grad for one in parts]
        if all(one is not None for one in grads):
            found.sent.append(("parameter", "all_reduce", str(node.target)))
            for one, grad in zip(parts, converted(grads, P, R)):  # type: ignore[arg-type]
                one.grad = grad


class _Run:
    def __init__(self, typing: Typing, module: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype | None) -> None:
        self.typing, self.module, self.given, self.dtype = typing, module, inputs, dtype
        self.ranks = typing.ranks
        self.env: dict[fx.Node, Parts] = {}
        self.made: dict[tuple[fx.Node, int], Parts] = {}
        self.found = Simulated([], {}, {}, {})
        self.by_storage: dict[int, Parts] = {}

    def run(self) -> Simulated:
        for node in self.typing.graph.nodes:
            if node.op == "output":
                break
            if is_record(node):
                continue
            self.env[node] = self._value(node)
            own = self.typing.at_node.get(node)
            if own is not None:
                self.env[node] = list(_Convert.apply(own, self._log, *self.env[node]))  # type: ignore[no-untyped-call]
        self.found.outputs = [self._fetch(node, OUTPUT) for node in outputs_of(self.typing.graph)]
        return self.found

    def _log(self, direction: str, name: str, conversion: Conversion) -> None:
        if name not in ("none", "mask", "split"):
            self.found.sent.append((direction, name, str(conversion.node.meta.get("within", ""))))

    def _fetch(self, node: fx.Node, reader: "fx.Node | str") -> Parts:
        parts = self.env[node]
        for table in (self.typing.on_edge, self.typing.grad_on_edge):
            one = table.get((node, reader))
            if one is not None:
                if (node, id(one)) not in self.made:
                    self.made[node, id(one)] = list(_Convert.apply(one, self._log, *parts))  # type: ignore[no-untyped-call]
                parts = self.made[node, id(one)]
        return parts

    def _value(self, node: fx.Node) -> Parts:
        if node.op == "placeholder":
            return self._input(node)
        if node.op == "get_attr":
            return self._attribute(node)
        parts = [self._arguments(node, rank) for rank in range(self.ranks)]
        signature = self.typing.signature.get(node)
        needs = signature.needs if signature is not None else ""
        if needs == "embedding":
            return local.embedding_in_lock_step(parts)
        if needs == "cross_entropy":
            return local.cross_entropy_in_lock_step(parts)
        if signature is not None and _drops(node, parts[0][1]):
            return _dropped(node, parts, self.typing)
        return [_call(node, args, kwargs) for args, kwargs in parts]

    def _input(self, node: fx.Node) -> Parts:
        value = self.given.get(str(node.target))
        if not isinstance(value, Tensor):
            return [value] * self.ranks
        if value.is_floating_point() and self.dtype is not None:
            value = value.to(self.dtype)
        parts = parts_of(value.detach(), self.typing.produced[node][0], self.ranks)
        if value.is_floating_point():
            self.found.inputs[str(node.target)] = [one.requires_grad_(value.requires_grad) for one in parts]
        return parts

    def _attribute(self, node: fx.Node) -> Parts:
        tensor: Any = self.module
        for atom in str(node.target).split("."):
            tensor = getattr(tensor, atom)
        if not isinstance(tensor, Tensor):
            return [tensor] * self.ranks
        if id(tensor) not in self.by_storage:
            value = tensor.detach()
            value = value.to(self.dtype) if self.dtype is not None and value.is_floating_point() else value
            parts = parts_of(value, self.typing.produced[node][0], self.ranks)
            self.by_storage[id(tensor)] = [one.requires_grad_(tensor.requires_grad) for one in parts]
        parts = self.by_storage[id(tensor)]
        if isinstance(tensor, nn.Parameter):
            self.found.parameters[str(node.target)] = parts
            self.found.placements[str(node.target)] = self.typing.produced[node][0]
        return parts

    def _arguments(self, node: fx.Node, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def pick(one: fx.Node) -> Any:
            return self._fetch(one, node)[rank]

        args, kwargs = fx.map_arg(node.args, pick), fx.map_arg(node.kwargs, pick)
        for place, size in self.typing.resized.get(node, {}).items():
            args = _with(args, place, size.needs)
        return tuple(args), dict(kwargs)


def _with(args: Any, place: tuple[int, ...], value: int) -> Any:
    """Nested arguments with one of them replaced."""
    index, rest = place[0], place[1:]
    changed = list(args)
    changed[index] = _with(args[index], rest, value) if rest else value
    return tuple(changed)


def _call(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _drops(node: fx.Node, kwargs: Mapping[str, Any]) -> bool:
    if canonical(name_of(node)) == "dropout":
        return True
    return name_of(node) == "scaled_dot_product_attention" and bool(kwargs.get("dropout_p"))


def _dropped(node: fx.Node, parts: list[tuple[tuple[Any, ...], dict[str, Any]]], typing: Typing) -> Parts:
    """Dropout with one mask for all ranks, drawn at the whole shape."""
    (result,) = tensors_of(node)
    placement = typing.produced[node][0]
    if name_of(node) == "scaled_dot_product_attention":
        return _dropped_attention(node, parts, placement)
    first, kwargs = parts[0]
    p = kwargs.get("p", first[1] if len(first) > 1 else 0.5)
    training = kwargs.get("training", first[2] if len(first) > 2 else True)
    x = first[0]
    mask = F.dropout(torch.ones(tuple(result.shape), dtype=x.dtype), p, training)
    return [args[0] * one for (args, _), one in zip(parts, parts_of(mask, placement, len(parts)))]


def _dropped_attention(
    node: fx.Node, parts: list[tuple[tuple[Any, ...], dict[str, Any]]], placement: Placement
) -> Parts:
    (result,) = tensors_of(node)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = [{**dict(zip(names, args)), **kwargs} for args, kwargs in parts]
    length = node_length(node)
    shape = (*tuple(result.shape)[:-1], length)
    mask = F.dropout(torch.ones(shape, dtype=given[0]["query"].dtype), given[0]["dropout_p"])
    masks = parts_of(mask, placement, len(parts))
    return [_attention(**{**one, "noise": noise}) for one, noise in zip(given, masks)]


def node_length(node: fx.Node) -> int:
    """The number of keys of an attention, whole."""
    key = node.args[1] if len(node.args) > 1 else node.kwargs["key"]
    return int(key.meta["val"].shape[-2])  # type: ignore[union-attr]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    noise: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention in its parts, with the noise of its dropout given."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.softmax(-1)
    return (weights if noise is None else weights * noise) @ value
