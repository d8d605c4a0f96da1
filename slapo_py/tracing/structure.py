"""The structure of what a submodule gives back, and the condition that it still is that."""

from typing import Any

from slapo_py.tracing.values import FUNCTIONS, Tensor, is_plain, signature


def structure_of(value: Any) -> Any:
    """Nested containers with a tensor as `Tensor`, other leaves as they are."""
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, (list, tuple)):
        return (type(value), *map(structure_of, value))
    if isinstance(value, dict):
        return (type(value), *((key, structure_of(item)) for key, item in value.items()))
    return value if is_plain(value) else signature(value)


def structure_check(expr: str, structure: Any) -> str:
    """What `structure_of` gave -> a python condition on `expr`."""
    conditions: list[str] = []
    _collect(expr, structure, conditions)
    return " and ".join(conditions)


def _collect(expr: str, structure: Any, conditions: list[str]) -> None:
    if structure is Tensor:
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
