"""Random legal schedules of small models: what they are drawn from, how they are applied, and what they compute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py import History, Schedule
from slapo_py.tracing import trace_of
from tests.laws import steps
from tests.models import ids, net, tiny_gpt2
from tests.patterns import functions
from tests.running import record

Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""primitive, path, arguments"""


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    inputs: dict[str, Any]
    places: tuple[str, ...]
    """Attention, MLP, layer, norm, and "" for the whole model."""
    parameters: dict[str, tuple[str, ...]]
    attributes: dict[str, dict[str, Sequence[Any]]]
    flattened: dict[str, list[str]]
    """What is traced flat, and the globs of what stays a call there."""
    patterns: dict[str, tuple[Any, Any]]
    """What is looked for at a traced place, and what comes in its stead."""
    linear: tuple[str, ...]
    """What can be decomposed."""
    attentions: tuple[str, ...] = ()
    """Backends of the whole model."""


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return nn.Sequential(nn.Linear(3, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(8))


def _floats() -> Tensor:
    return torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(1))


_H = ("transformer.h.0", "transformer.h.1")
_E = ("1.layers.0", "1.layers.1")
_B = ("blocks.0", "blocks.1")

MODELS: dict[str, Model] = {
    "gpt2": Model(
        tiny_gpt2,
        {"input_ids": ids(2, 4), "use_cache": False},
        ("", *_H, *(f"{h}.{part}" for h in _H for part in ("attn", "mlp", "ln_1"))),
        {"": ("transformer.wte.weight", "lm_head.weight"), _H[0]: ("attn.c_attn.weight", "ln_2.bias")},
        {
            f"{_H[0]}.ln_1": {"eps": (1e-3, 1e-6)},
            f"{_H[1]}.attn": {"scale_attn_weights": (True, False), "split_size": (slapo.per_rank("tp"),)},
            "transformer.drop": {"p": (0.0, 0.5)},
        },
        {"": ["transformer.h.*"], _H[0]: ["attn", "ln_*"], _H[1]: ["attn", "ln_*"]},
        dict.fromkeys(_H, (functions.residual, functions.my_add)),
        tuple(f"{h}.{part}" for h in _H for part in ("mlp.c_fc", "mlp.c_proj", "attn.c_attn")),
        ("eager", "sdpa"),
    ),
    "net": Model(
        net,
        {"ids": ids()},
        ("", *_B, "norm", "embed", "head", *(f"{b}.{part}" for b in _B for part in ("norm", "up", "down"))),
        {"": ("embed.weight", "head.weight"), _B[1]: ("up.weight", "norm.bias"), "norm": ("weight",)},
        {
            _B[0]: {"scale": (0.25, 2, -1.5), "flags": (["b"],)},
            f"{_B[1]}.norm": {"eps": (1e-3,)},
            f"{_B[1]}.drop": {"p": (0.0, 0.9)},
            "norm": {"momentum": (None, 0.5), "eps": (1e-2,)},
        },
        {"": ["*norm", "blocks.1"], _B[0]: ["up"], _B[1]: ["up"]},
        dict.fromkeys(_B, (functions.block_mlp, functions.block_mlp_parts)),
        tuple(f"{b}.{part}" for b in _B for part in ("up", "down")),
    ),
    "encoder": Model(
        encoder,
        {"input": _floats()},
        ("", "0", "1", "2", *_E, *(f"{e}.{part}" for e in _E for part in ("self_attn", "linear1", "norm1"))),
        {"": ("0.weight",), _E[0]: ("linear1.weight", "norm1.weight"), "2": ("bias",)},
        {
            _E[0]: {"norm_first": (True,)},
            f"{_E[1]}.norm1": {"eps": (1e-3, 1e-7)},
            f"{_E[1]}.self_attn": {"dropout": (0.0, 0.4)},
            "2": {"eps": (1e-2,)},
        },
        {"1": ["*self_attn"], _E[0]: ["self_attn"], _E[1]: ["self_attn"]},
        dict.fromkeys(_E, (functions.residual, functions.my_add)),
        ("0", *(f"{e}.{part}" for e in _E for part in ("linear1", "linear2"))),
    ),
}

# How often a primitive is drawn; compiling is the slowest to run.
WEIGHTS = {
    "trace": 10, "checkpoint": 6, "compile": 2, "annotate": 4, "configure": 5, "mark": 3, "recompute": 2, "replace": 4,
    "group": 3, "fuse": 5, "decompose": 3, "attention": 14, "shard": 2, "sync": 2, "reduce_grad": 3,
    "fork_rng": 2,
}  # fmt: skip


