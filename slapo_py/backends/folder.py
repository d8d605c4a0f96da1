"""A folder that is written all or nothing.

`write` fills a hidden sibling (`.NAME.saving`), ends it with a marker that lists every file with its checksum, and has
one of its own, and swaps it in by two renames; the folder before stays whole as `.NAME.previous` until the new one is
in place. Killed between the renames, `find` takes the newer sibling that is whole, and the next `write` puts it in
place.

On a mesh every rank fills the same folder with files of its own; the first rank makes it, and writes the marker and
renames after all have finished. Where one rank fails, the folder before stays.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from slapo_py.backends.together import ALONE, Together
from slapo_py.errors import CheckpointError

MARKER = "slapo.json"
FORMAT = 3
_CHUNK = 1 << 22

T = TypeVar("T")


def write(
    directory: str | os.PathLike[str], fill: Callable[[Path], tuple[list[str], dict[str, Any]]], together: Together
) -> None:
    """Let `fill(folder)` write files: it returns those of this rank, and what is kept in the marker.

    A collective call. Raises: CheckpointError, on all ranks where one fails.
    """
    target = _same(directory, "save", together)
    saving, previous = _siblings(target)
    together.from_first(lambda: _on_disk(lambda: _prepare(target, saving, previous)), "save")
    try:
        written, facts = together.agreed(lambda: _on_disk(lambda: _written(saving, fill)), "save")
    except CheckpointError:
        if together.first:  # what is half written may have filled the disk
            shutil.rmtree(saving, ignore_errors=True)
        raise
    files = dict(sorted(one for some in together.every(written, "save") for one in some.items()))
    together.from_first(lambda: _on_disk(lambda: _replace(target, saving, previous, files, facts)), "save")


def find(directory: str | os.PathLike[str], together: Together = ALONE) -> tuple[Path, dict[str, Any]]:
    """The whole folder under this name and its marker. A collective call: each rank reads a share of the files.

    Raises: CheckpointError, naming what is wrong.
    """
    target = _same(directory, "load", together)
    place = together.from_first(lambda: _whole_of(target), "load")
    marker = together.from_first(lambda: _read_marker(place), "load")
    share = list(marker["files"].items())[together.rank :: together.ranks]
    together.agreed(lambda: _check_files(place, share), "load")
    return place, marker


def _same(directory: str | os.PathLike[str], what: str, together: Together) -> Path:
    """The folder that all ranks name."""
    target = Path(directory).resolve()
    for rank, one in enumerate(together.every(str(target), what)):
        if one != str(target):
            raise CheckpointError(
                f"{what}: rank {rank} was given {one!r} and rank {together.rank} {str(target)!r}. "
                f"Give all ranks the same folder, on a disk that they share."
            )
    return target


def _on_disk(act: Callable[[], T]) -> T:
    try:
        return act()
    except OSError as error:
        raise CheckpointError(f"save: {error}. What was saved before is still there, and is whole.") from error


def _prepare(target: Path, saving: Path, previous: Path) -> None:
    _check_ours(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _settle(target, saving, previous)
    saving.mkdir()


def _written(
    saving: Path, fill: Callable[[Path], tuple[list[str], dict[str, Any]]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What this rank has written, on the disk for good."""
    names, facts = fill(saving)
    files = {}
    for file in names:
        _sync(saving / file)
        files[file] = {"bytes": (saving / file).stat().st_size, "crc32": _crc(saving / file)}
    return files, facts


def _replace(target: Path, saving: Path, previous: Path, files: dict[str, Any], facts: dict[str, Any]) -> None:
    for file, known in files.items():
        if not (saving / file).is_file() or (saving / file).stat().st_size != known["bytes"]:
            raise CheckpointError(
                f"save: a rank has written {file!r}, and rank 0 does not find it in {str(saving)!r}. "
                f"Save to a folder on a disk that all ranks share."
            )
    marker = saving / MARKER
    held = json.loads(json.dumps({"format": FORMAT, "files": files, **facts}))
    marker.write_text(json.dumps({**held, "crc32": _crc_of(held)}, indent=1), encoding="utf-8")
    _sync(marker)
    _sync(saving)
    if target.exists():
        os.rename(target, previous)
    os.rename(saving, target)
    _sync(target.parent)
    _settle(target, saving, previous)


