"""Everything about a model, and about torch and transformers, that a schedule must leave as it was.

``fingerprint(model)`` and ``global_state()`` are flat dicts of plain values.
``changes(before, after)`` says what differs.
"""

import random
import sys
import types
from typing import Any

import numpy
import torch
import torch._dynamo  # wraps torch.manual_seed when it is first imported, whoever does that
from torch import nn

Flat = dict[str, Any]


def fingerprint(model: nn.Module) -> Flat:
    """Ids of modules and tensors, versions, dtypes, .grad, every module's __dict__, hooks, flags, class, config."""
    flat: Flat = {}
    seen: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        at = name or "<model>"
        flat[f"{at}: object"] = id(module)
        flat[f"{at}: class"] = (id(type(module)), type(module).__qualname__, module.forward.__qualname__)
        flat[f"{at}: training"] = module.training
        if id(module) not in seen:
            seen[id(module)] = at
            _object(flat, at, vars(module), seen)
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        flat[f"{name}: tensor"] = id(tensor)
    flat["state_dict"] = tuple(model.state_dict())
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        flat["config"] = repr(config.to_dict())
    return flat


def _object(flat: Flat, at: str, value: Any, seen: dict[int, str]) -> None:
    if isinstance(value, torch.Tensor):
        flat[at] = _tensor(value)
        return
    if isinstance(value, nn.Module) or value is None or isinstance(value, type | types.FunctionType | types.ModuleType):
        flat[at] = ("id", id(value))
        return
    if isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        flat[at] = (type(value).__name__, repr(value))
        return
    if id(value) in seen:
        flat[at] = ("same as", seen[id(value)])
        return
    seen[id(value)] = at
    flat[at] = (type(value).__qualname__, id(value))
    if isinstance(value, dict):
        flat[f"{at} keys"] = tuple(repr(key) for key in value)
        for key, held in value.items():
            _object(flat, f"{at}[{key!r}]", held, seen)
    elif isinstance(value, list | tuple):
        for index, held in enumerate(value):
            _object(flat, f"{at}[{index}]", held, seen)
    elif isinstance(value, set | frozenset):
        flat[f"{at} items"] = tuple(sorted(map(repr, value)))
    else:
        for key, held in [*getattr(value, "__dict__", {}).items(), *_slots(value)]:
            _object(flat, f"{at}.{key}", held, seen)


def _slots(value: Any) -> list[tuple[str, Any]]:
    names = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    grad = tensor.grad if tensor.is_leaf else None
    return (
        id(tensor), tensor._version, str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.device),
        tensor.requires_grad, type(tensor).__name__, None if grad is None else (id(grad), grad._version),
        len(tensor._backward_hooks or ()), tuple(sorted(getattr(tensor, "__dict__", {}))),
    )  # fmt: skip


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors, to compare the contents as well: not every write counts up a version."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}


def global_state() -> Flat:
    """The written list of what we could touch outside the model."""
    flat: Flat = {
        "torch rng": torch.get_rng_state().numpy().tobytes(),
        "python rng": random.getstate(),
        "numpy rng": repr(numpy.random.get_state()),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast cpu": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cuda": (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "anomaly": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "function modes": len(torch.overrides._get_current_function_mode_stack()),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    }
    patched = [
        (
            nn.Module,
            ("__call__", "__getattr__", "__setattr__", "__delattr__", "_call_impl", "register_buffer", "forward"),
        ),
        (torch.autograd.Function, ("apply",)),
        (torch.autocast, ("__enter__", "__exit__")),
        (torch.no_grad, ("__enter__", "__exit__")),
        (torch.enable_grad, ("__enter__", "__exit__")),
        (torch.set_grad_enabled, ("__init__", "__enter__")),
        (torch, ("is_grad_enabled", "is_autocast_enabled", "_check", "compile", "manual_seed", "rand")),
        (torch.Tensor, ("__bool__", "item", "__int__", "__deepcopy__", "tolist")),
        (torch.compiler, ("is_compiling", "is_exporting")),
        (random, ("random", "randint", "uniform")),
        (torch.nn.functional, ("linear", "dropout", "scaled_dot_product_attention")),
        (sys, ("settrace", "gettrace")),
    ]
    for owner, names in patched:
        for name in names:
            held = getattr(owner, name, None)
            held = getattr(held, "__func__", held)
            flat[f"{owner.__name__}.{name}"] = id(held) if isinstance(held, types.FunctionType) else repr(held)
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    ):
        flat[name] = tuple(getattr(torch.nn.modules.module, name).items())
    masking = sys.modules.get("transformers.masking_utils")
    if masking is not None:
        flat["masking_utils"] = tuple(
            (name, id(held)) for name, held in sorted(vars(masking).items()) if callable(held)
        )
        flat["mask registry"] = _registry(masking.ALL_MASK_ATTENTION_FUNCTIONS)
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None:
        flat["attention registry"] = _registry(modeling.ALL_ATTENTION_FUNCTIONS)
    return flat


def _registry(registry: Any) -> tuple[Any, ...]:
    entries = {name: registry[name] for name in registry}
    return tuple((name, id(held)) for name, held in sorted(entries.items()) if not name.startswith("slapo"))


def changes(before: Flat, after: Flat) -> list[str]:
    """What differs, in words; an empty list if nothing does."""
    keys = list(dict.fromkeys([*before, *after]))
    return [
        f"{key}: {before.get(key, '(absent)')!r:.120} -> {after.get(key, '(absent)')!r:.120}"
        for key in keys
        if before.get(key, "(absent)") != after.get(key, "(absent)")
    ]
