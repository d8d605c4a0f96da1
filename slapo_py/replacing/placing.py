"""A new module in the place of an old one, or of a match, with all that has to survive."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from slapo_py import codec
from slapo_py.clone import clone
from slapo_py.errors import ArgumentError, CloneError, StepError
from slapo_py.params import named_in
from slapo_py.primitive import TABLE
from slapo_py.replacing.fitting import Fit, Params, Tensors, check_untied, fit, leaving, map_of, put_in
from slapo_py.replacing.mapped_state import MappedState, attach, maps_on, stages
from slapo_py.replacing.moving import Hooks, clear_hooks, hooks_on, move_hooks, references
from slapo_py.replacing.parameter_map import ParameterMap
from slapo_py.root import Root
from slapo_py.schedule import Schedule
from slapo_py.scheduled import bare, layers

New = nn.Module | Callable[[nn.Module], nn.Module]


class Old:
    """What a module was like before a step, noted first: a factory may take it apart."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tensors = Tensors(module)
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.flags = {name: one.training for name, one in self.modules.items()}
        self.hooks = {name: hooks_on(one) for name, one in module.named_modules()}
        self.full_backward = {name: one._is_full_backward_hook for name, one in self.modules.items()}
        self.mapped = [name for name, one in self.modules.items() if maps_on(one)]
        self.extra = _extra_states(module)
        self.keys = state_keys(module)
        self.original_keys = set(_original_keys(module))
        self.versions = {name: one._version for name, one in self.modules.items()}

    def label(self, name: str) -> str:
        return name or type(self.module).__name__


def state_keys(module: nn.Module) -> tuple[str, ...]:
    """The keys of a module's state_dict in order, apart from what its own hooks make of them."""
    found: dict[str, Any] = {}
    for path, one in module.named_modules(remove_duplicate=False):
        prefix = path + "." if path else ""
        for name, parameter in one._parameters.items():
            if parameter is not None:
                found[prefix + name] = None
        for name, buffer in one._buffers.items():
            if buffer is not None and name not in one._non_persistent_buffers_set:
                found[prefix + name] = None
        if _has_extra_state(one):
            found[prefix + "_extra_state"] = None
    for prefix, state in stages(module):
        if prefix:
            found = state.undo(found, prefix)
    return tuple(found)


# A whole module


def check_put(place: Schedule, new: Any, params: Any) -> None:
    """Refuse what can be refused before a factory is called."""
    where = _where(place)
    if not isinstance(new, nn.Module) and not callable(new):
        raise ArgumentError(
            f"{where}: needs a module, or a factory that makes one of the old module, found {new!r}. Write "
            f"replace(lambda old: MyModule(old.in_features)), or a function of a module of yours."
        )
    check_unscheduled(place.root, {place.path: place.module}, where)
    if any(maps_on(one) for one in place.module.modules()):
        raise StepError(
            f"{where}: the parameters of this {bare(place.module).__name__} were mapped when the model was built. "
            f"Write a schedule of the model that it was built from."
        )


def put(place: Schedule, new: New, params: Params) -> None:
    """Let a module, or what a factory makes of the old one, take the old one's place under all of its names."""
    where, root, path = _where(place), place.root, place.path
    old = Old(place.module)
    elsewhere = _elsewhere(root, {id(one) for one in old.modules.values()})
    made = made_of(where, new, old.module, path)
    _check_not_elsewhere(where, elsewhere, made)
    _check_forward(where, place, old.module, made)
    found = fit(where, old.tensors, made, params, by_name=True)
    check_untied(where, root.copy, found, old.tensors)
    kept = {id(one) for one in made.modules()}
    gone = {id(one): old.label(name) for name, one in old.modules.items() if id(one) not in kept}
    gone_tensors = {id(old.tensors.every[one]): one for name in found.made for one in named_in(found.sources[name])}
    own = {id(tensor): name for name, tensor in leaving(found, made)}
    put_in(made, found, old.tensors, copied=isinstance(new, nn.Module))
    _keep_extra_states(old, made)
    state = _state(old, made, found, map_of(where, found, old.tensors))
    if made is not old.module:
        _move_all_hooks(where, old, made, kept, gone, state)
        _keep_flags(old, made)
    elif state is not None:
        attach(made, state)
    check_keys(where, old, made)
    tags = tags_of(root, where, found, old.tensors)
    with _in_place(root, old.module, made, path):
        check_references(where, root.copy, {**gone, **gone_tensors}, own)
        put_tags(root, tags)
        if root.has_tracer:
            root.tracer.replaced(path)


