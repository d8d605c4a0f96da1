"""attention: the same numbers within rounding, masks that fit the backend, and no half-changed model."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import slapo_py as slapo
from slapo_py import Schedule
from slapo_py.errors import ArgumentError, StepError, TraceError
from slapo_py.tracing import misses
from tests import attentions, zoo
from tests.fingerprint import changes, fingerprint, global_state
from tests.running import equal

MODELS = ("gpt2", "llama", "bert", "opt", "t5", "vit", "bart", "clip", "gemma3")
PADDED = tuple(name for name in MODELS if name not in ("vit",))
DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob", "dropout_rate")


def made(name: str, implementation: str = "eager", dropout: float | None = None) -> nn.Module:
    model = zoo.make(name)
    model.set_attn_implementation(implementation)
    if dropout is not None:
        for one in model.modules():
            one.p = dropout if isinstance(one, nn.Dropout) else getattr(one, "p", None)
            for attribute in ("attention_dropout", "dropout", "dropout_prob"):
                if isinstance(getattr(one, attribute, None), float):
                    setattr(one, attribute, dropout)
    return model.eval()


def inputs(name: str, padding: str = "none") -> dict[str, Tensor]:
    """Three sequences of length 8, of which two are shorter than that; "whole": one is nothing but padding."""
    given = dict(zoo.BY_NAME[name].inputs(3, 8))
    if padding != "none":
        mask = torch.ones(3, 8, dtype=torch.long)
        mask[1, 5:], mask[2, 0 if padding == "whole" else 2 :] = 0, 0
        given["attention_mask"] = mask.flip(1) if padding == "left" else mask
    return given


def results(model: nn.Module, given: dict[str, Any], train: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Outputs, and gradients of a loss over the outputs at tokens (padding attends to whatever it likes)."""
    model.train(train)
    torch.manual_seed(seed)
    outputs = model(**given)
    found = {str(i): one for i, one in enumerate(tree_flatten(outputs)[0]) if isinstance(one, Tensor)}
    mask = given.get("attention_mask")
    for name, one in list(found.items()):
        if mask is not None and "decoder_input_ids" not in given and one.shape[:2] == mask.shape:
            found[name] = one[mask.bool()]
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (one * torch.randn(one.shape, generator=generator).to(one)).sum()
        for one in found.values()
        if one.requires_grad and one.is_floating_point()
    )
    found |= dict(zip(dict(model.named_parameters()), _gradients(loss, model), strict=True))
    return {name: one.detach() for name, one in found.items()}


def _gradients(loss: Any, model: nn.Module) -> Iterator[Tensor]:
    parameters = list(model.parameters())
    for one, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        yield torch.zeros_like(one) if gradient is None else gradient


