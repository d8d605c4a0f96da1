"""Buffers that are computed and in no checkpoint (rotary tables, positions): computed again for a model on "meta"."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from slapo_py.build.drawn import fill_watched, seed_for
from slapo_py.build.own_init import fill_by_own_methods, on_meta
from slapo_py.errors import BuildError


def computed_buffers(original: nn.Module, names: Iterable[str], device: torch.device, seed: int) -> dict[str, Tensor]:
    """By name, as the model's own methods write them. `init` is not asked: it would draw what is to be computed.

    Raises: BuildError, naming one that no method writes.
    """
    twin = on_meta(original)
    every = dict(original.named_buffers(remove_duplicate=False))
    found: dict[str, Tensor] = {}
    for name in names:
        found[name] = torch.empty(every[name].shape, dtype=every[name].dtype, device=device)
        seed_for(seed, name)
        if not fill_watched(name, found[name], lambda name, tensor: fill_by_own_methods(twin, name, tensor)):
            raise refused(name)
    return found


def refused(name: str) -> BuildError:
    """What is said of a buffer that nobody computes."""
    path, _, leaf = name.rpartition(".")
    owner = f'model.get_submodule("{path}")' if path else "model"
    return BuildError(
        f"build at {name!r}: this buffer is on 'meta' and is in no checkpoint (persistent=False), and neither "
        f"reset_parameters() of its module nor _init_weights() of its model computes it. Compute it as the constructor "
        f"does, before create_schedule: {owner}.{leaf} = ..."
    )