def made_of(where: str, new: New, old: nn.Module, path: str) -> nn.Module:
    if isinstance(new, nn.Module):
        try:
            return clone(new)  # the user's module stays theirs: another place, or another schedule, may use it, too
        except CloneError as error:
            raise ArgumentError(f"{where}: the new module can't be used: {error}") from error
    try:
        made: Any = new(old)
    except TypeError as error:
        name = getattr(new, "__qualname__", type(new).__name__)
        error.add_note(f"{where}: {name} was called with the old module, a {type(old).__name__}, to make the new one")
        raise
    if not isinstance(made, nn.Module):
        raise ArgumentError(
            f"{where}: the factory returned {type(made).__name__} and not a module. To put a function in this module's "
            f"place, write a pattern at the traced module around it: "
            f'sch[parent].replace(function, what=lambda x: slapo.call("{_last(path)}", x)).'
        )
    return made


def _elsewhere(root: Root, below: set[int]) -> dict[int, str]:
    """The modules of the model and of the original, by id, but for those of the place itself."""
    found = {id(one): f"{name!r} of the original" for name, one in root.original.named_modules()}
    found |= {id(one): f"{name!r} of the model" for name, one in root.copy.named_modules() if id(one) not in below}
    return found


def _check_not_elsewhere(where: str, elsewhere: dict[int, str], made: nn.Module) -> None:
    for name, one in made.named_modules():
        if id(one) in elsewhere:
            raise ArgumentError(
                f"{where}: the new module {'is' if not name else f'holds, as {name!r},'} the module at "
                f"{elsewhere[id(one)]}, so that one module would be at two places. Make a new module, or use the one "
                f"that the factory is called with."
            )


def _check_forward(where: str, place: Schedule, old: nn.Module, made: nn.Module) -> None:
    if bare(old).forward is nn.Module.forward and "forward" not in vars(old):
        return
    if bare(made).forward is nn.Module.forward and "forward" not in vars(made):
        raise ArgumentError(
            f"{where}: {type(made).__name__} has no forward, and the module that was there is called. Give it one."
        )
    call = place.root.tracer.recorded(place.path) if place.root.has_tracer else None
    if call is None or old._forward_pre_hooks:
        return
    signature = inspect.signature(made.forward)
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        given = [*(["..."] * len(call.args)), *(f"{name}=..." for name in call.kwargs)]
        raise ArgumentError(
            f"{where}: the old module is called with ({', '.join(given)}), which {type(made).__name__}.forward"
            f"{signature} does not take: {error}."
        ) from None


def _state(old: Old, made: nn.Module, found: Fit, mapping: ParameterMap) -> MappedState | None:
    """The map for the new module's state_dict, if names, shapes or their order are not those of the old one."""
    new = Tensors(made)
    renamed = set(found.sources)
    own = frozenset(name for name in new.passing if name in new.buffers and name not in found.values)
    taken = {*found.same, *(one for source in found.sources.values() for one in named_in(source))}
    gone = tuple(name for name in old.tensors.passing if name in old.tensors.buffers and name not in taken)
    if not renamed and not own and not gone and state_keys(made) == old.keys:
        return None
    return MappedState(mapping, old.keys, old.versions, own, tuple(sorted(gone)))


def _move_all_hooks(
    where: str, old: Old, made: nn.Module, kept: set[int], gone: dict[int, str], state: MappedState | None
) -> None:
    there = dict(made.named_modules(remove_duplicate=False))
    for name, hooks in old.hooks.items():
        if not hooks or (name and id(old.modules[name]) in kept):
            continue
        if name not in there:
            raise StepError(
                f"{where}: there are hooks on {name!r} ({kinds(hooks)}), and the new module has no submodule of that "
                f"name to carry them. Give it one, or take the hooks off before create_schedule."
            )
        if name:
            move_hooks(hooks, old.full_backward[name], there[name], gone, where)
    if state is not None:
        attach(made, state, inside=True)
    if id(old.module) in kept:
        clear_hooks(old.module)
    move_hooks(old.hooks[""], old.full_backward[""], made, gone, where)


def _keep_flags(old: Old, made: nn.Module) -> None:
    held = {id(one): old.flags[name] for name, one in old.modules.items()}
    for name, one in made.named_modules(remove_duplicate=False):
        one.training = held.get(id(one), old.flags.get(name, old.flags[""])) if name else old.flags[""]


# What both need