def within_rounding(new: dict[str, Tensor], old: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Maximum and RMS error at most twice the original's and one unit in the last place of the largest value."""
    assert list(new) == list(old) == list(exact)
    largest = max(float(want.abs().max()) for want in exact.values())
    unit = torch.finfo(torch.float32).eps * largest
    for name, want in exact.items():
        ours, theirs = (new[name].double() - want).abs(), (old[name].double() - want).abs()
        assert ours.max() <= 2 * theirs.max() + unit, name
        assert ours.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt() + unit, name


class Lifted(torch.overrides.TorchFunctionMode):
    """A model's own casts to float32 become casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda one: torch.float64 if one is torch.float32 else one, (args, kwargs or {}))
        return torch.Tensor.double(*args) if func is torch.Tensor.float else func(*args, **kwargs)


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often torch's attention is called, as one number."""
    count = [0]
    plain = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        count[0] += 1
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    return count


# Numbers


GIVEN = [(name, padding) for name in MODELS for padding in ("none", "right", "left")]
"""Images have no mask; clip's result is taken at the last token, which attends to nothing if padding is on the left."""
GIVEN = [one for one in GIVEN if one[1] == "none" or (one[0] in PADDED and one != ("clip", "left"))]


@pytest.mark.parametrize(("start", "backend"), [("eager", "sdpa"), ("sdpa", "eager")], ids=["to sdpa", "to eager"])
@pytest.mark.parametrize(("name", "padding"), GIVEN)
def test_numbers(name: str, padding: str, start: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name, start)
    given = inputs(name, padding)
    sch = slapo.create_schedule(model)
    before = fingerprint(model)
    sch.attention(backend)
    assert changes(before, fingerprint(model)) == []
    count = calls(monkeypatch)
    new = results(sch.module, given)
    assert (count[0] > 0) == (backend == "sdpa")
    count[0] = 0
    old = results(model, given)
    assert (count[0] > 0) == (start == "sdpa")
    double = copy.deepcopy(model).double()
    with Lifted():
        exact = results(
            double, {k: v.double() if v is not False and v.is_floating_point() else v for k, v in given.items()}
        )
    within_rounding(new, old, exact)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("padding", ["none", "right", "left", "whole"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "opt"])
def test_a_function_that_does_the_same_is_equal_to_the_bit(name: str, padding: str, train: bool) -> None:
    """Padding that attends to nothing included, and dropout, which draws the same numbers."""
    model = made(name, "eager")
    sch = slapo.create_schedule(model)
    sch.attention(attentions.matmuls)
    given = inputs(name, padding)
    for seed in (0, 1):
        old, new = results(model, given, train, seed), results(sch.module, given, train, seed)
        assert [key for key in old if not equal(old[key], new[key])] == []
    model.train(train), torch.manual_seed(0)
    whole = model(**given)[0]
    sch.module.train(train), torch.manual_seed(0)
    assert equal(whole, sch.module(**given)[0])


def test_a_function_from_sdpa() -> None:
    """The mask is made for the function, whatever the model was made with: None stood for causal."""
    model = made("llama", "sdpa")
    sch = slapo.create_schedule(model)
    sch.attention(attentions.matmuls)
    eager = made("llama", "eager")
    given = inputs("llama")
    assert equal(eager(**given).logits, sch.module(**given).logits)


def test_dropout_in_training_is_that_of_the_model() -> None:
    model = made("llama", "eager").train()
    sch = slapo.create_schedule(model)
    sch.attention("sdpa")
    given = inputs("llama")
    sch.module.train()
    torch.manual_seed(0)
    first = sch.module(**given).logits
    assert not torch.equal(first, sch.module(**given).logits)
    without = made("llama", "eager", dropout=0.0).train()
    again = slapo.create_schedule(without)
    again.attention("sdpa")
    again.module.train()
    torch.testing.assert_close(again.module(**given).logits, without(**given).logits)


def test_flex_is_refused_on_cpu_when_it_is_called() -> None:
    """torch's compiled flex_attention gives wrong numbers there (transformers' own entry lets it)."""
    sch = slapo.create_schedule(made("llama", "eager"))
    sch.attention("flex")
    assert sch.module.config._attn_implementation == "slapo_flex_attention"
    with pytest.raises(
        ArgumentError, match=r"flex_attention reads memory .* wrong numbers. Move .* attention\(\"sdpa\"\)"
    ):
        sch.module(**inputs("llama", "right"))
    attend = hf.AttentionInterface._global_mapping["slapo_flex_attention"]
    with pytest.raises(ArgumentError, match="on CPU"):
        attend(nn.Identity(), *torch.zeros(3, 1, 2, 4, 8), None)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers calls torch's compiler in a way of the past
@pytest.mark.parametrize("padding", ["none", "right"])
def test_flex(padding: str) -> None:
    model = made("llama", "eager", dropout=0.0).cuda()
    sch = slapo.create_schedule(model)
    sch.attention("flex")
    given = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in inputs("llama", padding).items()}
    old, new = results(model, given), results(sch.module, given)
    for name in old:
        torch.testing.assert_close(new[name], old[name], rtol=1e-3, atol=1e-3, msg=name)


