"""The structural clone: new module objects and new configs around the very same tensors."""

import copy
import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from slapo_py.errors import CloneError

Memo = dict[int, Any]

KEPT_ALIVE = -1  # a key that is no id

# Never copied and never looked into. Functions and classes belong to the user's program, not to the model.
ATOMIC: tuple[type, ...] = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range,
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType, property,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


def clone(model: nn.Module) -> nn.Module:
    """Clone a model structurally: before `model`, after a second model that can be rewritten freely.

    Every module object is new; so is everything else that hangs on a module (configs, lists, dicts), shared among
    the new modules as it was shared among the old ones. Parameters, buffers and other tensors are the *same* objects,
    so ties hold and no memory is spent. Hook functions are the same, bound to the new modules where they were
    methods of the old. What can't be copied (a lock, a process group, a random generator) is shared.

    Requires: no TorchScript, compiled, DDP-wrapped or uninitialized (lazy) module. Raises `CloneError` otherwise.
    """
    shells, memo = _survey(model)
    for module, shell in shells:
        for name, value in vars(module).items():
            shell.__dict__[name] = _copied_hooks(value, memo) if _is_hooks(name, value) else _copied(value, memo)
    result: nn.Module = memo[id(model)]
    return result


def copy_structure(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """A copy of any object (a cache, a dataclass) around the same tensors, and those tensors. Modules are shared."""
    memo: Memo = {}
    tensors: list[torch.Tensor] = []
    for one in _walk(value, set()):
        if isinstance(one, nn.Module):
            memo[id(one)] = one
        elif isinstance(one, torch.Tensor):
            memo[id(one)] = one
            tensors.append(one)
        elif _is_foreign(one, memo):
            memo[id(one)] = one
    return _copied(value, memo), tensors


def _survey(model: nn.Module) -> tuple[list[tuple[nn.Module, nn.Module]], Memo]:
    """All modules with an empty shell for each, and a memo of what stands for what in the copy."""
    names = {id(module): name for name, module in model.named_modules()}
    memo: Memo = {}
    shells: list[tuple[nn.Module, nn.Module]] = []
    shared: list[Any] = []
    for one in _walk(model, set()):
        if isinstance(one, nn.Module):
            _refuse(one, names.get(id(one), "(not registered)"))
            memo[id(one)] = _shell(one, names.get(id(one), "(not registered)"))
            shells.append((one, memo[id(one)]))
        elif isinstance(one, torch.Tensor):
            memo[id(one)] = one
        else:
            shared.append(one)
    for one in shared:  # after all shells are known: a weak reference to a module becomes one to its clone
        if isinstance(one, weakref.ref):
            target = one()
            if id(target) in memo and target is not None:
                memo[id(one)] = weakref.ref(memo[id(target)])
        elif _is_foreign(one, memo):
            memo[id(one)] = one
    return shells, memo


def _walk(root: Any, seen: set[int]) -> Iterator[Any]:
    """Everything reachable from an object that is no plain value, each once; also through unregistered modules."""
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, ATOMIC) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, nn.Module):
            for name, held in vars(value).items():
                if not _is_hooks(name, held):  # hooks are the user's: kept, not copied
                    stack.append(held)
        elif isinstance(value, torch.Tensor | weakref.ref | types.MethodType):
            continue
        elif isinstance(value, dict):
            stack.extend(value.keys())
            stack.extend(value.values())
            stack.extend(getattr(value, "__dict__", {}).values())
        elif isinstance(value, list | tuple | set | frozenset):
            stack.extend(value)
        elif isinstance(value, functools.partial):
            stack.extend([value.func, *value.args, *value.keywords.values()])
        else:
            stack.extend(getattr(value, "__dict__", {}).values())
            stack.extend(_slots(value))


def _slots(value: Any) -> Iterator[Any]:
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(value, name):
                yield getattr(value, name)


