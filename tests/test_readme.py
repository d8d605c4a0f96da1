"""The README is true: its snippet prints its output, and every primitive has a row and a test."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import slapo_py as slapo

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_the_code_prints_its_output() -> None:
    """All of it, one block after the other, as a reader would type it."""
    printed = io.StringIO()
    scope: dict[str, object] = {"__name__": "readme"}
    try:
        with contextlib.redirect_stdout(printed):
            for code in blocks("python"):
                exec(compile(code, "README.md", "exec"), scope)
    finally:
        if "set_dropout" in slapo.list_primitives():
            slapo.unregister("set_dropout")
    assert _trimmed(printed.getvalue()) == [line for text in blocks("text") for line in _trimmed(text)]


def test_the_snippet_and_its_output_come_first() -> None:
    end = README.index("\n```\n", README.index("```text"))
    assert README[:end].count("\n") < 30


@pytest.mark.parametrize("name", slapo.list_primitives())
def test_every_primitive_has_a_row_and_a_test(name: str) -> None:
    assert re.search(rf"^\| `{name}\(", README, flags=re.MULTILINE)
    tests = [p for p in (ROOT / "tests").rglob("test_*.py") if p != Path(__file__)]
    assert any(f".{name}(" in p.read_text(encoding="utf-8") for p in tests)


def test_every_primitive_file_is_a_registered_primitive() -> None:
    files = {p.stem for p in (ROOT / "primitives").glob("*.py") if not p.stem.startswith("_")}
    assert files == set(slapo.list_primitives())


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
