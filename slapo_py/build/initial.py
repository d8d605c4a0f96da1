"""The first values of a built module: drawn, or read from a checkpoint, one tensor after the other, then split.

All is said of the original's tensors under its names, so that neither a replaced module nor a mesh changes a number.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from slapo_py.build.computed import computed_buffers, refused
from slapo_py.build.drawn import Draw, common_seed
from slapo_py.build.facts import Fact, Facts
from slapo_py.build.from_checkpoint import Checkpoint
from slapo_py.build.slicing import part_of
from slapo_py.build.spread import value_hash
from slapo_py.build.tensors import byte_range, has_plain_storage, held_by
from slapo_py.distributed.mesh import Mesh
from slapo_py.errors import BuildError
from slapo_py.replacing.mapped_state import from_original, stages, to_original
from slapo_py.snapshot import random_states_kept

Init = Callable[[str, Tensor], object]


@dataclass(frozen=True)
class Initial:
    """made: id(tensor of the scheduled module) -> this rank's part. hashes: of whole ones, by name. names: of all."""

    made: dict[int, Tensor] = field(default_factory=dict)
    hashes: dict[str, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Wanted:
    """One tensor of the original, parameter or persistent buffer, under all its names."""

    names: tuple[str, ...]
    tensor: Tensor


@torch.no_grad()
def initial_values(
    original: nn.Module,
    source: nn.Module,
    facts: Facts,
    mesh: Mesh | None,
    init: Init | None,
    checkpoint: str | os.PathLike[str] | None,
) -> Initial:
    """What `init` and `checkpoint` give to a scheduled module: every tensor of the checkpoint, and what is on "meta".

    `init` is asked for what the checkpoint does not have. Ties are filled once. Raises: BuildError, CheckpointError.
    """
    if init is None and checkpoint is None:
        return Initial()
    wanted = _wanted(original)
    empty = [one.names[0] for one in wanted if one.tensor.is_meta]
    if init is not None and not callable(init):
        raise BuildError(
            f"build: init= takes a function that fills a tensor in place, and got {init!r}. For example: "
            f"init=slapo.own_init(model), or init=lambda name, tensor: torch.nn.init.normal_(tensor, std=0.02)."
        )
    if init is not None and not empty:
        raise BuildError(
            "build: init= fills what is on 'meta', and this model has values. Leave init= out, or make the model "
            'on "meta": with torch.device("meta"): model = ...'
        )
    read = None
    if checkpoint is not None:
        read = Checkpoint(checkpoint)
        read.check([(one.names, one.tensor) for one in wanted], empty if init is not None else ())
    seed = common_seed(mesh)
    making = _Making(source, facts, mesh, read, None if init is None else Draw(init, seed))
    with random_states_kept():
        for olds, news, changed in _groups(source, wanted):
            making.make(olds, news, changed)
        making.compute(original, seed)
    making.check_apart()
    return making.result


class _Making:
    def __init__(
        self, source: nn.Module, facts: Facts, mesh: Mesh | None, read: Checkpoint | None, draw: Draw | None
    ) -> None:
        self.source, self.mesh, self.read, self.draw = source, mesh, read, draw
        self.device = _device(mesh)
        self.result = Initial()
        self.here: dict[str, Tensor] = dict(source.named_parameters(remove_duplicate=False))
        self.here |= dict(source.named_buffers(remove_duplicate=False))
        self.names: dict[int, list[str]] = {}
        for name, one in self.here.items():
            self.names.setdefault(id(one), []).append(name)
        self.fact_of = {name: fact for fact in facts.values() for name in fact.names}

    def make(self, olds: list[_Wanted], news: list[str], changed: bool) -> None:
        """The tensors of some names that come from the same ones of the original. changed: by a parameter map."""
        if not any(one.tensor.is_meta or self._is_read(one) for one in olds):
            return
        if not changed and self._is_read(olds[0]):
            self._keep(news[0], self._part(olds[0], self.fact_of.get(news[0])))
            return
        wholes = {name: whole for one in olds for whole in [self._whole(one)] for name in one.names}
        values = from_original(self.source, wholes)
        for name in news:
            if id(self.here[name]) in self.result.made:
                continue
            self._keep_part(name, values[name])

    def compute(self, original: nn.Module, seed: int) -> None:
        """The buffers outside of the state that are on "meta"."""
        theirs = {id(one) for one in original.buffers()}
        names = []
        for name, one in self.source.named_buffers():
            if one.is_meta and id(one) not in self.result.made:
                if id(one) not in theirs:
                    raise refused(name)  # of a module that a step has put in
                names.append(name)
        if names:
            first = {id(one): name for name, one in original.named_buffers()}
            asked = {first[id(self.here[name])]: name for name in names}
            for known, value in computed_buffers(original, asked, self.device, seed).items():
                self._keep_part(asked[known], value)

    def check_apart(self) -> None:
        """Raises: BuildError, if a tensor that gets memory of its own shares it with another one so far."""
        windows: dict[int, list[tuple[int, int, str, int]]] = {}
        for path, one in held_by(self.source):
            if isinstance(one, Tensor) and has_plain_storage(one) and one.numel():
                low, high = byte_range(one)
                windows.setdefault(one.untyped_storage()._cdata, []).append((low, high, path, id(one)))
        for several in windows.values():
            for (_, end, name, key), (start, _, other, another) in itertools.pairwise(sorted(several)):
                if start < end and (key in self.result.made or another in self.result.made):
                    raise BuildError(
                        f"build at {name!r}: it shares memory with {other!r} without being the same tensor, and init= "
                        f"or checkpoint= gives it values of its own. Make them one tensor, or give each its own memory."
                    )

    def _keep_part(self, name: str, whole: Tensor) -> None:
        fact = self.fact_of.get(name)
        if fact is None or self.mesh is None:
            self._keep(name, whole)
            return
        self.result.hashes[fact.names[0]] = value_hash(whole)
        self._keep(name, part_of(whole, fact.placements, self.mesh) if fact.placements else whole)

    def _keep(self, name: str, value: Tensor) -> None:
        self.result.made[id(self.here[name])] = value
        self.result.names.update(self.names[id(self.here[name])])

    def _is_read(self, one: _Wanted) -> bool:
        return self.read is not None and bool(self.read.of(one.names))

    def _part(self, one: _Wanted, fact: Fact | None) -> Tensor:
        device = self.device if one.tensor.is_meta else one.tensor.device
        if fact is None or not fact.placements or self.mesh is None:
            part = torch.empty_like(one.tensor, device=device, requires_grad=False).as_subclass(Tensor)
            placements = {}
        else:
            placements = dict(fact.placements)
            at = {axis: self.mesh.coordinate(axis) for axis in self.mesh.sizes}
            part = torch.empty(fact.part(self.mesh.sizes, at), dtype=one.tensor.dtype, device=device)
        assert self.read is not None
        self.read.read(one.names, part, placements, self.mesh)
        return part

    def _whole(self, one: _Wanted) -> Tensor:
        if self._is_read(one):
            return self._part(one, None)
        if not one.tensor.is_meta:
            return one.tensor.detach()
        assert self.draw is not None  # else it would be missed in the checkpoint
        whole = torch.empty_like(one.tensor, device=self.device, requires_grad=False).as_subclass(Tensor)
        self.draw.fill(one.names[0], whole)
        return whole


def _wanted(original: nn.Module) -> list[_Wanted]:
    held: dict[str, Tensor] = dict(original.named_parameters(remove_duplicate=False))
    for path, module in original.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                held[f"{path}.{name}" if path else name] = buffer
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in to_original(original, held).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [_Wanted(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def _groups(source: nn.Module, wanted: list[_Wanted]) -> Iterator[tuple[list[_Wanted], list[str], bool]]:
    """Tensors of the original, the names of what a scheduled module makes of them alone, and whether a map does it."""
    origins = {name: {index} for index, one in enumerate(wanted) for name in one.names}
    mapped: set[int] = set()
    for prefix, state in reversed(list(stages(source))):
        gone = {prefix + name for name in state.map.old_shapes}
        new = {
            prefix + name: set[int]().union(*(origins[prefix + old] for old in state.map.sources(name)))
            for name in state.map.new_shapes
        }
        origins = {name: found for name, found in origins.items() if name not in gone} | new
        mapped |= set().union(*new.values())
    group = list(range(len(wanted)))
    for found in origins.values():
        joined = {group[index] for index in found}
        if len(joined) > 1:
            group = [min(joined) if one in joined else one for one in group]
    olds: dict[int, list[_Wanted]] = {}
    news: dict[int, list[str]] = {}
    for index, one in enumerate(wanted):
        olds.setdefault(group[index], []).append(one)
    for name, found in origins.items():
        news.setdefault(group[min(found)], []).append(name)
    changed = {group[index] for index in mapped}
    yield from ((olds[key], names, key in changed) for key, names in news.items())


def _device(mesh: Mesh | None) -> torch.device:
    """Where tensors are made that were on "meta"."""
    if mesh is None:
        return torch.get_default_device()
    kind = mesh.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
