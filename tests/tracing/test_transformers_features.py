"""What people do with a transformers model goes on working on a traced one: outputs, checkpointing, copies, dtypes."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import slapo_py as slapo
from slapo_py.errors import TraceError
from slapo_py.scheduled import dress
from slapo_py.tracing import trace_of
from tests import zoo
from tests.running import differences, equal, record

SIZES = ((2, 16), (3, 24))
ALL_OUTPUTS = {"output_hidden_states": True, "output_attentions": True}


def scheduled(name: str, *parts: str, model: nn.Module | None = None, **extra: Any) -> tuple[nn.Module, slapo.Schedule]:
    """A family's model and its schedule, with these parts of it traced."""
    family = zoo.BY_NAME[name]
    model = zoo.make(name) if model is None else model
    sch = slapo.create_schedule(model, example_inputs=[{**family.inputs(*size), **extra} for size in SIZES])
    for part in parts:
        sch[family.paths[part]].trace()
    return model, sch


def misses(model: nn.Module) -> int:
    return sum(trace.misses(m) for m in model.modules() if (trace := trace_of(m)) is not None)


def assert_same(name: str, model: nn.Module, other: nn.Module, missed: bool = False, **extra: Any) -> None:
    """Both give the same in both modes, and the traces were taken (or, with `missed`, were not)."""
    inputs = {**zoo.BY_NAME[name].inputs(*SIZES[0]), **extra}
    for train in (True, False):
        before = misses(other)
        assert not differences(record(model, inputs, train), record(other, inputs, train))
        assert (misses(other) > before) == missed


# ---- outputs of inner modules ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_outputs_asked_for_after_tracing(name: str) -> None:
    model, sch = scheduled(name, "attn", "layer", "model")
    for extra in ({"output_hidden_states": True}, {"output_attentions": True}, ALL_OUTPUTS):
        assert_same(name, model, sch.module, missed=True, **extra)
    inner = sch.module(**zoo.BY_NAME[name].inputs(*SIZES[0]), output_hidden_states=True)
    states = inner["decoder_hidden_states" if name == "t5" else "hidden_states"]
    assert len(states) == 3
    assert len({state.data_ptr() for state in states}) == 3


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_switching_the_attention_after_tracing(name: str) -> None:
    model, sch = scheduled(name, "attn", "layer")
    for implementation, missed in (("eager", True), ("sdpa", False)):
        model.set_attn_implementation(implementation)
        sch.module.set_attn_implementation(implementation)
        assert_same(name, model, sch.module, missed=missed)
        assert_same(name, model, sch.module, missed=missed or name != "gpt2", **ALL_OUTPUTS)


