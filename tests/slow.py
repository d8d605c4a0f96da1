"""Which of many alike are tested each time: the others are slow tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Parameters of a test; all that are not quick are marked slow. A tuple is several parameters."""
    chosen = list(quick)
    missing = [one for one in chosen if one not in (every := list(every))]
    assert not missing, missing
    return [_param(one, () if one in chosen else (pytest.mark.slow,)) for one in every]


def _param(values: Any, marks: Any) -> Any:
    return pytest.param(*values, marks=marks) if isinstance(values, tuple) else pytest.param(values, marks=marks)
