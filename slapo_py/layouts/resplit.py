"""Other ways to split the parameters of one module: along its other dim, or in as many parts as the code cuts."""

from collections.abc import Iterator, Mapping

from torch import fx

from slapo_py.layouts.faults import Look
from slapo_py.layouts.nodes import name_of, shape_of, tensors_of
from slapo_py.layouts.placement import Placement, R, Shard
from slapo_py.layouts.recorded import Asked
from slapo_py.layouts.shapes import divides
from slapo_py.layouts.state import Fault, said
from slapo_py.layouts.table import canonical

Params = Mapping[fx.Node, Placement]


def resplits(
    look: Look, asked: Asked, found: list[Fault], order: Mapping[fx.Node, int], most: int
) -> Iterator[tuple[Params, Fault]]:
    """The parameters with those of one module split otherwise, nearest to what does not fit first, and what is said."""
    modules: dict[str, list[fx.Node]] = {}
    for node in look.graph.nodes:
        if node.op == "get_attr" and node in look.names:
            path = str(node.target).rpartition(".")[0]
            if all(one.target != node.target for one in modules.setdefault(path, [])):
                modules[path].append(node)

    def distance(path: str) -> int:
        return min(abs(order[node] - order[fault.node]) for node in modules[path] for fault in found)

    parts = _parts(look.graph)
    weights = {path: [node for node in nodes if len(shape_of(node)) > 1] for path, nodes in modules.items()}
    for path in sorted((one for one in modules if len(weights[one]) == 1), key=distance)[:most]:
        weight, rest = weights[path][0], [node for node in modules[path] if node not in weights[path]]
        old = {node: one for node, one in asked.params.items() if node not in (weight, *rest)}
        for shard in _splits(weight, asked.params.get(weight), parts, look.ranks):
            changed = {weight: shard, **_terms(weight, rest, shard)}
            differ = [node for node in (weight, *rest) if asked.params.get(node) != changed.get(node)]
            if differ:
                now, needed = asked.params.get(differ[0], R), changed.get(differ[0], R)
                was = any(node in asked.params for node in (weight, *rest))
                yield _ties(look, {**old, **changed}), _said(differ[0], now, needed, _line(changed, look.axis), was)


def _splits(weight: fx.Node, now: Placement | None, parts: set[int], ranks: int) -> Iterator[Shard]:
    """How a weight can be split; along the dim that it is split along now first."""
    shape = shape_of(weight)
    for dim in sorted(range(len(shape)), key=lambda dim: not isinstance(now, Shard) or dim != now.dim):
        for blocks in (1, *sorted(parts)):
            if divides(shape[dim], blocks, ranks):
                yield Shard(dim, blocks)


def _terms(weight: fx.Node, rest: list[fx.Node], shard: Shard) -> dict[fx.Node, Shard]:
    """A bias is split with the dim of its size; it stays whole where the other dim is split."""
    size = shape_of(weight)[shard.dim]
    if word_of(weight, shard.dim) == '"in"':
        return {}
    return {node: Shard(0, shard.blocks) for node in rest if shape_of(node) == (size,)}


def word_of(weight: fx.Node, dim: int) -> str:
    """How a dim of a linear module's weight is called, as `shard` takes it; else its number."""
    names = {canonical(name_of(user)) for user in weight.users}
    for kinds, out in ({"linear", "conv1d", "conv2d", "conv3d"}, 0), ({"addmm"}, 1):
        if names and names <= kinds and dim in (0, 1):
            return '"out"' if dim == out else '"in"'
    return str(dim)


def _ties(look: Look, params: Params) -> Params:
    """All nodes of one parameter are split alike."""
    named = {look.names[node]: one for node, one in params.items()}
    return {node: named[name] for node, name in look.names.items() if name in named}


def _parts(graph: fx.Graph) -> set[int]:
    """Into how many equal results values are cut."""
    found = set()
    for node in graph.nodes:
        if node.op in ("call_method", "call_function") and canonical(name_of(node)) in ("split", "chunk"):
            shapes = [one.shape for one in tensors_of(node)]
            if len(shapes) > 1 and len(set(shapes)) == 1:
                found.add(len(shapes))
    return found


def _line(changed: Mapping[fx.Node, Shard], axis: str) -> str:
    weight = next(iter(changed))
    shard, path = changed[weight], str(weight.target).rpartition(".")[0]
    names = ", ".join(f'"{str(node.target).rpartition(".")[2]}"' for node in changed)
    parts = f", parts={shard.blocks}" if shard.blocks != 1 else ""
    more = "" if axis == "tp" else f', axis="{axis}"'
    place = f'sch["{path}"]' if path else "sch"
    return f"{place}.shard({names}, dim={word_of(weight, shard.dim)}{parts}{more})"


def _said(node: fx.Node, now: Placement, needed: Placement, line: str, was_split: bool) -> Fault:
    write = "Write instead" if was_split else "Write"
    text = f"{said(node)} is {now}, and what is done with it, and the syncs around it, need {needed}. {write}: {line}"
    return Fault("wrong split", node, text, line)