def calls(model: Model) -> dict[str, list[list[Call]]]:
    """What a schedule of this model is drawn from, by primitive: one call, or those that it needs before it.

    Some of them contradict each other.
    """
    single = _single_calls(model)
    found = {primitive: [[one] for one in these] for primitive, these in single.items()}
    traced = {at: ("trace", at, (), {}) for at in model.patterns}
    nth = {at: slapo.nth(pattern, 0) for at, (pattern, _) in model.patterns.items()}
    found["replace"] = [
        [traced[at], ("replace", at, (new,), {"what": what})]
        for at, (pattern, new) in model.patterns.items()
        for what in (pattern, nth[at], slapo.pattern(pattern))
    ] + [[("replace", at, (steps.same_linear,), {})] for at in model.linear]
    found["group"] = [[traced[at], ("group", at, (nth[at], name), {})] for at in nth for name in ("one", "two")]
    found["checkpoint"] += [
        [traced[at], ("checkpoint", at, (), {"match": what})] for at, (what, _) in model.patterns.items()
    ]
    found["fuse"] = [[traced[at], ("fuse", at, (nth[at],), {"compiler": "eager"})] for at in nth]
    found["fuse"] += [[("fuse", at, ("law_bias_gelu",), {})] for at in _B if model.make is net] * 2
    return found


def _single_calls(model: Model) -> dict[str, list[Call]]:
    flat = [
        ("trace", at, (), {"flatten": True, **({"leaves": kept} if leaves else {})})
        for at, kept in model.flattened.items()
        for leaves in (False, True)
    ]
    policies: list[dict[str, Any]] = [{}, {}, {"policy": ["aten.mm", "aten.addmm"]}, {"policy": steps.keep_matmuls}]
    tags: list[tuple[str, Any]] = [("lr", 0.1), ("lr", None), ("kind", {"a": (1, [True])}), ("dtype", torch.bfloat16)]
    small = [at for at in model.places if at.endswith(("norm", "norm1", "ln_1", "up", "linear1", "mlp", "2"))]
    return {
        "trace": [("trace", at, (), {}) for at in model.places] + flat,
        "checkpoint": [("checkpoint", at, (), policy) for at in model.places for policy in policies],
        "compile": [("compile", at, (), {"backend": "eager"}) for at in small],
        "annotate": [
            ("annotate", at, (name, *tag), {})
            for at, names in model.parameters.items()
            for name in names
            for tag in tags
        ],
        "configure": [
            ("configure", at, (), {name: value})
            for at, held in model.attributes.items()
            for name, values in held.items()
            for value in values
        ],
        "mark": [
            ("mark", at, args, kwargs)
            for at in model.places[:4]
            for args, kwargs in ((("a",), {}), (("b", "c"), {"times": 2}))
        ],
        "recompute": [("recompute", at, (), {}) for at in model.places[1:]],
        "decompose": [("decompose", at, (), {}) for at in model.linear],
        "attention": [("attention", "", (backend,), {}) for backend in model.attentions],
        "shard": [
            ("shard", at, (name,), {"dim": 0, **more})
            for at, names in model.parameters.items()
            for name in names
            for more in ({}, {"axis": "ep"})
        ],
        "sync": [
            ("sync", at, given[:2], {**given[2], "axis": axis})
            for at in model.places
            for given in (
                ("input", None, {"grad": "all_reduce"}),
                ("output", "all_reduce", {}),
                ("output", "all_gather", {"dim": 1}),
            )
            for axis in ("tp", "ep")
        ],
        "reduce_grad": [
            ("reduce_grad", at, (name,), {}) for at, names in model.parameters.items() for name in names
        ],
        "fork_rng": [("fork_rng", at, (), more) for at in model.places for more in ({}, {"axis": "ep"})],
    }  # fmt: skip


def sequences(model: Model) -> st.SearchStrategy[list[Call]]:
    known = calls(model)
    primitives = [name for name, weight in WEIGHTS.items() for _ in range(weight) if known[name]]
    drawn = st.lists(
        st.sampled_from(primitives).flatmap(lambda name: st.sampled_from(known[name])), min_size=2, max_size=8
    )
    return drawn.map(lambda groups: [call for group in groups for call in group])


def start(model: Model) -> Schedule:
    return slapo.create_schedule(model.make(), model.inputs)


def reset(sch: Schedule) -> Schedule:
    """The same schedule without steps; what was captured stays."""
    return sch.undo(len(sch.history)) if len(sch.history) else sch


def apply(sch: Schedule, sequence: Sequence[Call]) -> int:
    """Do what is legal, and say how many were refused."""
    refused = 0
    for primitive, path, args, kwargs in sequence:
        try:
            getattr(sch[path], primitive)(*args, **kwargs)
        except slapo.ScheduleError:
            refused += 1
    return refused


def outcome(sch: Schedule, model: Model) -> dict[str, Tensor]:
    """Outputs, gradients, buffers and the random state in train and in eval mode, and the calls that traces missed."""
    found = {f"train: {name}": value for name, value in record(sch.module, model.inputs, train=True, seed=3).items()}
    found |= {f"eval: {name}": value for name, value in record(sch.module, model.inputs, train=False).items()}
    for path, module in sch.module.named_modules():
        trace = trace_of(module)
        for guard, count in sorted(trace.missed_guards(module).items() if trace else ()):
            found[f"misses of {path!r} for {guard}"] = torch.tensor(count)
    return found


@dataclass(frozen=True)
class Made:
    """A schedule that was made, printed and run."""

    model: str
    history: History
    printed: str
    result: dict[str, Tensor]