def _is_hooks(name: str, value: Any) -> bool:
    ends = ("hooks", "hooks_with_kwargs", "hooks_always_called")
    return name.startswith("_") and name.endswith(ends) and isinstance(value, dict)


def _refuse(module: nn.Module, name: str) -> None:
    place = f"the module at {name!r}" if name else "the model"
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise CloneError(
            f"create_schedule: {place} is TorchScript ({kind}), which is compiled code that can't be rewritten. "
            f"Pass the plain nn.Module it was made from: create_schedule(model)."
        )
    if hasattr(module, "_orig_mod") and kind == "OptimizedModule":
        raise CloneError(
            f"create_schedule: {place} is the result of torch.compile, which always runs the module it was made from. "
            f'Pass the plain module and compile as a step: sch["{name}"].compile().'
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise CloneError(
            f"create_schedule: {place} is wrapped in DistributedDataParallel. Pass the plain module; the wrapping is "
            f"done by slapo_py.build."
        )
    if any(is_lazy(held) for held in (*module._parameters.values(), *module._buffers.values()) if held is not None):
        raise CloneError(
            f"create_schedule: {place} ({kind}) has parameters that are not initialized yet. Run the model once on a "
            f"small input, then create the schedule."
        )


def _shell(module: nn.Module, name: str) -> nn.Module:
    try:
        shell: nn.Module = object.__new__(type(module))
    except TypeError as error:  # a module that is also a list, a dict ...
        raise CloneError(
            f"create_schedule: the module at {name!r} ({type(module).__name__}) holds data outside its attributes: "
            f"{error}. Keep that data in an attribute of the module instead of inheriting from a built-in type."
        ) from error
    return shell


def _is_foreign(value: Any, memo: Memo) -> bool:
    """True for a leaf that is to be shared: it can't be copied, or it is a method of something outside the model."""
    if isinstance(value, types.MethodType):
        return id(value.__self__) not in memo
    if isinstance(value, torch.Generator):
        return True
    if isinstance(value, dict | list | tuple | set | frozenset | functools.partial):
        return False
    if getattr(value, "__dict__", None) or next(_slots(value), None) is not None:
        return False  # looked into: only those of its parts that can't be copied are shared
    try:
        copy.deepcopy(value, {})
    except Exception:
        return True
    return False


def _copied(value: Any, memo: Memo) -> Any:
    if isinstance(value, ATOMIC):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if _is_simple(value):
        return copy.deepcopy(value, memo)
    trial = dict(memo)  # a copy that fails half-way must leave nothing behind
    try:
        result = copy.deepcopy(value, trial)
    except Exception:  # whatever a user's __deepcopy__ or __reduce__ raises: the object stays one
        memo[id(value)] = value
        return value
    # deepcopy keeps temporary objects alive under the memo's own id; without that list their ids would be reused.
    memo.setdefault(KEPT_ALIVE, []).append(trial.pop(id(trial), None))
    memo.update(trial)
    return result


def _is_simple(value: Any) -> bool:
    """A container of plain values can't fail half-way, so it needs no trial memo."""
    if type(value) in (list, tuple, set):
        return all(isinstance(one, ATOMIC) for one in value)
    if type(value) is dict:
        return all(isinstance(one, (*ATOMIC, torch.Tensor, nn.Module)) for one in value.values())
    return False


def _copied_hooks(hooks: dict[int, Any], memo: Memo) -> dict[int, Any]:
    fresh = copy.copy(hooks)
    for key, hook in hooks.items():
        if isinstance(hook, types.MethodType) and id(hook.__self__) in memo and isinstance(hook.__self__, nn.Module):
            fresh[key] = types.MethodType(hook.__func__, memo[id(hook.__self__)])
        elif type(hook).__name__ == "_WrappedHook":
            fresh[key] = copy.deepcopy(hook, memo)  # torch's own holder of a hook and a weak reference to its module
    return fresh