def check_unscheduled(root: Root, places: dict[str, nn.Module], where: str) -> None:
    """Refuse to take modules away at which something was done that would be lost. Raises: StepError."""
    steps = [
        str(step)
        for step in root.history
        if any(step.path == path or step.path.startswith(path + ".") or not path for path in places)
        and not (TABLE[step.primitive].outlives and not _per_rank(step.kwargs.values()))
    ]
    dressed = [
        f"{'.'.join(filter(None, (path, name)))!r} ({', '.join(layer.describe() for layer in layers(one))})"
        for path, module in places.items()
        for name, one in module.named_modules()
        if layers(one)
    ]
    if steps or dressed:
        what = "; ".join(steps) if steps else ", ".join(dressed)
        raise StepError(
            f"{where}: steps at or below {', '.join(map(repr, places))} would be lost: {what}. Replace first, and do "
            f"those at the new module: sch.undo() takes back the last step."
        )


def _per_rank(values: Any) -> bool:
    return any(isinstance(one, codec.PerRank) for one in values)


def check_keys(where: str, old: Old, module: nn.Module) -> None:
    """Parameters and buffers are right by now; what else a state can hold is compared here."""
    now = set(_original_keys(module))
    lost, more = sorted(old.original_keys - now), sorted(now - old.original_keys)
    if lost or more:
        raise ArgumentError(
            f"{where}: the state_dict would {f'lose {lost[0]!r}' if lost else f'also have {more[0]!r}'}, what "
            f"get_extra_state returns. The new module needs get_extra_state and set_extra_state where the old one has "
            f"them, and nowhere else."
        )


def check_references(where: str, model: nn.Module, gone: dict[int, str], own: dict[int, str]) -> None:
    for what, at in references(model, own):
        raise ArgumentError(
            f"{where}: the new module also holds its own {what!r} in the attribute {at!r}, and the old tensor that "
            f"takes its place would not be used there. Look it up as self.{what} in forward instead."
        )
    for what, at in references(model, gone):
        raise StepError(
            f"{where}: {at!r} refers to {what!r} other than as a child, parameter or buffer, and would go on using the "
            f"old one. Let that module look it up when it is called, or replace the one at {at.rpartition('.')[0]!r}."
        )


def tags_of(root: Root, where: str, found: Fit, old: Tensors) -> dict[int, dict[str, Any]]:
    """The annotations by the id of their parameter; those of a new parameter are those of all that it is made of."""
    named = dict(root.copy.named_parameters())
    tags = {id(named[name]): held for name, held in root.annotations.items()}
    for name in found.made:
        sources = list(dict.fromkeys(named_in(found.sources[name])))
        first = tags.get(id(old.every[sources[0]]), {})
        for one in sources[1:]:
            other = tags.get(id(old.every[one]), {})
            if codec.key(other) != codec.key(first):
                raise StepError(
                    f"{where}: {name!r} is made of {sources[0]!r} and {one!r}, whose annotations differ: {first} and "
                    f"{other}. Annotate {name!r} after this step instead."
                )
        if first:
            tags[id(found.values[name])] = first
    return tags


def put_tags(root: Root, tags: dict[int, dict[str, Any]]) -> None:
    if root.annotations:
        now = {name: tags[id(one)] for name, one in root.copy.named_parameters() if id(one) in tags}
        root.annotations.clear()
        root.annotations.update(now)


@contextmanager
def _in_place(root: Root, old: nn.Module, new: nn.Module, path: str) -> Iterator[None]:
    """Within and after: the new module under all names of the old one. Whatever is raised, the old one is back."""
    places = [
        (one._modules, name) for one in root.copy.modules() for name, child in one._modules.items() if child is old
    ]
    copy = root.copy
    for children, name in places:
        children[name] = new
    if not path:
        root.copy = new
    try:
        yield
    except BaseException:
        for children, name in places:
            children[name] = old
        root.copy = copy
        raise


def _original_keys(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(state_keys(module))
    for state in maps_on(module):
        found = state.undo(found, "")
    return found


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _extra_states(module: nn.Module) -> dict[str, Any]:
    return {name: one.get_extra_state() for name, one in module.named_modules() if _has_extra_state(one)}


def _keep_extra_states(old: Old, made: nn.Module) -> None:
    for name, one in made.named_modules():
        if name in old.extra and one is not old.modules[name] and _has_extra_state(one):
            one.set_extra_state(old.extra[name])


def kinds(hooks: Hooks) -> str:
    return ", ".join(name.strip("_") for name in hooks)


def _where(place: Schedule) -> str:
    return f'replace at "{place.path}"' if place.path else "replace at the whole model"


def _last(path: str) -> str:
    return path.rpartition(".")[2] or "child"