# What changes, and what does not


def implementations(model: nn.Module) -> dict[str, str]:
    return {
        name: one.config._attn_implementation
        for name, one in model.named_modules()
        if isinstance(one, hf.PreTrainedModel)
    }


def test_every_config_of_the_copy_and_none_of_the_original() -> None:
    model = made("t5", "sdpa")
    sch = slapo.create_schedule(model)
    state = global_state()
    sch.attention("eager")
    assert set(implementations(sch.module).values()) == {"eager"}
    assert set(implementations(model).values()) == {"sdpa"}
    assert {"", "encoder", "decoder"} <= set(implementations(sch.module))
    assert changes(state, global_state()) == []
    sch.undo()
    assert set(implementations(sch.module).values()) == {"sdpa"}


def test_a_model_inside() -> None:
    model = made("clip", "eager")
    sch = slapo.create_schedule(model)
    sch["vision_model"].attention("sdpa")
    assert implementations(sch.module) == {"": "eager", "text_model": "eager", "vision_model": "sdpa"}
    assert sch.module.config.vision_config._attn_implementation == "sdpa"
    given = inputs("clip", "right")
    torch.testing.assert_close(sch.module(**given).logits_per_image, model(**given).logits_per_image)


@pytest.mark.parametrize("path", ["transformer", ""])
def test_the_model_that_makes_the_masks(path: str) -> None:
    sch = slapo.create_schedule(made("gpt2", "eager"))
    sch[path].attention("sdpa") if path else sch.attention("sdpa")
    assert set(implementations(sch.module).values()) == {"sdpa"}


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("backend", ["eager", attentions.biased], ids=["eager", "function"])
def test_saved_replayed_undone_built(name: str, backend: Any, tmp_path: Any) -> None:
    model = made(name, "sdpa", dropout=0.0)
    sch = slapo.create_schedule(model)
    sch.attention(backend)
    sch.history.save(tmp_path / "history.json")
    loaded = slapo.History.load(tmp_path / "history.json", allow=("tests",))
    assert loaded == sch.history
    other = slapo.create_schedule(model)
    loaded.replay(other)
    given = inputs(name)
    expected = sch.module(**given)[0]
    assert equal(other.module(**given)[0], expected)
    assert equal(slapo.build(sch)(**given)[0], expected)
    assert not equal(model(**given)[0], expected)
    torch.testing.assert_close(model(**given)[0], expected)
    sch.undo()
    assert equal(model(**given)[0], sch.module(**given)[0])
    assert ".attention(" in str(loaded)


def test_the_name_of_a_function_is_the_same_in_each_process_and_says_nothing() -> None:
    sch = slapo.create_schedule(made("llama"))
    sch.attention(attentions.matmuls)
    assert sch.module.config._attn_implementation == "slapo_5d6028387e51"

    # what transformers looks for in names
    def flash_sdpa_flex_attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any, **kwargs: Any
    ) -> Any:
        return attentions.matmuls(module, query, key, value, mask, scaling=scaling)

    other = slapo.create_schedule(made("llama"))
    other.attention(flash_sdpa_flex_attention)
    name = other.module.config._attn_implementation
    assert name.startswith("slapo_")
    assert name != sch.module.config._attn_implementation
    given = inputs("llama")
    assert equal(other.module(**given).logits, sch.module(**given).logits)


def test_two_functions_of_one_name() -> None:
    """As when a module is loaded anew: the earlier schedule keeps its own."""
    first = slapo.create_schedule(made("llama"))
    first.attention(attentions.doubled)
    given = inputs("llama")
    expected = first.module(**given).logits
    kept = attentions.doubled
    try:
        namespace = {"__name__": "tests.attentions"}
        source = "def doubled(module, query, key, value, attention_mask, scaling=None, **kwargs):"
        exec(source + "\n    return query.transpose(1, 2), None", namespace)
        attentions.doubled = namespace["doubled"]  # type: ignore[assignment]
        second = slapo.create_schedule(made("llama"))
        second.attention(attentions.doubled)
    finally:
        attentions.doubled = kept
    assert not equal(second.module(**given).logits, expected)
    assert equal(first.module(**given).logits, expected)


