"""`generate()` of a traced model gives the original's tokens, and the traced path is really on the way."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import TraceError
from tests import zoo
from tests.running import equal

FAMILIES = ("gpt2", "llama", "gemma3", "qwen3", "t5")
ATTENTION = re.compile(r"\.(attn|self_attn|SelfAttention|EncDecAttention)$")
LAYER = re.compile(r"\.(h|layers|block)\.\d+$")
SIZES = ((2, 16), (3, 24))
PROMPT = (2, 9)  # longer than the sliding window

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 2},
}

REFUSED = {
    # Its forward asks the cache for its length.
    ("t5", True): {
        "decoder.block.0.layer.0.SelfAttention",
        "decoder.block.0.layer.1.EncDecAttention",
        "decoder.block.1.layer.0.SelfAttention",
        "decoder.block.1.layer.1.EncDecAttention",
    }
}
"""(family, recorded with a cache) -> places whose trace is refused."""


def places(model: nn.Module) -> list[str]:
    """Every attention, every layer, and the whole model."""
    return [name for name, _ in model.named_modules() if not name or ATTENTION.search(name) or LAYER.search(name)]


def traced(model: nn.Module, inputs: list[dict[str, Any]], refused: set[str] | None = None) -> slapo.Schedule:
    sch = slapo.create_schedule(model, example_inputs=inputs)
    for path in places(model):
        if path in (refused or ()):
            with pytest.raises(
                TraceError, match=r"looks into an argument of type EncoderDecoderCache \(\.get_seq_length\)"
            ):
                sch[path].trace()
        else:
            sch[path].trace()
    return sch


def generated(model: nn.Module, way: str, **options: Any) -> list[Tensor]:
    """The tokens, and the scores of every step."""
    torch.manual_seed(7)
    result = model.generate(  # type: ignore[operator]
        zoo.BY_NAME["gpt2"].inputs(*PROMPT)["input_ids"],
        max_new_tokens=8,
        return_dict_in_generate=True,
        output_scores=True,
        **WAYS[way],
        **options,
    )
    return [result.sequences, *result.scores, torch.get_rng_state()]


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    assert a[0].tolist() == b[0].tolist()
    assert len(a) == len(b) == 1 + 8 + 1
    assert all(equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("cache", [False, True], ids=["recorded without cache", "recorded with cache"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens(name: str, cache: bool) -> None:
    model, family = zoo.make(name).eval(), zoo.BY_NAME[name]
    inputs = [{**family.inputs(*size), "use_cache": cache} for size in SIZES]
    sch = traced(model, inputs, REFUSED.get((name, cache)))
    assert len(places(model)) >= 5
    for way in WAYS:
        assert_equal(generated(model, way), generated(sch.module, way))
        assert_equal(generated(model, way, use_cache=cache), generated(sch.module, way, use_cache=cache))


def as_generate_calls(model: nn.Module, size: tuple[int, int], step: int, **options: Any) -> dict[str, Any]:
    """What `generate` calls the model with at one step: the example inputs for who wants to schedule generation."""
    calls: list[dict[str, Any]] = []

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        calls.append(copy.deepcopy(kwargs))  # a cache is filled by the call

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    ids = zoo.BY_NAME["gpt2"].inputs(*size)["input_ids"]
    model.generate(ids, max_new_tokens=step + 1, do_sample=False, **options)  # type: ignore[operator]
    handle.remove()
    return calls[step]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "qwen3"])
def test_recorded_as_generate_calls_it_every_trace_is_taken(name: str) -> None:
    model = zoo.make(name).eval()
    sch = traced(model, [as_generate_calls(model, size, 0, use_cache=False) for size in SIZES])
    for way in WAYS:
        assert_equal(generated(model, way, use_cache=False), generated(sch.module, way, use_cache=False))
    assert {path: sch[path].misses for path in places(model)} == dict.fromkeys(places(model), 0)


@pytest.mark.parametrize("step", [0, 1], ids=["recorded at the prompt", "recorded at a token"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "qwen3"])
def test_recorded_with_a_cache_the_trace_is_taken_where_it_holds(name: str, step: int) -> None:
    """The prompt and the single tokens after it take different roads in an attention; layers and model cover both."""
    model = zoo.make(name).eval()
    sch = traced(model, [as_generate_calls(model, size, step, use_cache=True) for size in SIZES])
    assert_equal(generated(model, "greedy"), generated(sch.module, "greedy"))
    for path in places(model):
        expected = (7 if step == 0 else 1) if ATTENTION.search(path) else 0
        assert sch[path].misses == expected, path
