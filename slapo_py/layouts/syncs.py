"""Collectives that a schedule puts at the borders of modules, and what the schedule says of its parameters."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_py.layouts.placement import P, Placement, R, Shard

if TYPE_CHECKING:
    from slapo_py.root import Root

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "split")
AUTO = "auto"


@dataclass(frozen=True)
class Sync:
    """One collective on a value and one on its gradient, where tensor number `index` enters or leaves a module.

    value: a collective, or None. grad: a collective, None, or "auto": whatever fits. dim: the dim that is split after
    `reduce_scatter`, `all_to_all` and `split`, and before `all_gather`; parts: in how many blocks, each split alike, or
    "batch": see `rows.py`, which knows the number.
    """

    side: str
    index: int
    axis: str
    value: str | None
    grad: str | None
    dim: int | None
    parts: int | str = 1

    @property
    def shard(self) -> Shard:
        """How the value is split before or after."""
        assert not isinstance(self.parts, str)  # `recorded.py` puts in the number
        return Shard(self.dim or 0, self.parts)

    def target(self, source: Placement) -> tuple[Placement, str]:
        """The placement after the collective on a value placed so, and why that is wrong ("" if it is right)."""
        if self.value is None:
            return source, ""
        if self.value == "all_reduce":
            twice = ": it would be added up once for each rank" if source == R else ""
            return R, "" if source == P else f"the value is {source}, not a partial sum{twice}"
        if self.value == "all_gather":
            fits = isinstance(source, Shard) and (source.dim, source.blocks) == (self.dim, self.parts)
            blocks = f" in {self.parts} blocks" if self.parts != 1 else ""
            return R, "" if fits else f"the value is {source}, not split along dim {self.dim}{blocks}"
        shard = self.shard
        if self.value == "all_to_all":
            if source == shard:
                return shard, f"the value is {source} before"
            return shard, "" if isinstance(source, Shard) else f"the value is {source}, not split"
        wanted = P if self.value == "reduce_scatter" else R
        return shard, "" if source == wanted else f"the value is {source}, and {self.value} takes {wanted}"


def placements_of(root: "Root", axis: str) -> dict[str, Shard]:
    """The split parameters by their first name."""
    key = tag(axis)
    return {name: tags[key] for name, tags in root.annotations.items() if key in tags}


def tag(axis: str) -> str:
    """Under which key of a parameter's annotations its placement on an axis is."""
    return f"placement on {axis}"


def reduced_of(root: "Root", axis: str) -> set[str]:
    """The parameters, by first name, whose gradient is summed over an axis."""
    key = reduce_tag(axis)
    return {name for name, tags in root.annotations.items() if key in tags}


def reduce_tag(axis: str) -> str:
    """Under which key it stands that a parameter's gradient is summed over an axis."""
    return f"gradient summed over {axis}"
