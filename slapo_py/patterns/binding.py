"""The arguments of a call by the name of their parameter, in one form for what means the same."""

import inspect
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from slapo_py.patterns.words import Attribute, Dim, Wild

REQUIRED = inspect.Parameter.empty

RENAMED = {
    "self": "input", "tensor": "input", "train": "training", "split_size_or_sections": "split_size",
    "split_sizes": "split_size",
}  # fmt: skip
_NUMPY = {"axis": "dim", "keepdims": "keepdim", "a": "input", "x": "input", "x1": "input", "x2": "other"}
IGNORED = {"_stacklevel", "cudnn_enable", "cudnn_enabled", "implicit"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of an operation; `kind` is what its values are, as far as it matters."""

    name: str
    default: Any = REQUIRED
    kind: str = ""
    count: int | None = None
    keyword_only: bool = False
    checked: bool = True


class Signature:
    """The parameters of an operation, and what binding needs to know of them, worked out once."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.positional = tuple(one for one in self.parameters if not one.keyword_only)
        self.names = frozenset(one.name for one in self.parameters)
        self.kept = tuple(
            (one, REQUIRED if one.default is REQUIRED else canonical(one, one.default))
            for one in self.parameters
            if one.name not in IGNORED
        )


@dataclass(frozen=True)
class Form:
    """One way to write an operation: what it is, and how its arguments are bound.

    `op` is a name, or for what is unknown here the callable itself. `swapped`: the operands stand in the other order.
    `given`: what this way of writing says by its name, as `x.float()` says the dtype.
    """

    op: Hashable
    signatures: tuple[Signature, ...] = ()
    swapped: bool = False
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bound:
    """The arguments of a call by parameter; those in `defaults` are what is taken when they are left out."""

    operands: dict[str, Any]
    defaults: frozenset[str] = frozenset()


def bind(form: Form, args: Sequence[Any], kwargs: dict[str, Any]) -> Bound:
    """The arguments of a call, by parameter."""
    if form.op == "to":
        return _bind_to(form, args, kwargs)
    bound = _first(form.signatures, args, kwargs)
    if bound is None:
        named = {RENAMED.get(name, name): value for name, value in kwargs.items()}
        return Bound({**{str(position): value for position, value in enumerate(args)}, **named, **form.given})
    if form.swapped and {"input", "other"} <= bound.operands.keys():
        swapped = {**bound.operands, "input": bound.operands["other"], "other": bound.operands["input"]}
        return Bound(swapped, bound.defaults)
    return bound


def _first(signatures: tuple[Signature, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> Bound | None:
    """With the first signature that takes these arguments: as they are, or with numbers in the place of tensors."""
    for strict in (True, False):
        for signature in signatures:
            bound = _try(signature, args, kwargs, strict)
            if bound is not None:
                return bound
    return None


def _try(signature: Signature, args: Sequence[Any], kwargs: dict[str, Any], strict: bool) -> Bound | None:
    given = _by_name(signature, args, kwargs)
    if given is None:
        return None
    operands, defaults = {}, set()
    for one, default in signature.kept:
        if one.name in given:
            operands[one.name] = value = canonical(one, given[one.name])
            if not _takes(one, value, strict):
                return None
            if default is not REQUIRED and same_literal(value, default):
                defaults.add(one.name)
        elif default is REQUIRED:
            return None
        else:
            operands[one.name] = default
            defaults.add(one.name)
    return Bound(operands, frozenset(defaults))


def _by_name(signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments that are given, if there are such parameters."""
    positional = signature.positional
    given = {one.name: value for one, value in zip(positional, args, strict=False)}
    if positional and len(args) >= len(positional) and positional[-1].kind == "ints":
        last = args[len(positional) - 1 :]
        if len(last) > 1 and not isinstance(last[0], list | tuple):
            given[positional[-1].name] = tuple(last)  # x.view(a, b)
            args = args[: len(positional)]
    if len(args) > len(positional):
        return None
    for name, value in kwargs.items():
        name = RENAMED.get(name, name)
        if name not in signature.names:
            name = _NUMPY.get(name, name)
        if name not in signature.names or name in given:
            return None
        given[name] = value
    return given


def _takes(one: Parameter, value: Any, strict: bool) -> bool:
    kind = one.kind
    if isinstance(value, fx.Node | Attribute) or not kind or not one.checked:
        return True
    if isinstance(value, Wild):
        return kind != "tensor" or not strict
    if kind.endswith("?"):
        if value is None:
            return True
        kind = kind[:-1]
    if kind == "tensor":
        return not strict and isinstance(value, int | float | complex)
    if kind == "tensors":
        return isinstance(value, tuple)
    if kind == "ints":
        return isinstance(value, tuple) or (isinstance(value, int) and not isinstance(value, bool))
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    wanted: Any = {
        "number": int | float | complex, "bool": bool, "str": str, "dtype": torch.dtype, "device": torch.device,
    }.get(kind, object)  # fmt: skip
    return isinstance(value, wanted)


def canonical(one: Parameter, value: Any) -> Any:
    """One form for values that a parameter takes for the same: (1,) and 1, a list and a tuple of sizes."""
    kind = one.kind.rstrip("?")
    if kind == "ints":
        if isinstance(value, list | tuple):
            return value[0] if len(value) == 1 else tuple(value)
        if one.count and one.count > 1 and type(value) is int:
            return (value,) * one.count
    if kind == "tensors" and isinstance(value, list):
        return tuple(value)
    if kind == "device" and isinstance(value, str):
        return torch.device(value)
    return value


def _bind_to(form: Form, args: Sequence[Any], kwargs: dict[str, Any]) -> Bound:
    """`x.to(...)`: with one of dtype, device and tensor it does not matter which way that one is given."""
    flags = {"non_blocking": False, "copy": False, "memory_format": None}
    operands: dict[str, Any] = dict(zip(("input",), args, strict=False))
    given = dict(form.given)
    rest = list(args[1:])
    if form.given:
        names = ["memory_format"]
    elif rest:
        first = rest.pop(0)
        given["target"] = torch.device(first) if isinstance(first, str) else first
        names = ["dtype"] if isinstance(given["target"], torch.device) else []
        names += ["non_blocking", "copy"]
        if names[0] == "dtype" and rest and isinstance(rest[0], bool):
            names = names[1:]
    else:
        names = []
    given.update(zip(names, rest, strict=False))
    given.update(kwargs)
    if isinstance(given.get("device"), str):
        given["device"] = torch.device(given["device"])
    said = [name for name in ("target", "dtype", "device", "other") if given.get(name) is not None]
    if len(said) == 1:
        operands["target"] = given.pop(said[0])
    elif len(said) == 2 and "target" in said:  # the device came first
        given["device" if "dtype" in said else "dtype"] = given.pop("target")
    defaults = {name for name in flags if same_literal(given.get(name, flags[name]), flags[name])}
    operands.update({**flags, **{name: value for name, value in given.items() if value is not None}})
    return Bound(operands, frozenset(defaults))


def same_literal(a: Any, b: Any) -> bool:
    """Whether two literals are the same: 1 and 1.0 are, 1 and True are not, and floats are compared to the last bit."""
    if a is b:
        return True
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        if isinstance(b, Dim) and isinstance(a, int):
            return a == b or a + b.ndim == b
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    for kind in (tuple, list):
        if isinstance(a, kind) or isinstance(b, kind):
            same_kind = isinstance(a, kind) and isinstance(b, kind)
            return same_kind and len(a) == len(b) and all(map(same_literal, a, b))
    if isinstance(a, slice) and isinstance(b, slice):
        return all(map(same_literal, (a.start, a.stop, a.step), (b.start, b.stop, b.step)))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_literal(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def parts(value: Any) -> Iterator[Any]:
    """The leaves of nested containers."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from parts(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from parts(one)
    elif isinstance(value, slice):
        yield from parts((value.start, value.stop, value.step))
    else:
        yield value
