"""A submodule made of operations of its parent's graph."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, fx, nn

from slapo_py.errors import GuardError
from slapo_py.patterns.rewrite import Group
from slapo_py.scheduled import Forward, Layer, dress


class Grouped(nn.Module):
    """Operations of a traced module, as a module. It owns nothing: weights, and modules that it calls, are given."""

    def forward(self, *values: Any) -> Any:
        """In the order of the parent's graph. What is computed is the layer on this module."""
        raise RuntimeError("this module has lost its operations")


class Body(Layer):
    """What a grouped module computes. Equal bodies share one class, so that identical groups compile once."""

    rank: ClassVar[int] = -20

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        code = graph.python_code("self")
        self._key = (code.src, frozenset(code.globals.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Body) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __deepcopy__(self, memo: Any) -> "Body":
        return self

    def __reduce__(self) -> Any:
        return Body, (self.graph,)

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        code = self.graph.python_code("self")
        scope = dict(code.globals)
        exec(compile(code.src, "<group>", "exec"), scope)
        body: Forward = scope["forward"]
        return body

    def describe(self) -> str:
        count = sum(node.op.startswith("call_") for node in self.graph.nodes)
        return f"group of {count} call{'s' * (count != 1)}"


def called(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a module that is itself an argument."""
    return module(*args, **kwargs)


class Check:
    """A condition on a value of the graph, as a call that hands the value on."""

    def __init__(self, name: str, condition: str, message: str) -> None:
        self.name, self.condition, self.message = name, condition, message
        self.__name__ = self.__qualname__ = f"checked_{name}"
        self._holds = eval(f"lambda {name}: {condition}", {"Tensor": Tensor})

    def __call__(self, value: Any) -> Any:
        if not self._holds(value):
            raise GuardError(self.message)
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Check) and (other.condition, other.message) == (self.condition, self.message)

    def __hash__(self) -> int:
        return hash((self.condition, self.message))

    def __reduce__(self) -> Any:
        return Check, (self.name, self.condition, self.message)


def extract(group: Group, checks: Mapping[str, tuple[str, str]]) -> tuple[Grouped, list[fx.Node], list[str]]:
    """The module that computes a group, the nodes whose values it is given, and the submodules that it is given.

    `checks`: what is checked of nodes while the graph runs, as in `Trace.checks`.
    """
    graph = fx.Graph()
    inside = set(group.nodes)
    outside = dict.fromkeys(one for node in group.nodes for one in node.all_input_nodes if one not in inside)
    table = {one: graph.placeholder(one.name) for one in outside}
    taken = {one.name for one in outside}
    children: dict[str, fx.Node] = {}
    for target in dict.fromkeys(str(node.target) for node in group.nodes if node.op == "call_module"):
        name = target.replace(".", "_")
        while name in taken:
            name += "_module"
        taken.add(name)
        children[target] = graph.placeholder(name)
    for node in group.nodes:
        args, kwargs = (fx.map_arg(one, table.__getitem__) for one in (node.args, node.kwargs))
        if node.op == "call_module":
            made = graph.call_function(called, (children[str(node.target)], *args), kwargs)  # type: ignore[arg-type,misc]
        else:
            made = graph.create_node(node.op, node.target, args, kwargs, node.name)  # type: ignore[arg-type]
        if node.name in checks and node not in group.outputs:
            made = graph.call_function(Check(node.name, *checks[node.name]), (made,))
        table[node] = made
    outputs = tuple(table[one] for one in group.outputs)
    graph.output(outputs[0] if len(outputs) == 1 else outputs)
    module = Grouped()
    dress(module, Body(graph))
    return module, list(outside), list(children)
