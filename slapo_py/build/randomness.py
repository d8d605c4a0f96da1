"""What the ranks draw: alike, differently where the schedule says so, or together what one process draws."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import fx

from slapo_py.build.rank_graph import graph_of
from slapo_py.distributed.masks import MaskedByIndex, Part, order_of
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.errors import BuildError
from slapo_py.layouts.inference.state import Typing
from slapo_py.layouts.placement import Shard, is_even
from slapo_py.layouts.recording.nodes import name_of, shape_of, slots_of
from slapo_py.layouts.rules.table import canonical
from slapo_py.scheduled import dress


def mask_by_index(place: Any, graph: fx.Graph, typed: Mapping[str, Typing], mesh: Mesh) -> None:
    """Let every dropout draw the mask of the whole tensor and take this rank's part of it.

    Raises `BuildError` for a module whose dropouts lie differently.
    """
    first = next(node for node in graph.nodes if node.op == "placeholder" and hasattr(node.meta.get("val"), "shape"))
    rows = shape_of(first)[0]
    parts: dict[str, tuple[Part, ...]] = {}
    orders: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for node in graph.nodes:
        if not _drops(node):
            continue
        path = graph_of(place.root, node.meta["within"])
        found = _parts(node, rows, typed, mesh)
        if parts.setdefault(path, found) != found:
            raise BuildError(
                f'build at "{path}": logical_masks= draws one kind of mask in a module, and the dropouts of this one '
                f"lie differently on the mesh. Make each an nn.Dropout."
            )
        if canonical(name_of(node)) == "dropout":  # attention draws for weights that it makes itself
            orders[path].add(order_of(slots_of(node)[0].meta["val"]))
    for path, found in parts.items():
        if found:
            order = orders[path].pop() if len(orders[path]) == 1 else None
            dress(place.root.module(path), MaskedByIndex(found, order))


def _parts(node: fx.Node, rows: int, typed: Mapping[str, Typing], mesh: Mesh) -> tuple[Part, ...]:
    shape = shape_of(node)
    found = []
    if mesh.size(DATA) > 1 and shape[0] % rows == 0:
        found.append(Part(Shard(0), mesh.ranks(DATA)))
    for axis, typing in typed.items():
        placement = typing.produced[node][0]
        size = None
        if isinstance(placement, Shard) and not is_even(shape, placement, mesh.size(axis)):
            size = shape[placement.dim]
        found.append(Part(placement, mesh.ranks(axis), size))
    return tuple(found)


def _drops(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if canonical(name_of(node)) == "dropout":
        return True
    if name_of(node) != "scaled_dot_product_attention":
        return False
    return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p"))
