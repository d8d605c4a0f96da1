"""Every family of the zoo, traced at four kinds of place: equal to the original to the bit, with the same names."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

import slapo_py as slapo
from slapo_py.errors import TraceError
from slapo_py.scheduled import dress
from slapo_py.tracing import trace_of
from tests import zoo
from tests.fingerprint import changes, fingerprint, global_state, values
from tests.running import differences, record

CELLS = """
llama.attn llama.mlp llama.layer llama.model
mistral.attn mistral.mlp mistral.layer mistral.model
qwen2.attn qwen2.mlp qwen2.layer qwen2.model
qwen3.attn qwen3.mlp qwen3.layer qwen3.model
gemma2.attn gemma2.mlp gemma2.layer gemma2.model
gemma3.attn gemma3.mlp gemma3.layer gemma3.model
gpt2.attn gpt2.mlp gpt2.layer gpt2.model
gpt_neo.attn gpt_neo.mlp gpt_neo.layer gpt_neo.model
gpt_neox.attn gpt_neox.mlp gpt_neox.layer gpt_neox.model
opt.attn opt.mlp opt.layer opt.model
bloom.attn bloom.mlp bloom.layer bloom.model
phi3.attn phi3.mlp phi3.layer phi3.model
falcon.attn falcon.mlp falcon.layer falcon.model
bert.attn bert.mlp bert.layer bert.model
roberta.attn roberta.mlp roberta.layer roberta.model
albert.attn albert.mlp albert.layer albert.model
electra.attn electra.mlp electra.layer electra.model
deberta_v2.attn deberta_v2.mlp deberta_v2.layer deberta_v2.model
t5.attn t5.mlp t5.layer t5.model
bart.attn bart.mlp bart.layer bart.model
whisper.attn whisper.mlp whisper.layer whisper.model
vit.attn vit.mlp vit.layer vit.model
clip.attn clip.mlp clip.layer clip.model
mixtral.attn mixtral.mlp mixtral.layer mixtral.model
mamba.attn mamba.mlp mamba.layer mamba.model
wide_resnet.attn wide_resnet.mlp wide_resnet.layer wide_resnet.model
transformer_encoder.attn transformer_encoder.mlp transformer_encoder.layer transformer_encoder.model
""".split()
"""family.part; the whole list, nothing is left out."""

REFUSED: dict[str, str] = {
    # The state-space scan is a python loop over the sequence.
    "mamba.attn": r"0\.mixer.*the operations depend on the size of the input, first at .*modeling_mamba\.py:\d+",
}
"""Cells whose trace is refused, and the reason that the error gives."""

ORIGINAL_BY_DESIGN: dict[tuple[str, str], str] = {}
"""(cell, mode) pairs in which the traced module runs the original forward, and why."""

RECORDED = ((2, 16), (3, 24))
SIZES = (*RECORDED, (1, 8))
MODES = (True, False, True)


@dataclass
class Reference:
    """A family's original, and what it gives at every size in both modes."""

    model: nn.Module
    results: dict[tuple[bool, tuple[int, int]], dict[str, torch.Tensor]]


@functools.lru_cache(maxsize=1)  # the cells of one family come one after another
def reference(name: str) -> Reference:
    model, family = zoo.make(name), zoo.BY_NAME[name]
    pairs = [(train, size) for train in (True, False) for size in SIZES]
    return Reference(model, {(train, size): record(model, family.inputs(*size), train) for train, size in pairs})


def place(cell: str) -> tuple[str, str]:
    """A cell -> its family and its path in the model."""
    name, _, part = cell.partition(".")
    return name, zoo.BY_NAME[name].paths[part]


def schedule(cell: str) -> slapo.Schedule:
    name, _ = place(cell)
    inputs = zoo.BY_NAME[name].inputs
    return slapo.create_schedule(reference(name).model, example_inputs=[inputs(*size) for size in RECORDED])


def faults(cell: str, sch: slapo.Schedule) -> list[str]:
    """Where the scheduled copy differs from the original, and where its trace was not taken."""
    name, path = place(cell)
    found = []
    for train in MODES:
        for size in SIZES:
            before, mode = sch[path].misses, "train" if train else "eval"
            result = record(sch.module, zoo.BY_NAME[name].inputs(*size), train)
            differing = differences(reference(name).results[train, size], result)
            found += [f"{mode} {size}: {what} differs" for what in differing]
            missed = sch[path].misses - before
            if bool(missed) != ((cell, mode) in ORIGINAL_BY_DESIGN):
                found.append(f"{mode} {size}: the trace was {'not taken' if missed else 'taken'}")
    return found


def test_the_list_is_whole() -> None:
    families = {cell.partition(".")[0] for cell in CELLS}
    assert len(CELLS) == len(set(CELLS)) == 27 * 4
    assert set(CELLS) == {f"{family}.{part}" for family in families for part in ("attn", "mlp", "layer", "model")}
    assert families == {
        "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "phi3",
        "falcon", "bert", "roberta", "albert", "electra", "deberta_v2", "t5", "bart", "whisper", "vit", "clip",
        "mixtral", "mamba", "wide_resnet", "transformer_encoder",
    }  # fmt: skip