# Traces


def test_traces_are_made_anew() -> None:
    model = made("llama", "eager")
    given = inputs("llama", "right")
    sch = slapo.create_schedule(model, example_inputs=given)
    sch.select("model.layers.*").trace()
    sch.select("**.self_attn").trace()
    sch.select("**.mlp").trace()
    kept = sch["model.layers.0.mlp"].graph
    sch.attention("sdpa")
    assert sch["model.layers.0.mlp"].graph is kept
    targets = [node.target for node in sch["model.layers.0.self_attn"].graph.nodes]
    assert torch.nn.functional.scaled_dot_product_attention in targets
    torch.testing.assert_close(sch.module(**given).logits[:1], model(**given).logits[:1])
    assert misses(sch.module) == {}
    plain = slapo.create_schedule(model)
    plain.attention("sdpa")
    assert equal(plain.module(**given).logits, sch.module(**given).logits)
    again = slapo.create_schedule(model, example_inputs=given)
    sch.history.replay(again)
    assert equal(again.module(**given).logits, sch.module(**given).logits)
    assert misses(again.module) == {}


class Attends(nn.Module):
    """An attention of one head that gives back one tensor."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attentions.matmuls)
        heads = x.unsqueeze(1)
        return attend(self, heads, heads, heads, mask, scaling=1.0, is_causal=False)[0].squeeze(2)


class Counts(nn.Module):
    """Is given the mask, too, and reads nothing of the config, nor does anything inside."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x if mask is None else x + mask.sum()


class Masked(hf.PreTrainedModel):
    """Makes a mask for eager attention only."""

    config_class = hf.LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.attends, self.counts = Attends(config), Counts()

    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(x.shape[0], 1, x.shape[1], x.shape[1])
        mask = zeros if self.config._attn_implementation == "eager" else None
        return self.counts(self.attends(x, mask), mask)


def test_a_module_that_is_given_another_kind_of_mask_is_traced_anew() -> None:
    x = torch.randn(2, 4, 8)
    model = Masked(hf.LlamaConfig(**zoo._DEC, attn_implementation="sdpa"))
    sch = slapo.create_schedule(model, example_inputs={"x": x})
    sch["counts"].trace()
    sch.attention("eager")
    torch.testing.assert_close(sch.module(x), model(x))
    assert misses(sch.module) == {}


def test_a_flattened_trace_is_made_anew() -> None:
    model = made("llama", "eager")
    given = inputs("llama", "right")
    sch = slapo.create_schedule(model, example_inputs=given)
    sch["model.layers.0"].trace(flatten=True)
    sch.attention("sdpa")
    targets = [node.target for node in sch["model.layers.0"].graph.nodes]
    assert torch.nn.functional.scaled_dot_product_attention in targets
    sch.module(**given)
    assert misses(sch.module) == {}


def product(x: Tensor, y: Any) -> Tensor:
    return x * y


def test_a_rewritten_graph_is_not_thrown_away() -> None:
    model = made("llama", "eager")
    given = inputs("llama", "right")
    sch = slapo.create_schedule(model, example_inputs=given)
    mlp, attention = sch["model.layers.0.mlp"], sch["model.layers.0.self_attn"]
    mlp.trace().group(mlp.find(product)[0], "product")
    kept = mlp.graph
    sch.attention("sdpa")  # what the MLP is called with is the same
    assert mlp.graph is kept
    sch.module(**given)
    assert misses(sch.module) == {}
    attention.trace()
    attention.group(attention.find(product)[0], "product")
    kept = attention.graph
    with pytest.raises(
        StepError,
        match=r"graphs of 'model.layers.0.self_attn' must be traced anew, "
        r'.*sch\["model.layers.0.self_attn"\].trace\(\).*sch.undo',
    ):
        sch.attention("eager")
    assert attention.graph is kept
    assert sch.module.config._attn_implementation == "sdpa"


