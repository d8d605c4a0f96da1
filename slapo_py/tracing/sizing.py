"""Which expression over the arguments gives a size, so that a guard can ask for it before the graph runs."""

import itertools
import operator
from collections.abc import Iterator

from torch import fx

from slapo_py.tracing.capture import Capture
from slapo_py.tracing.expressions import input_tensors, place
from slapo_py.tracing.sizes import ARITHMETIC

_SIGNS = {getattr(operator, name): sign for name, sign in ARITHMETIC.items()}


class SizeNames:
    """Sizes of arguments by expression; sizes of values in between by their two recorded numbers.

    The second kind is a conclusion, not a proof. So whoever uses one gets it checked while the graph runs: `checked`
    maps the node to the local name of the expected value, `locals` says how that is computed.
    """

    def __init__(self, captures: list[Capture], other: Capture | None, pairs: dict[fx.Node, tuple[int, int]]) -> None:
        main = captures[0]
        self._place = lambda node: next(filter(None, (place(c, node) for c in captures)), None)
        self._dims: list[tuple[str, int, int]] = []
        ours = input_tensors(main)
        theirs = input_tensors(other) if other is not None else ours
        for (expr, tensor), (_, twin) in zip(ours, theirs, strict=True):
            for index, (n, m) in enumerate(zip(tensor.shape, twin.shape, strict=True)):
                self._dims.append((f"{expr}.shape[{index}]", int(n), int(m)))
        self._second = pairs
        self.checked: dict[fx.Node, str] = {}
        self.locals: dict[str, str] = {}
        self.equal: list[str] = []

    def all(self) -> Iterator[tuple[str, int]]:
        """Every size of every argument."""
        return ((expr, n) for expr, n, _ in self._dims)

    def fixed(self) -> Iterator[tuple[str, int]]:
        """The sizes that were the same in both recordings."""
        return ((expr, n) for expr, n, m in self._dims if n == m)

    def is_fixed(self, node: object) -> bool:
        """Whether a size follows from sizes of arguments that are guarded to stay. Equal twice is not enough."""
        if not isinstance(node, fx.Node):
            return True
        if node.target in _SIGNS or node.target is operator.neg:
            return all(map(self.is_fixed, node.args))
        expr = self._exact(node)
        return expr is not None and any(expr == fixed for fixed, _ in self.fixed())

    def of(self, node: fx.Node) -> str | None:
        """The expression of a size over the arguments, or None."""
        return self._exact(node) or self._concluded(node)

    def _exact(self, node: object) -> str | None:
        if not isinstance(node, fx.Node):
            return repr(node) if isinstance(node, int) else None
        if node.target in _SIGNS:
            left, right = (self.of(arg) if isinstance(arg, fx.Node) else repr(arg) for arg in node.args)
            return f"({left} {_SIGNS[node.target]} {right})" if left and right else None
        if node.target is operator.neg:
            inner = self.of(node.args[0])  # type: ignore[arg-type]
            return inner and f"(-{inner})"
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0].target is getattr:
            base, index = self._place(node.args[0].args[0]), node.args[1]  # type: ignore[arg-type]
        else:
            return None
        return f"{base}.shape[{index}]" if base else None

    def _concluded(self, node: fx.Node) -> str | None:
        if node not in self._second:
            return None
        first, second = self._second[node]
        if first == second:  # constant as far as we know: checked like any other conclusion
            self.checked[node] = repr(first)
            return repr(first)
        expr = self._candidate((first, second))
        if expr is not None:
            name = next((known for known, text in self.locals.items() if text == expr), f"_size{len(self.locals)}")
            self.locals[name] = expr
            self.checked[node] = name
        return expr

    def _candidate(self, pair: tuple[int, int]) -> str | None:
        """A dim, a dim with something added, or a product of two dims that has these two values."""
        varying = [(expr, n, m) for expr, n, m in self._dims if n != m]
        for expr, n, m in varying:
            if (n, m) == pair:
                return expr
        for expr, n, m in varying:
            if pair[0] - n == pair[1] - m:
                return f"({expr} + {pair[0] - n})"
        for (a, n, m), (b, k, j) in itertools.combinations(varying, 2):
            if (n * k, m * j) == pair:
                return f"({a} * {b})"
        return None
