"""A graph as terms: each node is an operation with a name and operands, whatever way it was written in."""

import inspect
import operator
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo_py.patterns.binding import Form, bind, parts
from slapo_py.patterns.children import child_form, op_of
from slapo_py.patterns.effects import is_barrier
from slapo_py.patterns.ops import form_of_function, form_of_method, is_commutative
from slapo_py.patterns.words import Attribute, Child, Dim, Wild
from slapo_py.scheduled import bare

CALL = Child(".*")  # the operation under which every call of a submodule is found
_FACTS = {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad"}
_SIZE_ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.truediv,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Term:
    """A node as an operation.

    op: a name, or the callable itself where it is unknown.
    operands: by parameter; nodes, attributes of submodules, literals, and containers of them.
    defaults: the parameters whose operand is what leaving it out would mean.
    commutative: whether the operands `input` and `other` may be swapped.
    reads: for the call of a submodule, the plain attributes that were taken for literals.
    kind: and its class.
    """

    op: Hashable
    operands: dict[str, Any]
    defaults: frozenset[str] = frozenset()
    commutative: bool = False
    reads: dict[tuple[str, str], Any] = field(default_factory=dict)
    kind: type[nn.Module] | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes among the operands."""
        return [one for value in self.operands.values() for one in parts(value) if isinstance(one, fx.Node)]


class Terms:
    """The terms of a graph. `module` has the submodules that it calls; None for the graph of a pattern."""

    def __init__(self, module: nn.Module | None, graph: fx.Graph) -> None:
        self.module, self.graph = module, graph
        self.built = 0
        self.order: dict[fx.Node, int] = {}
        self.ops: dict[Hashable, list[fx.Node]] = {}
        self._heads: dict[fx.Node, Hashable] = {}
        self._same: dict[fx.Node, fx.Node] = {}
        self._terms: dict[fx.Node, Term] = {}
        self._child_ops: dict[type[nn.Module], str | None] = {}
        self._read()

    def _read(self) -> None:
        """One pass: the name of each operation, and which nodes only keep the books of sizes and dtypes."""
        known: dict[Hashable, fx.Node] = {}
        for position, node in enumerate(self.graph.nodes):
            self.order[node] = position
            op = node.op  # asked once: fx looks it up each time
            if op == "call_module":
                self.ops.setdefault(CALL, []).append(node)
            elif op not in ("call_function", "call_method", "get_attr"):
                continue
            if op != "get_attr":
                head = self._heads[node] = self._head(node)
                if head is not None:
                    self.ops.setdefault(head, []).append(node)
            key = self._book_key(node) if op != "call_module" else None
            if key is not None:
                self._same[node] = known.setdefault(key, node)

    def _head(self, node: fx.Node) -> Hashable | None:
        if node.op == "call_module":
            return self._child_op(node)
        if node.target is getattr and len(node.args) == 2 and node.args[1] == "shape":
            return "shape"
        if node.op == "call_method" and node.target == "size":
            return "size" if len(node.args) > 1 or node.kwargs else "shape"
        if node.target is operator.getitem and self._is_shape(node.args[0]) and isinstance(node.args[1], int | Wild):
            return "size"
        return CALL if isinstance(node.target, Child) else self._form(node).op

    def child(self, node: fx.Node) -> nn.Module:
        """The submodule that a node calls."""
        module: Any = self.module
        for atom in str(node.target).split("."):
            module = module._modules[atom]
        return module  # type: ignore[no-any-return]

    def _child_op(self, node: fx.Node) -> str | None:
        child = self.child(node)
        kind = type(child)
        if kind not in self._child_ops:
            self._child_ops[kind] = op_of(child)
        return self._child_ops[kind]

    @staticmethod
    def _form(node: fx.Node) -> Form:
        return form_of_method(str(node.target)) if node.op == "call_method" else form_of_function(node.target)

    def _is_shape(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and self._heads.get(value) == "shape"

    # Books: values that are computed again wherever they are needed

    def _book_key(self, node: fx.Node) -> Hashable | None:
        if node.op == "get_attr":
            return ("get_attr", node.target)
        head = self._heads.get(node)
        if head == "shape" or head == "size":
            term = self.term(node)
            dim = term.operands.get("dim")
            if isinstance(dim, Wild):
                dim = (dim.name, id(dim))  # two of them need not be the same
            return (head, self.same(term.operands["input"]), self.same(dim))
        if node.target is getattr and len(node.args) == 2 and node.args[1] in _FACTS:
            return ("getattr", self.same(node.args[0]), node.args[1])
        if node.op == "call_function" and node.target in _SIZE_ARITHMETIC and not node.kwargs:
            if all(type(one) is int or self._is_size(one) for one in node.args):
                operands = tuple((type(one), self.same(one)) for one in node.args)
                return (node.target, operands)
        return None

    def _is_size(self, value: Any) -> bool:
        return value in self._same and value.op != "get_attr" if isinstance(value, fx.Node) else False

    def is_book(self, node: fx.Node) -> bool:
        """Whether a node only reads an attribute, a size or a dtype, or computes with sizes."""
        return node in self._same

    def same(self, value: Any) -> Any:
        """A key for a value of the graph: equal for values that are the same."""
        if isinstance(value, fx.Node):
            value = self._same.get(value, value)
            return Attribute(str(value.target)) if value.op == "get_attr" else value
        return value

    # Terms

    def head(self, node: fx.Node) -> Hashable | None:
        """The name of a node's operation."""
        return self._heads.get(node)

    def term(self, node: fx.Node) -> Term:
        """The node as a term."""
        found = self._terms.get(node)
        if found is None:
            self.built += 1
            found = self._terms[node] = self._make(node)
        return found

    def writes(self, node: fx.Node) -> bool:
        """Whether a node writes in place; such a one never matches."""
        return self.module is not None and is_barrier(node, self.module)

    def _make(self, node: fx.Node) -> Term:
        head = self._heads[node]
        if node.op == "call_module":
            return self._make_child(node)
        if head == "shape":
            return Term("shape", {"input": node.args[0]})
        if head == "size":
            base = node.args[0]
            dim = node.args[1] if len(node.args) > 1 else node.kwargs["dim"]
            if self._is_shape(base):
                ndim = base.meta.get("ndim")  # type: ignore[union-attr]
                dim = Dim(dim, ndim) if ndim and type(dim) is int else dim
                base = base.args[0]  # type: ignore[union-attr]
            return Term("size", {"input": base, "dim": dim})
        if isinstance(node.target, Child):
            return Term(CALL, {})
        form = self._form(node)
        bound = bind(form, node.args, node.kwargs)
        operands = bound.operands
        return Term(form.op, operands, bound.defaults, is_commutative(form.op, operands))

    def _make_child(self, node: fx.Node) -> Term:
        child, path = self.child(node), str(node.target)
        form = child_form(child, path)
        given = [*node.args, *node.kwargs.values()]
        if form is None or len(given) != 1:
            return Term(CALL, {}, kind=type(child))
        target = getattr(F, form.op, None) or getattr(torch, form.op, None) or getattr(torch.ops.aten, form.op)
        bound = bind(form_of_function(target), (), {"input": given[0], **form.operands})
        return Term(form.op, bound.operands, bound.defaults, False, form.reads, type(child))

    def call(self, child: fx.Node, call: fx.Node) -> dict[str, Any] | None:
        """The arguments of `call` (of this graph or of a pattern's), bound to the forward of a submodule of this."""
        module = self.child(child)
        try:
            bound = inspect.signature(bare(module).forward).bind(module, *call.args, **call.kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        return dict(list(bound.arguments.items())[1:])
