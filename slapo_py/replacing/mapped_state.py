"""The state of a module whose parameters were mapped, under the names that they had before.

A `MappedState` sits on the module below which a map's names lie, as a hook of `state_dict`, with its counterpart for
`load_state_dict`. `to_original` and `from_original` do the same for any other tensors by name: gradients, the moments
of an optimizer. Where maps are nested, the inner ones are undone first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo_py.replacing.parameter_map import ParameterMap


@dataclass(frozen=True, eq=False)
class MappedState:
    """What one step did to the names at and below a module, and how to say it in those from before.

    Attributes:
        map: the tensors with another name or another shape than before.
        order: the keys of the module's state_dict before the step, in order.
        versions: the versions of the modules that a state_dict of before holds as metadata, by path.
        own: buffers outside of the state_dict that only the new module has.
        gone: buffers outside of the state_dict that only the old one had.
    """

    map: ParameterMap
    order: tuple[str, ...]
    versions: dict[str, int | None]
    own: frozenset[str]
    gone: tuple[str, ...]

    def __deepcopy__(self, memo: Any) -> "MappedState":
        return self  # it is never changed

    def __call__(self, module: nn.Module, state: Any, prefix: str, local_metadata: Any) -> None:
        """The hook of `state_dict`: what lies below `prefix` gets the names from before."""
        below = {name: state.pop(name) for name in [one for one in state if one.startswith(prefix)]}
        state.update(self.undo(below, prefix))
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            kept = metadata.get(prefix[:-1], local_metadata)
            for path in [one for one in metadata if one == prefix[:-1] or one.startswith(prefix)]:
                del metadata[path]
            for path, version in self.versions.items():
                metadata[(prefix + path).rstrip(".")] = dict(kept if not path else {}, version=version)

    def undo(self, state: Mapping[str, Any], prefix: str, known: dict[Any, Any] | None = None) -> dict[str, Any]:
        """Names after the step -> names before it, in the order that they had. Names not below `prefix` stay."""
        new = {name: state[prefix + name] for name in self.map.new_shapes if prefix + name in state}
        old = self.map.inverse(new, known)
        rank: dict[str, float] = {prefix + name: index for index, name in enumerate(self.order)}
        last = -1.0
        below: list[tuple[float, str, Any]] = [
            (rank.get(prefix + name, last), prefix + name, v) for name, v in old.items()
        ]
        for name, value in state.items():
            inner = name.removeprefix(prefix)
            if not name.startswith(prefix) or inner in self.map.new_shapes or inner in self.own:
                continue
            last = rank.get(name, last)  # what is not known, of a hook of the user's, stays behind what it followed
            below.append((last, name, value))
        below.sort(key=lambda one: one[0])
        result: dict[str, Any] = {}
        done = False
        for name, value in state.items():
            if not name.startswith(prefix):
                result[name] = value
            elif not done:
                done = True
                result.update({key: held for _, key, held in below})
        return result

    def redo(self, state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Names before the step -> names after it."""
        old = {name: state[prefix + name] for name in self.map.old_shapes if prefix + name in state}
        taken = {prefix + name for name in old}
        kept = {name: value for name, value in state.items() if name not in taken}
        return {**kept, **{prefix + name: value for name, value in self.map.forward(old).items()}}


@dataclass(frozen=True, eq=False)
class MappedLoading:
    """The counterpart of a `MappedState`: a hook before `load_state_dict`."""

    state: MappedState

    def __deepcopy__(self, memo: Any) -> "MappedLoading":
        return self

    @torch.no_grad()
    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        mapping = self.state.map
        expected = {name: shape for name, shape in mapping.old_shapes.items() if name in self.state.order}
        given = {name: state.pop(prefix + name) for name in expected if prefix + name in state}
        foreign = [prefix + name for name in mapping.new_shapes if prefix + name in state]
        for name in foreign:  # the new names are nobody's: a checkpoint has the old ones
            del state[name]
        if strict:
            unexpected += foreign
            missing += [prefix + name for name in expected if name not in given]
        for name, value in list(given.items()):
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            if shape != expected[name]:
                errors.append(
                    f"size mismatch for {prefix + name}: the checkpoint has {shape}, and the model needs "
                    f"{expected[name]}."
                )
                del given[name]
        held = {**dict(_parameters(module)), **dict(_buffers(module))}
        live = {name: held[name] for name in mapping.new_shapes if name in held}
        known = {} if len(given) == len(expected) else mapping.inverse(live)  # what is missing stays as it is
        known = {name: value for name, value in known.items() if name in expected}
        for name, value in mapping.forward({**known, **given}).items():
            if any(source in given for source in mapping.sources(name)):
                state[prefix + name] = value
            elif strict:
                state[prefix + name] = live[name]  # else it would be missed under its new name as well


def attach(module: nn.Module, state: MappedState, *, inside: bool = False) -> None:
    """Put a map on a module: undone first when its state is taken, done last when it is loaded.

    `inside`: the hooks of the state that the module has already see the new names, and so stay on the inner side.
    """
    saving = module._register_state_dict_hook(state)
    loading = module.register_load_state_dict_pre_hook(MappedLoading(state))
    if inside:
        module._load_state_dict_pre_hooks.move_to_end(loading.id, last=False)  # type: ignore[attr-defined]
    else:
        module._state_dict_hooks.move_to_end(saving.id, last=False)  # type: ignore[attr-defined]


def maps_on(module: nn.Module) -> list[MappedState]:
    """The maps whose names lie below this module, the latest first."""
    return [hook for hook in module._state_dict_hooks.values() if isinstance(hook, MappedState)]


def stages(module: nn.Module) -> Iterator[tuple[str, MappedState]]:
    """All maps at and below a module with their prefix, in the order in which they are undone."""
    for path, one in reversed(list(module.named_modules(remove_duplicate=False))):
        for state in maps_on(one):
            yield (path + "." if path else ""), state


def to_original(module: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by the names of a scheduled or built module -> the same under the original's names and in its order.

    For values, gradients and an optimizer's moments alike. A tensor that lies within one of the given is a window onto
    it. What is one object under several names is so afterwards. Raises: ArgumentError, if part of a tensor is missing.
    """
    result, known = dict(tensors), dict[Any, Any]()
    for prefix, state in stages(module):
        result = state.undo(result, prefix, known)
    return result


def from_original(module: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by the original's names -> the same under the names of a scheduled or built module."""
    result = dict(tensors)
    for prefix, state in reversed(list(stages(module))):
        result = state.redo(result, prefix)
    return result


def dropped_buffers(module: nn.Module) -> list[str]:
    """The original's buffers outside of its state_dict that a module does without."""
    return [prefix + name for prefix, state in stages(module) for name in state.gone]


def own_buffers(module: nn.Module) -> list[str]:
    """The buffers outside of the state_dict that the original does not have."""
    return [prefix + name for prefix, state in stages(module) for name in state.own]


def is_mapped(module: nn.Module) -> bool:
    return next(stages(module), None) is not None


def _parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_parameters(remove_duplicate=False)


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_buffers(remove_duplicate=False)
