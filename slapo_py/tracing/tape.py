"""What one run of a forward leaves behind: the graph, and everything that the run relied on."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from slapo_py.tracing.bindings import Bindings, bookkeeping
from slapo_py.tracing.reads import Reads
from slapo_py.tracing.sizes import Comparison
from slapo_py.tracing.source import where
from slapo_py.tracing.structure import structure_of
from slapo_py.tracing.values import Tensor, opaque_methods, tensors

_READS_RANK = {"dim", "ndimension"}
_READS_LAYOUT = {
    "is_contiguous",
    "stride",
    "storage_offset",
    "data_ptr",
    "untyped_storage",
    "is_set_to",
    "is_contiguous(memory_format)",
}
_READS_DTYPE = {"is_floating_point", "is_complex", "element_size", "type"}
_PLAIN_PROPERTIES = {"is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu"}


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


class Tape(Bindings):
    """The log of a run: written by the function mode (`Capture`) and by the patches around it (`Watch`)."""

    def __init__(self, root: nn.Module, is_leaf: Callable[[str, nn.Module], bool]) -> None:
        super().__init__(root)
        self.root = root
        self.active = False
        self.inputs: list[Input] = []
        self.comparisons: list[Comparison] = []
        self.facts: list[Fact] = []
        self.globals: dict[tuple[str, tuple[Any, ...]], Any] = {}
        self.children: dict[fx.Node, Any] = {}
        """The structure that each call of a submodule gave back."""
        self.lengths: dict[fx.Node, int] = {}
        """How many parts each operation gave that gives several; a size may decide."""
        self.paths = {id(module): name for name, module in root.named_modules()}
        self.leaves = {id(module) for name, module in root.named_modules() if name and is_leaf(name, module)}
        self.reads: Reads = {}
        self.deep_reads: Reads = {}
        """Config entries read inside submodules; they may decide what a submodule gives back."""
        self.inside = False  # a submodule
        self.inlined: set[str] = set()
        self.within = ""
        """The path of the submodule whose forward runs: "" is the root's."""
        self.module_globals: dict[tuple[str, str], Any] = {}
        self.changed_globals: list[str] = []
        self.said: list[str] = []
        """Where the forward printed, logged or warned."""

    # What a recording that sees more adds

    def entered(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the forward of the submodule `within`, which is part of the graph, is called with."""
        return args, kwargs

    def left(self, out: Any) -> Any:
        """What it gives back."""
        return out

    def instead(self, path: str) -> Callable[..., Any] | None:
        """What runs in place of the forward of the submodule at `path`, which is part of the graph."""
        return None

    def attribute(self, path: str, name: str, value: Any) -> Any:
        """What a forward sees of an attribute that it reads of a module."""
        return value

    def calling(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the next call of torch gets."""
        return args, kwargs

    def called(self, node: fx.Node, out: Any) -> Any:
        """What this call gives, which `node` stands for."""
        return out

    def quiet(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function whose torch-level calls are not logged."""
        was, self.active = self.active, False
        try:
            return function(*args, **kwargs)
        finally:
            self.active = was

    def call_opaque(
        self, make: Callable[[Any, Any], fx.Node], function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """One node for a call that is not looked into."""
        args, kwargs = self.calling(args, kwargs)
        given = frozenset(map(id, tensors((args, kwargs))))
        node = make(self.arg(tuple(args)), self.arg(dict(kwargs)))
        node.meta["where"] = where()
        node.meta["within"] = self.within
        self.inside = True
        try:
            out = self.quiet(function, *args, **kwargs)
        finally:
            self.inside = False
        out = self.called(node, out)
        self.children[node] = None if isinstance(out, Tensor) else structure_of(out)
        return self.quiet(self.bind_result, out, node, given)

    def device_of(self, tensor: Tensor, device: torch.device) -> torch.device:
        """The device of a tensor, as an object of its own that stands for that very read."""
        self.fact("device", tensor, device)
        own = torch.device(device.type, device.index) if device.index is not None else torch.device(device.type)
        return self.quiet(self.bind, own, bookkeeping(self.graph.call_function(getattr, (self.arg(tensor), "device"))))  # type: ignore[no-any-return]

    def fact(self, name: str, subject: Any, value: Any) -> None:
        """Log that the forward has asked `name` of a tensor and was told `value`."""
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

    @functools.cached_property
    def opaque(self) -> tuple[tuple[type, str], ...]:
        return opaque_methods()
