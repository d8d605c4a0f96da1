"""Nothing is lost: a built module has the original's parameters and buffers, under their names, tied as they were."""

from collections.abc import Collection, Iterable

import torch
from torch import nn

from slapo_py.build.facts import facts_of
from slapo_py.build.slicing import part_of
from slapo_py.distributed.mesh import Mesh
from slapo_py.errors import BuildError
from slapo_py.replacing.mapped_state import dropped_buffers, from_original, is_mapped, to_original


def check_conserved(
    original: nn.Module,
    built: nn.Module,
    *,
    donated: bool = False,
    mesh: Mesh | None = None,
    renewed: Collection[str] = (),
) -> None:
    """Compare a built module with the original.

    Requires: each parameter and buffer of the original is in the built module under the same name, with the same
    shape, dtype and `requires_grad`; no other one is; the names of one tensor in the original are the names of one
    tensor in the built module, and the reverse; no storage is shared with the original (unless donated). Where a step
    has mapped parameters, this is said of them under the original's names, and of their values; not of the values of
    those that were given new ones (`renewed`: their names in the built module).
    Raises: BuildError, naming what differs.
    """
    if mesh is not None:
        _check_parts(built, mesh)
    gone = {*dropped_buffers(built)} - {*dropped_buffers(original)}
    for kind in ("parameter", "buffer"):
        old, new = _under_original_names(original, kind), _under_original_names(built, kind)
        old = {name: tensor for name, tensor in old.items() if name not in gone}
        missing, extra = [name for name in old if name not in new], [name for name in new if name not in old]
        if missing:
            raise BuildError(f"build: the built module lost the original's {kind} {_list(missing)}. {_REMEDY}")
        if extra:
            raise BuildError(
                f"build: the built module has a {kind} that the original has not: {_list(extra)}. {_REMEDY}"
            )
        for name, tensor in old.items():
            was, now = _facts(tensor), _facts(new[name])
            if was != now:
                raise BuildError(f"build at {name!r}: this {kind} was {was} and is {now}. {_REMEDY}")
        _check_ties(kind, old, new)
    if is_mapped(built):
        _check_mapped_values(original, built, mesh, renewed)
    if not donated:
        _check_apart(original, built)


_REMEDY = "A step of the schedule has changed it: print(sch.history) shows the steps, sch.undo() takes back the last."


def _named(module: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    if kind == "parameter":
        return dict(module.named_parameters(remove_duplicate=False))
    return dict(module.named_buffers(remove_duplicate=False))


def _under_original_names(module: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    named = _named(module, kind)
    facts = facts_of(module)
    if not is_mapped(module) and not facts:
        return named
    # stand-ins without data, one for each object: only shapes, dtypes and ties are compared
    whole = {name: fact.shape for name, fact in facts.items()}
    stand_ins: dict[int, torch.Tensor] = {}
    for name, one in named.items():
        stand_ins.setdefault(id(one), _without_data(one, whole.get(name, tuple(one.shape))))
    if not is_mapped(module):
        return {name: stand_ins[id(one)] for name, one in named.items()}
    with torch.enable_grad():
        return to_original(module, {name: stand_ins[id(one)] for name, one in named.items()})


def _without_data(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)


def _check_parts(built: nn.Module, mesh: Mesh) -> None:
    """Nothing is lost or held twice on the mesh: this rank has its part of each parameter, and no more."""
    named: dict[str, torch.Tensor] = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    coordinates = {axis: mesh.coordinate(axis) for axis in mesh.sizes}
    for name, fact in facts_of(built).items():
        part, found = fact.part(mesh.sizes, coordinates), tuple(named[name].shape)
        if part != found:
            shown = ", ".join(f"{one} on {axis}" for axis, one in fact.placements.items()) or "whole"
            raise BuildError(
                f"build at {name!r}: this rank holds {found} of {fact.shape}, and {shown} is {part} of it. {_REMEDY}"
            )


def _check_mapped_values(original: nn.Module, built: nn.Module, mesh: Mesh | None, renewed: Collection[str]) -> None:
    """A mapped parameter is a copy from the moment of the step: the original may have changed since then."""
    theirs = {name: one.detach() for kind in ("parameter", "buffer") for name, one in _named(original, kind).items()}
    if is_mapped(original):
        theirs = to_original(original, theirs)
    ours = {name: one.detach() for kind in ("parameter", "buffer") for name, one in _named(built, kind).items()}
    known = {id(one) for one in theirs.values()}
    facts = facts_of(built) if mesh is not None else {}
    for name, wanted in from_original(built, theirs).items():
        if id(wanted) in known or name not in ours or name in renewed:  # known: at most renamed
            continue
        if name in facts and mesh is not None:
            wanted = part_of(wanted, facts[name].placements, mesh)
        if not torch.allclose(ours[name], wanted, rtol=0, atol=0, equal_nan=True):
            raise BuildError(
                f"build at {name!r}: the values that it was made of have changed in the original since the step that "
                f"made it. Replay the schedule: sch.history.replay(slapo.create_schedule(model)), and build that."
            )


def _facts(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" + (
        ", trainable" if tensor.requires_grad else ", frozen"
    )


def _check_ties(kind: str, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
    was, now = tie_groups(old), tie_groups(new)
    for name in old:
        if was[name] != now[name]:
            raise BuildError(
                f"build at {name!r}: the names of this {kind} were {_list(was[name])} and are {_list(now[name])}: "
                f"a tie was lost or made. {_REMEDY}"
            )


def tie_groups(named: dict[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    """name -> all names of the same tensor object."""
    groups: dict[int, list[str]] = {}
    for name, tensor in named.items():
        groups.setdefault(id(tensor), []).append(name)
    return {name: tuple(groups[id(tensor)]) for name, tensor in named.items()}


def _check_apart(original: nn.Module, built: nn.Module) -> None:
    theirs = {pointer: name for name, pointer in _pointers(original)}
    for name, pointer in _pointers(built):
        if pointer in theirs:
            raise BuildError(
                f"build at {name!r}: its storage is still that of the original's {theirs[pointer]!r}, so training "
                "would change the original. Write slapo.build(sch, donate=True) if that is wanted."
            )


def _pointers(module: nn.Module) -> Iterable[tuple[str, int]]:
    for kind in ("parameter", "buffer"):
        for name, tensor in _named(module, kind).items():
            if tensor.layout is torch.strided and not hasattr(type(tensor), "__tensor_flatten__"):
                pointer = tensor.untyped_storage().data_ptr()
                if pointer:
                    yield name, pointer


def _list(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
