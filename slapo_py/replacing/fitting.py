"""The parameters and buffers of a new module: which old one each becomes, so that none is lost or drawn anew."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from slapo_py import codec
from slapo_py.errors import ArgumentError, StepError
from slapo_py.params import is_source, named_in
from slapo_py.replacing.parameter_map import ParameterMap

Params = Mapping[str, Any] | None


class Tensors:
    """The parameters and buffers below a module at one moment, by all their names."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self.buffers: dict[str, torch.Tensor] = dict(module.named_buffers(remove_duplicate=False))
        self.every = {**self.parameters, **self.buffers}
        self.passing = {
            (f"{path}." if path else "") + name
            for path, one in module.named_modules(remove_duplicate=False)
            for name in one._non_persistent_buffers_set
        }
        """Buffers outside of the state_dict."""
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(one.shape) for name, one in self.every.items() if not is_lazy(one)
        }

    def kind(self, name: str) -> str:
        return "parameter" if name in self.parameters else "buffer"

    @property
    def lasting(self) -> list[str]:
        """Parameters and the buffers that the state_dict holds."""
        return [name for name in self.every if name not in self.passing]


@dataclass
class Fit:
    """What a new module's tensors become. Names of the new side are seen from the new module.

    Attributes:
        same: names on both sides: the old tensor itself is put in.
        sources: where the others come from.
        values: the tensor for each new name.
        made: names of `values` that are new tensors.
    """

    same: list[str] = field(default_factory=list)
    sources: dict[str, Any] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)


def fit(where: str, old: Tensors, new: nn.Module, params: Params, *, by_name: bool) -> Fit:
    """Find an old tensor for each that the new module's state consists of. Changes nothing.

    `by_name`: a name and shape that is also there in `old` means that tensor, and each tensor of `old` must be taken.
    Raises: ArgumentError, naming what is new, lost, used twice or of another shape, with the line to write.
    """
    theirs = Tensors(new)
    result = Fit()
    params = _checked(where, params, old, theirs)
    claimed = {one for source in params.values() for one in named_in(source)}
    for name, tensor in theirs.every.items():
        if is_lazy(tensor):
            raise ArgumentError(
                f"{where}: {theirs.kind(name)} {name!r} of the new module is not initialized yet. Run that module once "
                f"on a small input first."
            )
        source = params.get(name)
        if source is None:
            source = _renamed(name, tensor, old, claimed, by_name)
        if source is not None and (source != name or not by_name):
            result.sources[name] = source
        elif source == name or (by_name and _matches(where, name, theirs, old)):
            result.same.append(name)
        elif name not in theirs.passing:
            raise ArgumentError(f"{where}: {_new(name, theirs, old, by_name)}")
    if by_name:
        _check_all_taken(where, result, old, theirs)
    used = dict.fromkeys(one for source in result.sources.values() for one in named_in(source))
    twice = [name for name in result.same if name in used]
    if twice:
        raise ArgumentError(
            f"{where}: {old.kind(twice[0])} {twice[0]!r} is used in params, and the new module has one of that name as "
            f"well, which would be the same. Say in params where {twice[0]!r} comes from, or rename it."
        )
    mapping = map_of(where, result, old)
    for name, source in result.sources.items():
        if mapping.new_shapes[name] != theirs.shapes[name]:
            raise ArgumentError(
                f"{where}: {theirs.kind(name)} {name!r} of the new module has shape {theirs.shapes[name]}, and "
                f"{_written(source)} has {mapping.new_shapes[name]}."
            )
    _fill(where, result, mapping, old, theirs)
    _check_own_ties(where, result, theirs)
    return result


def map_of(where: str, found: Fit, old: Tensors) -> ParameterMap:
    """The map of the tensors that have another name or shape. Raises: ArgumentError."""
    used = dict.fromkeys(one for source in found.sources.values() for one in named_in(source))
    try:
        return ParameterMap(found.sources, {name: old.shapes[name] for name in used})
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}.") from None