@pytest.mark.parametrize("used", [False, True], ids=["first use", "used before"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_recorded_with_eager_attention_and_all_outputs(name: str, used: bool) -> None:
    """transformers collects these outputs with hooks of its own, which it puts on at the first use."""
    model = zoo.make(name)
    model.set_attn_implementation("eager")
    inputs = zoo.BY_NAME[name].inputs(*SIZES[0])
    if used:
        model(**inputs, **ALL_OUTPUTS)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    _, sch = scheduled(name, "attn", "mlp", "layer", "model", model=model, **ALL_OUTPUTS)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert [len(module._forward_hooks) for module in sch.module.modules()] == hooks
    assert_same(name, model, sch.module, **ALL_OUTPUTS)
    assert_same(name, model, sch.module, missed=True)
    assert_same(name, model, sch.module, **ALL_OUTPUTS)


def test_recorded_without_data_the_graphs_are_the_same() -> None:
    """Layers that are like one that ran are not run again, except where outputs are collected."""
    graphs = []
    for device in ("cpu", "meta"):
        model = zoo.make("llama")
        model.set_attn_implementation("eager")
        _, sch = scheduled("llama", "layer", "model", model=model.to(device), **ALL_OUTPUTS)
        graphs.append([str(sch[path].graph) for path in ("model.layers.0", "")])
    assert graphs[0] == graphs[1]
    assert "attentions" in graphs[0][1]


def test_hidden_states_of_children_are_in_the_graph() -> None:
    model, sch = scheduled("vit", "model", output_hidden_states=True)
    assert_same("vit", model, sch.module, output_hidden_states=True)
    assert len(sch.module(**zoo.BY_NAME["vit"].inputs(2, 16), output_hidden_states=True).hidden_states) == 3


@pytest.mark.parametrize(
    ("name", "what"),
    [("bert", "hidden_states and attentions from modules inside 'encoder'"), ("vit", "attentions from .* 'layers.0'")],
)
def test_outputs_from_deeper_inside_are_refused(name: str, what: str) -> None:
    model = zoo.make(name)
    model.set_attn_implementation("eager")
    _, sch = scheduled(name, "layer", model=model, **ALL_OUTPUTS)
    with pytest.raises(TraceError, match=f"collects {what}.*trace the modules below it instead"):
        sch.trace()
    assert trace_of(sch.module) is None
    assert_same(name, model, sch.module, **ALL_OUTPUTS)


# ---- transformers' own checkpointing --------------------------------------------------------------------------------
@pytest.mark.parametrize("first", [False, True], ids=["after tracing", "before tracing"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_gradient_checkpointing(name: str, first: bool) -> None:
    family, model = zoo.BY_NAME[name], zoo.make(name)
    calls = {"forward": 0}

    def switch(module: nn.Module, on: bool) -> None:
        with pytest.warns(FutureWarning, match="deprecated"):
            if on:
                module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            else:
                module.gradient_checkpointing_disable()

    if first:
        switch(model, True)
    _, sch = scheduled(name, "attn", "mlp", "layer", model=model)
    if not first:
        switch(model, True)
        switch(sch.module, True)
    handle = sch[family.attn].module.register_forward_hook(lambda *_: calls.update(forward=calls["forward"] + 1))
    assert_same(name, model, sch.module)  # both modes: with recomputation in training, without in evaluation
    assert calls["forward"] == 2 + 1, "nothing was recomputed"
    switch(sch.module, False)
    assert_same(name, model, sch.module)
    assert calls["forward"] == 3 + 2
    handle.remove()


# ---- copies ----------------------------------------------------------------------------------------------------------
def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "wide_resnet", "transformer_encoder"])
def test_copies_are_traced_and_independent(name: str) -> None:
    model, sch = scheduled(name, "attn", "layer", "model")
    inputs = zoo.BY_NAME[name].inputs(*SIZES[0])
    result = record(model, inputs)
    for copied in (copy.deepcopy, pickled, saved):
        new = copied(sch.module)
        assert isinstance(new, type(model))
        assert not {id(p) for p in new.parameters()} & {id(p) for p in model.parameters()}
        for path in (zoo.BY_NAME[name].attn, zoo.BY_NAME[name].layer, ""):
            trace = trace_of(new.get_submodule(path))
            assert trace is not None
            assert trace.guards == sch[path].guards
        assert_same(name, model, new)
        with torch.no_grad():
            next(iter(new.parameters())).add_(1)
        assert differences(result, record(new, inputs)), "the copy doesn't use its own parameters"
    assert misses(sch.module) == 0
    assert not differences(result, record(sch.module, inputs))


def test_state_dict_travels_through_a_file() -> None:
    model, sch = scheduled("gpt2", "layer", "model")
    file = io.BytesIO()
    torch.save(sch.module.state_dict(), file)
    file.seek(0)
    other = zoo.make("gpt2", seed=1)
    other.load_state_dict(torch.load(file), strict=True)
    assert_same("gpt2", other, sch.module)


# ---- torch.compile ---------------------------------------------------------------------------------------------------
COMPILED = [
    ("gpt2", "transformer.h.0.attn"),
    ("gpt2", "transformer.h.0.ln_1"),
    ("gpt2", "transformer.h.0"),
    ("llama", "model.layers.0.self_attn"),
    ("llama", "model.layers.0.input_layernorm"),
    ("llama", "model.layers.0"),
    ("t5", "encoder.block.0.layer.0.SelfAttention"),
    ("bert", "encoder.layer.0"),
    ("transformer_encoder", "enc.layers.0"),
    ("wide_resnet", "layer2.0"),
]


def call_of(model: nn.Module, path: str, inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module inside a model is called with."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    module = model.get_submodule(path)
    handle = module.register_forward_pre_hook(lambda _, a, k: calls.append((a, dict(k))), with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return calls[0]


def outputs(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    return [leaf for leaf in tree_leaves(module(*args, **kwargs)) if isinstance(leaf, Tensor)]


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own doings
@pytest.mark.parametrize(("name", "path"), COMPILED, ids=lambda value: value)
def test_compile_in_one_graph(name: str, path: str) -> None:
    model, sch = scheduled(name)
    sch[path].trace()
    for train in (True, False):
        model.train(train)
        sch.module.train(train)
        args, kwargs = call_of(model, path, zoo.BY_NAME[name].inputs(*SIZES[0]))
        results = []
        for module in (model.get_submodule(path), sch[path].module):
            torch._dynamo.reset()
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            results.append(outputs(compiled, args, kwargs))
        assert len(results[0]) == len(results[1]) > 0
        assert all(equal(a, b) for a, b in zip(*results, strict=True))
    assert misses(sch.module) == 0
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_compile_takes_the_trace() -> None:
    """Misses are not counted while compiling, so a changed graph must be seen in the result."""
    model, sch = scheduled("gpt2", "attn")
    module = sch["transformer.h.0.attn"].module.eval()
    args, kwargs = call_of(model, "transformer.h.0.attn", zoo.BY_NAME["gpt2"].inputs(*SIZES[0]))
    plain = outputs(module, args, kwargs)
    trace = trace_of(module)
    assert trace is not None
    graph = copy.deepcopy(trace.graph)
    node = next(node for node in graph.nodes if node.name == "scaled_dot_product_attention")
    node.kwargs = {**node.kwargs, "scale": 0.5}
    dress(module, trace.rewritten(graph, structural=False))
    changed = outputs(module, args, kwargs)
    torch._dynamo.reset()
    compiled = outputs(torch.compile(module, fullgraph=True, backend="aot_eager"), args, kwargs)
    assert not equal(plain[0], changed[0])
    assert equal(compiled[0], changed[0])
    torch._dynamo.reset()


# ---- other inputs, types and modes ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "side"), [("gpt2", "left"), ("llama", "right"), ("gemma3", "left"), ("t5", "right"), ("bert", "left")]
)
def test_padded_batches(name: str, side: str) -> None:
    mask = torch.ones(SIZES[0], dtype=torch.long)
    mask[0, :4] = 0
    mask = mask if side == "left" else mask.flip(1)
    model, sch = scheduled(name, "attn", "layer", "model")  # recorded without padding
    assert_same(name, model, sch.module, missed=True, attention_mask=mask)
    padded = {"example_inputs": [{**zoo.BY_NAME[name].inputs(*s), "attention_mask": padding(*s)} for s in SIZES]}
    sch = slapo.create_schedule(model, **padded)
    for part in ("attn", "layer", "model"):
        sch[zoo.BY_NAME[name].paths[part]].trace()
    assert_same(name, model, sch.module, attention_mask=mask)


def padding(batch: int, seq: int) -> Tensor:
    mask = torch.ones(batch, seq, dtype=torch.long)
    mask[0, :3] = 0
    return mask


TYPED = ["gpt2", "llama", "gemma3", "t5", "wide_resnet", "transformer_encoder", "mixtral"]


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


@pytest.mark.parametrize("name", TYPED)
def test_bfloat16_after_tracing(name: str) -> None:
    model, sch = scheduled(name, "attn", "mlp", "layer", "model")
    model, other = copy.deepcopy(model).to(torch.bfloat16), copy.deepcopy(sch.module).to(torch.bfloat16)
    inputs = cast(zoo.BY_NAME[name].inputs(*SIZES[0]), torch.bfloat16)
    for train in (True, False):
        result = record(other, inputs, train)
        assert not differences(record(model, inputs, train), result)
        assert result["output 0"].dtype is torch.bfloat16
    assert misses(other) == 0


RUNS_THE_ORIGINAL_UNDER_AUTOCAST = {
    "t5": "asks for the dtype of what a child gives back",
    "transformer_encoder": "asks whether autocast is on",
}


@pytest.mark.parametrize("name", TYPED)
def test_autocast(name: str) -> None:
    model, sch = scheduled(name, "attn", "mlp", "layer")
    inputs = zoo.BY_NAME[name].inputs(*SIZES[0])

    def run(module: nn.Module, train: bool) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):  # one each: it keeps what it has cast
            return record(module, inputs, train)

    for train in (True, False):
        result = run(sch.module, train)
        assert not differences(run(model, train), result)
        assert differences(record(model, inputs, train), result), "autocast did nothing"
    assert (misses(sch.module) > 0) == (name in RUNS_THE_ORIGINAL_UNDER_AUTOCAST)
    before = misses(sch.module)
    assert_same(name, model, sch.module)
    assert misses(sch.module) == before


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["gpt2", "llama", "wide_resnet"])
def test_without_gradients(name: str, context: Callable[[], Any]) -> None:
    model, sch = scheduled(name, "attn", "mlp", "layer", "model")
    inputs = zoo.BY_NAME[name].inputs(*SIZES[0])
    for train in (True, False):
        results = []
        for module in (model, sch.module):
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            module.train(train)
            torch.manual_seed(0)
            with context():
                out = module(**inputs)
            leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            assert not any(leaf.requires_grad for leaf in leaves)
            results.append([*leaves, *(b.clone() for b in module.buffers()), torch.get_rng_state()])
            with torch.no_grad():
                for key, buffer in module.named_buffers():
                    buffer.copy_(buffers[key])
        assert all(equal(a, b) for a, b in zip(*results, strict=True))
    assert misses(sch.module) == 0


class Switches(nn.Module):
    """Changes grad mode and autocast, and calls a child in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            scale = self.inner(x).float()
        return x * scale


def modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def test_an_exception_leaves_the_modes_as_they_were() -> None:
    sch = slapo.create_schedule(Switches(), example_inputs=[torch.randn(3, 8), torch.randn(5, 8)])
    sch.trace()
    before = modes()

    def fail(module: nn.Module, args: Any) -> None:
        assert modes() == (False, True, torch.bfloat16, True), "the hook doesn't run inside"
        raise RuntimeError("planted")

    handle = sch["inner"].module.register_forward_pre_hook(fail)
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            inside = modes()
            with pytest.raises(RuntimeError, match="planted"):
                sch.module(torch.randn(3, 8))
            assert modes() == inside
    assert modes() == before
    handle.remove()
    x = torch.randn(4, 8)
    assert equal(sch.module(x), sch.original(x))
    assert sch.misses == 1  # that without gradients: the graph switches them on again
