"""Whether the ranks' parts of each parameter are the whole: no part is lost, none is held twice, replicas are equal.

Each rank hashes its own part and a share of the whole, and one number for each parameter is exchanged. The hash is the
exclusive or of the elements' bits, so that of a whole is that of its parts together, however they were cut.
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_py.build.facts import facts_of
from slapo_py.distributed.mesh import Mesh
from slapo_py.errors import BuildError


def value_hash(tensor: Tensor) -> int:
    """The exclusive or of the bits of a tensor's elements; 0 without any."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    if not plain.numel():
        return 0
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.element_size() == 1:
        plain = plain.view(torch.uint8)
    return int(torch.hash_tensor(plain).cpu().numpy())


def check_spread(built: nn.Module, wholes: Mapping[str, Tensor | int], mesh: Mesh) -> None:
    """Compare what all ranks hold of each parameter with the whole. wholes: by name, the tensor or its hash, if known.

    Raises: BuildError on every rank, naming the parameter.
    """
    facts = facts_of(built)
    named: dict[str, Tensor] = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    place, count = _place(mesh)
    parts, shares = [], []
    for name in facts:
        parts.append(value_hash(named[name]))
        whole = wholes.get(name)
        if isinstance(whole, Tensor):
            rows = whole.detach() if whole.dim() else whole.detach().reshape(1)
            # not the rows that it holds itself: where ranks have other models, parts and shares would agree
            shares.append(value_hash(rows.tensor_split(count)[(place + 1) % count]))
        else:
            shares.append(whole or 0)
    held = _gathered([parts, shares], mesh)
    for index, (name, fact) in enumerate(facts.items()):
        # an axis that splits the parameter puts its parts together; the ranks of every other one hold the same
        split = tuple(axis for axis, one in enumerate(mesh.sizes) if one in fact.placements)
        together = np.bitwise_xor.reduce(held[..., 0, index], axis=split) if split else held[..., 0, index]
        if (together != together.flat[0]).any():
            raise BuildError(
                f"build at {name!r}: the ranks hold other values of it where they should hold the same. Give every "
                f"rank the same model: the same torch.manual_seed(...) before it is made, the same checkpoint, and an "
                f"init= that draws from torch's default generator only."
            )
        whole = wholes.get(name)
        if whole is None:
            continue
        shares_of = held[..., 1, index]
        expected = np.bitwise_xor.reduce(shares_of, axis=None) if isinstance(whole, Tensor) else shares_of.flat[0]
        if together.flat[0] != expected:
            raise BuildError(
                f"build at {name!r}: the parts of all ranks together are not the whole of {fact.shape}: elements are "
                f"lost, or held twice. Give every rank the same model, with torch.manual_seed(...) before it is made."
            )


def _place(mesh: Mesh) -> tuple[int, int]:
    """This rank's place among all of the mesh, and how many there are."""
    place, count = 0, 1
    for axis, size in mesh.sizes.items():
        place, count = place * size + mesh.coordinate(axis), count * size
    return place, count


def _gathered(rows: list[list[int]], mesh: Mesh) -> np.ndarray:
    """What every rank has: one dim for each axis of the mesh, then those of the rows."""
    numbers = torch.from_numpy(np.array(rows, dtype=np.uint64).view(np.int64))
    known = numbers.to(mesh.device_mesh.device_type)
    for axis in reversed(mesh.sizes):
        heard = [torch.empty_like(known) for _ in range(mesh.size(axis))]
        dist.all_gather(heard, known, group=mesh.group(axis))
        known = torch.stack(heard)
    return known.cpu().numpy()
