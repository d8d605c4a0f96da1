"""One name for each operation, however it is written, and its arguments by the name of their parameter.

`torch.softmax(x, -1)`, `x.softmax(dim=-1)` and `F.softmax(x, -1, dtype=None)` are one operation here. What the
parameters of a builtin are is read from torch's own schemas, what those of a Python function are from its signature.
"""

import inspect
import operator
import types
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.patterns.binding import RENAMED, REQUIRED, Form, Parameter, Signature, same_literal

_OPERATORS: dict[Any, str] = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.truediv: "div",
    operator.floordiv: "floor_divide", operator.mod: "remainder", operator.pow: "pow", operator.matmul: "matmul",
    operator.neg: "neg", operator.pos: "positive", operator.abs: "abs", operator.invert: "bitwise_not",
    operator.and_: "bitwise_and", operator.or_: "bitwise_or", operator.xor: "bitwise_xor",
    operator.lshift: "bitwise_left_shift", operator.rshift: "bitwise_right_shift", operator.eq: "eq",
    operator.ne: "ne", operator.lt: "lt", operator.le: "le", operator.gt: "gt", operator.ge: "ge",
    operator.getitem: "getitem", getattr: "getattr",
}  # fmt: skip
_ATEN = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_IN_PLACE: dict[Any, str] = {
    getattr(operator, f"i{fn.__name__.rstrip('_')}"): name
    for fn, name in _OPERATORS.items()
    if hasattr(operator, f"i{fn.__name__.rstrip('_')}")
}
_DUNDERS = {f"__{fn.__name__.rstrip('_')}__": name for fn, name in _OPERATORS.items()}
_REFLECTED = {
    f"__r{word}__": _DUNDERS[f"__{word}__"]
    for word in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
}
_SYNONYMS = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "clip": "clamp", "concat": "cat", "concatenate": "cat",
    "divide": "div", "fix": "trunc", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "moveaxis": "movedim", "multiply": "mul", "negative": "neg", "not_equal": "ne", "special_erf": "erf",
    "special_expit": "sigmoid", "special_exp2": "exp2", "special_expm1": "expm1", "special_log1p": "log1p",
    "special_softmax": "softmax", "special_log_softmax": "log_softmax", "special_logsumexp": "logsumexp",
    "subtract": "sub", "swapaxes": "transpose", "swapdims": "transpose", "true_divide": "div",
}  # fmt: skip
_SWAPPED = {"gt": "lt", "ge": "le", "rsub": "sub"}  # a > b is b < a
_CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int": torch.int32, "long": torch.int64, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
_COMMUTATIVE = {
    "add", "mul", "eq", "ne", "maximum", "minimum", "logical_and", "logical_or", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_xor",
}  # fmt: skip
_BY_HAND: dict[str, tuple[str, ...]] = {
    "getitem": ("input", "index"), "getattr": ("input", "name"), "size": ("input", "dim"), "shape": ("input",),
}  # fmt: skip


def form_of_function(target: Any) -> Form:
    """The form of a `call_function` node's target."""
    if target in _OPERATORS or target in _names() or isinstance(target, _ATEN):
        return _known(target)
    signature = _python(target) if isinstance(target, types.FunctionType) else None
    return Form(target, (signature,) if signature else ())


@cache
def _known(target: Any) -> Form:
    """The form of one of torch's functions; those of users are not kept."""
    if target in _OPERATORS:
        return _named(_OPERATORS[target])
    if not isinstance(target, _ATEN):
        name = _names()[target]
        return _named(name, _python_named(target, name))
    overload = target if isinstance(target, torch._ops.OpOverload) else None
    packet: Any = target if overload is None else target.overloadpacket
    signatures = _overloads(packet) if overload is None else (_schema(overload),)
    space, _, name = packet._qualified_op_name.partition("::")
    return _named(name, signatures) if space == "aten" else Form(packet, signatures)


@cache
def form_of_method(name: str) -> Form:
    """The form of a `call_method` node's target."""
    if name in _REFLECTED:
        form = _named(_REFLECTED[name])
        return Form(form.op, form.signatures, not form.swapped, form.given)
    if name in _DUNDERS:
        return _named(_DUNDERS[name])
    if name in _CASTS:
        return Form("to", given={"target": _CASTS[name]})
    implemented = getattr(Tensor, name, None)
    if isinstance(implemented, types.FunctionType):
        return _named(name, _python_named(implemented, name))
    if implemented is None:
        return Form(f".{name}")
    return _named(name, method=True)


