"""What hangs on a module, or points to it, when another one takes its place: hooks, and references past the tree."""

import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _WrappedHook

from slapo_py.clone import _is_hooks, _walk
from slapo_py.errors import StepError

Hooks = dict[str, dict[int, Any]]

_OLD_FIRST = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_pre_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
)
"""These prepare what the module itself then sees, so those from outside come before its own. Of others, after them."""


def hooks_on(module: nn.Module) -> Hooks:
    """A copy of all hooks of a module, those of its state included, by the attribute that holds them."""
    return {name: dict(held) for name, held in vars(module).items() if _is_hooks(name, held) and held}


def move_hooks(hooks: Hooks, full_backward: bool | None, target: nn.Module, gone: dict[int, str], where: str) -> None:
    """Let hooks run around another module. `gone`: modules that leave the model, by id.

    Raises: StepError, if a hook is a method of a module that leaves, or its kind does not go with those of the target.
    """
    if not hooks:
        return
    for held in hooks.values():
        for hook in held.values():
            owner = getattr(hook, "__self__", None)
            if id(owner) in gone:
                raise StepError(
                    f"{where}: the hook {hook.__name__} is a method of the module that leaves, {gone[id(owner)]!r}, "
                    f"and would see that one only. Make it a function of the module that it is called with."
                )
    if "_backward_hooks" in hooks or "_backward_pre_hooks" in hooks:
        own = target._is_full_backward_hook
        if own is not None and full_backward is not None and own is not full_backward:
            raise StepError(
                f"{where}: the old module has {_kind(full_backward)} hooks and the new one {_kind(own)} hooks, which "
                f"torch can't run together. Use register_full_backward_hook for both."
            )
        target._is_full_backward_hook = full_backward if own is None else own
    for name, held in hooks.items():
        moved = {key: _rewrapped(hook, target) for key, hook in held.items()}
        held_there: Any = getattr(target, name)
        own_hooks = dict(held_there)
        held_there.clear()
        held_there.update({**moved, **own_hooks} if name in _OLD_FIRST else {**own_hooks, **moved})


def clear_hooks(module: nn.Module) -> None:
    for name, held in vars(module).items():
        if _is_hooks(name, held):
            held.clear()


def _rewrapped(hook: Any, target: nn.Module) -> Any:
    """torch binds some hooks to their module."""
    if type(hook) is _WrappedHook and hook.with_module:
        return _WrappedHook(hook.hook, target)
    return hook


def _kind(full: bool) -> str:
    return "full backward" if full else "backward"


def references(model: nn.Module, wanted: dict[int, str]) -> Iterator[tuple[str, str]]:
    """Where modules or tensors are held other than as a child, parameter or buffer: (what, path of the attribute)."""
    seen = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_modules", "_parameters", "_buffers"):
                continue
            at = f"{path}.{name}" if path else name
            held = value.values() if _is_hooks(name, value) else _walk(value, seen)
            for one in held:
                target = one
                if isinstance(one, types.MethodType):
                    target = one.__self__
                elif isinstance(one, weakref.ref):
                    target = one()
                    if isinstance(target, Tensor):  # it ends with the tensor, as it is meant to
                        continue
                if isinstance(target, nn.Module | Tensor) and id(target) in wanted:
                    yield wanted[id(target)], at
