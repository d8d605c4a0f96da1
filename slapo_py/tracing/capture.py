"""One run of a module's own forward on fake tensors: the torch-level calls become graph nodes.

The forward sees plain tensors, numbers and None, never a proxy, so any python works. Each call of a torch function is
logged under the identity of the tensors that go in and come out; calls of submodules stay calls. Nothing is decided
here: `Capture` also lists all that the run relied on, for the guards.
"""

import contextlib
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode

from slapo_py.errors import TraceError
from slapo_py.scheduled import own_forward
from slapo_py.tracing.bindings import bookkeeping, containers
from slapo_py.tracing.huggingface import without_checkpointing
from slapo_py.tracing.module_globals import GlobalReads, caches_kept
from slapo_py.tracing.recorder import Call
from slapo_py.tracing.sandbox import Fakes, changed_attribute, changed_container, random_state_kept, sandbox
from slapo_py.tracing.sizes import Comparison, Size
from slapo_py.tracing.source import where, where_raised
from slapo_py.tracing.tape import Input, Tape
from slapo_py.tracing.values import FUNCTIONS, SIMPLE, Tensor, map_tensors, tensors
from slapo_py.tracing.watch import Watch

_AS_OPERATOR: dict[Any, Callable[..., Any]] = {
    Tensor.add: operator.add, Tensor.sub: operator.sub, Tensor.mul: operator.mul, Tensor.div: operator.truediv,
    Tensor.__getitem__: operator.getitem, Tensor.__setitem__: operator.setitem,
    Tensor.__matmul__: operator.matmul, Tensor.neg: operator.neg, Tensor.__pow__: operator.pow,
    Tensor.__floordiv__: operator.floordiv, Tensor.__mod__: operator.mod, Tensor.__ipow__: operator.ipow,
}  # fmt: skip
_SWAPPED: dict[str, Callable[..., Any]] = {
    "__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rtruediv__": operator.truediv,
    "__rpow__": operator.pow, "__rfloordiv__": operator.floordiv, "__rmatmul__": operator.matmul,
    "__rmod__": operator.mod,
}  # fmt: skip
_METHOD_TYPES = (type(Tensor.view), type(Tensor.__add__))
_READS_DATA = {
    "__bool__", "item", "__int__", "__float__", "__index__", "__complex__", "tolist", "numpy", "__array__",
    "is_nonzero", "equal", "allclose", "__contains__",
}  # fmt: skip
_LEAVES_A_MARK = {"backward", "register_hook", "retain_grad", "register_post_accumulate_grad_hook"}
_NO_EFFECT = {
    getattr, operator.getitem, operator.neg, operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod
}  # fmt: skip


