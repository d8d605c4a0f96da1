"""Forward: each node takes the cheapest signature that its inputs can be converted to.

A partial sum is settled early: at the highest module border that it has passed since it became one. To find that border
the pass goes back there, converts, and goes on.
"""

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor, fx, nn

from slapo_py.layouts.inference.cost import cost
from slapo_py.layouts.inference.meant import adds_to_each, batch_is_split
from slapo_py.layouts.inference.sizes import local_size_read, wrong_sizes
from slapo_py.layouts.inference.state import OUTPUT, Conversion, Fault, Placements, Typing, said
from slapo_py.layouts.inference.whole_sizes import is_of_whole, of_whole
from slapo_py.layouts.placement import P, Placement, R, Shard
from slapo_py.layouts.recording.nodes import (
    bytes_of,
    carries,
    is_border,
    is_record,
    is_size,
    is_tensor,
    name_of,
    numbers_of,
    operation_of,
    outputs_of,
    picks_part,
    readers,
    shape_of,
    slots_of,
    tensors_of,
)  # fmt: skip
from slapo_py.layouts.recording.owned import Owned, Owner
from slapo_py.layouts.rules.shapes import carry, dim_map
from slapo_py.layouts.rules.signatures import Signature, signatures
from slapo_py.layouts.syncs import Sync

Syncs = Mapping[fx.Node, Placement | Sync]


