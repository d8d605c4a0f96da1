"""A folder that is written all or nothing.

`write` fills a hidden sibling (`.NAME.saving`), ends it with a marker that lists every file, and swaps it in by two
renames; the folder before stays whole as `.NAME.previous` until the new one is in place. Killed between the renames,
`find` takes the newer sibling that is whole, and the next `write` puts it in place.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slapo_py.errors import CheckpointError

MARKER = "slapo.json"
FORMAT = 1
_CHUNK = 1 << 22


def write(directory: str | os.PathLike[str], fill: Callable[[Path], dict[str, Any]]) -> None:
    """Let `fill(folder)` write files; what it returns is kept in the marker. Raises: CheckpointError."""
    target = Path(directory).resolve()
    saving, previous = _siblings(target)
    _check_ours(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _settle(target, saving, previous)
    saving.mkdir()
    facts = fill(saving)
    files = {}
    for file in _files(saving):
        _sync(saving / file)
        files[file] = {"bytes": (saving / file).stat().st_size, "crc32": _crc(saving / file)}
    marker = saving / MARKER
    marker.write_text(json.dumps({"format": FORMAT, "files": files, **facts}, indent=1), encoding="utf-8")
    _sync(marker)
    _sync(saving)
    if target.exists():
        os.rename(target, previous)
    os.rename(saving, target)
    _sync(target.parent)
    _settle(target, saving, previous)


def find(directory: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The whole folder under this name and its marker. Raises: CheckpointError, naming what is wrong."""
    target = Path(directory).resolve()
    if target.exists():
        return target, _verified(target)
    for sibling in _siblings(target):
        if sibling.exists() and _is_whole(sibling):
            return sibling, _verified(sibling)
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
        _verified(folder)
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
    return found


def _verified(folder: Path) -> dict[str, Any]:
    marker = _read_marker(folder)
    for name, facts in marker["files"].items():
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
    return marker


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


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
