"""The device mesh: named axes over the ranks of a world, and where this rank stands on them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slapo_py.errors import BuildError, EngineError

if TYPE_CHECKING:
    from slapo_py.distributed.collectives import Ranks


DATA = "dp"
"""The axis that splits the batch; every other one is given it whole."""
_MESHES: "dict[Any, Mesh]" = {}
"""The last mesh of each sizes: it keeps its world alive, so that there is one for all worlds."""


class Mesh:
    """Named axes over all ranks, outer axis first, ascending. An axis that it does not have is one of a single rank.

    device_mesh: torch's own, for what is handed to torch (FSDP2, pipelines, checkpoints).
    """

    def __init__(self, device_mesh: DeviceMesh) -> None:
        names = device_mesh.mesh_dim_names
        if not names:
            raise BuildError(
                'build: the device mesh has no names. Write init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)).'
            )
        for dim, name in enumerate(names):
            if not bool((device_mesh.mesh.diff(dim=dim) > 0).all()):
                raise BuildError(
                    f'build: the ranks of the device mesh do not ascend along "{name}": {device_mesh.mesh.tolist()}. '
                    f"torch puts the ranks of a group in order, so that parts would be exchanged. Sort them."
                )
        self.device_mesh = device_mesh
        self.sizes = dict(zip(names, map(int, device_mesh.mesh.shape), strict=True))
        self._world = dist.group.WORLD

    @staticmethod
    def of(mesh: "Mesh | DeviceMesh | Mapping[str, int]") -> "Mesh":
        """A mesh as users write it: `{"dp": 2, "tp": 2}`, outer axis first, or torch's DeviceMesh with names.

        Requires: an initialised default process group of as many ranks. Raises `BuildError`.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, DeviceMesh):
            return Mesh(mesh)
        sizes = check_sizes(mesh)
        ranks = 1
        for size in sizes.values():
            ranks *= size
        if not dist.is_initialized():
            raise BuildError(
                f"build: mesh={sizes} needs {ranks} processes that know of each other. Start the script with "
                f"torchrun --nproc-per-node {ranks}, and write its work into a block of: with slapo.launch():"
            )
        if dist.get_world_size() != ranks:
            raise BuildError(
                f"build: mesh={sizes} has {ranks} ranks and the world has {dist.get_world_size()}. "
                f"Start the script with torchrun --nproc-per-node {ranks}."
            )
        key = tuple(sizes.items())
        if key not in _MESHES or not _MESHES[key]._is_there():  # making one makes process groups: once is enough
            device = "cuda" if torch.cuda.is_available() and "nccl" in str(dist.get_backend()) else "cpu"
            _MESHES[key] = Mesh(init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
        return _MESHES[key]

    def _is_there(self) -> bool:
        return dist.group.WORLD is self._world

    def check_there(self, what: str) -> None:
        """Raises `EngineError` where the process group that it was made in is no more. what: the call that needs it."""
        if not self._is_there():
            raise EngineError(
                f"{what}: the process group of {self!r} is gone, as it is after the block of `with slapo.launch():`. "
                f"Make the call inside of the block."
            )

    def size(self, axis: str) -> int:
        """How many ranks an axis has."""
        return self.sizes.get(axis, 1)

    def coordinate(self, axis: str) -> int:
        """Where this rank stands on an axis."""
        return self.device_mesh.get_local_rank(axis) if axis in self.sizes else 0

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along an axis that the mesh has."""
        return self.device_mesh.get_group(axis)

    def ranks(self, axis: str) -> "Ranks":
        """The same as plain data, for collectives."""
        from slapo_py.distributed.collectives import Ranks  # it needs the layouts, which need nothing of this

        return Ranks.of(self.group(axis))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self.sizes.items())})"


def check_sizes(mesh: Any) -> dict[str, int]:
    """The sizes of a mesh given as a mapping. Raises `BuildError`."""
    if not isinstance(mesh, Mapping) or not mesh:
        raise BuildError(f'build: mesh= takes sizes by axis, as in mesh={{"dp": 2, "tp": 2}}, and got {mesh!r}.')
    for axis, size in mesh.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise BuildError(f'build: mesh={dict(mesh)}: {axis!r} is not the name of an axis, as "tp" is.')
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise BuildError(f"build: mesh={dict(mesh)}: the size of {axis!r} must be a whole number from 1.")
    return dict(mesh)