def test_the_exceptions_are_few() -> None:
    exceptions = set(REFUSED) | {cell for cell, _ in ORIGINAL_BY_DESIGN}
    assert exceptions <= set(CELLS)
    assert len(exceptions) <= 0.03 * len(CELLS)


@pytest.mark.parametrize("cell", CELLS)
def test_cell(cell: str) -> None:
    (name, path), reason = place(cell), REFUSED.get(cell)
    model = reference(name).model
    before, outside, tensors = fingerprint(model), global_state(), values(model)
    sch = schedule(cell)
    if reason is None:
        sch[path].trace()
    else:
        with pytest.raises(TraceError, match=reason):
            sch[path].trace()
    assert not changes(before, fingerprint(model)), "the original was touched"
    assert not changes(outside, global_state()), "torch or transformers was touched"
    assert not differences(tensors, values(model)), "the original's tensors were written to"
    if reason is not None:
        assert trace_of(sch[path].module) is None
        assert not sch.history
        return

    assert not faults(cell, sch)
    assert bool(sch[path].notes) == any(cell == one for one, _ in ORIGINAL_BY_DESIGN)
    check_names(model, sch.module)

    other = schedule(cell)
    other.module.eval()
    other[path].trace()
    assert not other.module.training
    assert str(other[path].graph) == str(sch[path].graph), "the trace depends on the mode that it was made in"
    assert other[path].guards == sch[path].guards


def check_names(original: nn.Module, scheduled: nn.Module) -> None:
    """Laws 4 and 5: names, order, shapes, persistence, ties, and strict loading in both directions."""
    assert outline(scheduled) == outline(original)
    assert ties(scheduled) == ties(original)
    first, second = copy.deepcopy(original), copy.deepcopy(scheduled)
    for model, other in ((first, scheduled), (second, original)):
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        model.load_state_dict(other.state_dict(), strict=True)
        assert not differences(dict(model.state_dict()), dict(other.state_dict()))
        assert ties(model) == ties(original)


def outline(model: nn.Module) -> dict[str, Any]:
    """All names of a model, in order, with the shapes."""

    def shapes(named: Any) -> list[tuple[str, torch.Size, torch.dtype]]:
        return [(name, tensor.shape, tensor.dtype) for name, tensor in named]

    return {
        "state_dict": shapes(model.state_dict().items()),
        "parameters": shapes(model.named_parameters()),
        "buffers": shapes(model.named_buffers()),
        "non-persistent": [(name, sorted(m._non_persistent_buffers_set)) for name, m in model.named_modules()],
        "modules": [name for name, _ in model.named_modules()],
    }


def ties(model: nn.Module) -> set[tuple[str, ...]]:
    """The partition of all names of parameters and buffers into the same objects."""
    groups: dict[int, list[str]] = {}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in every:
        groups.setdefault(id(tensor), []).append(name)
    return {tuple(sorted(group)) for group in groups.values()}


Change = Callable[[fx.Graph, fx.Node], None]


def faster_falling(graph: fx.Graph, node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "scale": 0.25 + 2**-20}


def never_dropped(graph: fx.Graph, node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "dropout_p": 0.0}


def other_operands(graph: fx.Graph, node: fx.Node) -> None:
    query, key, value = node.args
    node.args = (key, query, value)


def called_twice(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        graph.call_module(node.target, node.args)


def no_gradient(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        cut = graph.call_method("detach", (node,))
    node.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut)


@pytest.mark.parametrize(
    ("cell", "at", "change", "seen"),
    [
        ("gpt2.attn", "scaled_dot_product_attention", faster_falling, "eval (2, 16): output 0 differs"),
        ("gpt2.attn", "scaled_dot_product_attention", never_dropped, "train (2, 16): random state differs"),
        ("gpt2.attn", "scaled_dot_product_attention", other_operands, "eval (1, 8): output 0 differs"),
        ("gpt2.attn", "c_attn", no_gradient, "gradient of transformer.h.0.attn.c_attn.weight differs"),
        ("wide_resnet.layer", "bn1", called_twice, "train (2, 16): buffer layer2.0.bn1.running_mean differs"),
        ("wide_resnet.layer", "dropout", called_twice, "random state differs"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_fault_is_seen(cell: str, at: str, change: Change, seen: str) -> None:
    path = place(cell)[1]
    sch = schedule(cell)
    sch[path].trace()
    module = sch[path].module
    trace = trace_of(module)
    assert trace is not None
    graph = copy.deepcopy(trace.graph)
    change(graph, next(node for node in graph.nodes if node.name == at))
    dress(module, trace.rewritten(graph, structural=True))
    assert any(seen in fault for fault in faults(cell, sch))


def test_a_trace_that_is_not_taken_is_seen() -> None:
    path = place("gpt2.attn")[1]
    sch = schedule("gpt2.attn")
    sch[path].trace()
    sch[path].module.scaling = 0.5  # read by the forward, so the guards see it
    found = faults("gpt2.attn", sch)
    assert "eval (2, 16): the trace was not taken" in found
    assert "eval (2, 16): output 0 differs" in found
