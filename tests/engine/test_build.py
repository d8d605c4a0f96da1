"""`build(sch)`: new storage, everything else as it was, and refusals."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from slapo_py.build import build
from slapo_py.build.conserve import check_conserved
from slapo_py.errors import BuildError
from slapo_py.schedule import create_schedule
from slapo_py.scheduled import Layer, bare, dress, layers
from tests.engine.models import TinyLM, adamw, batches, engine_of, fingerprint, loss, same_state


def built(model: nn.Module, **options: Any) -> nn.Module:
    return build(create_schedule(model), **options)


def test_values_are_copied_and_ties_are_kept() -> None:
    model = TinyLM()
    new = built(model)
    assert same_state(model, new)
    assert new.embed.weight is new.head.weight
    ours = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not ours & {tensor.data_ptr() for tensor in new.state_dict().values()}
    with torch.no_grad():
        for tensor in (*new.parameters(), *new.buffers()):
            tensor.zero_()
    assert model.embed.weight.any() and model.down.weight.any() and model.scale.all()


def test_original_is_untouched_by_build_and_three_steps() -> None:
    model = TinyLM()
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    sch = create_schedule(model)
    before = fingerprint(model)
    new = build(sch)
    assert fingerprint(model) == before
    engine = engine_of(sch, micro_batches=2, precision="bf16", clip=0.5)
    assert fingerprint(model) == before
    random_states = before[:3]
    for batch in batches(3):
        engine.train_step(batch)
    assert fingerprint(model)[3:] == before[3:]
    assert fingerprint(model)[0] != random_states[0]  # dropout draws, as training itself does
    assert all(parameter.grad is None for parameter in new.parameters())
    assert same_state(new, model)


class Windows(nn.Module):
    """Parameters and buffers that are windows onto one storage, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(40.0)
        self.a = nn.Parameter(flat[8:20].view(3, 4))
        self.b = nn.Parameter(flat[16:28].view(4, 3).t())
        self.register_buffer("c", flat[38:40])
        self.plain = {"inside": [flat[8:10]]}
        self.wide = nn.Parameter(torch.arange(3.0).expand(5, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a


def test_windows_onto_one_storage_stay_so() -> None:
    model = Windows()
    new = built(model)
    for name in ("a", "b", "c", "wide"):
        old_tensor, new_tensor = getattr(model, name), getattr(new, name)
        assert torch.equal(old_tensor, new_tensor)
        assert old_tensor.stride() == new_tensor.stride()
    inside = new.plain["inside"][0]
    with torch.no_grad():
        new.a[0, 0] = 100.0
        new.a[2, 0] = 200.0
    assert inside[0] == 100.0
    assert new.b[0, 0] == 200.0
    assert model.a[0, 0] == 8.0 and model.plain["inside"][0][0] == 8.0
    # only the covered bytes are copied (from 64-byte boundaries)
    large = nn.Linear(2, 2, bias=False)
    large.weight = nn.Parameter(torch.zeros(10_000)[5_000:5_004].view(2, 2))
    assert built(large).weight.untyped_storage().nbytes() <= 128


class Tagged(nn.Parameter):
    pass


def test_facts_of_parameters_come_along() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), "low": nn.Linear(2, 2)})
    model["low"].to(torch.bfloat16).requires_grad_(False)
    model["conv"].bias = Tagged(torch.ones(4))
    model["conv"].bias.rate = {"lr": 0.1}
    model["conv"].weight.grad = torch.ones_like(model["conv"].weight)
    calls: list[str] = []
    model["conv"].bias.register_hook(lambda grad: calls.append("hook"))
    model["conv"].bias.register_post_accumulate_grad_hook(lambda parameter: calls.append("after"))
    model["low"].eval()
    new = built(model)
    assert new["conv"].weight.is_contiguous(memory_format=torch.channels_last)
    assert new["conv"].weight.grad is None and model["conv"].weight.grad is not None
    assert type(new["conv"].bias) is Tagged and new["conv"].bias.rate == {"lr": 0.1}
    assert new["conv"].bias.rate is not model["conv"].bias.rate
    assert new["low"].weight.dtype is torch.bfloat16 and not new["low"].weight.requires_grad
    assert new["conv"].training and not new["low"].training
    new["conv"](torch.ones(1, 3, 4, 4)).sum().backward()
    assert calls == ["hook", "after"]


