"""One run of a module's own forward on fake tensors: the torch-level calls become graph nodes.

The forward sees plain tensors, numbers and None, never a proxy, so any python works. Each call of a torch function is
logged under the identity of the tensors that go in and come out; calls of submodules stay calls. Nothing is decided
here: `Capture` also lists all that the run relied on, for the guards.
"""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode

from slapo_py.errors import TraceError
from slapo_py.scheduled import bare
from slapo_py.tracing.bindings import Bindings, bookkeeping, containers
from slapo_py.tracing.huggingface import without_checkpointing
from slapo_py.tracing.module_globals import GlobalReads
from slapo_py.tracing.recorder import Call
from slapo_py.tracing.sandbox import Fakes, changed_container, random_state_kept, sandbox
from slapo_py.tracing.sizes import Comparison, Size
from slapo_py.tracing.source import where, where_raised
from slapo_py.tracing.values import FUNCTIONS, SIMPLE, Tensor, is_plain, map_tensors, opaque_methods, signature, tensors
from slapo_py.tracing.watch import Reads, Watch

_AS_OPERATOR: dict[Any, Callable[..., Any]] = {
    Tensor.add: operator.add, Tensor.sub: operator.sub, Tensor.mul: operator.mul, Tensor.div: operator.truediv,
    Tensor.__getitem__: operator.getitem, Tensor.__setitem__: operator.setitem,
    Tensor.__matmul__: operator.matmul, Tensor.neg: operator.neg,
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
_READS_RANK = {"dim", "ndimension"}
_READS_LAYOUT = {"is_contiguous", "stride", "storage_offset", "data_ptr", "untyped_storage", "is_set_to"}
_READS_DTYPE = {"is_floating_point", "is_complex", "element_size", "type"}
_PLAIN_PROPERTIES = {"is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu"}
_NO_EFFECT = {
    getattr, operator.getitem, operator.neg, operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod
}  # fmt: skip


class Input(NamedTuple):
    """An argument of the captured call."""

    expr: str  # how the generated forward reaches it: `x`, `kwargs['x']`, `args[0]`
    value: Any
    node: fx.Node


class Fact(NamedTuple):
    """Something read of a tensor: `what` of the value of `node` was `value`."""

    what: str
    node: fx.Node | None
    value: Any
    where: str


class Capture(Bindings, TorchFunctionMode):
    """The graph of one run, and what the run relied on."""

    def __init__(self, root: nn.Module, is_leaf: Callable[[str, nn.Module], bool], watch_globals: bool = False) -> None:
        Bindings.__init__(self, root)
        TorchFunctionMode.__init__(self)
        self.root, self.watch_globals = root, watch_globals
        self.active = False
        self.inputs: list[Input] = []
        self.comparisons: list[Comparison] = []
        self.facts: list[Fact] = []
        self.globals: dict[tuple[str, tuple[Any, ...]], Any] = {}
        self.children: dict[fx.Node, Any] = {}
        """The structure that each call of a submodule gave back."""
        self.paths = {id(module): name for name, module in root.named_modules()}
        self.leaves = {id(module) for name, module in root.named_modules() if name and is_leaf(name, module)}
        self.reads: Reads = {}
        self.deep_reads: Reads = {}
        """Config entries read inside submodules; they may decide what a submodule gives back."""
        self.inside = False  # a submodule
        self.inlined: set[str] = set()
        self.module_globals: dict[tuple[str, str], Any] = {}
        self.changed_globals: list[str] = []
        self.said: list[str] = []
        """Where the forward printed, logged or warned."""
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
        forward = without_checkpointing(bare(self.root).forward)
        if "forward" in vars(self.root):
            raise TraceError("an instance attribute `forward` hides the forward of its class; delete it first")

        def own(tensor: Tensor) -> Tensor:
            new = tensor.detach()
            if dtype is not None and tensor.is_floating_point():
                new = new.to(dtype)
            return new.requires_grad_(tensor.requires_grad != (id(tensor) in flipped))

        with random_state_kept() as moved, sandbox(self.root, fakes, training, dtype) as before:
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
                name = changed_container(module, before[id(module)])
                if name and id(module) not in self.leaves:
                    raise TraceError(f"the forward changes the container self.{name}: a graph would not")
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
        node = self.graph.placeholder(name)
        self.inputs.append(Input(expr, value, node))
        if tensors(value):
            self.bind_result(value, node)
        elif not isinstance(value, (*SIMPLE, *FUNCTIONS, tuple, list, dict)):
            self.bind(value, node)
            self.foreign[id(value)] = value
        for container in containers(value):
            self.hold(container)

    def quiet(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        was, self.active = self.active, False
        try:
            return function(*args, **kwargs)
        finally:
            self.active = was

    # ---- calls that stay one node ----------------------------------------------------------------------------------
    def call_opaque(
        self, make: Callable[[Any, Any], fx.Node], function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """One node for a call that is not looked into."""
        given = frozenset(map(id, tensors((args, kwargs))))
        node = make(self.arg(tuple(args)), self.arg(dict(kwargs)))
        node.meta["where"] = where()
        self.inside = True
        try:
            out = self.quiet(function, *args, **kwargs)
        finally:
            self.inside = False
        self.children[node] = _shape_of(out)
        return self.quiet(self.bind_result, out, node, given)

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
        sets = name == "__setitem__"
        if not sets and not tensors(out):
            self._fact(name, args[0] if args else None, out)
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
        in_place = (
            sets
            or "out" in kwargs
            or kwargs.get("inplace") is True
            or (name.endswith("_") and not name.endswith("__"))
            or (name.startswith("__i") and name != "__invert__")
        )
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
        self._fact(name, tensor, out)
        return out

    def device_of(self, tensor: Tensor, device: torch.device) -> torch.device:
        """The device of a tensor, as an object of its own that stands for that very read."""
        self._fact("device", tensor, device)
        own = torch.device(device.type, device.index) if device.index is not None else torch.device(device.type)
        return self.quiet(self.bind, own, bookkeeping(self.graph.call_function(getattr, (self.arg(tensor), "device"))))  # type: ignore[no-any-return]

    def _sizes(self, tensor: Tensor, size: torch.Size) -> torch.Size:
        self._fact("shape", tensor, len(size))
        return torch.Size([Size(n, self._size_node(tensor, i), self) for i, n in enumerate(size)])

    def _size_node(self, tensor: Tensor, index: int) -> fx.Node:
        """The node of one size of a tensor; reading it twice gives the same node."""
        base = self.arg(tensor)
        if (base, index) not in self._size_nodes:
            if (base, None) not in self._size_nodes:
                self._size_nodes[base, None] = bookkeeping(self.graph.call_function(getattr, (base, "shape")))
            shape = self._size_nodes[base, None]
            node = bookkeeping(self.graph.call_function(operator.getitem, (shape, index)))
            node.meta["where"] = where()
            self._size_nodes[base, index] = node
        return self._size_nodes[base, index]

    def _size(self, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        if isinstance(out, torch.Size):
            return self._sizes(args[0], out)
        self._fact("shape", args[0], args[0].ndim)
        if name == "size":
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            return Size(out, self._size_node(args[0], int(dim) % args[0].ndim), self)
        if name == "__len__":  # len() turns its result into a plain number: the size is fixed
            node = self._size_node(args[0], 0)
            self.comparisons.append(Comparison(node, "==", out, True))
            node.meta["int"] = out
            return out
        return Size(out, self.graph.call_method(name, self.arg(tuple(args)), self.arg(dict(kwargs))), self)

    def _fact(self, name: str, subject: Any, value: Any) -> None:
        if name in _READS_RANK or name == "ndim":
            what = "shape"
        elif name in _READS_LAYOUT:
            what = name
        elif name in _READS_DTYPE or name == "dtype":
            what = "dtype"
        elif name in _PLAIN_PROPERTIES:
            what, value = "device", self.quiet(getattr, subject, "device")
        elif name == "requires_grad":
            what = name
        elif name in ("shape", "device", "is_leaf", "grad", "grad_fn"):
            what = name
        else:
            return
        if isinstance(value, torch.device):
            value = value.type
        node = self.quiet(self.arg, subject) if isinstance(subject, Tensor) else None
        self.facts.append(Fact(what, node, value, where()))

    # ---- what Watch reports ----------------------------------------------------------------------------------------
    @functools.cached_property
    def opaque(self) -> tuple[tuple[type, str], ...]:
        return opaque_methods()


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


def _shape_of(out: Any) -> Any:
    """The structure of what a submodule gave back, where more than a tensor can come out."""
    return None if isinstance(out, Tensor) else map_structure(out)


def map_structure(value: Any) -> Any:
    """Nested containers with a tensor as `Tensor`, other leaves as they are."""
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, (list, tuple)):
        return (type(value), *map(map_structure, value))
    if isinstance(value, dict):
        return (type(value), *((key, map_structure(item)) for key, item in value.items()))
    return value if is_plain(value) else signature(value)


def sweep(graph: fx.Graph, keep: frozenset[fx.Node] = frozenset()) -> None:
    """Erase bookkeeping that nothing uses. Operations stay, used or not: they may draw, write or raise."""
    for node in reversed(list(graph.nodes)):
        idle = not node.users and node not in keep
        if idle and (node.op == "get_attr" or (node.op == "call_function" and node.target in _NO_EFFECT)):
            graph.erase_node(node)
        elif idle and node.op == "call_method" and node.target in ("numel", "nelement"):
            graph.erase_node(node)
