"""Values drawn for the tensors of a model on "meta": each with a seed of its name, and none left without."""

import hashlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slapo_py.distributed.mesh import Mesh
from slapo_py.distributed.rng import generators
from slapo_py.errors import BuildError


@dataclass(frozen=True)
class Draw:
    """Fills whole tensors by name. seed: the same on all ranks."""

    init: Callable[[str, Tensor], object]
    seed: int

    def fill(self, name: str, tensor: Tensor) -> None:
        """Let `init` fill a tensor in place. Random states are left anywhere. Raises: BuildError."""
        seed_for(self.seed, name)
        written = fill_watched(name, tensor, self.init)
        if not written:
            raise BuildError(
                f"build at {name!r}: init({name!r}, tensor) left {'elements' if written is None else 'all'} of "
                f"{tuple(tensor.shape)} without a value; it fills the tensor in place. For example: "
                f"init=lambda name, tensor: torch.nn.init.normal_(tensor, std=0.02)."
            )


def fill_watched(name: str, tensor: Tensor, fill: Callable[[str, Tensor], object]) -> bool | None:
    """Call `fill`; whether it has written the tensor. None: a part of it."""
    known = tensor.is_floating_point() or tensor.is_complex()
    if known:
        tensor.fill_(float("nan"))
    version = tensor._version
    try:
        fill(name, tensor)
    except BaseException as error:
        error.add_note(f"build: in init({name!r}, tensor of {tuple(tensor.shape)} {tensor.dtype})")
        raise
    if not tensor.numel():
        return True
    if not known:
        return tensor._version != version
    # a sum is quicker than looking at each; it is also nan of two infinities
    if tensor.element_size() > 1 and not tensor.sum().isnan():
        return True
    empty = tensor.isnan()
    return False if empty.all() else None if empty.any() else True


def seed_for(seed: int, name: str) -> None:
    """Start the random generators at what follows from a seed and a name."""
    digest = hashlib.blake2b(repr((seed, name)).encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "big")
    for generator in generators():
        generator.manual_seed(start)
    random.seed(start)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(start % 2**32)


def common_seed(mesh: Mesh | None) -> int:
    """The seed of `torch.manual_seed`; on a mesh that of its first rank, which the others may have moved on from."""
    seed = torch.initial_seed()
    if mesh is not None:
        for axis in mesh.sizes:
            heard = [0] * mesh.size(axis)
            torch.distributed.all_gather_object(heard, seed, group=mesh.group(axis))
            seed = heard[0]
    return seed
