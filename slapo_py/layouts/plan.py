"""`slapo.plan`: what a mesh would hold and send, worked out on a laptop: no process group, no weights."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from slapo_py.errors import PlacementError
from slapo_py.layouts.placement import Placement, R, local_shape
from slapo_py.layouts.syncs import placements_of
from slapo_py.snapshot import random_states_kept

if TYPE_CHECKING:
    from torch import fx

    from slapo_py.layouts.inference.state import Typing
    from slapo_py.schedule import Schedule

_MOMENTS = 8  # bytes: Adam's two, in float32


@dataclass(frozen=True)
class Traffic:
    """A collective of one kind at places that are alike: how often, and bytes in all over the ranks of the axis."""

    where: str
    direction: str
    kind: str
    count: int
    bytes: int


@dataclass
class Plan:
    """What one rank holds, in bytes, and what the ranks of the axis send for one batch of the example's size.

    placements: of each parameter, by its first name. faults: messages of the checker; empty if the schedule fits.
    """

    mesh: dict[str, int]
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    placements: dict[str, Placement] = field(default_factory=dict)
    traffic: list[Traffic] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Bytes of parameters, gradients and optimizer state on the rank that holds most."""
        return self.parameters + self.gradients + self.optimizer

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table("what", "where", "count", "bytes", title=f"a rank of {self.mesh}")
        for name in ("parameters", "gradients", "optimizer", "held"):
            table.add_row(name, "", "", _said(getattr(self, name)))
        for one in self.traffic:
            table.add_row(f"{one.direction}: {one.kind}", one.where, str(one.count), _said(one.bytes))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=100, color_system=None)
        with console.capture() as shown:
            console.print(self)
        return shown.get() + "".join(f"{one}\n" for one in self.faults)


def plan(sch: "Schedule", mesh: Mapping[str, int], axis: str = "tp") -> Plan:
    """What each rank of a mesh would hold, and what the ranks of `axis` would send, layer by layer.

    mesh: sizes of the axes by name, such as {"dp": 8, "tp": 8}; all that is not `axis` holds copies. The optimizer is
    Adam, with two float32 moments a parameter. A model on `meta` is enough. Raises `PlacementError` for a mesh that
    lacks the axis, `TraceError`, `NoExampleInputs`.
    """
    if axis not in mesh or any(not isinstance(size, int) or size < 1 for size in mesh.values()):
        raise PlacementError(
            f'plan: the mesh needs a positive size of "{axis}", as {{"{axis}": 8}}; found {dict(mesh)}.'
        )
    made = Plan(dict(mesh))
    with random_states_kept():  # what is imported here may draw
        from slapo_py.layouts.checking.check import checked
        from slapo_py.layouts.recording.record import record

        typing, faults = checked(sch, record(sch), axis, mesh[axis])
    made.faults = [one.message for one in faults]
    known = placements_of(sch.root, axis)
    for name, parameter in sch.root.copy.named_parameters():
        placement = made.placements[name] = known.get(name, R)
        count = math.prod(local_shape(parameter.shape, placement, mesh[axis], 0))
        made.parameters += count * parameter.element_size()
        if parameter.requires_grad:
            made.gradients += count * parameter.element_size()
            made.optimizer += count * _MOMENTS
    made.traffic = _traffic(_sent(typing))
    return made


def _sent(typing: "Typing") -> Iterator[tuple[str, str, str, int]]:
    """(where, direction, kind, bytes) of each collective."""
    from slapo_py.layouts.conversions import factor
    from slapo_py.layouts.recording.nodes import bytes_of

    for one in typing.conversions():
        for direction, kind in (("forward", one.forward), ("backward", one.backward)):
            if kind not in ("none", "mask", "split"):
                size = int(factor(kind, typing.ranks) * bytes_of(one.node))
                yield str(one.node.meta.get("within", "")), direction, kind, size
    for node, signature in typing.signature.items():
        if signature.needs == "cross_entropy":
            yield str(node.meta.get("within", "")), "forward", "all_gather", _of_a_loss(node, typing.ranks)
    for node in typing.reduced:
        size = int(factor("all_reduce", typing.ranks) * bytes_of(node))
        yield str(node.target).rpartition(".")[0], "parameter", "all_reduce", size


def _of_a_loss(node: "fx.Node", ranks: int) -> int:
    """Bytes of the one exchange of `slapo_py.distributed.cross_entropy`: three or four numbers of each row."""
    from slapo_py.layouts.recording.nodes import shape_of, slots_of

    logits = slots_of(node)[0]
    wide = torch.promote_types(logits.meta["val"].dtype, torch.float32)
    numbers = 4 if node.kwargs.get("label_smoothing") else 3
    return (ranks - 1) * ranks * numbers * math.prod(shape_of(logits)[:-1]) * wide.itemsize


def _traffic(sent: Iterable[tuple[str, str, str, int]]) -> list[Traffic]:
    """The same at places whose names differ in numbers alone is one line."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for where, direction, kind, size in sent:
        found.setdefault((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", where), direction, kind), []).append(size)
    return [Traffic(*key, len(sizes), sum(sizes)) for key, sizes in found.items()]


def _said(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
