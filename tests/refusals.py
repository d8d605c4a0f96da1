"""Which refusals of slapo_py a ``pytest.raises(..., match=...)`` has met so far in this process."""

import ast
import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slapo_py import errors

ROOT = Path(__file__).parent.parent
SOURCES = ("slapo_py", "primitives", "kernels")
FOLDER = "build/refusals"
met: set[tuple[str, int]] = set()
"""(file, line) of every frame that a matched ScheduleError passed, and of the errors that it came from."""


class _Watched(pytest.RaisesExc):  # type: ignore[type-arg]
    def __exit__(self, exc_type: Any, exc: Any, trace: Any) -> bool:
        accepted = super().__exit__(exc_type, exc, trace)
        if accepted and self.match is not None:
            note(exc)
        return accepted


def watch() -> None:
    """From here on, `pytest.raises(..., match=...)` as a context manager notes what it met."""
    original = pytest.raises

    def raises(*args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        if isinstance(context, pytest.RaisesExc):
            context.__class__ = _Watched
        return context

    pytest.raises = raises


def note(exc: BaseException | None) -> None:
    """Remember the lines of a ScheduleError and of the errors that it was raised from."""
    if not isinstance(exc, errors.ScheduleError):
        return
    cause: BaseException | None = exc
    while cause is not None:
        trace = cause.__traceback__
        while trace is not None:
            met.add((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
            trace = trace.tb_next
        cause = cause.__cause__ or cause.__context__


def all_refusals() -> Iterator[tuple[Path, int, int]]:
    """Every `raise` of an error that is not one of Python's own: (file, first line, last line)."""
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and not _is_builtin(node.exc.func):
                    yield path, node.lineno, node.end_lineno or node.lineno


def write(root: Path, worker: str) -> None:
    """Leave what this process met for the one that looks at all."""
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{worker}.json").write_text(json.dumps(sorted(met)), encoding="utf-8")


def _met_by_all() -> set[tuple[str, int]]:
    found = set(met)
    for path in (ROOT / FOLDER).glob("*.json"):
        found |= {(file, line) for file, line in json.loads(path.read_text(encoding="utf-8"))}
    return found


def unmet() -> list[str]:
    """The refusals that no test has matched, as file:line."""
    lines: dict[str, set[int]] = {}
    for file, line in _met_by_all():
        lines.setdefault(str(Path(file).resolve()), set()).add(line)
    return [
        f"{path.relative_to(ROOT)}:{first}"
        for path, first, last in all_refusals()
        if not lines.get(str(path.resolve()), set()) & set(range(first, last + 1))
    ]


def _is_builtin(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and hasattr(builtins, function.id)
