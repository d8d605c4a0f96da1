"""Sizes that stay symbolic: an `int` that remembers the graph node computing it.

User code sees a plain number. Arithmetic gives new nodes; comparisons, and every use that we can't follow, are
logged, because the graph then holds only where they come out the same.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import fx


class Log(Protocol):
    """What a size needs of the tape that it is on."""

    active: bool
    graph: fx.Graph
    comparisons: "list[Comparison]"

    def arg(self, value: Any) -> Any: ...


class Comparison(NamedTuple):
    """One thing the capture relies on: `node sign other` came out as `result`."""

    node: fx.Node
    sign: str
    other: Any  # a number, or the node of another size
    result: bool


class Size(int):
    """A size (or a number computed from sizes) and the node that computes it."""

    node: fx.Node
    capture: Log

    def __new__(cls, value: int, node: fx.Node, capture: Log) -> "Size":
        size = int.__new__(cls, value)
        size.node, size.capture = node, capture
        node.meta["int"] = int.__int__(size)
        return size

    def __neg__(self) -> int:
        plain = int.__neg__(self)
        if not self.capture.active:
            return plain
        return Size(plain, self.capture.graph.call_function(operator.neg, (self.node,)), self.capture)

    def __pos__(self) -> int:
        return self

    def __bool__(self) -> bool:
        result = int.__ne__(self, 0)
        self._log("!=", 0, result)
        return result

    def __reduce__(self) -> Any:
        return (int, (int.__int__(self),))

    def _log(self, sign: str, other: Any, result: bool) -> None:
        if self.capture.active:
            node = other.node if isinstance(other, Size) and other.capture is self.capture else other
            self.capture.comparisons.append(Comparison(self.node, sign, node, result))


def _arithmetic(name: str, op: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Size, Any], Any]:
    plain = getattr(int, name)

    def method(self: Size, other: Any) -> Any:
        value = plain(self, other)
        if value is NotImplemented:
            self._log("==", int.__int__(self), True)  # python goes on with plain numbers
        if type(value) is not int or not self.capture.active:
            return value
        left, right = (other, self) if swapped else (self, other)
        capture = self.capture
        return Size(value, capture.graph.call_function(op, (capture.arg(left), capture.arg(right))), capture)

    return method


def _comparison(name: str, sign: str) -> Callable[[Size, Any], Any]:
    plain = getattr(int, name)

    def method(self: Size, other: Any) -> Any:
        result = plain(self, other)
        if result is NotImplemented:
            self._log("==", int.__int__(self), True)
        else:
            self._log(sign, other, result)
        return result

    return method


def _escape(name: str) -> Callable[..., Any]:
    """A use that is not followed (a float, a hash, a bit operation): the size is then fixed to its value."""
    plain = getattr(int, name)

    def method(self: Size, *args: Any) -> Any:
        self._log("==", int.__int__(self), True)
        return plain(self, *args)

    return method


ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}
_COMPARISONS = {"gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==", "ne": "!="}
_ESCAPES = ["int", "float", "hash", "truediv", "rtruediv", "pow", "rpow", "divmod", "rdivmod", "and", "rand", "or",
            "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift", "invert", "abs", "round", "trunc", "floor",
            "ceil", "str", "repr", "format"]  # fmt: skip
for _name in ARITHMETIC:
    setattr(Size, f"__{_name}__", _arithmetic(f"__{_name}__", getattr(operator, _name), False))
    setattr(Size, f"__r{_name}__", _arithmetic(f"__r{_name}__", getattr(operator, _name), True))
for _name, _sign in _COMPARISONS.items():
    setattr(Size, f"__{_name}__", _comparison(f"__{_name}__", _sign))
for _name in _ESCAPES:
    setattr(Size, f"__{_name}__", _escape(f"__{_name}__"))
for _name in ("bit_length", "bit_count", "to_bytes"):
    setattr(Size, _name, _escape(_name))
