"""Values from safetensors under the original's names: of each tensor only what a rank holds is read."""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slapo_py.build.slicing import indexes_of
from slapo_py.distributed.mesh import Mesh
from slapo_py.errors import CheckpointError
from slapo_py.layouts.placement import Shard

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """A safetensors file, or a folder of such as transformers' `save_pretrained` writes it.

    names: of the tensors in it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._held: dict[str, Any] = {}
        for file, listed in _files(self.path):
            opened = _opened(file)
            inside = list(opened.keys())
            lost = [name for name in listed or () if name not in inside]
            if lost:
                raise CheckpointError(
                    f"build: checkpoint {str(self.path)!r}: {file.name!r} does not have {_list(lost)}, which the index "
                    f"says. Write the checkpoint again, to its end."
                )
            self._held.update(dict.fromkeys(inside if listed is None else listed, opened))

    @property
    def names(self) -> list[str]:
        return list(self._held)

    def check(self, groups: Iterable[tuple[Sequence[str], Tensor]], missing_is_fine: Iterable[str]) -> None:
        """Names, shapes and dtypes, before anything is read. groups: the names of each tensor of a model, and it.

        Raises: CheckpointError, naming what is missing, what no model has, and what does not fit.
        """
        groups, fine = list(groups), set(missing_is_fine)
        missing = [names[0] for names, _ in groups if not self.of(names) and names[0] not in fine]
        known = {name for names, _ in groups for name in names}
        for found, verb in ((missing, "misses"), ([name for name in self._held if name not in known], "also has")):
            if found:
                raise CheckpointError(
                    f"build: checkpoint {str(self.path)!r} {verb} {_list(found)}: it is of another model, or has other "
                    f"names. Write it under the original's names: safetensors.torch.save_model(model, "
                    f'"model.safetensors").'
                )
        for names, tensor in groups:
            for name in self.of(names):
                self._check_fits(name, tensor)

    def _check_fits(self, name: str, tensor: Tensor) -> None:
        shape = tuple(self._held[name].get_slice(name).get_shape())
        if shape != tuple(tensor.shape):
            raise CheckpointError(
                f"build: checkpoint {str(self.path)!r} has {name!r} in shape {shape}, and the model needs "
                f"{tuple(tensor.shape)}. Build the model that was saved, or give another checkpoint."
            )
        dtype = self._dtype(name)
        if not _holds(tensor.dtype, dtype):
            raise CheckpointError(
                f"build: checkpoint {str(self.path)!r} has {name!r} in {_short(dtype)}, which the model's "
                f"{_short(tensor.dtype)} would round. Make the model of that dtype, or write the checkpoint in "
                f"{_short(tensor.dtype)}."
            )

    def of(self, names: Iterable[str]) -> list[str]:
        """Those of a tensor's names that are here."""
        return [name for name in names if name in self._held]

    def read(self, names: Sequence[str], into: Tensor, placements: Mapping[str, Shard], mesh: Mesh | None) -> None:
        """Fill a rank's part of a tensor, piece by piece. names: its names; those that are here must agree.

        Raises: CheckpointError, where two names of one tensor have other values.
        """
        first, *others = self.of(names)
        source = self._held[first].get_slice(first)
        for here, there in _pieces(source.get_shape(), placements, mesh):
            target = into[here]
            target.copy_(self._piece(first, there))
            for other in others:
                if not torch.equal(self._piece(other, there).to(target), target):
                    raise CheckpointError(
                        f"build: checkpoint {str(self.path)!r} has other values for {other!r} than for {first!r}, and "
                        f"in the model they are one tensor. Untie them before create_schedule, or leave one out."
                    )

    def _piece(self, name: str, there: tuple[slice, ...]) -> Tensor:
        """A window onto the file."""
        opened = self._held[name]
        piece: Tensor = opened.get_slice(name)[there] if there else opened.get_tensor(name)
        return piece

    def _dtype(self, name: str) -> torch.dtype:
        opened = self._held[name]
        piece: Tensor = opened.get_slice(name)[0:0] if opened.get_slice(name).get_shape() else opened.get_tensor(name)
        return piece.dtype


def _pieces(
    shape: Sequence[int], placements: Mapping[str, Shard], mesh: Mesh | None
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The boxes of which a rank's part consists: where each lies in the part, and where in the whole."""
    runs = [_runs(indexes_of(dim, shape, placements, mesh)) for dim in range(len(shape))]
    for box in itertools.product(*runs):
        yield tuple(here for here, _ in box), tuple(there for _, there in box)


def _runs(indexes: Tensor) -> list[tuple[slice, slice]]:
    """Rising indexes as runs without a gap: where each lies among them, and what it is."""
    breaks = ((indexes[1:] - indexes[:-1]) != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(indexes)]
    found = []
    for low, high in itertools.pairwise(edges):
        if high > low:
            start = int(indexes[low])
            found.append((slice(low, high), slice(start, start + high - low)))
    return found


def _files(path: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """The files of a checkpoint, each with the names that are to be read of it; None for all."""
    if path.is_file():
        yield path, None
        return
    if (path / _INDEX).is_file():
        try:
            where = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            names: dict[str, list[str]] = {}
            for name, file in where.items():
                names.setdefault(file, []).append(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"build: checkpoint {str(path / _INDEX)!r} is damaged ({error}). Write the checkpoint again."
            ) from error
        yield from ((path / file, listed) for file, listed in names.items())
    elif (path / _WHOLE).is_file():
        yield path / _WHOLE, None
    else:
        raise CheckpointError(
            f"build: checkpoint {str(path)!r} is no file, and no folder with {_WHOLE} or {_INDEX} in it. Give what "
            f"model.save_pretrained(folder) or safetensors.torch.save_model(model, file) wrote."
        )


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"build: checkpoint file {str(file)!r} can't be read as safetensors ({error}). Give what "
            f"model.save_pretrained(folder) or safetensors.torch.save_model(model, file) wrote."
        ) from error


def _holds(wanted: torch.dtype, given: torch.dtype) -> bool:
    """Whether each number of one dtype is one of the other."""
    if wanted == given:
        return True
    kinds = [(one.is_floating_point, one.is_complex, one == torch.bool) for one in (wanted, given)]
    if kinds[0] != kinds[1] or any(one.is_floating_point and one.itemsize == 1 for one in (wanted, given)):
        return False  # numbers of eight bits have a scale beside them
    return torch.promote_types(wanted, given) == wanted


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
