"""The random generators that a training step draws from: the process's own, and those that a module holds."""

import random
import sys
from typing import Any

import torch
from torch import nn

from slapo_py.build.tensors import held_by
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.distributed.rng import differ, seed_of


def process_state() -> dict[str, Any]:
    """The states of torch, Python and numpy, in plain values and tensors."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        found = sys.modules["numpy"].random.get_state()
        if isinstance(found, tuple):  # the legacy generator; another one is the user's own to save
            name, keys, position, has_gauss, gauss = found
            state["numpy"] = (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(gauss))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_process_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        name, keys, *others = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *others))
    if "cuda" in state and torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)


def generators(module: nn.Module) -> dict[str, torch.Generator]:
    """A module's own generators, by the path of what holds them."""
    found = [(path, one) for path, one in held_by(module) if isinstance(one, torch.Generator)]
    return {f"{path}#{index}": one for index, (path, one) in enumerate(found)}


def state_here(module: nn.Module, mesh: Mesh | None) -> dict[str, Any]:
    """All that this rank draws from, and where the rank stands."""
    sizes = axes_of(mesh)
    return {
        "coordinates": {axis: mesh.coordinate(axis) for axis in sizes} if mesh is not None else {},
        "random": process_state(),
        "generators": {path: one.get_state() for path, one in generators(module).items()},
    }


def axes_of(mesh: Mesh | None) -> dict[str, int]:
    """The axes of more than one rank, and their sizes."""
    return {} if mesh is None else {axis: size for axis, size in mesh.sizes.items() if size > 1}


def set_state_here(module: nn.Module, mesh: Mesh | None, sizes: dict[str, int], saved: list[dict[str, Any]]) -> None:
    """Take the saved states: each rank its own on the mesh that they come from, which has these sizes.

    On another mesh, ranks of one place on "dp" draw alike: as the rank did that was at this place and at 0 on the other
    axes. Where there was no such place, as the first rank; set apart by the place, if those that there were on "dp"
    drew differently.
    """
    here = axes_of(mesh)
    at = {axis: mesh.coordinate(axis) for axis in here} if mesh is not None else {}
    place = at.get(DATA, 0)
    wanted = at if here == sizes else {axis: place if axis == DATA else 0 for axis in sizes}
    state = next((one for one in saved if one["coordinates"] == wanted), saved[0])
    apart = {DATA: place} if state["coordinates"] != wanted and _differ(saved) else {}
    set_process_state(state["random"])
    for path, generator in generators(module).items():
        generator.set_state(state["generators"][path])
        _set_apart(generator, apart)
    if apart:
        differ(apart)
        random.seed(seed_of(random.getrandbits(62), apart))
        if "numpy" in state["random"] and "numpy" in sys.modules:
            numpy = sys.modules["numpy"].random
            numpy.seed(seed_of(int(numpy.randint(2**31)), apart) % 2**32)


def _differ(saved: list[dict[str, Any]]) -> bool:
    """Whether ranks of other places on "dp" have other states."""
    along = [one for one in saved if not any(at for axis, at in one["coordinates"].items() if axis != DATA)]
    return any(not torch.equal(one["random"]["torch"], along[0]["random"]["torch"]) for one in along)


def _set_apart(generator: torch.Generator, apart: dict[str, int]) -> None:
    if apart:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        generator.manual_seed(seed_of(seed, apart))
