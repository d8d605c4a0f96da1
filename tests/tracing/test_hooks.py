"""Hooks of the user's: traced modules run them all, in the original's order, and no step of a schedule runs any."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import slapo_py as slapo
from tests import zoo
from tests.running import differences, record

# torch says so where a module is called with keyword arguments only, as an attention is.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")

SIZES = ((2, 16), (3, 24))
Events = list[tuple[Any, ...]]
PLACES = {
    "gpt2": ("", "transformer", "transformer.h.0", "transformer.h.0.attn", "transformer.h.0.mlp"),
    "llama": ("", "model.layers.0", "model.layers.0.self_attn", "model.layers.0.self_attn.q_proj"),
    "wide_resnet": ("", "layer2", "layer2.0", "layer2.0.bn1", "fc"),
    "transformer_encoder": ("", "enc.layers.0", "enc.layers.0.self_attn", "enc.layers.0.linear1"),
}  # fmt: skip
TRACED = {
    "gpt2": ("", "transformer.h.0", "transformer.h.0.attn", "transformer.h.0.mlp"),
    "llama": ("", "model.layers.0", "model.layers.0.self_attn", "model.layers.0.mlp"),
    "wide_resnet": ("", "layer2", "layer2.0"),
    "transformer_encoder": ("", "enc.layers.0", "enc.layers.0.self_attn"),
}


SELF_ATTENTION = "enc.layers.0.self_attn"
"""A backward hook makes query, key and value three tensors, and the forward asks whether they are one."""


def digest(value: Any) -> Any:
    """What a hook was given, to the bit: every number counts, containers and names too."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().double().sum().item())
    if isinstance(value, dict):
        return tuple((key, digest(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(digest, value))
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def watch(model: nn.Module, name: str, events: Events) -> list[Any]:
    """One hook of every kind at every place, each of which notes what it was given."""
    handles = []
    for path in PLACES[name]:
        module = model.get_submodule(path)

        def note(kind: str, path: str = path) -> Callable[..., None]:
            return lambda _, *given: events.append((kind, path, digest(list(given))))

        handles += [
            module.register_forward_pre_hook(note("pre")),
            module.register_forward_pre_hook(note("pre with kwargs"), with_kwargs=True),
            module.register_forward_pre_hook(note("pre first"), prepend=True),
            module.register_forward_hook(note("forward")),
            module.register_forward_hook(note("forward with kwargs"), with_kwargs=True),
            module.register_forward_hook(note("always"), always_call=True),
            module.register_state_dict_pre_hook(note("state_dict pre")),
            module.register_state_dict_post_hook(note("state_dict")),
            module.register_load_state_dict_pre_hook(note("load pre")),
            module.register_load_state_dict_post_hook(note("load")),
        ]
        if has_backward(name, path):
            handles += [
                module.register_full_backward_pre_hook(note("backward pre")),
                module.register_full_backward_hook(note("backward")),
            ]
    return handles


def has_backward(name: str, path: str) -> bool:
    """torch refuses backward hooks around in-place operations, and doesn't call them where a dataclass comes back."""
    return name != "wide_resnet" and path not in ("", "transformer", SELF_ATTENTION)


def scheduled(model: nn.Module, name: str) -> slapo.Schedule:
    inputs = zoo.BY_NAME[name].inputs
    sch = slapo.create_schedule(model, example_inputs=[inputs(*size) for size in SIZES])
    for path in TRACED[name]:
        sch[path].trace()
    return sch


def misses(sch: slapo.Schedule, name: str) -> int:
    return sum(sch[path].misses for path in TRACED[name])


@pytest.mark.parametrize("name", PLACES)
def test_the_same_events_in_the_same_order(name: str) -> None:
    """Hooks put on the scheduled copy."""
    model = zoo.make(name)
    sch = scheduled(model, name)
    inputs = zoo.BY_NAME[name].inputs(*SIZES[0])
    seen: list[Events] = []
    for module in (model, sch.module):
        events: Events = []
        handles = watch(module, name, events)
        for train in (True, False):
            record(module, inputs, train)
        module.load_state_dict(module.state_dict())
        for handle in handles:
            handle.remove()
        count = len(events)
        record(module, inputs)
        assert len(events) == count, "a removed hook ran"
        seen.append(events)
    assert seen[0] == seen[1]
    kinds = {"pre", "pre with kwargs", "pre first", "forward", "forward with kwargs", "always"}
    kinds |= {"state_dict pre", "state_dict", "load pre", "load"}
    expected = {(kind, path) for kind in kinds for path in PLACES[name]}
    expected |= {
        (kind, path) for kind in ("backward pre", "backward") for path in PLACES[name] if has_backward(name, path)
    }
    assert {(kind, path) for kind, path, _ in seen[0]} == expected
    assert misses(sch, name) == 0


@pytest.mark.parametrize("name", PLACES)
def test_hooks_of_the_original_come_along_and_stay_silent_until_it_runs(name: str) -> None:
    model, events = zoo.make(name), []  # type: ignore[var-annotated]
    watch(model, name, events)
    inputs = zoo.BY_NAME[name].inputs(*SIZES[0])
    sch = scheduled(model, name)
    assert str(sch)
    assert str(sch[TRACED[name][1]])
    assert not events, "a hook ran during create_schedule, recording, tracing or printing"
    sch.undo()
    sch[TRACED[name][-1]].trace()
    assert not events
    record(model, inputs)
    first = list(events)
    events.clear()
    record(sch.module, inputs)
    assert first
    assert events == first
    assert misses(sch, name) == 0


def test_a_backward_hook_that_changes_the_road_of_the_forward() -> None:
    model = zoo.make("transformer_encoder")
    sch = scheduled(model, "transformer_encoder")
    inputs = zoo.BY_NAME["transformer_encoder"].inputs(*SIZES[0])
    seen: list[Events] = []
    for module in (model, sch.module):
        events: Events = []
        module.get_submodule(SELF_ATTENTION).register_full_backward_hook(
            lambda _, *given, events=events: events.append(digest(list(given)))
        )
        record(module, inputs)
        seen.append(events)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 1
    assert not differences(record(model, inputs), record(sch.module, inputs))
    assert sch[SELF_ATTENTION].misses == 2, "the original forward stood in"
    assert sch["enc.layers.0"].misses == 0


def double(module: nn.Module, args: Any, out: Any) -> Any:
    return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2


def shift(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    move = lambda value: value + 0.25 if isinstance(value, Tensor) and value.is_floating_point() else value
    return tuple(map(move, args)), {key: move(value) for key, value in kwargs.items()}


def scale_gradient(module: nn.Module, given: Any, out: Any) -> Any:
    return tuple(None if gradient is None else gradient * 3 for gradient in given)


def halve_gradient(module: nn.Module, out: Any) -> Any:
    return tuple(None if gradient is None else gradient / 2 for gradient in out)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "output": lambda module: module.register_forward_hook(double),
    "arguments": lambda module: module.register_forward_pre_hook(shift, with_kwargs=True),
    "gradient of the input": lambda module: module.register_full_backward_hook(scale_gradient),
    "gradient of the output": lambda module: module.register_full_backward_pre_hook(halve_gradient),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gpt2", "transformer.h.0.mlp"),
        ("gpt2", "transformer.h.0.attn"),
        ("llama", "model.layers.0.mlp"),
        ("transformer_encoder", "enc.layers.0"),
    ],
)
def test_hooks_that_change_what_they_are_given(name: str, path: str, change: str) -> None:
    model = zoo.make(name)
    sch = scheduled(model, name)
    inputs = zoo.BY_NAME[name].inputs(*SIZES[0])
    plain = record(model, inputs)
    handles = [CHANGES[change](module.get_submodule(path)) for module in (model, sch.module)]
    for train in (True, False):
        changed = record(model, inputs, train)
        assert not differences(changed, record(sch.module, inputs, train))
    assert differences(plain, record(model, inputs)), "the hook changes nothing"
    for handle in handles:
        handle.remove()
    assert not differences(plain, record(sch.module, inputs))
    assert misses(sch, name) == 0


def test_an_always_called_hook_runs_when_the_forward_fails() -> None:
    model = zoo.make("gpt2")
    sch = scheduled(model, "gpt2")
    counts = []
    for module in (model, sch.module):
        events: Events = []
        block = module.get_submodule("transformer.h.0")
        block.register_forward_hook(lambda *_, events=events: events.append(("plain",)))
        block.register_forward_hook(lambda *_, events=events: events.append(("always",)), always_call=True)

        def fail(*_: Any) -> None:
            raise RuntimeError("planted")

        module.get_submodule("transformer.h.0.mlp").register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            module(**zoo.BY_NAME["gpt2"].inputs(*SIZES[0]))
        counts.append(events)
    assert counts[0] == counts[1] == [("always",)]


def test_global_hooks_see_traced_modules() -> None:
    model = zoo.make("gpt2")
    sch = scheduled(model, "gpt2")
    inputs = zoo.BY_NAME["gpt2"].inputs(*SIZES[0])
    seen: list[Events] = []
    for module in (model, sch.module):
        events: Events = []
        names = {id(m): name for name, m in module.named_modules()}
        handle = nn.modules.module.register_module_forward_hook(
            lambda m, args, out, names=names, events=events: events.append((names[id(m)], digest(tree_leaves(out))))
        )
        try:
            torch.manual_seed(0)
            module(**inputs)
        finally:
            handle.remove()
        seen.append(events)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 20
    assert misses(sch, "gpt2") == 0
