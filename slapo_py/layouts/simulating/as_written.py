"""p ranks in lock step that do what a schedule says, right or wrong: its own collectives and no others.

`simulate` runs what inference finds right; here the syncs of the schedule stand where it has them, and each is done as
written: an all-reduce of a whole value multiplies it by p, and where one is missing every rank goes on with its part.
What a build does by itself is as inference has it: lookups in a rank's rows, losses over its classes, a bias that is
added once, attributes that are divided, constants that are made in part.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from slapo_py.layouts.checking.check import checked
from slapo_py.layouts.inference.buffers import split_buffers
from slapo_py.layouts.inference.recorded import divided_on, sync_nodes
from slapo_py.layouts.inference.state import OUTPUT, Conversion, Fault, Typing, is_local
from slapo_py.layouts.placement import Placement, R, Shard, balanced, join, split
from slapo_py.layouts.recording.modes import modes_of
from slapo_py.layouts.recording.nodes import is_border
from slapo_py.layouts.recording.owned import Owned
from slapo_py.layouts.recording.record import record
from slapo_py.layouts.simulating.lock_step import Arguments, Parts, computed, parts_of
from slapo_py.layouts.simulating.simulate import with_size
from slapo_py.layouts.syncs import AUTO, Sync
from slapo_py.scheduled import own_forward
from slapo_py.tracing import Tracer

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Exchange:
    """What the ranks do with their parts: a collective, or a local step. before, after: how a split value is split."""

    kind: str
    before: Placement | None = None
    after: Placement | None = None

    def __call__(self, parts: Sequence[Tensor]) -> list[Tensor]:
        ranks, before, after = len(parts), self.before, self.after
        if self.kind in ("all_reduce", "reduce_scatter"):
            parts = [torch.stack(list(parts)).sum(0)] * ranks
        if self.kind == "all_gather" and isinstance(before, Shard):
            parts = [join(parts, before)] * ranks
        elif self.kind in ("split", "reduce_scatter") and isinstance(after, Shard):
            parts = [split(one, after, ranks)[rank] for rank, one in enumerate(parts)]
        elif self.kind == "all_to_all" and isinstance(before, Shard) and isinstance(after, Shard):
            parts = split(join(parts, before), after, ranks)  # along another dim, or along the same in other blocks
        elif self.kind == "mask":
            parts = [parts[0], *(torch.zeros_like(one) for one in parts[1:])]
        return [one.clone() for one in parts]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Exchange, gradient: Exchange, arrive: Any, *parts: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.gradient, ctx.arrive = gradient, arrive
        return tuple(value(parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.arrive()
        return (None, None, None, *ctx.gradient(grads))


@dataclass(frozen=True)
class Program:
    """What every rank runs: a flat graph for inputs of one size in one mode.

    typing: the placements as they should be. syncs: what the schedule has, by border. inputs: how each argument of the
    graph is reached from those of the forward. divided: the attributes of which a rank has a part, by path. buffers:
    those of which it has a part, at each node that reads one. faults: what the checker says of it.
    """

    typing: Typing
    syncs: Mapping[fx.Node, Sync]
    inputs: Mapping[fx.Node, str]
    constants: Mapping[str, Tensor]
    divided: Mapping[str, set[str]]
    buffers: Mapping[fx.Node, Shard]
    faults: Sequence[Fault]


def program(place: "Schedule", inputs: Inputs, training: bool, axis: str, ranks: int) -> Program:
    """What the ranks of an axis run for inputs of the whole model. Raises `TraceError`."""
    args, kwargs = inputs
    recording = record(place, training, Tracer(lambda: place.root.copy, kwargs or args))
    typing, faults = checked(place, recording, axis, ranks)
    return Program(
        typing,
        sync_nodes(place, recording.graph, axis),
        {one.node: one.expr for one in recording.inputs},
        recording.constants,
        divided_on(place.root, axis),
        split_buffers(typing, recording.root),
        faults,
    )


class Ranks:
    """The tensors that p ranks hold: parts or copies of the parameters and buffers of a model."""

    def __init__(self, module: nn.Module, placements: Mapping[str, Shard], count: int) -> None:
        self.module, self.count = module, count
        self.at = ""
        """The path of the module that runs, or where the gradient has come to."""
        self.border: tuple[Program, fx.Node] | None = None
        """The sync that the gradient has come to, on its way back."""
        self._held: dict[int, tuple[Tensor, Parts]] = {}
        self._placed: dict[int, Placement] = {}
        self._place(dict(module.named_parameters()), placements)

    def placement(self, tensor: Tensor) -> Placement:
        """How a tensor of the model lies on the ranks."""
        return self._placed.get(id(tensor), R)

    def _place(self, named: Mapping[str, Tensor], placements: Mapping[str, Shard]) -> None:
        self._placed |= {id(named[name]): one for name, one in placements.items() if id(named[name]) not in self._held}

    def parts(self, tensor: Tensor) -> Parts:
        """What each rank has of a tensor of the model."""
        if id(tensor) not in self._held:
            made = parts_of(tensor.detach(), self.placement(tensor), self.count)
            self._held[id(tensor)] = tensor, [one.requires_grad_(tensor.requires_grad) for one in made]
        return self._held[id(tensor)][1]

    def whole(self, tensor: Tensor, parts: Sequence[Tensor], rank: int) -> Tensor:
        """A tensor of the model as a rank would give it: its own copy, or all parts together."""
        placement = self.placement(tensor)
        return join(parts, placement) if isinstance(placement, Shard) else parts[rank]

    def run(
        self, program: Program, given: Sequence[Inputs], passed: Callable[[fx.Node, Parts, Parts], None] | None = None
    ) -> list[Any]:
        """Run a program on the inputs of each rank: what each rank returns.

        passed: is told of each border with the tensors before and after its sync.
        """
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        self._place(buffers, {str(node.target): one for node, one in program.buffers.items()})
        return _Run(self, program, given, passed).run()


class _Run:
    def __init__(self, ranks: Ranks, program: Program, given: Sequence[Inputs], passed: Any) -> None:
        self.ranks, self.program, self.passed = ranks, program, passed
        self.typing = program.typing
        self.values: dict[fx.Node, Parts] = {}
        self.made: dict[tuple[fx.Node, int, bool], Parts] = {}
        signature = inspect.signature(own_forward(ranks.module))
        self.arguments = []
        for args, kwargs in given:
            bound = signature.bind(ranks.module, *args, **kwargs)
            bound.apply_defaults()
            self.arguments.append(dict(bound.arguments))

    def run(self) -> list[Any]:
        every = range(self.ranks.count)
        for node in self.typing.graph.nodes:
            self.ranks.at, self.ranks.border = str(node.meta.get("within", self.ranks.at)), None
            if node.op == "output":
                return [self._filled(node.args[0], OUTPUT, rank) for rank in every]
            with modes_of(node):
                self.values[node] = self._value(node)
            if is_border(node):
                self._cross(node)
        raise AssertionError("a graph has an output")

    def _value(self, node: fx.Node) -> Parts:
        every = range(self.ranks.count)
        if node.op == "placeholder":
            return [eval(self.program.inputs[node], {}, self.arguments[rank]) for rank in every]
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        return computed(node, [self._given(node, rank) for rank in every], self.typing.signature.get(node))

    def _attribute(self, name: str) -> Parts:
        found: Any = self.program.constants.get(name)
        if found is None:
            found = self.ranks.module
            for atom in name.split("."):
                found = getattr(found, atom)
        return self.ranks.parts(found) if isinstance(found, Tensor) else [found] * self.ranks.count

    def _given(self, node: fx.Node, rank: int) -> Arguments:
        args, kwargs = self._filled(node.args, node, rank), self._filled(dict(node.kwargs), node, rank)
        if node in self.typing.made_local:
            for place, size in self.typing.resized.get(node, {}).items():
                args, kwargs = with_size((args, kwargs), place, size.needs)
        return tuple(args), dict(kwargs)

    def _filled(self, value: Any, reader: "fx.Node | str", rank: int) -> Any:
        """Arguments with a rank's values for nodes, and its share of attributes that are divided."""

        def fill(one: Any) -> Any:
            if isinstance(one, fx.Node):
                return self._read(one, reader)[rank]
            if isinstance(one, Owned) and one.owner[1] in self.program.divided.get(one.owner[0], ()):
                return balanced(int(one), self.ranks.count)[rank]
            return one

        return _plain(fx.node.map_aggregate(value, fill))

    def _read(self, node: fx.Node, reader: "fx.Node | str") -> Parts:
        """The parts of a node as a reader gets them: a step that sends nothing may be done for it alone."""
        parts, edge = self.values[node], (node, reader)
        one = self.typing.on_edge.get(edge) or self.typing.grad_on_edge.get(edge)
        if one is None or not is_local(one) or node in self.program.buffers:
            return parts
        key = (node, id(one), torch.is_grad_enabled())
        if key not in self.made:
            self.made[key] = self._exchanged(parts, *_of(one), node)
        return self.made[key]

    def _cross(self, node: fx.Node) -> None:
        before = after = [one.view_as(one) for one in self.values[node]]
        sync, own = self.program.syncs.get(node), self.typing.at_node.get(node)
        if sync is not None:
            after = self._exchanged(before, *exchanges(sync, node, self.typing), node)
        elif own is not None and is_local(own):
            after = self._exchanged(before, *_of(own), node)
        self.values[node] = after
        if self.passed is not None:
            self.passed(node, before, after)

    def _exchanged(self, parts: Parts, value: Exchange, gradient: Exchange, node: fx.Node) -> Parts:
        def arrive() -> None:
            if is_border(node):
                self.ranks.at, self.ranks.border = str(node.args[2]), (self.program, node)

        with modes_of(node):
            return list(_Exchanged.apply(value, gradient, arrive, *parts))  # type: ignore[no-untyped-call]


def _plain(value: Any) -> Any:
    """The lists and dicts of a graph's arguments are of classes of their own."""
    if isinstance(value, immutable_list):
        return [_plain(one) for one in value]
    if isinstance(value, immutable_dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return type(value)(*map(_plain, value)) if hasattr(value, "_fields") else tuple(map(_plain, value))
    return value


def _of(one: Conversion) -> tuple[Exchange, Exchange]:
    """A conversion of inference, on the value and on the gradient."""
    value = Exchange(one.forward, one.source, one.target)
    return value, Exchange(one.backward, one.grad_source, one.grad_target)


def exchanges(sync: Sync, node: fx.Node, typing: Typing) -> tuple[Exchange, Exchange]:
    """What a sync of a schedule does at a border, on the value and on the gradient."""
    shard = sync.shard
    other = typing.produced[node][0] if sync.value == "all_to_all" else shard
    value = Exchange(sync.value or "none", other, shard)
    if sync.grad != AUTO:
        return value, Exchange(sync.grad or "none", shard, other)
    own = typing.at_node.get(node)
    return value, Exchange("none") if own is None else _of(own)[1]
