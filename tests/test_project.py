"""The house: what is packed, and which way imports run."""

import ast
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAPPED = {"primitives": "slapo_py.primitives", "kernels": "slapo_py.kernels"}


def module_files() -> dict[str, Path]:
    """Every module of the distribution by its import name."""
    files: dict[str, Path] = {}
    for folder in ("slapo_py", *MAPPED):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join((MAPPED.get(parts[0], parts[0]), *parts[1:])).removesuffix(".__init__")
            files[name] = path
    return files


def imports_of(path: Path, known: set[str]) -> set[str]:
    """The modules of the distribution that a file imports at any level, type-checking blocks apart."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
    return found & known


def graph() -> dict[str, set[str]]:
    files = module_files()
    return {name: imports_of(path, set(files)) - {name} for name, path in files.items()}


def test_every_package_is_listed() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == {name for name, path in module_files().items() if path.name == "__init__.py"}


def test_imports_run_one_way() -> None:
    for name, imported in graph().items():
        for other in imported:
            if name.startswith("slapo_py.kernels"):
                assert not other.startswith("slapo_py.primitives"), f"{name} imports {other}"
            elif not name.startswith(("slapo_py.primitives", "slapo_py.recipes")) and name != "slapo_py":
                assert not other.startswith(("slapo_py.primitives", "slapo_py.kernels")), f"{name} imports {other}"


def test_no_import_cycle() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_core_imports_without_transformers() -> None:
    code = "import sys; sys.modules['transformers'] = None; sys.modules['matplotlib'] = None; import slapo_py"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "tests")


def test_the_torch_pin_is_allowed_by_the_project() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "\ntorch==2." in pins
    assert "setuptools" not in pins
