"""Where a transformers model makes masks and attends, and whether a place can be given another backend.

The danger is a mask of one backend in the attention of another: for sdpa, None stands for a causal mask; eager adds
what it is given, and takes None for "nothing is masked". So all that makes masks or attends by one config changes
together, or not at all.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from slapo_py.root import Root
from slapo_py.schedule import Schedule
from slapo_py.scheduled import bare

Backend = str | Callable[..., Any]

BACKENDS = ("sdpa", "eager", "flex")
FLAGS = {"sdpa": "_supports_sdpa", "flex": "_supports_flex_attn"}
"""By which attribute a model class says that it supports one."""


@dataclass(frozen=True)
class _Role:
    """What the functions of a class do: call an attention of the registry, make masks for one, ask for flex by name."""

    attends: bool
    masks: bool
    asks_for_flex: bool


def _role(module: nn.Module) -> _Role:
    cls: Any = bare(module)
    found: _Role = _role_of(cls)
    return found


@functools.cache
def _role_of(cls: Any) -> _Role:
    """Read off the globals that the class's own functions name: models differ in everything else."""
    from transformers import modeling_utils

    attends = masks = flex = False
    for base in cls.__mro__:
        # What every model inherits (generate, from_pretrained) is not how this one runs.
        if base.__module__.startswith(("torch.", "transformers.modeling_", "transformers.generation")):
            continue
        for function in vars(base).values():
            function = inspect.unwrap(function) if callable(function) else function
            if not inspect.isfunction(function):
                continue
            for held in (function.__globals__.get(name) for name in _words(function.__code__, "co_names")):
                attends |= isinstance(held, modeling_utils.AttentionInterface)
                made = getattr(held, "__module__", "") == "transformers.masking_utils"
                masks |= made and getattr(held, "__name__", "").startswith("create_")
            flex |= "flex_attention" in _words(function.__code__, "co_consts")
    return _Role(attends, masks, flex)


def _words(code: CodeType, what: str) -> Iterator[str]:
    """The names, or the constants, of a function and those inside it."""
    yield from (one for one in getattr(code, what) if isinstance(one, str))
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _words(one, what)


def _is_model(module: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def _nested(config: Any) -> list[Any]:
    """A config and those inside it."""
    kind = sys.modules["transformers"].PretrainedConfig
    if not isinstance(config, kind):
        return []
    return [config, *(one for value in vars(config).values() for one in _nested(value))]


def configs_below(place: Schedule) -> list[Any]:
    found = [one for module in place.module.modules() for one in _nested(getattr(module, "config", None))]
    return list({id(one): one for one in found}.values())


def _is_within(path: str, above: str) -> bool:
    return not above or path == above or path.startswith(above + ".")


def problem(place: Schedule, backend: Backend) -> str | None:
    """Why this place can't be given the backend, with what to write instead; None if it can."""
    module, kind, root = place.module, bare(place.module).__name__, place.root
    if not _is_model(module):
        above = [path for path in _above(place.path) if _is_model(root.module(path))]
        if not above:
            return f"{kind} is not a transformers model (PreTrainedModel). For others, write replace(...)."
        fit = next((path for path in above if problem(root.cursor(path), backend) is None), above[0])
        return f"{kind} is a part of a transformers model, which makes the masks for it. {_write(fit, backend)}"
    every = {path: (one, _role(one)) for path, one in root.copy.named_modules()}
    attends = [path for path, (_, role) in every.items() if role.attends and _is_within(path, place.path)]
    if not attends:
        return (
            f"no attention of this {kind} goes through transformers' registry. Choose it where the model is made: "
            f"{kind}._from_config(config, attn_implementation=...)."
        )
    return (
        _strays(place, every, attends, backend)
        or _shared(root, place, every, backend)
        or _unsupported(place, every, attends, backend)
    )


def _strays(place: Schedule, every: dict[str, Any], attends: list[str], backend: Backend) -> str | None:
    """Attention that would not change, while the masks that it is given do."""
    for path, (one, _) in every.items():
        inside = _is_within(path, place.path) and "Attention" in bare(one).__name__
        own = bare(one).__module__.startswith("transformers.")
        if inside and own and not any(_is_within(path, at) or _is_within(at, path) for at in attends):
            return (
                f"the {bare(one).__name__} at {path!r} does not go through transformers' registry, so it would be "
                f"given masks that are made for another.{_below(place, backend)}"
            )
    return None


def _shared(root: Root, place: Schedule, every: dict[str, Any], backend: Backend) -> str | None:
    """Masks or attentions outside that the same config decides."""
    ours = {id(one) for one in configs_below(place)}
    for path, (one, role) in every.items():
        if _is_within(path, place.path) or not (role.attends or role.masks):
            continue
        if role.masks and _is_within(place.path, path):
            return (
                f"the masks come from the {bare(one).__name__} at {path!r}, which would go on making those of another "
                f"backend. {_write(path, backend)}"
            )
        if any(id(config) in ours for config in _nested(getattr(one, "config", None))):
            common = next(at for at in _above(place.path) if _is_within(path, at) and _is_model(root.module(at)))
            return f"its config is that of {path!r}, too, which lies outside. {_write(common, backend)}"
    return None


def _unsupported(place: Schedule, every: dict[str, Any], attends: list[str], backend: Backend) -> str | None:
    flag = FLAGS.get(backend, "") if isinstance(backend, str) else ""
    for path, (one, role) in every.items():
        if backend == "flex" and role.asks_for_flex and _is_within(path, place.path):
            return (
                f"the {bare(one).__name__} at {path!r} asks for transformers' own 'flex_attention' by name, which is "
                f'unsafe on CPU; ours has another name. Write attention("sdpa").'
            )
        if not _is_within(path, place.path) or not _is_model(one) or not any(_is_within(at, path) for at in attends):
            continue
        if flag and not getattr(one, flag, False):
            at = f" at {path!r}" if path != place.path else ""
            return f"{bare(one).__name__}{at} does not support {backend!r} ({flag} is False).{_below(place, backend)}"
    if backend != "eager" and any(getattr(one, "output_attentions", False) for one in configs_below(place)):
        return (
            "its config has output_attentions=True, and only the backend 'eager' gives attention weights. "
            "Set it to False in the original's config, or leave the backend."
        )
    return None


def _above(path: str) -> list[str]:
    """The paths above, the nearest first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:depth]) for depth in reversed(range(len(parts)))]


def _write(path: str, backend: Backend) -> str:
    shown = f'"{backend}"' if isinstance(backend, str) else getattr(backend, "__name__", "f")
    place = f'sch["{path}"]' if path else "sch"
    return f"Write {place}.attention({shown})."


def _below(place: Schedule, backend: Backend) -> str:
    """The models inside that could be given the backend."""
    for name, one in place.module.named_modules():
        if name and _is_model(one) and problem(place[name], backend) is None:
            return f" A model inside it does: {_write(place[name].path, backend)}"
    return ""
