"""`slapo.kernels.list()`, and what every registered kernel must say of itself."""

import inspect
from pathlib import Path

import pytest

import slapo_py as slapo
from slapo_py import kernels

FOLDER = Path(__file__).parents[2] / "kernels"
OURS = [one.stem for one in sorted(FOLDER.glob("*.py")) if "\nregister_kernel(\n" in one.read_text(encoding="utf-8")]


def test_the_table_lists_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    slapo.kernels.list()
    printed = capsys.readouterr().out
    for name in OURS:
        assert name in printed
    assert "placement" in printed and "...H, H" in printed


@pytest.mark.parametrize("name", OURS)
def test_a_kernel_is_a_plain_function_with_a_file_of_tests(name: str) -> None:
    kernel = kernels.find_kernel(name)
    assert inspect.getdoc(getattr(kernels, name))
    assert kernel.example is not None
    assert (Path(__file__).parent / f"test_{name}.py").exists()
