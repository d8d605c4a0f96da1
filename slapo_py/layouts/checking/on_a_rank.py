"""A forward once more, at the sizes that a rank sees: with parts of parameters, and of what collectives give it.

What python makes of sizes on its own (a branch, a loop, a square root) is in no graph. So it runs again, and what it
does otherwise shows.
"""

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, fx, nn

from slapo_py.errors import TraceError
from slapo_py.layouts.inference.state import Typing
from slapo_py.layouts.placement import Placement, Shard, balanced, local_shape, local_size
from slapo_py.layouts.recording.nodes import is_tensor, shape_of, slots_of, tensors_of
from slapo_py.layouts.recording.owned import Owner, owned
from slapo_py.layouts.recording.record import Recording, taken
from slapo_py.layouts.recording.rewritten import Rewritten
from slapo_py.tracing.sandbox import Fakes
from slapo_py.tracing.values import map_tensors, tensors

_LOCAL = ("embedding", "cross_entropy")
"""Operations that something else stands for on a rank."""


class OnARank(Recording):
    """The recording of a forward on one rank.

    whole: the recording of all of it, which `typing` is of. divided: the attributes that a rank has a part of.
    """

    def __init__(self, whole: Recording, typing: Typing, divided: Set[Owner], rank: int = 0) -> None:
        super().__init__(whole.root)
        self.typing, self.divided, self.rank = typing, divided, rank
        self.read: list[Owner] = []
        """The divided attributes that were read, in this order."""
        self.failed = ""
        """Why it could not be run to its end."""
        self._whole = {node.meta["call"]: node for node in typing.graph.nodes if "call" in node.meta}
        self.rewritten = {
            path: Rewritten(self, path, one.module, one.trace, one.marks) for path, one in whole.rewritten.items()
        }
        self.run_again(whole)

    @property
    def rank_name(self) -> str:
        """How a message names the rank: all have the sizes of the first, unless something does not divide evenly."""
        return f"rank {self.rank}" if self.rank else "a rank"

    def run_again(self, whole: Recording) -> None:
        """Run as the whole was run."""
        assert whole.given is not None
        call, fakes, training = whole.given
        named = dict(self.root.named_parameters(remove_duplicate=False))
        placements = {id(named[str(node.target)]): one for node, one in self.typing.params.items()}
        try:
            self.run(call, _Parts(fakes, placements, self.typing.ranks, self.rank), training)
        except TraceError as error:
            self.failed = str(error)
        self.taken = taken(self.graph)

    def of_whole(self, node: fx.Node) -> fx.Node | None:
        """The node of the whole that stands for the same call, if anything uses it there."""
        return self._whole.get(node.meta.get("call"))

    # What a rank has

    def attribute(self, path: str, name: str, value: Any) -> Any:
        if (path, name) not in self.divided or type(value) is not int:
            return super().attribute(path, name, value)
        self.read.append((path, name))
        return owned(path, name, balanced(value, self.typing.ranks)[self.rank])

    def calling(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = super().calling(args, kwargs)
        reader = self._whole.get(self.calls)
        return (args, kwargs) if reader is None else self.quiet(self._passed, reader, args, kwargs)

    def _passed(self, reader: fx.Node, args: Any, kwargs: Any) -> Any:
        """Arguments as a reader of the whole gets them: what is done for it alone changes their shapes."""
        slots = slots_of(reader)
        if not self._is_local(reader) and not any((one, reader) in self.typing.on_edge for one in slots):
            return args, kwargs
        left = list(slots)
        for one in tensors((args, kwargs)):
            self.arg(one)  # parameters are read in the order of the whole

        def passed(tensor: Tensor) -> Tensor:
            slot = left.pop(0)
            if self._is_local(reader):  # it runs on the whole, and a rank's part of the result is taken
                return self._as(tensor, shape_of(slot))
            one = self.typing.on_edge.get((slot, reader))
            return tensor if one is None else self._as(tensor, self._part(slot, one.target))

        return map_tensors((args, kwargs), passed) if len(tensors((args, kwargs))) == len(slots) else (args, kwargs)

    def called(self, node: fx.Node, out: Any) -> Any:
        super().called(node, out)
        one = self._whole.get(self.calls)
        if one is None or not (self._is_local(one) or one in self.typing.made_local):
            return out
        return self.quiet(lambda: _made(out, self._part(one, self.typing.produced[one][0])))

    def cross(self, tensor: Tensor, side: str, path: str, index: int) -> Tensor:
        found = super().cross(tensor, side, path, index)
        node = self._whole.get(self.calls)
        if node is None:
            return found
        return self.quiet(lambda: self._as(found, self._part(node, self.typing.after[node][0])))  # type: ignore[no-any-return]

    def _is_local(self, node: fx.Node) -> bool:
        signature = self.typing.signature.get(node)
        return signature is not None and signature.needs in _LOCAL and len(tensors_of(node)) == 1

    def _part(self, node: fx.Node, placement: Placement) -> tuple[int, ...]:
        return local_shape(shape_of(node), placement, self.typing.ranks, self.rank)

    def _as(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor of another shape in the place of this one."""
        return tensor if tuple(tensor.shape) == shape else self.bind(_made(tensor, shape), self.arg(tensor))


def unlike(recording: Recording, typing: Typing) -> list[int]:
    """One rank of each set of ranks that have the same sizes: the first alone, if everything divides evenly."""
    placed = [*typing.params.items()]
    for table in (typing.produced, typing.after):
        placed += [(node, one) for node, kinds in table.items() if is_tensor(node) for one in kinds]
    split = {(shape_of(node)[one.dim], one) for node, one in placed if isinstance(one, Shard)}
    numbers = [getattr(recording.root.get_submodule(path), name) for path, name in typing.divided]
    found: dict[tuple[int, ...], int] = {}
    for rank in range(typing.ranks):
        sizes = [local_size(size, one, one.dim, typing.ranks, rank) for size, one in split]
        sizes += [balanced(one, typing.ranks)[rank] for one in numbers if type(one) is int]
        found.setdefault(tuple(sizes), rank)
    return list(found.values())


def _made(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        made = like.new_empty(shape)
    return made.requires_grad_().clone() if like.requires_grad else made


class _Parts(Fakes):
    """The fakes of a run, with parts of the tensors that a rank has in part, by their ids."""

    def __init__(self, fakes: Fakes, placements: Mapping[int, Placement], ranks: int, rank: int) -> None:
        super().__init__()
        self.mode = fakes.mode
        self._fakes, self._placements, self._ranks, self._rank = fakes, placements, ranks, rank
        self._parts: dict[int, Tensor] = {}

    def of(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        fake, placement = self._fakes.of(tensor, dtype), self._placements.get(id(tensor))
        if not isinstance(placement, Shard):
            return fake
        if id(tensor) not in self._parts:
            with self.mode, torch.no_grad():
                part = fake.new_empty(local_shape(fake.shape, placement, self._ranks, self._rank))
            self._parts[id(tensor)] = nn.Parameter(part, fake.requires_grad)
        return self._parts[id(tensor)]
