"""Random graphs, and patterns cut out of them: what is cut out must be found where it was."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

WIDTH = 4
UNARY: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: torch.relu(x),
    "tanh": lambda x: x.tanh(),
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softmax": lambda x: F.softmax(x, -1),
    "scale": lambda x: x * 0.5,
    "shift": lambda x: 1.5 + x,
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "square": lambda x: x.pow(2),
    "mean": lambda x: x.mean(-1, keepdim=True) + x,
    "flip": lambda x: x.view(x.shape[0], -1).transpose(0, 1).reshape(x.shape[0], x.shape[1]),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "sub": lambda x, y: x - y,
    "maximum": lambda x, y: torch.maximum(x, y),
    "matmul": lambda x, y: x @ y,
    "linear": lambda x, y: F.linear(x, y),
}
COMMUTATIVE = {"add", "mul", "maximum"}


class Op(NamedTuple):
    """One operation of a program: its name, and the values it takes: `i` is input i, `inputs + k` what op k gave."""

    name: str
    operands: tuple[int, ...]


class Program(NamedTuple):
    """Operations in an order in which they can run."""

    inputs: int
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]

    def run(self, *values: Any) -> tuple[Any, ...]:
        known = list(values)
        for op in self.ops:
            given = [known[index] for index in op.operands]
            known.append((UNARY.get(op.name) or BINARY[op.name])(*given))
        return tuple(known[index] for index in self.outputs)


class Runs(nn.Module):
    """A module that runs a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return self.program.run(*values)


class Cut(NamedTuple):
    """A graph, a pattern that was cut out of it, and what the pattern must be found to be.

    module: runs on `inputs`. graph: its graph. pattern: a function of a part of it, operands swapped at random.
    nodes: that part, the operations of which a match must be able to consist.
    """

    module: nn.Module
    graph: fx.Graph
    pattern: Callable[..., Any]
    nodes: frozenset[fx.Node]
    inputs: tuple[Tensor, ...]


def function_of(program: Program, arguments: str) -> Callable[..., Any]:
    """A program as a function with these parameters, which gives back one value or a tuple."""

    def run(*values: Any) -> Any:
        found = program.run(*values)
        return found[0] if len(found) == 1 else found

    made: Callable[..., Any] = eval(f"lambda {arguments}: run({arguments})", {"run": run})
    return made


def random_program(rng: random.Random, size: int) -> Program:
    """Operations over shared values; whatever nothing uses is an output."""
    inputs = rng.randint(1, 3)
    ops: list[Op] = []
    for index in range(size):
        count = inputs + index
        recent = max(0, count - 4)  # so that chains come about, and not only bushes
        one = rng.randrange(recent, count)
        other = rng.randrange(count)
        name = rng.choice([*UNARY, *BINARY])
        ops.append(Op(name, (one,) if name in UNARY else (one, other)))
    used = {index for op in ops for index in op.operands}
    last = inputs + size
    outputs = [index for index in range(inputs, last) if index not in used or rng.random() < 0.05]
    return Program(inputs, tuple(ops), tuple(outputs))


def cut(rng: random.Random, size: int = 12, swap: bool = True) -> Cut | None:
    """A random graph and a pattern cut out of it; None where the part that was drawn can be no pattern.

    With `swap`, operands of commutative operations are swapped at random. (Their strides may then differ in what is
    computed, and kernels round by stride: such a pattern computes the same, but not to the last bit.)
    """
    program = random_program(rng, size)
    module = Runs(program)
    graph = fx.Graph()
    nodes_of: dict[int, list[fx.Node]] = {}
    tracer = fx.proxy.GraphAppendingTracer(graph)
    values = [fx.Proxy(graph.placeholder(f"x{index}"), tracer) for index in range(program.inputs)]
    for index, op in enumerate(program.ops):
        before = len(graph.nodes)
        values.append((UNARY.get(op.name) or BINARY[op.name])(*(values[one] for one in op.operands)))
        nodes_of[program.inputs + index] = list(graph.nodes)[before:]
    graph.output(tuple(values[index].node for index in program.outputs))

    part = _part(rng, program)
    inside = set(part)
    inputs = [one for index in part for one in program.ops[index - program.inputs].operands if one not in inside]
    inputs = list(dict.fromkeys(inputs))
    users = [(index + program.inputs, one) for index, op in enumerate(program.ops) for one in op.operands]
    outside = {one for user, one in users if user not in inside} | set(program.outputs)
    outputs = [index for index in part if index in outside]
    if not inputs or not outputs or not _hangs_together(program, part, outputs):
        return None
    place = {value: index for index, value in enumerate([*inputs, *part])}
    ops = []
    for index in part:
        op = program.ops[index - program.inputs]
        operands = [place[one] for one in op.operands]
        if swap and op.name in COMMUTATIVE and rng.random() < 0.5:
            operands.reverse()
        ops.append(Op(op.name, tuple(operands)))
    rng.shuffle(outputs)
    what = Program(len(inputs), tuple(ops), tuple(place[index] for index in outputs))
    pattern = function_of(what, ", ".join(f"v{index}" for index in range(len(inputs))))
    nodes = frozenset(node for index in part for node in nodes_of[index])
    if _has_cycle(graph, nodes):
        return None
    torch.manual_seed(rng.randrange(1000))
    given = tuple(torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(program.inputs))
    return Cut(module, graph, pattern, nodes, given)


def _part(rng: random.Random, program: Program) -> list[int]:
    """Some operations that hang together, in order."""
    first = program.inputs
    part = {rng.randrange(first, first + len(program.ops))}
    for _ in range(rng.randint(0, 5)):
        near = {one for index in part for one in program.ops[index - first].operands if one >= first}
        near |= {first + index for index, op in enumerate(program.ops) if set(op.operands) & part}
        near -= part
        if near:
            part.add(rng.choice(sorted(near)))
    return sorted(part)


def _hangs_together(program: Program, part: list[int], outputs: list[int]) -> bool:
    """Whether each operation is needed for an output."""
    needed = set(outputs)
    for index in reversed(part):
        if index in needed:
            needed |= set(program.ops[index - program.inputs].operands)
    return set(part) <= needed


def _has_cycle(graph: fx.Graph, nodes: frozenset[fx.Node]) -> bool:
    """Whether a node outside needs one of these and is needed by another."""
    after: set[fx.Node] = set()
    for node in graph.nodes:
        uses = any(one in after for one in node.all_input_nodes)
        if node in nodes and uses:
            return True
        if node not in nodes and (uses or any(one in nodes for one in node.all_input_nodes)):
            after.add(node)
    return False