def test_an_attention_that_cannot_be_traced_leaves_all_as_it_was() -> None:
    def looks(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = 1.0, dropout: Any = 0.0, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if query.sum() > 0:
            query = -query
        return attentions.matmuls(module, query, key, value, mask, scaling)[0], None

    sch = slapo.create_schedule(made("llama", "eager"), example_inputs=inputs("llama"))
    sch["model.layers.0.self_attn"].trace()
    before = fingerprint(sch.module)
    with pytest.raises(TraceError, match="reads the value of a tensor"):
        sch.attention(looks)
    assert changes(before, fingerprint(sch.module)) == []
    assert sch.module.config._attn_implementation == "eager"


# Refusals


def no_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2))


def stray() -> nn.Module:
    """A part whose attention is its own, beside others."""
    model = made("bert")
    model.pooler.add_module(
        "extra", hf.models.gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention(hf.GPTNeoConfig(), "global")
    )
    return model


def wants_weights() -> nn.Module:
    model = made("bert", "eager")
    model.config.output_attentions = True
    return model


def two_in_one() -> nn.Module:
    """A model that holds two models of the same config."""

    class Pair(hf.PreTrainedModel):
        config_class = hf.BertConfig
        _supports_sdpa = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.left, self.right = hf.BertModel(config), hf.BertModel(config)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.left(input_ids)[0] + self.right(input_ids)[0]

    return Pair(hf.BertConfig(**zoo._ENC))


def partly() -> nn.Module:
    """One of the models inside does not support sdpa."""
    model = made("clip", "eager")
    type(model)._supports_sdpa  # noqa: B018  the whole does
    kind = type(model.text_model)
    model.text_model.__class__ = type("Text", (kind,), {"_supports_sdpa": False, "__module__": kind.__module__})
    return model


def asks_for_flex() -> nn.Module:
    """As Gemma 4 does."""
    model = made("llama")

    class Asks(type(model.model)):  # type: ignore[misc]
        def asks(self) -> bool:
            return bool(self.config._attn_implementation == "flex_attention")

    model.model.__class__ = Asks
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, Any, str]] = {
    "no transformers model": (no_model, "", "sdpa", "whole model: Sequential is not a transformers model"),
    "one layer": (
        lambda: made("gpt2"),
        "transformer.h.0.attn",
        "sdpa",
        r'at "transformer.h.0.attn": GPT2Attention is a part .* Write sch\["transformer"\]\.attention\("sdpa"\)',
    ),
    "a layer of a decoder": (
        lambda: made("bart"),
        "model.decoder.layers.0",
        attentions.matmuls,
        r'BartDecoderLayer is a part of .* Write sch\["model"\]\.attention\(matmuls\)',
    ),
    "a shared config": (
        lambda: made("bart"),
        "model.decoder",
        "sdpa",
        r"its config is that of 'model.encoder', too, .*|its config is that of 'model.encoder.layers.0.self_attn', too",
    ),
    "a twin": (two_in_one, "left", "sdpa", r"its config is that of 'right', too.* Write sch\.attention\(\"sdpa\"\)"),
    "not supported": (lambda: made("gemma2"), "", "sdpa", r"does not support 'sdpa' \(_supports_sdpa is False\)"),
    "flex not supported": (lambda: made("gpt2"), "", "flex", "GPT2LMHeadModel does not support 'flex'"),
    "flex by name": (
        asks_for_flex,
        "",
        "flex",
        "the Asks at 'model' asks for transformers' own 'flex_attention' by name",
    ),
    "partly supported": (
        partly,
        "",
        "sdpa",
        r"Text at 'text_model' does not support 'sdpa'.*A model inside it does: Write sch\[\"vision_model\"\]",
    ),
    "no registry": (lambda: made("bloom"), "", "eager", r"no attention of this BloomForCausalLM goes .*_from_config"),
    "attention of its own": (stray, "", "sdpa", "the GPTNeoSelfAttention at 'pooler.extra' does not go through"),
    "weights": (wants_weights, "", "sdpa", "output_attentions=True, and only the backend 'eager' gives"),
    "unknown": (
        lambda: made("llama"),
        "",
        "spda",
        r"no backend 'spda'. Did you mean \"sdpa\"\? Backends: 'sdpa', 'eager'",
    ),
    "unknown, unlike any": (lambda: made("llama"), "", 3, r"no backend 3\. Backends: .*or a function f\(module, query"),
    "a function of another form": (
        lambda: made("llama"),
        "",
        attentions.too_few,
        r"too_few\(query: .*\) .* can't be called as models call it. Write def f\(module, query, key, value",
    ),
}


