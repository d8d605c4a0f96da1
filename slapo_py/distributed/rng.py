"""Random states over a mesh: which ranks draw alike, and which draw differently.

Ranks that start from one seed draw alike. `differ({"dp": 3})` sets the ranks of an axis apart for good, where each has
other data; a rank at coordinate 0 goes on as one process alone would. Within `forked({"tp": 1})` they are apart for a
while, and draw alike again after it.

All follows from the state before and from the coordinates, so a forward that is run again from the same state, as under
`torch.utils.checkpoint`, draws the same again. Concerned are torch's default generators: of the CPU, and of the current
CUDA device once CUDA is in use. Not for use within compiled code: compile what is inside.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

import torch


def seed_of(seed: int, coordinates: Mapping[str, int]) -> int:
    """A seed for a place on a mesh: another one for other coordinates, and `seed` itself where they are all 0."""
    moved = sorted((axis, at) for axis, at in coordinates.items() if at)
    return _hashed(repr((seed, moved)).encode()) if moved else seed


def differ(coordinates: Mapping[str, int]) -> None:
    """From here on this rank draws as its coordinates say; where they are all 0, nothing changes."""
    if any(coordinates.values()):
        seed = _hashed(torch.default_generator.get_state().numpy().tobytes())
        for generator in generators():
            generator.manual_seed(seed_of(seed, coordinates))


@contextlib.contextmanager
def forked(coordinates: Mapping[str, int]) -> Iterator[None]:
    """Within, ranks with other coordinates draw differently; after, as if one number had been drawn on the CPU.

    So what follows does not depend on how much is drawn within, and two such bodies after one another differ.
    """
    seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    states = [(one, one.get_state()) for one in generators()]
    try:
        for generator, _ in states:
            generator.manual_seed(seed_of(seed, coordinates))
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def generators() -> list[torch.Generator]:
    """Torch's default ones of the devices in use."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def checksum() -> int:
    """Of the states of torch's default generators: equal on ranks that draw alike."""
    return _hashed(b"".join(one.get_state().numpy().tobytes() for one in generators()))


def _hashed(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1