def put_in(new: nn.Module, found: Fit, old: Tensors, *, copied: bool) -> None:
    """Let the new module hold the tensors that were found for it. `copied`: others hold its other buffers, too."""
    for name, tensor in found.values.items():
        owner, leaf = owner_of(new, name)
        if getattr(owner, leaf) is not tensor:
            setattr(owner, leaf, tensor)
        if leaf in owner._buffers:
            source = found.sources.get(name, name)
            first = next(named_in(source))
            (owner._non_persistent_buffers_set.add if first in old.passing else _discard(owner))(leaf)
    devices = {tensor.device for tensor in old.every.values()}
    made: dict[int, torch.Tensor] = {}
    for name, tensor in list(new.named_buffers(remove_duplicate=False)):
        if name not in found.values:
            device = next(iter(devices)) if len(devices) == 1 else tensor.device
            owner, leaf = owner_of(new, name)
            if id(tensor) not in made:
                made[id(tensor)] = tensor.to(device, copy=copied)
            setattr(owner, leaf, made[id(tensor)])


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter or buffer, and its name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def holders(model: nn.Module, tensor: torch.Tensor) -> set[tuple[int, str]]:
    """The modules, by id, that hold a tensor, each with the name there."""
    return {
        (id(module), name)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for name, held in table.items()
        if held is tensor
    }


def check_untied(where: str, model: nn.Module, found: Fit, old: Tensors) -> None:
    """A tensor that goes into a new one must not live on elsewhere. Raises: StepError."""
    for name in found.made:
        for source in named_in(found.sources[name]):
            tensor = old.every[source]
            if len(holders(model, tensor)) > 1:
                every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
                ties = ", ".join(repr(one) for one, held in every if held is tensor)
                raise StepError(
                    f"{where}: {source!r} is tied: {ties} are one tensor, and {name!r} would take its values into "
                    f"another. Only a whole tensor under a new name can stay tied."
                )


def _discard(owner: nn.Module) -> Any:
    return owner._non_persistent_buffers_set.discard


def _checked(where: str, params: Params, old: Tensors, new: Tensors) -> dict[str, Any]:
    if params is None:
        return {}
    example = 'params={"qkv.weight": slapo.params.cat("q.weight", "k.weight", "v.weight")}'
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise ArgumentError(f"{where}: params must be a dict by the names of new parameters, found {params!r}. Write "
                            f"{example}.")  # fmt: skip
    for name, source in params.items():
        if name not in new.every:
            close = difflib.get_close_matches(name, new.every, n=3, cutoff=0.4) or list(new.every)[:6]
            raise ArgumentError(
                f"{where}: params names {name!r}, and the new module has no such parameter. It has "
                f"{', '.join(map(repr, close)) or 'none'}."
            )
        if not is_source(source):
            raise ArgumentError(
                f"{where}: params[{name!r}] must be the name of an old parameter, or slapo.params.cat, split or "
                f"transpose of such, found {source!r}. Write {example}."
            )
        for one in named_in(source):
            if one not in old.every:
                close = difflib.get_close_matches(one, old.every, n=3, cutoff=0.4) or list(old.every)[:6]
                raise ArgumentError(
                    f"{where}: params[{name!r}] uses {one!r}, and there is no such parameter here. There are "
                    f"{', '.join(map(repr, close)) or 'none'}."
                )
            if old.kind(one) != new.kind(name):
                raise ArgumentError(
                    f"{where}: params[{name!r}] would make a {new.kind(name)} of the {old.kind(one)} {one!r}."
                )
    return dict(params)


def _renamed(name: str, tensor: torch.Tensor, old: Tensors, claimed: set[str], by_name: bool) -> str | None:
    """The old name of a tensor that the new module already holds; each name for one tensor only."""
    if by_name and old.every.get(name) is tensor:
        return name
    found = next((one for one, held in old.every.items() if held is tensor and one not in claimed), None)
    if found is not None:
        claimed.add(found)
    return found


def _matches(where: str, name: str, new: Tensors, old: Tensors) -> bool:
    """Whether a tensor of the same name is there. One of another shape is refused, unless neither is kept."""
    if name not in old.every or old.kind(name) != new.kind(name):
        return False
    if old.shapes[name] == new.shapes[name]:
        return True
    if name in old.passing and name in new.passing:
        return False
    raise ArgumentError(
        f"{where}: {new.kind(name)} {name!r} has shape {old.shapes[name]} in the old module and {new.shapes[name]} in "
        f"the new one. Give the new module that shape, or say where {name!r} comes from: "
        f"params={{{codec.Source().write(name)}: ...}}."
    )


