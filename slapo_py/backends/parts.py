"""A rank's part of a whole tensor: which boxes of it, and where they lie in what the rank holds.

torch.distributed.checkpoint writes and reads such a part by its protocol for tensors that are spread: each box is a
chunk of the whole, so a tensor that was saved in other boxes is read piece by piece.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from slapo_py.build.facts import Fact
from slapo_py.distributed import raw
from slapo_py.distributed.mesh import Mesh
from slapo_py.layouts.placement import Shard, balanced

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """start: in the whole tensor. size: of the box. at: where it starts in the part."""

    start: Shape
    size: Shape
    at: Shape

    def of_whole(self, whole: Tensor) -> Tensor:
        """The window onto the whole tensor."""
        return _window(whole, self.start, self.size)

    def of_part(self, part: Tensor) -> Tensor:
        """The window onto the part."""
        return _window(part, self.at, self.size)


@dataclass(frozen=True, eq=False)
class Part:
    """A rank's part of a tensor.

    tensor: what the rank holds, a plain tensor. shape: of the whole. boxes: what it is of the whole; a fused weight
    that is split block by block is several, a part without elements is none.
    """

    tensor: Tensor
    shape: Shape
    boxes: tuple[Box, ...]

    @staticmethod
    def whole(tensor: Tensor) -> "Part":
        """A tensor that the rank has whole."""
        origin = (0,) * tensor.dim()
        return Part(tensor, tuple(tensor.shape), (Box(origin, tuple(tensor.shape), origin),))

    def like(self, tensor: Tensor) -> "Part":
        """Another tensor that lies as this one."""
        return Part(tensor, self.shape, self.boxes)

    def cut(self, whole: Tensor) -> Tensor:
        """A fresh tensor: the same part of another whole one."""
        part = torch.empty(self.tensor.shape, dtype=whole.dtype, device=whole.device)
        for box in self.boxes:
            box.of_part(part).copy_(box.of_whole(whole))
        return part

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def size(self) -> torch.Size:
        """The shape of the whole: what torch.distributed.checkpoint compares."""
        return torch.Size(self.shape)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        box = next(box for box in self.boxes if index.offset is None or box.start == tuple(index.offset))
        return box.of_part(self.tensor)


class SavePlanner(DefaultSavePlanner):
    """Torch's own, which finds what is saved among tensors only."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, Part) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """The same for loading, into what is given and as flat as it is."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, Part) else super().lookup_tensor(index)


def part_of(tensor: Tensor, fact: Fact, mesh: Mesh) -> Part:
    """What this rank's tensor of a parameter is of the whole. tensor: it, or what lies as it does."""
    runs = [[(0, size)] for size in fact.shape]
    for axis, shard, _ in _splits(fact, mesh):
        runs[shard.dim] = _of_rank(runs[shard.dim], shard, mesh.size(axis), mesh.coordinate(axis))
    held = tensor.detach()
    if isinstance(held, DTensor):
        (chunk,) = held.__create_chunk_list__()
        runs = [_taken(one, start, size) for one, start, size in zip(runs, chunk.offsets, chunk.sizes, strict=True)]
        held = held.to_local()
    return Part(held, fact.shape, tuple(_boxes(runs, fact.shape)))


def gathered(tensor: Tensor, fact: Fact, mesh: Mesh) -> Tensor:
    """The whole of which this rank holds a part, as a tensor of its own. A collective call."""
    held = tensor.detach()
    whole = held.full_tensor() if isinstance(held, DTensor) else held
    for axis, shard, size in reversed(_splits(fact, mesh)):
        whole = raw.all_gather(whole, shard.dim, raw.encode(shard), size, mesh.ranks(axis).name)
    return whole.clone() if whole is held else whole


def _splits(fact: Fact, mesh: Mesh) -> list[tuple[str, Shard, int]]:
    """(axis, how what outer axes have left is split, the size of the split dim before it), the outer axis first."""
    found = []
    left: dict[int, tuple[int, ...]] = {}  # the blocks of a dim that was split
    for axis, shard in fact.placements.items():
        if mesh.size(axis) == 1:
            continue
        blocks = left.get(shard.dim) or tuple(shard.block_sizes(fact.shape[shard.dim]))
        found.append((axis, Shard(shard.dim, blocks), sum(blocks)))
        left[shard.dim] = tuple(balanced(block, mesh.size(axis))[mesh.coordinate(axis)] for block in blocks)
    return found


def _of_rank(runs: list[tuple[int, int]], shard: Shard, ranks: int, rank: int) -> list[tuple[int, int]]:
    """What a rank has of the runs (start, length) that make up a dim."""
    total = sum(length for _, length in runs)
    found, begin = [], 0
    for block in shard.block_sizes(total):
        shares = balanced(block, ranks)
        found += _taken(runs, begin + sum(shares[:rank]), shares[rank])
        begin += block
    return found


def _taken(runs: list[tuple[int, int]], begin: int, size: int) -> list[tuple[int, int]]:
    """The runs of `size` elements from the `begin`-th on."""
    found: list[tuple[int, int]] = []
    passed = 0
    for start, length in runs:
        low, high = max(begin, passed), min(begin + size, passed + length)
        if low < high:
            found.append((start + low - passed, high - low))
        passed += length
    return found


def _boxes(runs: Sequence[list[tuple[int, int]]], shape: Shape) -> list[Box]:
    if 0 in shape:  # nothing is in it, and it must be in the folder
        return [Box((0,) * len(shape), shape, (0,) * len(shape))]
    placed = []
    for one in runs:
        merged: list[tuple[int, int]] = []
        for start, length in one:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        starts = itertools.accumulate((length for _, length in merged), initial=0)
        placed.append([(start, length, at) for (start, length), at in zip(merged, starts)])
    return [
        Box(tuple(one[0] for one in box), tuple(one[1] for one in box), tuple(one[2] for one in box))
        for box in itertools.product(*placed)
    ]


def _window(tensor: Tensor, start: Shape, size: Shape) -> Tensor:
    for dim, (begin, length) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor
