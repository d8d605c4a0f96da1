"""Settings of every test: no network, one thread, fixed seeds, and golden texts."""

import os

# Before transformers is imported: it reads these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests import refusals

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
"""The name of this process, if several run the tests together."""

torch.set_num_threads(1)
refusals.watch()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew instead of comparing")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # What the other tests met is looked at last, and only when they were all asked for: by one process at the end of
    # its own run, or after a run of several, which leave what they met in a folder.
    last = [item for item in items if item.path == config.rootpath / "tests" / "test_every_refusal.py"]
    items[:] = [item for item in items if item not in last]
    asked = {Path(a).resolve() for a in config.args}
    whole = not config.getoption("keyword") and asked <= {config.rootpath / "tests"}
    if asked == {item.path for item in last} or (whole and WORKER is None):
        items.extend(last)

    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if WORKER is not None:
        refusals.write(session.config.rootpath, WORKER)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Each test starts from the same random state, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)
    yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` compares with ``golden/<name>.txt`` beside the test file."""
    folder = Path(str(request.node.path)).parent / "golden"

    def compare(name: str, text: str) -> None:
        path = folder / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest --update-golden and read what it wrote"
        assert text == path.read_text(encoding="utf-8")

    return compare