def _whole_of(target: Path) -> Path:
    if target.exists():
        return target
    for sibling in _siblings(target):
        if sibling.exists() and _is_whole(sibling):
            return sibling
    raise CheckpointError(f"load: there is no folder {str(target)!r}. engine.save(...) writes one.")


def _siblings(target: Path) -> tuple[Path, Path]:
    return target.with_name(f".{target.name}.saving"), target.with_name(f".{target.name}.previous")


def _check_ours(target: Path) -> None:
    """Saving replaces the folder, so it must be one that was saved, or be empty."""
    if target.is_dir() and ((target / MARKER).exists() or not any(target.iterdir())):
        return
    if target.exists():
        raise CheckpointError(
            f"save: {str(target)!r} exists and is not a saved engine, and saving would replace it. "
            f"Write engine.save({str(target / 'engine')!r})."
        )


def _settle(target: Path, saving: Path, previous: Path) -> None:
    """Finish a swap that was cut short, then clear what is left over."""
    if not target.exists():
        for sibling in (saving, previous):
            if sibling.exists() and _is_whole(sibling):
                os.rename(sibling, target)
                break
    if previous.exists():
        known = {*_read_marker(previous)["files"], MARKER} if (previous / MARKER).exists() else set()
        for entry in list(previous.iterdir()):  # a file that somebody put beside ours stays with the folder
            if entry.name not in known and not (target / entry.name).exists():
                os.rename(entry, target / entry.name)
        shutil.rmtree(previous)
    if saving.exists():
        shutil.rmtree(saving)


def _is_whole(folder: Path) -> bool:
    try:
        _check_files(folder, _read_marker(folder)["files"].items())
    except CheckpointError:
        return False
    return True


def _read_marker(folder: Path) -> dict[str, Any]:
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if not isinstance(marker["files"], dict):
            raise TypeError("files")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"load: {str(folder)!r} has no {MARKER}: it was not saved by an engine, or not to its end."
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"load: {str(folder / MARKER)!r} is damaged ({error}). Load another save.") from error
    if marker.get("format") != FORMAT:
        raise CheckpointError(
            f"load: {str(folder)!r} has format {marker.get('format')!r} and this version reads {FORMAT}. "
            "Load it with the version that saved it."
        )
    found: dict[str, Any] = marker
    if found.pop("crc32", None) != _crc_of(found):
        raise CheckpointError(
            f"load: {str(folder / MARKER)!r} is damaged: it has changed since it was saved. Load another save."
        )
    return found


def _check_files(folder: Path, files: Iterable[tuple[str, dict[str, Any]]]) -> None:
    for name, facts in files:
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"load: {str(folder)!r} is incomplete: {name!r} is missing. Load another save.")
        size = file.stat().st_size
        if size != facts["bytes"]:
            raise CheckpointError(
                f"load: {str(folder)!r} is damaged: {name!r} has {size} bytes and should have {facts['bytes']}. "
                "Load another save."
            )
        if _crc(file) != facts["crc32"]:
            raise CheckpointError(
                f"load: {str(folder)!r} is damaged: the content of {name!r} has changed since it was saved. "
                "Load another save."
            )


def _crc_of(marker: dict[str, Any]) -> int:
    """The checksum of what a marker says."""
    return zlib.crc32(json.dumps(marker, sort_keys=True).encode())


def _crc(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _sync(path: Path) -> None:
    """Make a file, or a folder's list of names, survive a power cut."""
    if os.name != "posix" and path.is_dir():
        return  # folders can't be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
