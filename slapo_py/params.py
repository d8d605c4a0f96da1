"""Parameter maps: where the parameters of a new module come from, element by element, said so that it can be undone.

`{"qkv.weight": cat("q.weight", "k.weight", "v.weight")}` names, for each new parameter, the elements of old ones that
it consists of: whole parameters (a plain string is a rename), `cat`, `split` and `transpose` of such, nested at will.
Each element of an old parameter is used exactly once, so the same map takes weights, gradients and an optimizer's
moments there and back.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slapo_py import codec
from slapo_py.errors import ArgumentError


class Expression(codec.Value):
    """A part of a parameter map that is more than a name."""

    def __repr__(self) -> str:
        return codec.Source().write(self)


@codec.value("params.cat")
@dataclass(frozen=True, repr=False)
class Cat(Expression):
    """Tensors one after the other along a dim."""

    parts: "tuple[str | Expression, ...]"
    dim: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise ArgumentError('slapo.params.cat(): needs the names of parameters, as in cat("q.weight", "k.weight").')
        for part in self.parts:
            _check_source("cat", part)
        _check_dim("cat", self.dim)

    def written(self, write: Callable[[Any], str]) -> str:
        dim = f", dim={write(self.dim)}" if self.dim else ""
        return f"slapo.params.cat({', '.join(map(write, self.parts))}{dim})"


@codec.value("params.part")
@dataclass(frozen=True, repr=False)
class Part(Expression):
    """One of the parts into which a tensor is split along a dim."""

    source: "str | Expression"
    parts: "int | tuple[int, ...]"
    index: int
    dim: int = 0

    def __post_init__(self) -> None:
        _check_source("split", self.source)
        _check_dim("split", self.dim)
        sizes: Any = (self.parts,) if _is_whole(self.parts) else self.parts
        fits = isinstance(sizes, list | tuple) and all(_is_whole(size) and size > 0 for size in sizes) and sizes
        if not fits:
            raise ArgumentError(
                f"slapo.params.split: needs a number of parts or a list of sizes, found {self.parts!r}. Write "
                f'split("qkv.weight", 3) or split("qkv.weight", [8, 4, 4]).'
            )
        if isinstance(self.parts, list | tuple):
            object.__setattr__(self, "parts", tuple(self.parts))
        count = self.parts if isinstance(self.parts, int) else len(self.parts)
        if not _is_whole(self.index) or not 0 <= self.index < count:
            raise ArgumentError(f"slapo.params.split: there is no part {self.index!r} of {count}, counted from 0.")

    def written(self, write: Callable[[Any], str]) -> str:
        parts = write(self.parts if isinstance(self.parts, int) else list(self.parts))
        dim = f", dim={write(self.dim)}" if self.dim else ""
        return f"slapo.params.split({write(self.source)}, {parts}{dim})[{write(self.index)}]"


@codec.value("params.transpose")
@dataclass(frozen=True, repr=False)
class Transpose(Expression):
    """A tensor with two dims swapped."""

    source: "str | Expression"
    dim0: int
    dim1: int

    def __post_init__(self) -> None:
        _check_source("transpose", self.source)
        _check_dim("transpose", self.dim0)
        _check_dim("transpose", self.dim1)

    def written(self, write: Callable[[Any], str]) -> str:
        return f"slapo.params.transpose({write(self.source)}, {write(self.dim0)}, {write(self.dim1)})"


def cat(*parts: "str | Expression", dim: int = 0) -> Cat:
    """The new parameter is these, one after the other: `cat("q.weight", "k.weight", "v.weight")`."""
    return Cat(parts, dim)


def split(source: "str | Expression", parts: int | Sequence[int], dim: int = 0) -> tuple[Part, ...]:
    """The parts of an old parameter, for as many new ones: `q, k, v = split("c_attn.weight", 3, dim=1)`.

    `parts`: a number of equal parts, or a list of their sizes.
    """
    sizes: Any = tuple(parts) if isinstance(parts, list | tuple) else parts
    count = len(sizes) if isinstance(sizes, tuple) else sizes
    return tuple(Part(source, sizes, index, dim) for index in range(count if _is_whole(count) and count > 0 else 1))


def transpose(source: "str | Expression", dim0: int, dim1: int) -> Transpose:
    """The new parameter is an old one with two dims swapped: `transpose("c_fc.weight", 0, 1)`."""
    return Transpose(source, dim0, dim1)


def named_in(source: "str | Expression") -> Iterator[str]:
    """The names of the old parameters in an expression, in order, each as often as it is used."""
    if isinstance(source, str):
        yield source
    elif isinstance(source, Cat):
        for part in source.parts:
            yield from named_in(part)
    elif isinstance(source, Part | Transpose):
        yield from named_in(source.source)


def is_source(value: Any) -> bool:
    return isinstance(value, str | Cat | Part | Transpose)


def _check_source(what: str, part: Any) -> None:
    if not is_source(part):
        raise ArgumentError(
            f"slapo.params.{what}: needs names of parameters, or cat, split or transpose of such, found {part!r}."
        )


def _check_dim(what: str, dim: Any) -> None:
    if not _is_whole(dim):
        raise ArgumentError(f"slapo.params.{what}: a dim is a whole number, found {dim!r}.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
