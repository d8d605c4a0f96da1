"""Which graph node stands for which value, while a forward runs."""

import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from slapo_py.errors import TraceError
from slapo_py.tracing.held import Held
from slapo_py.tracing.sizes import Size
from slapo_py.tracing.source import where
from slapo_py.tracing.values import FUNCTIONS, SIMPLE, Tensor, is_plain


def bookkeeping(node: fx.Node) -> fx.Node:
    """Mark a node that only reads a size or picks an item: its place in the graph is free."""
    node.meta["bookkeeping"] = True
    return node


def containers(value: Any) -> Iterator[Any]:
    """The lists and dicts inside a value."""
    if isinstance(value, (list, dict)):
        yield value
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)


class Bindings:
    """The graph being written, and the nodes of the values that user code holds, by identity."""

    def __init__(self, root: nn.Module) -> None:
        self.graph = fx.Graph()
        self.graph._graph_namespace._used_names.add("self")  # a child may be called "self" (BertAttention)
        self.constants: dict[str, Tensor] = {}
        self.foreign: dict[int, Any] = {}
        """Arguments that are objects of an unknown kind: they are handed on, not looked into."""
        self.inside_objects: dict[int, str] = {}
        """Tensors read from plain objects: they are no part of the module that a built copy could own."""
        self._root = root
        self._nodes: dict[int, Any] = {}  # id(value) -> node, or (node, key, how) still to be projected
        self._keep: list[Any] = []  # the values, so that their ids stay unique
        self._held: dict[int, Held] = {}  # what lists and dicts held when they were bound
        self._tensor_names: dict[int, str] = {}

    def name_tensors(self) -> None:
        """Learn the names of the module's parameters, buffers and other tensors, as they are now."""
        for name, module in self._root.named_modules():
            for store in (module._parameters, module._buffers, module.__dict__):
                for key, value in store.items():
                    if isinstance(value, Tensor):
                        self._tensor_names.setdefault(id(value), f"{name}.{key}" if name else key)

    def hold(self, value: Any) -> None:
        """Note what a list or dict holds."""
        if isinstance(value, (list, dict)):
            self._held[id(value)] = Held(value)

    def is_unchanged(self, value: Any) -> bool:
        """Whether a list or dict holds what it held when it was bound."""
        return id(value) not in self._held or self._held[id(value)].matches(value)

    def is_bound(self, value: Any) -> bool:
        return id(value) in self._nodes

    def bind(self, value: Any, node: Any) -> Any:
        self._nodes[id(value)] = node
        self._keep.append(value)
        return value

    def node_of(self, value: Any) -> fx.Node | None:
        """The node that computes this very object, if there is one."""
        node = self._nodes.get(id(value))
        if isinstance(node, tuple):
            node = self._nodes[id(value)] = self._project(node)
        return node

    def _project(self, node: Any) -> fx.Node:
        if not isinstance(node, tuple):
            return node  # type: ignore[no-any-return]
        parent, key, how = node
        return bookkeeping(self.graph.call_function(how, (self._project(parent), key)))

    def arg(self, value: Any) -> Any:
        """What stands for a value in the arguments of a node."""
        if isinstance(value, Size):
            return value.node if value.node.graph is self.graph else int.__int__(value)
        record = dataclasses.is_dataclass(value) and not isinstance(value, type)
        rebuilt = record or not self.is_unchanged(value)  # python may have changed it since
        if not rebuilt and (not isinstance(value, SIMPLE) or isinstance(value, torch.device)):
            node = self.node_of(value)
            if node is not None:
                return node
        if isinstance(value, Tensor):
            return self._get_attr(value)
        if isinstance(value, torch.Size):
            return tuple(map(self.arg, value))
        if isinstance(value, (list, tuple)):
            items = [self.arg(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if record and id(value) not in self.foreign:
            return self._record(value)
        if isinstance(value, dict):
            fields = {key: self.arg(item) for key, item in value.items()}
            if type(value) in (dict, OrderedDict):
                return fields if type(value) is dict else self.graph.call_function(OrderedDict, (fields,))
        if isinstance(value, slice):
            return slice(self.arg(value.start), self.arg(value.stop), self.arg(value.step))
        if isinstance(value, (*SIMPLE, *FUNCTIONS)) or is_plain(value):
            return value
        name = type(value).__qualname__
        raise TraceError(
            f"an object of type {name} that the graph can't hold is used at {where()}"
            + (": call the model with use_cache=False" if name.endswith("Cache") else "")
        )

    def _record(self, value: Any) -> fx.Node:
        """A dataclass is made anew from its fields: python may have changed it since a node gave it."""
        kind, fields = type(value), dataclasses.fields(value)
        collects = issubclass(kind, dict)  # transformers' outputs: a dict of the fields that are not None
        extra = set(vars(value)) - {field.name for field in fields}
        if not collects and (extra or hasattr(kind, "__post_init__")):
            why = f"sets {sorted(extra)}" if extra else "has a __post_init__"
            raise TraceError(
                f"the dataclass {kind.__qualname__}, which {why}, is used at {where()}: a graph can't make it"
            )
        given = {field.name: getattr(value, field.name) for field in fields}
        left_out = {field.name for field in fields if given[field.name] is None and field.default is None}
        return self.graph.call_function(kind, (), {k: self.arg(v) for k, v in given.items() if k not in left_out})

    def _get_attr(self, tensor: Tensor) -> fx.Node:
        name = self._tensor_names.get(id(tensor))
        if name is None:
            if isinstance(tensor, torch._subclasses.FakeTensor):
                raise TraceError(f"a tensor used at {where()} comes from an operation that torch does not show")
            if tensor.requires_grad:
                raise TraceError(f"a tensor from outside this module that requires a gradient is used at {where()}")
            if id(tensor) in self.inside_objects:
                raise TraceError(
                    f"the tensor {self.inside_objects[id(tensor)]}, which an object of the module holds, is used at "
                    f"{where()}: register it as a buffer of the module"
                )
            name = f"_slapo_constant_{len(self.constants)}"
            self.constants[name] = tensor
        node = self.graph.create_node("get_attr", name)
        self.bind(tensor, node)
        return node

    def bind_result(self, value: Any, node: Any, given: frozenset[int] = frozenset()) -> Any:
        """Bind what a node gives. A tensor that was also given in (a no-op) gets a fresh alias: its uses stay apart."""
        if isinstance(value, Tensor):
            return self.bind(value.view_as(value) if id(value) in given else value, node)
        if isinstance(value, SIMPLE) or (isinstance(value, tuple) and not value):
            return value  # python has one empty tuple: it stands for itself
        if dataclasses.is_dataclass(value):
            for key, item in vars(value).items():
                self.bind_result(item, (node, key, getattr))
        elif isinstance(value, dict):
            for key, item in value.items():
                self.bind_result(item, (node, key, operator.getitem))
        elif isinstance(value, (tuple, list)):
            items = [self.bind_result(item, (node, i, operator.getitem), given) for i, item in enumerate(value)]
            if isinstance(value, tuple) and any(a is not b for a, b in zip(items, value, strict=True)):
                value = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        self.hold(value)
        return self.bind(value, node)
