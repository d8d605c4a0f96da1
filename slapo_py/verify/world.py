"""The global state that a forward may leave behind: noted, compared, put back."""

import contextlib
import dataclasses
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from random import getstate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _device

from slapo_py.snapshot import random_states_kept
from slapo_py.verify.compiled import compiling_always

_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
_REGISTRIES = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
)


class Setting(NamedTuple):
    """One switch of torch that a forward could flip."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]


_CUDA, _CUDNN = torch.backends.cuda, torch.backends.cudnn
SETTINGS: tuple[Setting, ...] = (
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("default device", lambda: _device.CURRENT_DEVICE, torch.set_default_device),
    Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting(
        "deterministic algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    Setting("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Setting("anomaly mode", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    Setting("autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    Setting("cudnn benchmark", lambda: _CUDNN.benchmark, lambda value: setattr(_CUDNN, "benchmark", value)),
    Setting("cudnn deterministic", lambda: _CUDNN.deterministic, lambda value: setattr(_CUDNN, "deterministic", value)),
    Setting("flash attention", _CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    Setting("memory-efficient attention", _CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    Setting("attention by matmuls", _CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    *(
        setting
        for kind in ("cpu", "cuda")
        for setting in (
            Setting(
                f"autocast on {kind}",
                functools.partial(torch.is_autocast_enabled, kind),
                functools.partial(torch.set_autocast_enabled, kind),
            ),
            Setting(
                f"autocast dtype on {kind}",
                functools.partial(torch.get_autocast_dtype, kind),
                functools.partial(torch.set_autocast_dtype, kind),
            ),
        )
    ),
    Setting("trace function", sys.gettrace, sys.settrace),
    Setting("nn.Module.__call__", lambda: nn.Module.__call__, lambda value: setattr(nn.Module, "__call__", value)),
)


def random_states() -> dict[str, Any]:
    """The states of the random generators of torch, Python and numpy."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": getstate()}
    if "numpy" in sys.modules:
        found["numpy"] = _plain(sys.modules["numpy"].random.get_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.update({f"cuda:{index}": one for index, one in enumerate(torch.cuda.get_rng_state_all())})
    return found


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _plain(held) for name, held in state.items()}
    if isinstance(state, tuple | list):
        return tuple(_plain(one) for one in state)
    return state.tobytes() if hasattr(state, "tobytes") else state


def global_state() -> dict[str, Any]:
    """What there is besides random states, by name."""
    found: dict[str, Any] = {one.name: one.get() for one in SETTINGS}
    found["inference mode"] = torch.is_inference_mode_enabled()
    found["function modes"] = len(torch.overrides._get_current_function_mode_stack())
    found["dispatch modes"] = torch._C._len_torch_dispatch_stack()
    found["hooks of saved tensors"] = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    for name, content in _tables().items():
        found[name] = tuple((key, id(held)) for key, held in _others(content))
    for key, value in os.environ.items():
        if not key.lstrip("_").startswith(_COMPILERS):
            found[f"environment variable {key}"] = _Hidden(value)
    return found


_COMPILERS = ("TORCH", "TRITON")
"""torch.compile leaves such variables to itself: where its cache lies, which Python object its code asks."""


@dataclasses.dataclass(frozen=True, repr=False)
class _Hidden:
    """A value that is compared and never printed: it may be a secret."""

    value: str

    def __repr__(self) -> str:
        return "set to a value"


def _tables() -> dict[str, Any]:
    """Dicts that belong to everybody, live."""
    found: dict[str, Any] = {}
    for name in _HOOKS:
        found[name.strip("_").replace("_", " ")] = getattr(torch.nn.modules.module, name)
    for module, name in _REGISTRIES:
        registry = getattr(sys.modules.get(module), name, None)
        if isinstance(getattr(registry, "_global_mapping", None), dict):
            found[f"transformers' {name}"] = registry._global_mapping  # type: ignore[union-attr]
    return found


def _others(table: Any) -> list[tuple[Any, Any]]:
    """Without what this package registers, which stays registered: a config refers to it by name."""
    return [(key, held) for key, held in table.items() if not _is_ours(key)]


def _is_ours(key: Any) -> bool:
    return isinstance(key, str) and key.startswith("slapo")


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Whatever the body leaves behind, all is as it was. Warnings that it gives are not shown."""
    settings = [(one, one.get()) for one in SETTINGS]
    tables = {name: dict(content) for name, content in _tables().items()}
    environment = dict(os.environ)
    with random_states_kept():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            for one, value in settings:
                if one.get() != value:
                    one.set(value)
            for name, live in _tables().items():
                before = tables.get(name, live)
                if _others(live) != _others(before):
                    ours = {key: held for key, held in live.items() if _is_ours(key)}
                    live.clear()
                    live.update({**before, **ours})
            if dict(os.environ) != environment:
                os.environ.clear()
                os.environ.update(environment)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """As `kept`; what the user has switched on around verify (autocast, inference mode) is off within."""
    with kept(), torch.inference_mode(False), compiling_always():
        for kind in ("cpu", "cuda"):
            torch.set_autocast_enabled(kind, False)
        yield
