"""Backward: the placement of every gradient, and where partial ones are summed.

A value that is S has its gradient S alike; one that is R or P has its gradient R or P. So the only question is where a
partial gradient meets what needs it whole. It is summed at the lowest border that sees all partial gradients of a
value; the gradient of a whole parameter stays partial, and is reduced by itself.
"""

from collections.abc import Mapping

from torch import fx

from slapo_py.layouts.inference.forward import Forward
from slapo_py.layouts.inference.state import OUTPUT, Conversion, Fault, Typing, collective, said
from slapo_py.layouts.placement import P, Placement, R, Shard
from slapo_py.layouts.recording.nodes import carries, is_border, is_record, outputs_of, picks_part, readers, slots_of
from slapo_py.layouts.recording.rows import parts_of
from slapo_py.layouts.syncs import AUTO, Sync

_ROUNDS = 8


class Backward:
    """One pass back over what `Forward` has typed. given: the collective that a user put on a border's gradient."""

    def __init__(self, forward: Forward, given: Mapping[fx.Node, str]) -> None:
        self.forward, self.typing, self.given = forward, forward.typing, given
        self.edge: dict[tuple[fx.Node, fx.Node | str], Placement] = {}
        self._values()
        self.faults = len(self.typing.faults)
        self.of_parameters = of_parameters(forward.nodes)
        self.summed: dict[fx.Node, frozenset[fx.Node]] = {}
        """Where a whole gradient of a node was summed further down."""
        self.passing: set[fx.Node] = set()
        """Nodes that pass a partial gradient on, to be summed further up together with others."""

    def run(self) -> Typing:
        for _ in range(_ROUNDS):
            better = self._pass()
            if better <= self.passing:
                break
            self.passing |= better
            self._forget()
        return self.typing

    def _pass(self) -> set[fx.Node]:
        """One pass; gives the nodes that should pass their gradient on."""
        typing, forward = self.typing, self.forward
        self.better: set[fx.Node] = set()
        for node in outputs_of(typing.graph):
            self.edge[node, OUTPUT] = forward.outputs
        for node in reversed(forward.nodes):
            if node in forward.needing and node.op != "output" and node in typing.after and not is_record(node):
                self._visit(node)
        return self.better

    def _forget(self) -> None:
        typing = self.typing
        for table in (self.edge, self.summed, typing.gradient, typing.reduced, typing.grad_on_edge):
            table.clear()  # type: ignore[attr-defined]
        for node in [node for node, one in typing.at_node.items() if one.source == one.target]:
            del typing.at_node[node]
        del typing.faults[self.faults :]

    def _visit(self, node: fx.Node) -> None:
        typing = self.typing
        if len(typing.after[node]) != 1:
            self._several(node)
            return
        ends: list[fx.Node | str] = [*readers(node), OUTPUT]
        users = [one for one in ends if (node, one) in self.edge]
        if not users:
            return
        for user in users:
            conversion = typing.on_edge.get((node, user))
            if conversion is not None:
                self.edge[node, user] = self._through(conversion, self.edge[node, user])
        gradient = self._meet(node, users)
        own = typing.at_node.get(node)
        if own is not None and own.source != own.target:
            gradient = self._through(own, gradient)
            self.summed.pop(node, None)
            self._compare(own)
        elif node in self.given:
            gradient = self._by_user(node, gradient)
        typing.gradient[node] = gradient
        if node.op == "get_attr":
            if typing.produced[node][0] == R and gradient == P:
                typing.reduced.append(node)
        elif node.op != "placeholder":
            self._pass_on(node, (gradient,))

    def _several(self, node: fx.Node) -> None:
        """Of a node with several results: the parts that are read bring their gradients."""
        parts = {one.args[1]: self.typing.gradient.get(one) for one in node.users if picks_part(one)}
        found = tuple(parts.get(index) for index in range(len(self.typing.after[node])))
        if any(one is not None for one in found):
            known = next(one for one in found if one is not None)
            self._pass_on(node, tuple(known if one is None else one for one in found))

    def _pass_on(self, node: fx.Node, gradients: tuple[Placement, ...]) -> None:
        if picks_part(node):
            return  # the node that it picks from asks for it
        signature = self.typing.signature[node]
        partial = any(one == P for one in gradients)
        for slot, wanted in zip(slots_of(node), signature.gradients):
            if slot not in self.forward.needing:
                continue
            found = (P if partial else R) if wanted is None else wanted
            if found == R and partial and signature.kind != "contracted":
                found = P
            before = self.edge.get((slot, node))
            self.edge[slot, node] = found if before is None or before == found else P

    def _meet(self, node: fx.Node, users: "list[fx.Node | str]") -> Placement:
        """The gradients of all readers meet here; one comes out."""
        typing = self.typing
        partial = [one for one in users if self.edge[node, one] == P]
        if not partial:
            self.summed[node] = frozenset().union(*(self._summed(node, one) for one in users))
        if not partial or isinstance(typing.after[node][0], Shard):
            return P if partial else self.edge[node, users[0]]
        own = typing.at_node.get(node)
        free = carries(node) or (own is not None and isinstance(own.source, Shard)) or node in self.given
        free = free or node in self.passing or node in self.of_parameters  # these as the parameter's gradient
        if len(partial) == len(users) and ((free and typing.produced[node][0] != P) or node.op == "get_attr"):
            return P
        low = self._lowest_border(node, partial)
        if low is None and len(partial) == len(users) and typing.produced[node][0] != P and self._may_pass(node):
            return P  # no border has come yet: one further up may
        placed = typing.after[node][0]
        further = [self._summed(node, one) for one in users if one not in partial]
        if low is None and further and all(further):  # no border for these alone: sum all of them here
            self.better |= {one for found in further for one in found if self._may_pass(one)}
        self.summed[node] = frozenset().union(*further) if further and all(further) else frozenset({node})
        if low is not None:
            typing.at_node[low] = Conversion(low, placed, placed, P, R)
        else:
            conversion = Conversion(node, placed, placed, P, R, frozenset(partial))
            for user in partial:
                typing.grad_on_edge[node, user] = conversion
        return R

    def _summed(self, node: fx.Node, user: "fx.Node | str") -> frozenset[fx.Node]:
        """Where the whole gradient that a reader gives was summed before."""
        if isinstance(user, str) or (node, user) in self.typing.on_edge:
            return frozenset()
        return self.summed.get(user, frozenset())

    def _may_pass(self, node: fx.Node) -> bool:
        """Whether the operation behind a node takes a partial gradient: it is linear in it, and asks for no other."""
        signature = self.typing.signature.get(node)
        return signature is not None and all(one is None for one in signature.output_gradients)

    def _lowest_border(self, node: fx.Node, partial: "list[fx.Node | str]") -> fx.Node | None:
        """Down a single reader through what only moves: the last border that still sees every partial gradient."""
        typing, best = self.typing, None
        seen = {one for one in readers(node) if (node, one) in self.edge}
        if is_border(node) and set(partial) == seen and node not in typing.at_node:
            best = node
        while len(partial) == 1 and isinstance(partial[0], fx.Node):
            user = partial[0]
            if not carries(user) or user in typing.at_node or (node, user) in typing.on_edge:
                break
            if is_border(user):
                best = user
            node, partial = user, [one for one in readers(user) if (user, one) in self.edge]
            if best is node and len(partial) > 1:
                break
        return best

    def _through(self, conversion: Conversion, gradient: Placement) -> Placement:
        """A gradient arrives at a conversion of the value: what leaves."""
        conversion.grad_source = gradient
        conversion.grad_target = conversion.source if isinstance(conversion.source, Shard) else R
        return conversion.grad_target

    def _compare(self, own: Conversion) -> None:
        """The collective that a user put on the gradient, with the right one."""
        asked = self.given.get(own.node)
        if asked is not None and asked != own.backward:
            line = sync_line(own.node, own.forward, own.backward, own, self._axis(own.node))
            self.typing.faults.append(
                Fault(
                    "wrong in backward", own.node,
                    f"{said(own.node)}: the value goes through {own.forward}, so the gradient arrives as "
                    f"{own.grad_source} and must leave as {own.grad_target}: that is {own.backward}, not {asked}. "
                    f"Write instead: {line}", line,
                )
            )  # fmt: skip

    def _values(self) -> None:
        """Conversions that came to stand where a sync of the schedule stands, and that its own collective is not."""
        typing = self.typing
        told = {one.node for one in typing.faults if one.kind == "wrong in forward"}
        for node, own in typing.at_node.items():
            asked = self.forward.syncs.get(node)
            if node in told or not isinstance(asked, Sync) or asked.target(own.source)[0] == own.target:
                continue
            line = sync_line(node, own.forward, AUTO, own, asked.axis)
            typing.faults.append(
                Fault(
                    "wrong in forward", node,
                    f"{said(node)}: the value is {own.source} and is needed {own.target}: that is {own.forward}, not "
                    f"{asked.value or 'none'}. Write instead: {line}", line,
                )
            )  # fmt: skip

    def _axis(self, node: fx.Node) -> str:
        asked = self.forward.syncs.get(node)
        return asked.axis if isinstance(asked, Sync) else "tp"

    def _by_user(self, node: fx.Node, gradient: Placement) -> Placement:
        """A sync of the gradient alone."""
        typing = self.typing
        asked, placed = self.given[node], typing.after[node][0]
        if asked == "none":
            return gradient
        if asked == collective(P, R) and gradient == P:
            typing.at_node[node] = Conversion(node, placed, placed, P, R)
            return R
        said_so = f"{typing.ranks} times too large" if gradient == R else "something else"
        typing.faults.append(
            Fault(
                "doubled in backward", node,
                f"{said(node)}: {asked} of a gradient that is {gradient}: it becomes {said_so}. Leave it out.",
            )
        )  # fmt: skip
        return gradient


def of_parameters(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes that are worked out from parameters and buffers alone, as the `1 + weight` of a norm."""
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op == "get_attr" or (node.all_input_nodes and all(one in found for one in node.all_input_nodes)):
            found.add(node)
    return found


def sync_line(node: fx.Node, value: str, grad: str, one: Conversion, axis: str = "tp") -> str:
    """The line of a schedule that puts these collectives at a border."""
    _, side, path, index = node.args
    split = one.source if value == "all_gather" else one.target
    more = [f'"{side}"', _quoted(value)]
    if grad != "auto":
        more.append(f"grad={_quoted(grad)}")
    if value != "none" and isinstance(split, Shard):
        parts = parts_of(node, split)
        more += [f"dim={split.dim}", *([f"parts={_written(parts)}"] if parts != 1 else [])]
    more += [f'axis="{axis}"'] * (axis != "tp")
    more += [f"index={index}"] * bool(index)
    place = f'sch["{path}"]' if path else "sch"
    return f"{place}.sync({', '.join(more)})"


def _written(parts: object) -> str:
    return f'"{parts}"' if isinstance(parts, str) else str(parts)


def _quoted(name: str) -> str:
    return "None" if name == "none" else f'"{name}"'