class Forward:
    """One pass over a graph. `syncs`: borders whose value is converted: to a placement, or by a sync of a schedule.

    known: signatures that an earlier pass over the same graph has worked out; this one adds its own. divided:
    attributes of which a rank has its part. asked: the dims that syncs of the caller's split.
    """

    def __init__(
        self,
        graph: fx.Graph,
        ranks: int,
        params: Mapping[fx.Node, Placement],
        syncs: Syncs,
        inputs: Mapping[str, Placement],
        outputs: Placement,
        known: dict[Any, list[Signature]],
        divided: Set[Owner] = frozenset(),
        asked: Set[int] = frozenset(),
    ) -> None:
        self.asked = asked
        self.typing = Typing(graph, ranks, params, divided=set(divided))
        self.ranks, self.syncs, self.inputs, self.outputs = ranks, dict(syncs), inputs, outputs
        self.nodes = list(graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.needing = needing_gradient(self.nodes)
        self._signatures = known
        self._blocks: set[Any] = set()

    def run(self) -> Typing:
        index = 0
        while index < len(self.nodes):
            node = self.nodes[index]
            index += 1
            back = self._visit(node)
            if back is not None:
                index = self._rewind(back, node)
        return self.typing

    def _visit(self, node: fx.Node) -> fx.Node | None:
        typing = self.typing
        if node.op == "output":
            return self._finish()
        if is_record(node):
            return None
        if node.op == "placeholder":
            typing.produced[node] = (self.inputs.get(node.name, R),)
        elif node.op == "get_attr":
            typing.produced[node] = (typing.params.get(node, R),)
        elif is_size(node):
            typing.local[node] = local_size_read(typing, node)
            return None
        elif not tensors_of(node):
            if name_of(node) == "setitem":
                self._written(node)
            return None
        elif picks_part(node):
            base, at = node.args
            typing.produced[node] = (typing.after[base][at],)  # type: ignore[index]
        else:
            back = self._operation(node)
            if back is not None:
                return back
        self._sync(node)
        return None

    def _rewind(self, back: fx.Node, node: fx.Node) -> int:
        """Forget what was found between two nodes."""
        first = self.order[back]
        typing = self.typing
        for one in self.nodes[first : self.order[node] + 1]:
            for table in (typing.produced, typing.after, typing.signature, typing.resized, typing.at_node):
                table.pop(one, None)  # type: ignore[attr-defined]
        late = set(self.nodes[first:])
        typing.on_edge = {edge: one for edge, one in typing.on_edge.items() if edge[1] not in late}
        typing.faults = [one for one in typing.faults if one.node not in late]
        return first

    def _sync(self, node: fx.Node) -> None:
        typing = self.typing
        typing.after[node] = typing.produced[node]
        self._blocks |= {one.blocks for one in typing.produced[node] if isinstance(one, Shard)}
        target = self.syncs.get(node)
        if target is None or len(typing.produced[node]) != 1:
            return
        source = typing.produced[node][0]
        if isinstance(target, Sync):
            target, wrong = target.target(source)
            if wrong:
                self._wrong(node, source, wrong)
        if source != target:
            typing.at_node[node] = Conversion(node, source, target)
        typing.after[node] = (target,)

    def _wrong(self, node: fx.Node, source: Placement, wrong: str) -> None:
        asked = self.syncs[node]
        line = "Leave it out." if source == R else f"It is {source} here: give the collective that is for it."
        value = asked.value if isinstance(asked, Sync) else ""
        self.typing.faults.append(Fault("wrong in forward", node, f"{value} at {said(node)}: {wrong}. {line}"))

    # ---- one operation

    def placement(self, node: fx.Node, reader: "fx.Node | str") -> Placement:
        """How a reader gets the value of a node."""
        conversion = self.typing.on_edge.get((node, reader))
        return conversion.target if conversion else self.typing.after[node][0]

    def _legal(self, node: fx.Node, have: list[Placement]) -> list[Signature]:
        blocks = {one.blocks for one in have if isinstance(one, Shard)}
        if P in have:  # a partial sum may be scattered into any pattern that is in use
            blocks |= self._blocks
        key = (node, frozenset(blocks))
        if key not in self._signatures:
            patterns = sorted(blocks, key=str)
            self._signatures[key] = signatures(operation_of(node), self.ranks, patterns, node.meta.get("rule"))
        return self._signatures[key]

    def _operation(self, node: fx.Node) -> fx.Node | None:
        typing, slots = self.typing, slots_of(node)
        have = [self.placement(slot, node) for slot in slots]
        if node in typing.made_local:
            own = typing.made_local[node]
            best = Signature("made", (R,) * len(slots), (own,), (P,) * len(slots), (own if slots else None,))
        else:
            best = self._meant(node, have) or self._cheapest(node, slots, have)
        for slot, source, target in zip(slots, have, best.inputs):
            if source == target:
                continue
            if source == P:
                top = highest_border(slot, target)
                if top is not None and top not in self.syncs:
                    self.syncs[top] = target
                    return top
            made = self._source(slot, source, target)
            if made is not None and made[0] not in typing.made_local:
                typing.made_local[made[0]] = made[1]
                return made[0]
            typing.on_edge.setdefault((slot, node), Conversion(slot, source, target, readers=frozenset({node})))
        typing.signature[node], typing.produced[node] = best, best.outputs
        self._note_sizes(node, best)
        return None

    def _meant(self, node: fx.Node, have: list[Placement]) -> Signature | None:
        found = batch_is_split(node, have)
        if found is None and P in have and highest_border(slots_of(node)[have.index(P)], R) is None:
            found = adds_to_each(node, have, self.ranks)
        if found is None:
            return None
        self.typing.faults.append(found[1])
        return found[0]

    def _cheapest(self, node: fx.Node, slots: list[fx.Node], have: list[Placement]) -> Signature:
        best, least = None, math.inf
        for one in self._legal(node, have):
            if in_place(node) and (one.inputs[0], one.outputs[0]) != (have[0], have[0]):
                continue  # what is written to is the value itself, not a converted copy
            price = self._price(slots, have, one)
            if 0 < price < math.inf:
                price += self._ahead(node, one.outputs)
            if price < least and any(size.kind == "computed" for size in wrong_sizes(self.typing, node, one).values()):
                price += 1e12
            if price < least:
                best, least = one, price
            if price == 0:
                break
        if best is None:
            given = ", ".join(f"{said(slot)} {one}" for slot, one in zip(slots, have))
            wrong = f"{said(node)} takes no such placements: {given}."
            if "rule" in node.meta and not node.meta["rule"].line:
                wrong += " Called so, this kernel takes only whole values: don't split what it is given."
            self.typing.faults.append(Fault("no signature", node, wrong))
            best = self._legal(node, have)[-1]
        return best

    def _written(self, node: fx.Node) -> None:
        """Elements are written in place: at the same indexes on every rank, so not along a dim that is split."""
        base: Any
        value: Any
        base, index, value = node.args
        target = self.typing.after[base][0]
        given = [self.typing.after[one][0] for one in node.all_input_nodes[1:] if is_tensor(one)]
        whole = target == R and all(one == R for one in given)
        if whole or (all(one == R for one in given) and not is_tensor(index) and keeps_dim(index, target)):
            if not (isinstance(target, Shard) and is_tensor(value) and len(shape_of(value)) > 0):
                return
        if is_tensor(index) and not is_tensor(value) and given == [target] and isinstance(target, Shard):
            return  # a mask that is split as the value is
        self.typing.faults.append(
            Fault(
                "no signature", node,
                f"{said(base)} is {target}, and elements of it are written in place: each rank would write at the same "
                f"indexes of its own part. Write it without: torch.where, masked_fill, or torch.cat of the parts.",
            )
        )  # fmt: skip

    def _price(self, slots: list[fx.Node], have: list[Placement], one: Signature) -> float:
        if self._unasked(slots, have, one.inputs):
            return math.inf
        return sum(
            cost(
                source, target, bytes_of(slot), self.ranks,
                parameter=slot.op == "get_attr", gradient=slot in self.needing, added=one.kind == "contracted",
            )
            for slot, source, target in zip(slots, have, one.inputs)
            if not (slot in self.needing and self._source(slot, source, target))
        )  # fmt: skip

    def _unasked(self, slots: list[fx.Node], have: list[Placement], wanted: Placements) -> bool:
        """Whether a value that is split would be split along another dim, which nothing else is split along.

        Of what is split in its features that would make data parallelism, which is cheap here, and nobody meant.
        """
        for slot, source, target in zip(slots, have, wanted):
            if slot.op == "get_attr" or not isinstance(source, Shard) or not isinstance(target, Shard):
                continue
            known = target in [one for one, other in zip(have, wanted) if one == other]
            if source.dim != target.dim and not known and (target.dim == 0 or not self.asked):
                if target.dim not in self.asked:
                    return True
        return False

    def _source(self, slot: fx.Node, source: Placement, target: Placement) -> tuple[fx.Node, Placement] | None:
        """The constant, or what repeats a whole value, that each rank can make its part of for a reader."""
        if source != R or not isinstance(target, Shard):
            return None
        return made_in_part(slot, target, self.ranks, expands=slot in self.needing)

    def _ahead(self, node: fx.Node, outputs: Placements, depth: int = 4) -> float:
        """What the next operation with another operand would pay: it decides between P to R and P to S."""
        users = readers(node)
        if len(users) != 1 or depth == 0 or not is_tensor(node) or users[0].op == OUTPUT or is_record(users[0]):
            return 0
        user = users[0]
        slots = slots_of(user)
        known = [outputs if slot is node else self.typing.after.get(slot) for slot in slots]
        if not slots or any(one is None for one in known):
            return 0
        have = [one[0] for one in known if one is not None]
        best, least = None, math.inf
        for one in self._legal(user, have):
            price = self._price(slots, have, one)
            if price < least:
                best, least = one, price
            if price == 0:
                break
        if best is None:
            return 0
        return least if least else self._ahead(user, best.outputs, depth - 1)

    # ---- sizes

    def _note_sizes(self, node: fx.Node, one: Signature) -> None:
        for place, size in wrong_sizes(self.typing, node, one).items():
            if size.kind == "literal":
                self.typing.resized.setdefault(node, {})[place] = size
                if size.owner is not None:
                    self.typing.divided.add(size.owner)
            elif size.kind == "computed" and is_of_whole(self.typing, dict(numbers_of(node))[place]):
                self.typing.faults.append(of_whole(node, place, size.passes, size.needs))
            else:
                self.typing.faults.append(
                    Fault(
                        "size", node,
                        f"{said(node)} is given the size {size.passes}, read of a split value, and needs {size.needs}.",
                    )
                )  # fmt: skip

    def _finish(self) -> fx.Node | None:
        for node in outputs_of(self.typing.graph):
            source = self.typing.after[node][0]
            if source == P and source != self.outputs:
                top = highest_border(node, self.outputs)
                if top is not None and top not in self.syncs:
                    self.syncs[top] = self.outputs
                    return top
            if source != self.outputs:
                self.typing.on_edge.setdefault(
                    (node, OUTPUT), Conversion(node, source, self.outputs, readers=frozenset({OUTPUT}))
                )
        return None


def needing_gradient(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes through which a gradient flows, if any of their results has one."""
    found: set[fx.Node] = set()
    for node in nodes:
        tensors = tensors_of(node)
        if node.op == "get_attr":
            if tensors and isinstance(tensors[0], nn.Parameter) and tensors[0].requires_grad:
                found.add(node)
            elif tensors and tensors[0].requires_grad:
                found.add(node)
        elif node.op == "placeholder":
            if tensors and differentiable(tensors[0]):
                found.add(node)
        elif any(one in found for one in node.all_input_nodes) and not is_size(node):
            if any(map(differentiable, tensors)):
                found.add(node)
    return found


def differentiable(tensor: Tensor) -> bool:
    """Whether a tensor of its dtype can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def reads_any(nodes: list[fx.Node], owners: Set[Owner]) -> bool:
    """Whether a size is computed with one of these attributes."""
    return any(isinstance(one, Owned) and one.owner in owners for node in nodes if is_size(node) for one in node.args)


def in_place(node: fx.Node) -> bool:
    """Whether a method writes to its tensor."""
    name = name_of(node)
    return node.op == "call_method" and name.endswith("_") and not name.endswith("__") and is_tensor(node)


def keeps_dim(index: Any, placement: Placement) -> bool:
    """Whether an index leaves a split dim as it is."""
    if not isinstance(placement, Shard):
        return False
    given = index if isinstance(index, tuple) else (index,)
    plain = all(isinstance(one, int | slice) and not isinstance(one, bool) for one in given)
    return plain and (placement.dim >= len(given) or given[placement.dim] == slice(None))


def highest_border(node: fx.Node, target: Placement) -> fx.Node | None:
    """The earliest border that a value has passed since it became partial."""
    best = None
    while True:
        if is_border(node):
            best = node
        if not carries(node) or (target != R and shape_of(node) != shape_of(node.args[0])):  # type: ignore[arg-type]
            return best
        node = node.args[0]  # type: ignore[assignment]


def made_in_part(node: fx.Node, target: Shard, ranks: int, expands: bool) -> tuple[fx.Node, Placement] | None:
    """The constant fill that a value comes from, and how it must be placed for the value to be placed so.

    expands: or the expansion: of a whole value each rank makes as many copies as it needs. (One key for a group of
    heads, say: its gradient is then a partial sum.)
    """
    chain = []
    while carries(node) and not (expands and made_dims(node)):
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    dims = made_dims(node)
    if not dims or len(readers(node)) > 1:
        return None
    for dim in dims:
        placed: Placement | None = Shard(dim) if shape_of(node)[dim] >= ranks else None
        first = placed
        for one in reversed(chain):
            if isinstance(placed, Shard):
                moved = carry(operation_of(one), placed, ranks)
                placed = moved[0] if moved else None
        if placed == target and first is not None:
            return node, first
    return None


def made_dims(node: fx.Node) -> Sequence[int]:
    """The dims of a constant, or those that an expansion adds or makes larger."""
    if not is_tensor(node):
        return ()
    if name_of(node) in ("zeros", "ones"):
        return range(len(shape_of(node)))
    if name_of(node) not in ("expand", "broadcast_to"):
        return ()
    kept = set(dim_map(operation_of(node)).values())
    return [dim for dim in range(len(shape_of(node))) if dim not in kept]
