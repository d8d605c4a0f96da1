"""A module for a match: a new submodule of a traced module, whose parameters come from those that it stands for."""

from torch import fx, nn

from slapo_py.errors import StepError
from slapo_py.params import is_source, named_in
from slapo_py.replacing.fitting import Fit, Params, Tensors, check_untied, fit, leaving, map_of, owner_of, put_in
from slapo_py.replacing.mapped_state import MappedState, attach
from slapo_py.replacing.placing import (
    Old,
    check_keys,
    check_references,
    check_unscheduled,
    kinds,
    made_of,
    put_tags,
    tags_of,
)
from slapo_py.root import Root
from slapo_py.schedule import Schedule


def taken_children(module: nn.Module, params: Params) -> frozenset[str]:
    """The submodules, by path, whose parameters and buffers a map takes all: `install` removes them."""
    used = {one for source in (params or {}).values() if is_source(source) for one in named_in(source)}
    return _emptied(module, used)


def install(
    place: Schedule, name: str, new: nn.Module, params: Params, graph: fx.Graph, primitive: str = "replace"
) -> None:
    """Let a traced module have one more submodule, whose parameters come from it and its submodules.

    `params`: by the names seen from the new module, expressions of names seen from the traced one. `graph`: the one
    that the traced module is going to run. Submodules that have nothing left are removed; the state has the old names.

    Requires: a fresh name; no step, hook or reference at what is removed, and no use of it in `graph`.
    Raises: ArgumentError, StepError.
    """
    where, root, base = f'{primitive} at "{place.path}"', place.root, place.module
    old = Old(base)
    made = made_of(where, new, base, place.path)
    found = fit(where, old.tensors, made, params, by_name=False)
    check_untied(where, root.copy, found, old.tensors)
    tags = tags_of(root, where, found, old.tensors)
    used = {one for source in found.sources.values() for one in named_in(source)}
    removed = sorted(_emptied(base, used))
    inside = {path: base.get_submodule(path) for path in removed}
    _check_not_shared(where, root, base, {one.rpartition(".")[0]: owner_of(base, one)[0] for one in used})
    prefix = place.path + "." if place.path else ""
    check_unscheduled(root, {prefix + path: one for path, one in inside.items()}, where)
    gone = {
        id(one): f"{path}.{below}".rstrip(".")
        for path, module in inside.items()
        for below, one in module.named_modules()
    }
    for path, hooks in old.hooks.items():
        if id(old.modules[path]) in gone and path in old.mapped:
            raise StepError(
                f"{where}: the parameters of {path!r} were mapped when the model was built. Write a schedule "
                f"of the model that it was built from."
            )
        if hooks and id(old.modules[path]) in gone:
            raise StepError(
                f"{where}: there are hooks on {path!r} ({kinds(hooks)}), which would be removed, since {name!r} takes "
                f"its parameters. Take the hooks off before create_schedule."
            )
    lasting = used if not removed else {one for one in used if not any(_below(one, path) for path in removed)}
    _check_unused(where, graph, removed, lasting)
    own = {id(tensor): one for one, tensor in leaving(found, made)}
    put_in(made, found, old.tensors, copied=True)
    for one in made.modules():
        one.training = base.training
    for taken in sorted(lasting):
        owner, leaf = owner_of(base, taken)
        (owner._parameters if leaf in owner._parameters else owner._buffers).pop(leaf)
    for path in removed:
        owner, leaf = owner_of(base, path)
        del owner._modules[leaf]
    base.add_module(name, made)
    mapping = map_of(where, Fit(sources={f"{name}.{key}": value for key, value in found.sources.items()}), old.tensors)
    mine = Tensors(made)
    passing = frozenset(f"{name}.{one}" for one in mine.passing if one in mine.buffers and one not in found.values)
    there = Tensors(base).every
    gone_buffers = tuple(
        sorted(one for one in old.tensors.passing - used if one in old.tensors.every and one not in there)
    )
    if found.sources or passing or gone_buffers:
        attach(base, MappedState(mapping, old.keys, old.versions, passing, gone_buffers))
    gone_tensors = {id(old.tensors.every[one]): one for key in found.made for one in named_in(found.sources[key])}
    check_keys(where, old, base)
    check_references(where, root.copy, {**gone, **gone_tensors}, own)
    put_tags(root, tags)
    if root.has_tracer:
        root.tracer.forget_below(prefix + name)


def _emptied(module: nn.Module, used: set[str]) -> frozenset[str]:
    """The topmost submodules that have parameters or buffers of the state, all of them among these names."""
    tensors = Tensors(module)
    found: set[str] = set()
    for path, _ in module.named_modules(remove_duplicate=False):
        if not path or any(_below(path, one) for one in found):
            continue
        held = [one for one in tensors.lasting if _below(one, path)]
        if held and used.issuperset(held):
            found.add(path)
    return frozenset(found)


def _below(name: str, path: str) -> bool:
    return name.startswith(path + ".")


def _check_not_shared(where: str, root: Root, base: nn.Module, taken: dict[str, nn.Module]) -> None:
    below = {id(one) for one in base.modules()}
    wanted = {id(one): path for path, module in sorted(taken.items()) if path for one in module.modules()}
    seen: set[int] = set()
    for parent in root.copy.modules():
        for child in parent._modules.values():
            if id(child) not in wanted:
                continue
            if id(parent) not in below or id(child) in seen:
                raise StepError(
                    f"{where}: {wanted[id(child)]!r} is at more than one place of the model, and would lose its "
                    f"parameters at all of them. Replace the module itself at each, without a pattern."
                )
            seen.add(id(child))


def _check_unused(where: str, graph: fx.Graph, removed: list[str], names: set[str]) -> None:
    for node in graph.nodes:
        target = str(node.target)
        if node.op in ("call_module", "get_attr") and (
            target in names
            or any(target == path or _below(target, path) for path in removed)
            or (node.op == "call_module" and any(_below(name, target) for name in names))
        ):
            raise StepError(
                f"{where}: the graph still uses {target!r} at {node.name!r}, and params takes its parameters. Match "
                f"all of its uses, or leave it out of params."
            )
