"""Whether the original, the world and the schedule are what they were."""

from typing import Any

import torch
from torch import nn

from slapo_py import Schedule
from slapo_py.scheduled import layers
from slapo_py.tracing import trace_of
from tests.fingerprint import changes, fingerprint, global_state, values
from tests.running import equal

GONE = torch.empty(0)
RANDOM = ("torch rng", "python rng", "numpy rng")


class Untouched:
    """`Untouched(model)` now; `.changes()` later: everything that is not as it was."""

    def __init__(self, original: nn.Module) -> None:
        self.original = original
        self._names = fingerprint(original)
        self._values = values(original)
        self._gradients = [(name, p, _copy(p.grad)) for name, p in original.named_parameters()]
        self._world = global_state()

    def changes(self, *, random: bool = True) -> list[str]:
        """`random=False` where the random states are meant to move on, as in training."""
        found = changes(self._names, fingerprint(self.original))
        worlds = [{k: v for k, v in one.items() if random or k not in RANDOM} for one in (self._world, global_state())]
        found += changes(*worlds)
        now = values(self.original)
        found += [f"{name}: other values" for name, old in self._values.items() if not equal(old, now.get(name, GONE))]
        for name, parameter, old in self._gradients:
            if old is not None and (parameter.grad is None or not equal(old, parameter.grad)):
                found.append(f"{name}: other gradient")
        return found


def state(sch: Schedule) -> dict[str, Any]:
    """All of a schedule: tree, hooks, parameters, classes and layers, graphs, history, annotations, misses."""
    flat = {f"copy: {name}": value for name, value in fingerprint(sch.module).items()}
    for name, module in sch.module.named_modules():
        trace = trace_of(module)
        flat[f"{name}: layers"] = [id(layer) for layer in layers(module)]
        if trace is not None:
            nodes = [(node.name, node.op, str(node.target), str(node.args)) for node in trace.graph.nodes]
            flat[f"{name}: graph"] = (id(trace.graph), nodes, trace.guards, trace.notes, trace.misses(module))
    flat["history"] = (sch.history, str(sch.history))
    flat["annotations"] = repr(sch.root.annotations)
    flat["printed"] = str(sch)
    return flat


def form(sch: Schedule) -> dict[str, Any]:
    """What is the same for two schedules of one model with the same steps: `state` without the ids."""
    flat: dict[str, Any] = {"history": sch.history, "source": str(sch.history), "printed": str(sch)}
    flat["annotations"] = repr(sch.root.annotations)
    for name, module in sch.module.named_modules():
        trace = trace_of(module)
        flat[f"{name}: layers"] = [layer.describe() for layer in layers(module)]
        flat[f"{name}: plain"] = {
            key: repr(value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | list) or value is None
        }
        if trace is not None:
            code = trace.graph.python_code("self").src
            flat[f"{name}: trace"] = (code, trace.guards, trace.notes, sorted(trace.inlined))
    tensors = [*sch.module.named_parameters(remove_duplicate=False), *sch.module.named_buffers(remove_duplicate=False)]
    flat["tensors"] = [(name, id(tensor)) for name, tensor in tensors]
    return flat


def _copy(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.clone()
