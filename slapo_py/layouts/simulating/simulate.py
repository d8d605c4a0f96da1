"""p ranks in lock step, in one process and one autograd graph: the oracle of the layouts.

Every node is computed rank by rank on the parts that its placement says, at the sizes that a rank really sees; a
conversion is one autograd function over the p parts, with exactly the collectives that inference names. Dropout draws
one mask at the whole shape and gives each rank its part of it, so that the ranks together drop what one process drops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from slapo_py.layouts.inference.state import OUTPUT, Conversion, Typing
from slapo_py.layouts.placement import P, Partial, Placement, R, Shard, join
from slapo_py.layouts.recording.nodes import is_record, outputs_of
from slapo_py.layouts.simulating.lock_step import Parts, computed, parts_of


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
        return computed(node, parts, self.typing.signature.get(node))

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
            args, kwargs = with_size((args, kwargs), place, size.needs)
        return tuple(args), dict(kwargs)


def with_size(given: tuple[Any, Any], place: tuple[int | str, ...], size: int) -> tuple[Any, Any]:
    """Positional and named arguments with one number in them replaced."""
    args, kwargs = given
    return (args, _with(kwargs, place, size)) if isinstance(place[0], str) else (_with(args, place, size), kwargs)


def _with(held: Any, place: tuple[int | str, ...], size: int) -> Any:
    key: Any = place[0]
    changed = dict(held) if isinstance(held, dict) else list(held)
    changed[key] = _with(held[key], place[1:], size) if place[1:] else size
    return changed if isinstance(held, dict) else tuple(changed)