def _new(name: str, theirs: Tensors, old: Tensors, by_name: bool) -> str:
    shape = theirs.shapes[name]
    free = [one for one in old.lasting if not (by_name and one in theirs.every) and old.kind(one) == theirs.kind(name)]
    alike = [one for one in free if old.shapes[one] == shape]
    known = difflib.get_close_matches(name, alike, n=1, cutoff=0.0) or _stacked(free, old, shape)
    write = codec.Source().write
    example = write(known[0]) if len(known) == 1 else f"slapo.params.cat({', '.join(map(write, known))})"
    return (
        f"{theirs.kind(name)} {name!r} {shape} of the new module is not one of the old module's, and nothing is "
        f"initialized in silence. Say where it comes from: params={{{write(name)}: {example if known else '...'}}}."
    )


def _stacked(free: list[str], old: Tensors, shape: tuple[int, ...]) -> list[str]:
    """The first of some tensors that have this shape when they are put together along their first dim."""
    found: list[str] = []
    for name in free:
        one = old.shapes[name]
        if len(one) == len(shape) > 0 and one[1:] == shape[1:]:
            found.append(name)
            if sum(old.shapes[name][0] for name in found) >= shape[0]:
                break
    return found if found and sum(old.shapes[name][0] for name in found) == shape[0] else []


def _check_all_taken(where: str, found: Fit, old: Tensors, new: Tensors) -> None:
    taken = {*found.same, *(one for source in found.sources.values() for one in named_in(source))}
    lost = [name for name in old.lasting if name not in taken]
    if lost:
        shown = ", ".join(f"{name!r} {old.shapes[name]}" for name in lost[:4])
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        raise ArgumentError(
            f"{where}: the new module has no place for {old.kind(lost[0])} {shown}{more}, which would be lost. Give it "
            f"a {old.kind(lost[0])} of that name and shape, or say in params which one takes it."
        )


def _fill(where: str, found: Fit, mapping: ParameterMap, old: Tensors, new: Tensors) -> None:
    for name in found.same:
        found.values[name] = old.every[name]
    for name in found.sources:
        renamed = mapping.renames(name)
        if renamed is not None:
            found.values[name] = old.every[renamed]
            continue
        parts = {one: old.every[one] for one in mapping.sources(name)}
        _check_agree(where, name, parts, old)
        found.made.append(name)
    with torch.no_grad():
        used = {one: old.every[one].detach() for name in found.made for one in mapping.sources(name)}
        others = {one: old.every[one].detach() for one in mapping.old_shapes if one not in used}
        made = mapping.forward({**used, **others}) if found.made else {}
    for name in found.made:
        like = old.every[mapping.sources(name)[0]]
        found.values[name] = _in_class_of(like, made[name])
        found.values[name].__dict__.update(vars(like))


def _in_class_of(like: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    if isinstance(like, nn.Parameter):
        made: torch.Tensor = torch.Tensor._make_subclass(type(like), data, like.requires_grad)
        return made
    return data


def _check_agree(where: str, name: str, parts: dict[str, torch.Tensor], old: Tensors) -> None:
    first, *rest = parts
    for one in rest:
        for what, value in _facts(parts[one], one in old.passing).items():
            wanted = _facts(parts[first], first in old.passing)[what]
            if value != wanted:
                raise StepError(
                    f"{where}: {name!r} is made of {first!r} and {one!r}, which differ in {what}: {wanted} and "
                    f"{value}. They can't be one tensor."
                )
    for one, tensor in parts.items():
        if tensor.is_leaf and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
            raise StepError(
                f"{where}: there is a hook on the tensor {one!r}, which can't move on to a part of {name!r}. Take it "
                f"off before create_schedule."
            )


def _facts(tensor: torch.Tensor, passing: bool) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
        "class": type(tensor).__name__,
        "attributes": {name: codec.key(value) for name, value in sorted(vars(tensor).items())},
        "persistence": not passing,
    }


def _check_own_ties(where: str, found: Fit, new: Tensors) -> None:
    """What is one tensor in the new module must not become two."""
    first: dict[int, str] = {}
    for name, value in found.values.items():
        other = first.setdefault(id(new.every[name]), name)
        if found.values[other] is not value:
            raise ArgumentError(
                f"{where}: {other!r} and {name!r} are one tensor in the new module, and two in the old one. Give the "
                f"new module two."
            )


def _written(source: Any) -> str:
    return codec.Source().write(source)


def leaving(found: Fit, new: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The new module's own tensors that others take the place of, before `put_in`."""
    for name, tensor in Tensors(new).every.items():
        if name in found.values and found.values[name] is not tensor:
            yield name, tensor
