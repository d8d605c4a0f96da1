"""The guards of a trace that was made of the whole model, as a rank's sizes are."""

import inspect
import re
from typing import Any

from torch import Tensor, nn

from slapo_py.layouts.inference.state import Typing
from slapo_py.layouts.placement import Placement, local_shape
from slapo_py.layouts.recording.borders import ENTER
from slapo_py.layouts.recording.nodes import is_border
from slapo_py.scheduled import bare
from slapo_py.tracing.trace import Trace
from slapo_py.tracing.values import map_tensors

_SIZE = re.compile(r"(\S+)\.shape\[(\d+)\] == (\d+)")
_CONSTANT = re.compile(r"\w+ == \d+")


def localised(trace: Trace, module: nn.Module, call: Any, path: str, typing: Typing, rank: int) -> Trace:
    """The trace with the sizes that it expects of its arguments as they are on a rank; the same one if none differs.

    call: what the module was called with when the whole was recorded.
    """
    lines = [_local(line, module, call, path, typing, rank) for line in trace._guards.lines]
    if lines == trace._guards.lines:
        return trace
    guards = trace._guards.copy()
    guards.lines = lines
    made = trace.rewritten(trace.graph, trace.structural, ("build", "sizes"), guards=guards)
    made.checks = {name: one for name, one in made.checks.items() if not _CONSTANT.fullmatch(one[0])}
    return made


def _local(line: str, module: nn.Module, call: Any, path: str, typing: Typing, rank: int) -> str:
    found = _SIZE.fullmatch(line)
    if found is None:
        return line
    expr, dim, whole = found[1], int(found[2]), int(found[3])
    bound = inspect.signature(bare(module).forward).bind(module, *call.args, **call.kwargs)
    bound.apply_defaults()
    tensor = eval(expr, {**bound.arguments, "self": module})
    placement = _placements(path, typing).get(_number(tensor, (call.args, call.kwargs)))
    if not isinstance(tensor, Tensor) or placement is None:
        return line
    shape = [int(size) for size in tensor.shape]
    return (
        f"{expr}.shape[{dim}] == {local_shape(shape, placement, typing.ranks, 0)[dim]}" if shape[dim] == whole else line
    )


def _placements(path: str, typing: Typing) -> dict[int, Placement]:
    """How each tensor that enters a module lies, by its number."""
    found: dict[int, Placement] = {}
    for node in typing.graph.nodes:
        if is_border(node) and node.args[1:3] == (ENTER, path):
            found.setdefault(int(node.args[3]), typing.after[node][0])
    return found


def _number(tensor: Any, values: Any) -> int:
    """Which of the tensors among the arguments this is, as a recording numbers them; -1 if none."""
    seen: list[Tensor] = []

    def look(one: Tensor) -> Tensor:
        if not isinstance(one, nn.Parameter) and not any(one is known for known in seen):
            seen.append(one)
        return one

    map_tensors(values, look)
    return next((number for number, one in enumerate(seen) if one is tensor), -1)
