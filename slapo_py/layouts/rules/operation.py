"""A neutral description of one operation: what rules are asked about. No tensor, no graph, no module.

`Operation("linear", (TensorSpec((2, 8, 4)), TensorSpec((6, 4)), None), results=(TensorSpec((2, 8, 6)),))`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Key = int | str | tuple[int | str, int]
"""Where an argument stands: a position, a keyword, or (either, index) within a tuple of tensors."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's whole shape, whether it may have a gradient, and whether it is a mask."""

    shape: tuple[int, ...]
    is_floating: bool = True
    is_bool: bool = False


@dataclass(frozen=True)
class Operation:
    """One call of a torch operation at whole shapes.

    name: of the function or method, as `__name__` has it; `add`, `add_`, `__add__` and `iadd` are the same.
    operands: the positional arguments: a `TensorSpec`, a tuple that may hold some, or a plain value.
    kwargs: the keyword arguments. results: the tensors that come out (of `split`: each of them).
    """

    name: str
    operands: tuple[object, ...]
    kwargs: Mapping[str, object] = field(default_factory=dict)
    results: tuple[TensorSpec, ...] = ()

    def argument(self, position: int | None, name: str | None = None, default: object = None) -> object:
        """The argument at a position or under a keyword. torch takes `axis` for `dim` nearly everywhere."""
        if position is not None and position < len(self.operands):
            return self.operands[position]
        if name is None:
            return default
        return self.kwargs.get(name, self.kwargs.get(name.replace("dim", "axis"), default))

    def slots(self) -> Iterator[tuple[Key, TensorSpec]]:
        """Each tensor argument with the place where it stands, positional ones first. Placements keep this order."""
        given: list[tuple[int | str, object]] = [*enumerate(self.operands), *self.kwargs.items()]
        for key, value in given:
            if isinstance(value, TensorSpec):
                yield key, value
            elif isinstance(value, (tuple, list)):
                for index, one in enumerate(value):
                    if isinstance(one, TensorSpec):
                        yield (key, index), one
