"""The condition that a value still has the structure that it had."""

from typing import Any

import torch

from slapo_py.tracing.values import FUNCTIONS


def structure_check(expr: str, structure: Any) -> str:
    """`structure` (as `capture.map_structure` gives it) -> a python condition on `expr`."""
    conditions: list[str] = []
    _collect(expr, structure, conditions)
    return " and ".join(conditions)


def _collect(expr: str, structure: Any, conditions: list[str]) -> None:
    if structure is torch.Tensor:
        conditions.append(f"isinstance({expr}, Tensor)")
    elif structure is None or isinstance(structure, bool):
        conditions.append(f"{expr} is {structure}")
    elif isinstance(structure, tuple) and structure and isinstance(structure[0], type):
        kind, *items = structure
        if issubclass(kind, dict):
            conditions.append(f"list({expr}) == {[key for key, _ in items]!r}")
            for key, item in items:
                _collect(f"{expr}[{key!r}]", item, conditions)
        else:
            conditions.append(f"len({expr}) == {len(items)}")
            for index, item in enumerate(items):
                _collect(f"{expr}[{index}]", item, conditions)
    elif isinstance(structure, (int, str, float)):
        conditions.append(f"{expr} == {structure!r}")
    elif isinstance(structure, FUNCTIONS):
        conditions.append(f"type({expr}).__qualname__ == {structure.__qualname__!r}")
    else:
        conditions.append(f"{expr} is not None")