class Capture(Tape, TorchFunctionMode):
    """The graph of one run, and what the run relied on."""

    def __init__(self, root: nn.Module, is_leaf: Callable[[str, nn.Module], bool], watch_globals: bool = False) -> None:
        Tape.__init__(self, root, is_leaf)
        TorchFunctionMode.__init__(self)
        self.watch_globals = watch_globals
        self._size_nodes: dict[tuple[fx.Node, int | None], fx.Node] = {}

    # ---- the run ---------------------------------------------------------------------------------------------------
    def run(
        self,
        call: Call,
        fakes: Fakes,
        training: bool,
        dtype: torch.dtype | None = None,
        flipped: frozenset[int] = frozenset(),
        identity: str = "recorded",
    ) -> "Capture":
        """Run `root.forward` once as it was called in `call`.

        `dtype` casts floating tensors; `flipped` are ids of tensors of the call whose `requires_grad` is turned over.
        `identity`: whether arguments that are the same tensor stay so ("recorded"), each argument is a tensor of its
        own ("apart"), or all that could be the same tensor are ("together").
        """
        forward = without_checkpointing(own_forward(self.root))
        if "forward" in vars(self.root):
            raise TraceError("an instance attribute `forward` hides the forward of its class; delete it first")

        def own(tensor: Tensor) -> Tensor:
            new = tensor.detach()
            if dtype is not None and tensor.is_floating_point():
                new = new.to(dtype)
            return new.requires_grad_(tensor.requires_grad != (id(tensor) in flipped))

        with caches_kept(self.root), random_state_kept() as moved, sandbox(self.root, fakes, training, dtype) as before:
            self.name_tensors()
            with fakes.mode, torch.no_grad():
                args, kwargs = _own_arguments(call, own, identity)
                self._placeholders(forward, args, kwargs)
            with fakes.mode, Watch(self), self, torch.enable_grad():
                result = self._forward(forward, args, kwargs)
            code = getattr(inspect.unwrap(forward), "__code__", None)
            self.graph.output(self.arg(result)).meta["where"] = (
                f"the result of {code.co_filename}:{code.co_firstlineno}" if code else "the result"
            )
            for module in self.root.modules():
                if id(module) not in self.leaves:
                    name = changed_container(module, before[id(module)])
                    if name:
                        raise TraceError(f"the forward changes the container self.{name}: a graph would not")
                    name = changed_attribute(module, before[id(module)])
                    if name:
                        raise TraceError(f"the forward changes the attribute self.{name}: a graph would not")
            self._refuse_changed_arguments()
            if self.changed_globals:
                raise TraceError(f"the forward changes {self.changed_globals[0]!r} outside itself: a graph would not")
        if moved:
            raise TraceError(f"the forward draws from or sets {moved[0]}: the graph would hold one draw for ever")
        return self

    def _forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen = GlobalReads(lambda: self.active)
        try:
            self.active = True
            with seen if self.watch_globals else contextlib.nullcontext():
                return forward(self.root, *args, **kwargs)  # in the recorded form: decorators look at it
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            at = where_raised(error.__traceback__)
            name = getattr(error, "func", error)
            raise TraceError(f"the forward needs the data of a tensor ({name}) at {at}") from None
        except TraceError:
            raise
        except Exception as error:
            at = where_raised(error.__traceback__)
            raise TraceError(f"the forward failed on fake tensors at {at}: {type(error).__name__}: {error}") from error
        finally:
            self.active = False
            self.module_globals = seen.found()
            self.changed_globals = seen.changed()

    def _placeholders(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameters = inspect.signature(forward).parameters
        try:
            bound = inspect.signature(forward).bind(self.root, *args, **kwargs).arguments
        except TypeError as error:
            raise TraceError(f"the recorded call does not fit the forward's signature: {error}") from None
        for index, parameter in enumerate(parameters.values()):
            name = parameter.name
            if index == 0:
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                for key, value in bound.get(name, {}).items():
                    self._given(f"{name}[{key!r}]", key, value)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                for position, value in enumerate(bound.get(name, ())):
                    self._given(f"{name}[{position}]", f"{name}_{position}", value)
            else:
                self._given(name, name, bound.get(name, parameter.default))

    def _refuse_changed_arguments(self) -> None:
        for one in self.inputs:
            for container in containers(one.value):
                if not self.is_unchanged(container):
                    raise TraceError(
                        f"the forward changes the container that is given as {one.expr}: a graph would not"
                    )

    def _given(self, expr: str, name: str, value: Any) -> None:
        if hasattr(value, "__next__"):
            raise TraceError(f"the argument {expr} is an iterator, which a call uses up: give a list")
        node = self.graph.placeholder(name)
        self.inputs.append(Input(expr, value, node))
        if tensors(value):
            self.bind_result(value, node)
        elif not isinstance(value, (*SIMPLE, *FUNCTIONS, tuple, list, dict)):
            self.bind(value, node)
            self.foreign[id(value)] = value
        for container in containers(value):
            self.hold(container)

    # ---- torch-level calls -----------------------------------------------------------------------------------------
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in _READS_DATA:
            raise TraceError(
                f"the forward reads the value of a tensor ({name}) at {where()}, and a graph can't depend on data: "
                "write it with tensors (torch.where, a mask), or trace the modules below this one instead"
            )
        args, kwargs = self.calling(args, kwargs)
        out = self.quiet(func, *args, **kwargs)
        if name == "__get__":
            return self._property(func.__self__.__name__, args[0], out)
        if name == "__set__":
            raise TraceError(f"the forward sets .{func.__self__.__name__} of a tensor at {where()}")
        if name in ("size", "numel", "nelement", "__len__"):
            return self._size(name, args, kwargs, out)
        if name == "__iter__":
            self._size("__len__", args, {}, len(args[0]))
            return iter(self._operation(Tensor.unbind, "unbind", args, {}, self.quiet(torch.unbind, args[0]), False))
        if func is torch._C._set_grad_enabled:
            self.graph.call_function(func, self.arg(tuple(args)))
            return out
        if name in _LEAVES_A_MARK:
            raise TraceError(f"the forward calls .{name}() of a tensor at {where()}: a graph would not")
        sets = name == "__setitem__"
        if not sets and not tensors(out):
            if name == "is_contiguous" and (kwargs or len(args) > 1):
                name = "is_contiguous(memory_format)"
            self.fact(name, args[0] if args else None, out)
            return out
        return self._operation(func, name, args, kwargs, out, sets)

    def _operation(self, func: Any, name: str, args: Any, kwargs: Any, out: Any, sets: bool) -> Any:
        a, k = self.arg(tuple(args)), self.arg(dict(kwargs))
        if func in _AS_OPERATOR and not k:
            node = self.graph.call_function(_AS_OPERATOR[func], a)
        elif name in _SWAPPED:
            node = self.graph.call_function(_SWAPPED[name], (a[1], a[0]))
        elif isinstance(func, _METHOD_TYPES) or getattr(Tensor, name, None) is func:
            node = self.graph.call_method(name, a, k)
        else:
            node = self.graph.call_function(func, a, k)
        node.meta["where"] = where()
        node.meta["within"] = self.within
        out = self.called(node, out)
        in_place = (
            sets
            or "out" in kwargs
            or kwargs.get("inplace") is True
            or (name.endswith("_") and not name.endswith("__"))
            or (name.startswith("__i") and name != "__invert__")
        )
        if isinstance(out, (tuple, list)):
            self.lengths[node] = len(out)
        given = frozenset() if in_place else frozenset(map(id, tensors((args, kwargs))))
        return self.quiet(self.bind_result, out, node, given)

    def _property(self, name: str, tensor: Tensor, out: Any) -> Any:
        if isinstance(out, torch.Size):
            return self._sizes(tensor, out)
        if isinstance(out, torch.device):
            return self.device_of(tensor, out)
        if isinstance(out, Tensor):
            node = self.graph.call_function(getattr, (self.arg(tensor), name))
            return self.quiet(self.bind_result, out, node, frozenset({id(tensor)}))
        self.fact(name, tensor, out)
        return out

    def _sizes(self, tensor: Tensor, size: torch.Size) -> torch.Size:
        self.fact("shape", tensor, len(size))
        return torch.Size([Size(n, self._size_node(tensor, i), self) for i, n in enumerate(size)])

    def _size_node(self, tensor: Tensor, index: int) -> fx.Node:
        """The node of one size of a tensor; reading it twice gives the same node."""
        base = self.arg(tensor)
        if (base, index) not in self._size_nodes:
            if (base, None) not in self._size_nodes:
                self._size_nodes[base, None] = bookkeeping(self.graph.call_function(getattr, (base, "shape")))
                self._size_nodes[base, None].meta["ndim"] = tensor.ndim  # a pattern may count dims from the end
            shape = self._size_nodes[base, None]
            node = bookkeeping(self.graph.call_function(operator.getitem, (shape, index)))
            node.meta["where"] = where()
            self._size_nodes[base, index] = node
        return self._size_nodes[base, index]

    def _size(self, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        if isinstance(out, torch.Size):
            return self._sizes(args[0], out)
        self.fact("shape", args[0], args[0].ndim)
        if name == "size":
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            return Size(out, self._size_node(args[0], int(dim) % args[0].ndim), self)
        if name == "__len__":  # len() turns its result into a plain number: the size is fixed
            node = self._size_node(args[0], 0)
            self.comparisons.append(Comparison(node, "==", out, True))
            node.meta["int"] = out
            return out
        return Size(out, self.graph.call_method(name, self.arg(tuple(args)), self.arg(dict(kwargs))), self)


def _own_arguments(
    call: Call, own: Callable[[Tensor], Tensor], identity: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with tensors of the capture's own; see `Capture.run` for `identity`."""
    memo: dict[Any, Tensor] = {}

    def one(value: Any, place: Any) -> Any:
        if isinstance(value, Tensor) and identity != "recorded":
            key = place if identity == "apart" else likeness(value)
            return memo[key] if key in memo else memo.setdefault(key, own(value))
        return map_tensors(value, lambda t: memo[id(t)] if id(t) in memo else memo.setdefault(id(t), own(t)))

    args = tuple(one(value, ("argument", index)) for index, value in enumerate(call.args))
    return args, {name: one(value, ("argument", name)) for name, value in call.kwargs.items()}


def likeness(tensor: Tensor) -> Any:
    """What two tensors share that could be one and the same object."""
    return (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)


def sweep(graph: fx.Graph, keep: frozenset[fx.Node] = frozenset()) -> None:
    """Erase bookkeeping that nothing uses. Operations stay, used or not: they may draw, write or raise."""
    for node in reversed(list(graph.nodes)):
        idle = not node.users and node not in keep
        if idle and (node.op == "get_attr" or (node.op == "call_function" and node.target in _NO_EFFECT)):
            graph.erase_node(node)
        elif idle and node.op == "call_method" and node.target in ("numel", "nelement"):
            graph.erase_node(node)
