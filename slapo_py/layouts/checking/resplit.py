"""Other ways to split the parameters of one module: along its other dim, in as many parts as the code cuts, or not."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from slapo_py.layouts.checking.faults import Look
from slapo_py.layouts.inference.recorded import Asked
from slapo_py.layouts.inference.state import Fault, said
from slapo_py.layouts.placement import Placement, R, Shard
from slapo_py.layouts.recording.nodes import name_of, shape_of, slots_of, tensors_of
from slapo_py.layouts.rules.shapes import divides
from slapo_py.layouts.rules.table import canonical

Params = Mapping[fx.Node, Placement]
Modules = dict[str, list[fx.Node]]


def resplits(
    look: Look, asked: Asked, found: list[Fault], order: Mapping[fx.Node, int], most: int
) -> Iterator[tuple[Params, Fault]]:
    """The parameters with those of one module split otherwise, nearest to what does not fit first, and what is said."""
    modules = _modules(look)
    parts = _parts(look.graph)
    weights = {path: [node for node in nodes if len(shape_of(node)) > 1] for path, nodes in modules.items()}
    near = _nearest(modules, found, order)
    for path in [one for one in near if len(weights[one]) == 1][:most]:
        weight = weights[path][0]
        for shard in _splits(weight, asked.params.get(weight), parts, look.ranks):
            changed = _split(weight, modules[path], shard)
            if _differ(asked, modules[path], changed):
                yield _changed(look, asked, modules[path], changed)


def left_out(
    look: Look, asked: Asked, found: list[Fault], order: Mapping[fx.Node, int], most: int
) -> Iterator[tuple[Params, Fault]]:
    """The same with the parameters of one module whole."""
    modules = _modules(look)
    near = _nearest(modules, found, order)
    for path in [one for one in near if _differ(asked, modules[one], {})][:most]:
        params, fault = _changed(look, asked, modules[path], {})
        refused = [one for one in found if one.kind == "no signature" and {*modules[path]} & {*slots_of(one.node)}]
        yield params, replace(fault, message=f"{refused[0].message} Leave it out.") if refused else fault


def _nearest(modules: Modules, found: list[Fault], order: Mapping[fx.Node, int]) -> list[str]:
    def distance(path: str) -> int:
        return min(abs(order[node] - order[fault.node]) for node in modules[path] for fault in found)

    return sorted(modules, key=distance)


def otherwise(look: Look, asked: Asked, weight: fx.Node, shard: Shard) -> tuple[Params, Fault]:
    """The parameters with those of a weight's module split as this weight, and what is said."""
    nodes = _modules(look)[str(weight.target).rpartition(".")[0]]
    weight = next(node for node in nodes if node.target == weight.target)
    return _changed(look, asked, nodes, _split(weight, nodes, shard))


def _modules(look: Look) -> Modules:
    """The nodes of each module's own parameters, one for each."""
    modules: Modules = {}
    for node in look.graph.nodes:
        if node.op == "get_attr" and node in look.names:
            path = str(node.target).rpartition(".")[0]
            if all(one.target != node.target for one in modules.setdefault(path, [])):
                modules[path].append(node)
    return modules


def _differ(asked: Asked, nodes: list[fx.Node], changed: Mapping[fx.Node, Shard]) -> list[fx.Node]:
    return [node for node in [*changed, *nodes] if asked.params.get(node) != changed.get(node)]


def _changed(look: Look, asked: Asked, nodes: list[fx.Node], changed: Mapping[fx.Node, Shard]) -> tuple[Params, Fault]:
    differ = _differ(asked, nodes, changed)[0]
    now, needed = asked.params.get(differ, R), changed.get(differ, R)
    line = _line(changed, look.axis) if changed else ""
    own = {look.names[node] for node in nodes}
    old = {node: one for node, one in asked.params.items() if look.names[node] not in own}
    was = any(node in asked.params for node in nodes)
    return _ties(look, {**old, **changed}), _said(differ, now, needed, line, was)


def _splits(weight: fx.Node, now: Placement | None, parts: set[int], ranks: int) -> Iterator[Shard]:
    """How a weight can be split; along the dim that it is split along now first."""
    shape = shape_of(weight)
    for dim in sorted(range(len(shape)), key=lambda dim: not isinstance(now, Shard) or dim != now.dim):
        for blocks in (1, *sorted(parts)):
            if divides(shape[dim], blocks, ranks):
                yield Shard(dim, blocks)


def _split(weight: fx.Node, nodes: list[fx.Node], shard: Shard) -> dict[fx.Node, Shard]:
    """A bias is split with the dim of its size; it stays whole where the other dim is split."""
    size = shape_of(weight)[shard.dim]
    if word_of(weight, shard.dim) == '"in"':
        return {weight: shard}
    return {weight: shard, **{node: Shard(0, shard.blocks) for node in nodes if shape_of(node) == (size,)}}


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
    do = "Leave it out." if not line else f"Write instead: {line}" if was_split else f"Write: {line}"
    text = f"{said(node)} is {now}, and what is done with it, and the syncs around it, need {needed}. {do}"
    return Fault("wrong split", node, text, line)
