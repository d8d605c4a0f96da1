"""What inference finds out about a flat recording on one mesh axis."""

from collections.abc import Mapping, MutableSet
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from slapo_py.layouts.conversions import how
from slapo_py.layouts.placement import Placement
from slapo_py.layouts.recording.nodes import is_border, name_of
from slapo_py.layouts.recording.owned import Owner
from slapo_py.layouts.rules.signatures import Signature

Placements = tuple[Placement, ...]
Edge = tuple[fx.Node, "fx.Node | str"]
"""A node and who reads it; "output" is the caller."""
OUTPUT = "output"


@dataclass(eq=False)
class Conversion:
    """A redistribution of the value of a node, and of the gradient on its way back.

    source, target: of the value. grad_source, grad_target: the gradient of the target arrives as the first and leaves
    as the second; None where there is no gradient. readers: who reads the converted value; None stands for all.
    """

    node: fx.Node
    source: Placement
    target: Placement
    grad_source: Placement | None = None
    grad_target: Placement | None = None
    readers: "frozenset[fx.Node | str] | None" = None

    @property
    def forward(self) -> str:
        """The collective on the value."""
        return collective(self.source, self.target)

    @property
    def backward(self) -> str:
        """The collective on the gradient."""
        if self.grad_source is None or self.grad_target is None:
            return "none"
        return collective(self.grad_source, self.grad_target)

    @property
    def at_border(self) -> bool:
        """Whether it stands where the tensor enters or leaves a module, for all that read it."""
        return is_border(self.node) and self.readers is None

    def __str__(self) -> str:
        return (
            f"{said(self.node)}: value {self.source} -> {self.target} ({self.forward}), "
            f"gradient {self.grad_source or '-'} -> {self.grad_target or '-'} ({self.backward})"
        )


def is_local(one: Conversion) -> bool:
    """Whether each rank does it by itself: it takes its part of what is whole, or one rank adds it; nothing is sent."""
    free = ("none", "split", "mask")
    whole = one.node.op == "get_attr"  # a parameter keeps its gradient as it is, and it is summed by itself
    return one.forward in free and (whole or one.backward in free)


def collective(source: Placement, target: Placement) -> str:
    """What turns one placement into another: a collective, "split" or "mask" (no bytes are sent), or "none"."""
    kind = how(source, target)
    return "none" if kind in (None, "nothing") else str(kind)


def said(node: "fx.Node | str") -> str:
    """How a message names a value."""
    if isinstance(node, str):
        return "the result"
    if is_border(node):
        _, side, path, index = node.args
        return f'{side} {index} of "{path}"'
    if node.op == "get_attr":
        return f'the parameter "{node.target}"'
    if node.op == "placeholder":
        return f"the input {node.name!r}"
    if node.op == OUTPUT:
        return "the result"
    within = node.meta.get("within", "")
    return f'{name_of(node)} in "{within}"' if within else name_of(node)


@dataclass(frozen=True)
class Fault:
    """Something that does not fit: of which kind, where, and the sentence that says so.

    line: what to write, if one line mends it; it is part of the message. `sch` stands for the place that was checked.
    """

    kind: str
    node: fx.Node
    message: str
    line: str = ""


@dataclass(frozen=True)
class Resize:
    """A size in the arguments of a node that a rank must pass otherwise.

    passes, needs: what it would pass, and what is right. owner: the module and attribute that a literal came from.
    """

    passes: int
    needs: int
    kind: str
    owner: tuple[str, str] | None = None


@dataclass(eq=False)
class Typing:
    """Placements of all values and gradients of a flat graph, and the conversions between them.

    produced, after: of each node's results, before and after its own conversion. at_node: conversions for all readers.
    on_edge, grad_on_edge: conversions for some of them, of value and gradient or of the gradient alone. reduced: the
    parameters whose gradient is a partial sum. resized: sizes to change. made_local: constants that each rank makes a
    part of.
    """

    graph: fx.Graph
    ranks: int
    params: Mapping[fx.Node, Placement]
    produced: dict[fx.Node, Placements] = field(default_factory=dict)
    after: dict[fx.Node, Placements] = field(default_factory=dict)
    signature: dict[fx.Node, Signature] = field(default_factory=dict)
    at_node: dict[fx.Node, Conversion] = field(default_factory=dict)
    on_edge: dict[Edge, Conversion] = field(default_factory=dict)
    grad_on_edge: dict[Edge, Conversion] = field(default_factory=dict)
    gradient: dict[fx.Node, Placement] = field(default_factory=dict)
    reduced: list[fx.Node] = field(default_factory=list)
    resized: dict[fx.Node, dict[tuple[int | str, ...], Resize]] = field(default_factory=dict)
    made_local: dict[fx.Node, Placement] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    divided: MutableSet[Owner] = field(default_factory=set)
    """The attributes of which a rank has its part: those that are divided, and those that have to be."""
    local: dict[fx.Node, Any] = field(default_factory=dict)
    """What a rank sees of sizes."""

    def conversions(self) -> list[Conversion]:
        """Each once: those for all readers, in order, then the others."""
        every = [*self.at_node.values(), *self.on_edge.values(), *self.grad_on_edge.values()]
        return list({id(one): one for one in every}.values())