class Odd(nn.Module):
    """Attributes that are not parameters: a generator, a lock, a list of tensors, a bound method, a hook object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.rng = torch.Generator().manual_seed(5)
        self.lock = threading.Lock()
        self.cache = [torch.ones(2), {"x": torch.zeros(2)}]
        self.call = self.noise
        self.register_forward_hook(lambda module, args, output: output * 2)
        self.sparse = torch.eye(3).to_sparse()

    def noise(self) -> torch.Tensor:
        return torch.rand(3, generator=self.rng)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.call()


def test_odd_attributes() -> None:
    model = Odd()
    model.noise()
    new = built(model)
    x = torch.ones(2, 3)
    assert new.call.__self__ is new
    assert new.rng is not model.rng
    expected = new(x)
    assert torch.equal(expected, model(x))  # the generator's state came along, and is its own
    assert torch.equal(model.noise(), new.noise())
    new.cache[1]["x"].add_(1)
    assert not model.cache[1]["x"].any()
    assert new.lock is model.lock
    assert new.sparse.is_sparse and new.sparse is not model.sparse


@pytest.mark.parametrize("make", [lambda: nn.LSTM(4, 4, 2), lambda: nn.MultiheadAttention(4, 2)])
def test_torch_modules_with_private_lists(make: Any) -> None:
    model = make().eval()
    x = torch.randn(3, 2, 4)
    new = built(model)
    args = (x,) if isinstance(model, nn.LSTM) else (x, x, x)
    assert torch.equal(model(*args)[0], new(*args)[0])
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(1.0)
    assert not torch.equal(model(*args)[0], new(*args)[0])


class Double(Layer):
    rank = 50

    def wrap(self, forward: Any, base: type[nn.Module]) -> Any:
        return lambda self, *args, **kwargs: 2 * forward(self, *args, **kwargs)


def test_layers_of_classes_are_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    sch = create_schedule(model)
    dress(sch.module[0], Double())
    new = build(sch)
    assert bare(new[0]) is nn.Linear and isinstance(layers(new[0])[0], Double)
    assert type(new[0]) is type(sch.module[0])
    assert torch.equal(new(torch.ones(1, 2)), nn.functional.relu(2 * model[0](torch.ones(1, 2))))


def test_configs_of_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

    for model in (
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11)),
        T5ForConditionalGeneration(
            T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=11, decoder_start_token_id=0)
        ),
    ):
        before = fingerprint(model)
        new = built(model)
        assert model.config.use_cache and not new.config.use_cache
        assert not any(module.config.use_cache for module in new.modules() if hasattr(module, "config"))
        assert new.generation_config.use_cache == model.generation_config.use_cache
        assert new.generation_config is not model.generation_config
        assert fingerprint(model) == before
        tied = {name for name, one in new.named_parameters(remove_duplicate=False) if one is new.lm_head.weight}
        assert len(tied) > 1


class Config:
    def __init__(self, **inner: "Config") -> None:
        self.use_cache = True
        self.__dict__.update(inner)


def test_configs_inside_configs() -> None:
    model = nn.Linear(1, 1)
    model.config = Config(text_config=Config(), generation_config=None)  # type: ignore[arg-type]
    new = built(model)
    assert not new.config.use_cache and not new.config.text_config.use_cache
    assert model.config.use_cache and model.config.text_config.use_cache


def test_donate_moves() -> None:
    model = TinyLM()
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    held = dict(model.named_parameters())
    new = built(model, donate=True)
    assert all(parameter is held[name] for name, parameter in new.named_parameters())
    assert new.scale is model.scale
    assert new.embed.weight.grad is None
    assert new is not model


def test_built_twice_is_two_modules() -> None:
    sch = create_schedule(TinyLM())
    first, second = build(sch), build(sch)
    with torch.no_grad():
        first.up.weight.zero_()
    assert second.up.weight.any()
    assert same_state(second, sch.module)


# Refusals


def test_refuses_a_place() -> None:
    sch = create_schedule(TinyLM())
    with pytest.raises(BuildError, match=r"build at 'up': build takes the whole schedule.*Write slapo.build\(sch\)"):
        build(sch["up"])


def test_refuses_a_module() -> None:
    with pytest.raises(BuildError, match=r"needs a schedule and got a TinyLM.*create_schedule\(model\)"):
        build(TinyLM())  # type: ignore[call-overload]


def test_refuses_meta() -> None:
    with torch.device("meta"):
        model = TinyLM()
    with pytest.raises(
        BuildError, match=r"build at 'embed.weight': a tensor on device 'meta' has no values.*init=slapo.own_init"
    ):
        built(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"tp": 2}}, r"needs 2 processes that know of each other. .* torchrun --nproc-per-node 2"),
        ({"mesh": ("tp", 2)}, r"mesh= takes sizes by axis"),
        ({"mesh": {"t p": 2}}, r"'t p' is not the name of an axis"),
        ({"mesh": {"tp": 0}}, r"the size of 'tp' must be a whole number from 1"),
        ({"optimizer": adamw}, r'optimizer= is for an engine, and no target is named.*target="torch", optimizer='),
        ({"micro_batches": 2}, r"micro_batches= is for an engine"),
        ({"precision": "bf16"}, r"precision= is for an engine"),
        ({"target": "tensorflow"}, r"there is no target 'tensorflow'. Write one of: target='torch'"),
        ({"target": "torch"}, r"an engine needs optimizer=. For example: optimizer=partial"),
        ({"target": "torch", "optimizer": adamw}, r"an engine needs loss="),
        ({"target": "torch", "optimizer": adamw, "loss": loss}, r"an engine needs count="),
    ],
)
def test_refuses_arguments(options: dict[str, Any], message: str) -> None:
    model = TinyLM()
    sch = create_schedule(model)
    before = fingerprint(model)
    with pytest.raises(BuildError, match=message):
        build(sch, **options)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": 0}, r"micro_batches=0: write a whole number from 1"),
        ({"micro_batches": 2.0}, r"micro_batches=2.0: write a whole number"),
        ({"precision": "fp16"}, r"precision='fp16': write precision=\"fp32\" or precision=\"bf16\""),
        ({"data_parallel": "zero"}, r"data_parallel='zero': write data_parallel=\"ddp\""),
        ({"clip": 0}, r"clip=0: write a number above 0, or clip=None"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)], lr=1)}, r"takes a factory.*partial\(torch.optim.SGD, lr=...\)"),
        ({"scheduler": "cosine"}, r"scheduler= takes a function and got 'cosine'"),
        ({"count": 3}, r"count= takes a function and got 3. For example: count="),
        ({"inputs": ("ids",)}, r"inputs= takes a function and got \('ids',\)"),
    ],
)
def test_refuses_training_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        engine_of(TinyLM(), **options)


# Nothing is lost: faults planted in a copy of the built module


def lose(new: TinyLM) -> None:
    del new.up.bias


def add(new: TinyLM) -> None:
    new.up.more = nn.Parameter(torch.ones(1))


def cut(new: TinyLM) -> None:
    new.up.weight = nn.Parameter(new.up.weight[:16].clone())


def freeze(new: TinyLM) -> None:
    new.up.weight.requires_grad_(False)


def untie(new: TinyLM) -> None:
    new.head.weight = nn.Parameter(new.head.weight.clone())


def tie(new: TinyLM) -> None:
    new.norm.bias = new.norm.weight


def lose_buffer(new: TinyLM) -> None:
    del new.scale


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lose, r"lost the original's parameter 'up.bias'.*sch.undo\(\)"),
        (add, r"has a parameter that the original has not: 'up.more'"),
        (cut, r"build at 'up.weight': this parameter was \(32, 16\) float32, trainable and is \(16, 16\) float32"),
        (freeze, r"build at 'up.weight': this parameter was .* trainable and is .* frozen"),
        (
            untie,
            r"build at 'embed.weight': the names .* were 'embed.weight', 'head.weight' and are 'embed.weight': a tie",
        ),
        (tie, r"build at 'norm.weight': the names .* were 'norm.weight' and are 'norm.weight', 'norm.bias': a tie"),
        (lose_buffer, r"lost the original's buffer 'scale'"),
    ],
)
def test_a_planted_loss_is_found(fault: Any, message: str) -> None:
    model = TinyLM()
    new = built(model)
    check_conserved(model, new)
    fault(new)
    with pytest.raises(BuildError, match=message):
        check_conserved(model, new)


def test_a_loss_in_the_schedule_is_found() -> None:
    sch = create_schedule(TinyLM())
    del sch.module.up.bias
    with pytest.raises(BuildError, match=r"lost the original's parameter 'up.bias'"):
        build(sch)


def test_a_shared_storage_is_found() -> None:
    model = TinyLM()
    new = copy.deepcopy(model)
    check_conserved(model, new)
    new.up.bias.data = model.up.bias.data
    with pytest.raises(BuildError, match=r"build at 'up.bias': its storage is still that of the original's 'up.bias'"):
        check_conserved(model, new)
    check_conserved(model, new, donated=True)
