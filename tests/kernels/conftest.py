"""Tests marked `triton` run where Triton does: on a GPU, or in a process of their own under Triton's interpreter."""

import pytest
import torch

from slapo_py.kernels.launch import INTERPRETED

if INTERPRETED:
    from tests.kernels import interpreter

    interpreter.mend()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(__file__.rpartition("/")[0])]
    runs = INTERPRETED or torch.cuda.is_available()

    def belongs(item: pytest.Item) -> bool:
        if item.get_closest_marker("triton"):
            return runs
        return not INTERPRETED and not (runs and item.name == "test_triton_in_the_interpreter")

    out = [item for item in here if not belongs(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]