@pytest.mark.parametrize(("make", "path", "backend", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(make: Callable[[], nn.Module], path: str, backend: Any, message: str) -> None:
    sch = slapo.create_schedule(make())
    place: Schedule = sch[path] if path else sch
    before = fingerprint(sch.module)
    with pytest.raises(ArgumentError, match=message):
        place.attention(backend)
    assert changes(before, fingerprint(sch.module)) == []
    assert len(sch.history) == 0


def test_masks_that_come_from_above() -> None:
    """A model inside one that makes the masks from a config of its own."""
    masking = hf.masking_utils

    class Outer(hf.PreTrainedModel):
        config_class = hf.LlamaConfig
        _supports_sdpa = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.inner = hf.LlamaModel(copy.deepcopy(config))

        def forward(self, x: Tensor) -> Tensor:
            mask = create_causal_mask(self.config, x, None, None)
            return self.inner(inputs_embeds=x, attention_mask=mask)[0]

    global create_causal_mask
    create_causal_mask = masking.create_causal_mask
    model = Outer(hf.LlamaConfig(**zoo._DEC, attn_implementation="eager"))
    sch = slapo.create_schedule(model)
    with pytest.raises(
        ArgumentError, match=r"masks come from the Outer at '', which .* Write sch\.attention\(\"sdpa\"\)"
    ):
        sch["inner"].attention("sdpa")
    sch.attention("sdpa")
    assert set(implementations(sch.module).values()) == {"sdpa"}


class Masks(nn.Module):
    """Makes masks by a part of its config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Any:
        return create_causal_mask(self.config.text_config, x, None, None)


def test_masks_of_a_part_of_a_config() -> None:
    class Outer(hf.PreTrainedModel):
        config_class = hf.CLIPConfig
        _supports_sdpa = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.masks, self.inner = Masks(config), hf.CLIPTextModel(config.text_config)

    global create_causal_mask
    create_causal_mask = hf.masking_utils.create_causal_mask
    sch = slapo.create_schedule(Outer(made("clip").config))
    with pytest.raises(ArgumentError, match=r"its config is that of 'masks', too, .* Write sch\.attention\(\"sdpa\"\)"):
        sch["inner"].attention("sdpa")
    sch.attention("sdpa")
    assert sch["masks"].module.config.text_config._attn_implementation == "sdpa"


def test_a_function_that_would_overlook_an_argument_is_refused_when_called() -> None:
    sch = slapo.create_schedule(made("t5"))
    sch.attention(attentions.matmuls)
    with pytest.raises(
        ArgumentError,
        match=r"attention\(matmuls\): T5Attention calls it with position_bias=Tensor, which it does not name.*"
        r"attention_mask, position_bias=None, \*\*kwargs\)",
    ):
        sch.module(**inputs("t5"))
    other = slapo.create_schedule(made("t5"))
    other.attention(attentions.biased)
    torch.testing.assert_close(other.module(**inputs("t5"))[0], sch.original(**inputs("t5"))[0])
    other.module.train()
    with pytest.raises(ArgumentError, match=r"calls it with dropout=0\.\d+, which it does not name"):
        other.module(**inputs("t5"))