def _named(name: str, signatures: tuple[Signature, ...] | None = None, method: bool = False) -> Form:
    if name == "to":
        return Form("to")
    name = _SYNONYMS.get(name, name)
    if signatures is None:
        signatures = schemas(name, method)
    return Form(_SWAPPED.get(name, name), signatures, swapped=name in _SWAPPED)


@cache
def _names() -> dict[Any, str]:
    """What torch calls its functions."""
    found: dict[Any, str] = {}
    spaces = (torch, F, torch._C._nn, torch.special, torch.linalg, torch.fft)
    for space in spaces:
        for name, one in vars(space).items():
            if isinstance(one, type | types.ModuleType) or not callable(one) or name.startswith("__"):
                continue
            own = getattr(one, "__name__", name) if isinstance(one, types.BuiltinFunctionType) else name
            if isinstance(one, types.BuiltinFunctionType | types.FunctionType):
                found.setdefault(one, own.lstrip("_") if space is F else own)
    for name in dir(torch._C._VariableFunctions):
        one = getattr(torch._C._VariableFunctions, name)
        if isinstance(one, types.BuiltinFunctionType):
            found.setdefault(one, name)
    return found


# Signatures


def _python(function: Callable[..., Any]) -> Signature | None:
    """The parameters of a Python function, or None if it takes any number of arguments."""
    found = []
    for one in inspect.signature(function).parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            return None
        name = RENAMED.get(one.name, one.name)
        found.append(Parameter(name, one.default, keyword_only=one.kind is one.KEYWORD_ONLY))
    return Signature(found)


def _python_named(function: Any, name: str) -> tuple[Signature, ...] | None:
    """The signature of one of torch's own Python functions; which parameters are lists is read from the schemas."""
    signature = _python(function) if isinstance(function, types.FunctionType) else None
    if signature is None:
        return None
    lists = {one.name: one for schema in schemas(name) for one in schema.parameters if one.kind in ("ints", "tensors")}
    known = {
        one.name: replace(one, kind=lists[one.name].kind, count=lists[one.name].count, checked=False)
        for one in signature.parameters
        if one.name in lists
    }
    return (Signature(known.get(one.name, one) for one in signature.parameters),)


@cache
def schemas(name: str, method: bool = False) -> tuple[Signature, ...]:
    """The overloads of one of torch's own operations."""
    if name in _BY_HAND:
        return (Signature(Parameter(one) for one in _BY_HAND[name]),)
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return ()
    return _overloads(packet, method)


def _overloads(packet: torch._ops.OpOverloadPacket, method: bool = False) -> tuple[Signature, ...]:
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    found = [_schema(one, method) for one in overloads if not one._schema.is_mutable]
    return tuple(one for one in found if any(parameter.kind in ("tensor", "tensors") for parameter in one.parameters))


def _schema(overload: torch._ops.OpOverload, method: bool = False) -> Signature:
    arguments = list(overload._schema.arguments)
    if method:  # the tensor itself comes first
        arguments.sort(key=lambda one: one.name != "self")
    return Signature(
        Parameter(
            RENAMED.get(one.name, one.name),
            one.default_value if one.has_default_value() else REQUIRED,
            _kind(str(one.real_type)),
            getattr(one, "N", None),
            one.kwarg_only and one.name != "approximate",
        )
        for one in arguments
    )


_KINDS = {
    "Tensor": "tensor", "List[Tensor]": "tensors", "List[Optional[Tensor]]": "tensors", "List[int]": "ints",
    "List[SymInt]": "ints", "int": "int", "SymInt": "int", "number": "number", "float": "number", "bool": "bool",
    "str": "str", "ScalarType": "dtype", "Device": "device",
}  # fmt: skip


def _kind(text: str) -> str:
    if text.startswith("Optional["):
        return _KINDS.get(text[9:-1], "") + "?"
    return _KINDS.get(text, "")


def op_in_place(target: Any) -> str | None:
    """The name of the operation of which this is the form that writes into its first operand."""
    name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    if isinstance(target, types.BuiltinFunctionType) and target in _IN_PLACE:
        return _IN_PLACE[target]
    if name.endswith("_") and not name.endswith("__"):
        return _SYNONYMS.get(name[:-1], name[:-1])
    return None


def is_commutative(op: Hashable, operands: dict[str, Any]) -> bool:
    """Whether the operands `input` and `other` may be swapped."""
    return op in _COMMUTATIVE and {"input", "other"} <= operands.keys() and same_literal(operands.get("alpha", 1), 1)
