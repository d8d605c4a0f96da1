"""Our entries in transformers' registries: a user's attention function, and flex_attention without its trap on CPU."""

import functools
import hashlib
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slapo_py.codec import importable_name
from slapo_py.errors import ArgumentError

_IDLE = frozenset({
    # what models hand on that changes no number: the mask holds it already, or it is for other kernels
    "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "cache_params", "logits_to_keep", "num_items_in_batch", "deterministic",
})  # fmt: skip


def check_function(where: str, function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    kinds = [one.kind for one in signature.parameters.values()]
    try:
        signature.bind(*range(5), scaling=1.0, dropout=0.0)
    except TypeError:
        fits = False
    else:
        fits = inspect.Parameter.VAR_KEYWORD in kinds
    if not fits:
        raise ArgumentError(
            f"{where}: {getattr(function, '__name__', function)}{signature} can't be called as models call it. Write "
            f"def f(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs)."
        )


_NAMES: dict[int, str] = {}


def registered(function: Callable[..., Any]) -> str:
    """Put a function into transformers' registries; the name that a config calls it by.

    The name is the same in each process that can import the function, so that a saved config finds it or fails, and
    says nothing more: transformers looks for "sdpa", "flash" and the like in names.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    if id(function) not in _NAMES:
        known = importable_name(function)
        text = known or f"{os.getpid()} {id(function)} {len(_NAMES)}"
        name = f"slapo_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if name in AttentionInterface._global_mapping:  # another of this name: its module was loaded anew
            name += f"_{len(_NAMES)}"
        AttentionInterface.register(name, _adapted(function))
        AttentionMaskInterface.register(name, eager_mask)
        _NAMES[id(function)] = name
    return _NAMES[id(function)]


def _adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which refuses to overlook an argument."""
    parameters = inspect.signature(function).parameters.values()
    named = frozenset(one.name for one in parameters if one.kind is not one.VAR_KEYWORD)

    @functools.wraps(function)
    def attend(module: nn.Module, query: Any, key: Any, value: Any, mask: Any = None, **kwargs: Any) -> Any:
        for name, given in kwargs.items():
            if name not in named and name not in _IDLE and given is not None and given is not False:
                if name == "dropout" and given == 0.0:
                    continue
                shown = given if isinstance(given, int | float | str) else type(given).__name__
                raise ArgumentError(
                    f"attention({getattr(function, '__name__', 'f')}): {type(module).__name__} calls it with "
                    f"{name}={shown}, which it does not name and so would overlook. Write "
                    f"def f(module, query, key, value, attention_mask, {name}=None, **kwargs)."
                )
        return function(module, query, key, value, mask, **kwargs)

    return attend


def registered_flex() -> str:
    """transformers' flex_attention, which refuses to run on CPU; the name that a config calls it by."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = "slapo_flex_attention"
    if name not in AttentionInterface._global_mapping:
        AttentionInterface.register(name, _flex_attention)
        AttentionMaskInterface.register(name, _flex_mask)
    return name


def _flex_attention(module: nn.Module, query: Any, *args: Any, **kwargs: Any) -> Any:
    from transformers.integrations.flex_attention import flex_attention_forward

    _refuse_cpu(query.device.type)
    return flex_attention_forward(module, query, *args, **kwargs)


def _flex_mask(*, device: Any = "cpu", **kwargs: Any) -> Any:
    from transformers.masking_utils import flex_attention_mask

    _refuse_cpu(torch.device(device).type)
    return flex_attention_mask(device=device, **kwargs)


def _refuse_cpu(device: str) -> None:
    # Seen with torch 2.13: compiled, short and padded sequences give other numbers, or NaN, from call to call.
    if device == "cpu":
        raise ArgumentError(
            'attention("flex"): torch\'s compiled flex_attention reads memory of others on CPU and gives wrong '
            'numbers. Move the model to a GPU, or write attention("sdpa").'
        )
