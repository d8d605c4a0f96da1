"""The engine's steps against the plain PyTorch loop."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_py as slapo
from slapo_py.backends import TARGETS, find_engine
from slapo_py.backends.base import Engine
from slapo_py.backends.torch_target import TorchEngine
from slapo_py.errors import BuildError, EngineError
from tests.engine.models import TinyLM, adamw, batches, count, decay, engine_of, loss, plain_loop, same_state

OPTIMIZERS = {
    "adamw": adamw,
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_one_micro_batch_is_the_plain_loop_to_the_bit(name: str, clip: float | None) -> None:
    model, data = TinyLM(), batches(6)
    engine = engine_of(model, optimizer=OPTIMIZERS[name], scheduler=decay, clip=clip)
    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    expected = list(plain_loop(plain, data, OPTIMIZERS[name], decay, clip))
    end = torch.get_rng_state()
    torch.manual_seed(3)
    for batch, (mean, norm) in zip(data, expected, strict=True):
        assert torch.equal(engine.train_step(batch), mean)
        assert engine.grad_norm is not None and torch.equal(engine.grad_norm, norm)
    assert torch.equal(torch.get_rng_state(), end)
    assert same_state(engine.module, plain)
    assert engine.step_count == 6
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(OPTIMIZERS[name].keywords["lr"] / 8)
    assert expected[-1][0] < expected[0][0]
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    if clip is None:
        assert max(norm for _, norm in expected) > 0.05, "the clipped case must clip"


@pytest.mark.parametrize("parts", [2, 3, 4, 6])
def test_micro_batches_give_the_gradient_of_the_whole_batch(parts: int) -> None:
    model, data = TinyLM(dropout=0.0).double(), batches(4)
    whole = engine_of(model, clip=0.5)
    split = engine_of(model, clip=0.5, micro_batches=parts)
    for batch in data:
        torch.testing.assert_close(split.train_step(batch), whole.train_step(batch), rtol=1e-12, atol=0)
        torch.testing.assert_close(split.grad_norm, whole.grad_norm, rtol=1e-10, atol=0)
    for one, other in zip(split.module.parameters(), whole.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_micro_batches_are_the_plain_accumulation_to_the_bit() -> None:
    model, (batch,) = TinyLM(), batches(1, rows=4)
    engine = engine_of(model, micro_batches=2, optimizer=partial(torch.optim.SGD, lr=1.0))
    plain = copy.deepcopy(model)
    halves = [{key: value[:2] for key, value in batch.items()}, {key: value[2:] for key, value in batch.items()}]
    torch.manual_seed(3)
    for half in halves:
        (loss(plain(**half), half) / count(batch)).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    torch.manual_seed(3)
    engine.train_step(batch)
    assert same_state(engine.module, plain)


def test_eval_step_measures_and_changes_nothing() -> None:
    model, (batch,) = TinyLM(), batches(1)
    engine = engine_of(model, micro_batches=4)
    engine.module.norm.eval()
    modes = [module.training for module in engine.module.modules()]
    before, states = copy.deepcopy(engine.module.state_dict()), torch.get_rng_state()
    mean = engine.eval_step(batch)
    assert [module.training for module in engine.module.modules()] == modes
    assert same_state(engine.module, before) and torch.equal(torch.get_rng_state(), states)
    assert not mean.requires_grad
    model.eval()
    torch.testing.assert_close(mean, (loss(model(**batch), batch) / count(batch)).detach())
    two_rows = {key: value[:2] for key, value in batch.items()}
    torch.testing.assert_close(
        engine.eval_step(two_rows), (loss(model(**two_rows), two_rows) / count(two_rows)).detach()
    )


def test_eval_step_restores_modes_after_an_error() -> None:
    engine = engine_of(TinyLM())
    with pytest.raises(IndexError):
        engine.eval_step({"ids": torch.tensor([[99]]), "labels": torch.tensor([[0]])})
    assert engine.module.training


def test_train_step_enters_training_mode_once() -> None:
    model = TinyLM().eval()
    engine = engine_of(model)
    (batch,) = batches(1)
    engine.train_step(batch)
    assert all(module.training for module in engine.module.modules())
    engine.module.drop.eval()  # what is kept in eval mode on purpose stays there
    engine.train_step(batch)
    assert engine.module.training and not engine.module.drop.training


def test_state_dict_loads_strictly_into_the_original() -> None:
    model = TinyLM()
    engine = engine_of(model)
    for batch in batches(2):
        engine.train_step(batch)
    fresh = TinyLM()
    fresh.load_state_dict(engine.state_dict(), strict=True)
    assert list(engine.state_dict()) == list(model.state_dict())
    assert same_state(fresh, engine.module)


def test_ties_stay_ties_in_training() -> None:
    engine = engine_of(TinyLM())
    for batch in batches(2):
        engine.train_step(batch)
    assert engine.module.embed.weight is engine.module.head.weight


def test_frozen_parameters_stay() -> None:
    model = TinyLM()
    model.up.requires_grad_(False)
    seen: list[str] = []

    def factory(pairs: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        seen.extend(name for name, _ in pairs)
        return adamw(pairs)

    engine = engine_of(model, optimizer=factory)
    engine.train_step(batches(1)[0])
    assert seen == ["embed.weight", "norm.weight", "norm.bias", "down.weight"]  # ties once, frozen ones not
    assert torch.equal(engine.module.up.weight, model.up.weight)
    assert not torch.equal(engine.module.down.weight, model.down.weight)


def test_groups_by_name() -> None:
    def factory(pairs: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        decayed = [(name, one) for name, one in pairs if one.dim() > 1]
        others = [(name, one) for name, one in pairs if one.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)

    engine = engine_of(TinyLM(), optimizer=factory)
    before = engine.eval_step(batches(1)[0])
    engine.train_step(batches(1)[0])
    assert engine.eval_step(batches(1)[0]) < before


def test_sparse_gradients_are_counted_and_clipped() -> None:
    class Bag(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB_SIZE, 4, sparse=sparse)
            self.embed.weight.data.fill_(0.5)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.embed(ids).square()

    VOCAB_SIZE = 23
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "clip": 0.1, "micro_batches": 2}
    options["loss"] = lambda output, batch: output.sum()
    sparse, dense = engine_of(Bag(True), **options), engine_of(Bag(False), **options)
    for batch in batches(2):
        torch.testing.assert_close(sparse.train_step(batch), dense.train_step(batch))
        torch.testing.assert_close(sparse.grad_norm, dense.grad_norm)
        assert sparse.grad_norm > 0.1
    torch.testing.assert_close(sparse.module.embed.weight, dense.module.embed.weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_not_finite_is_returned(precision: str) -> None:
    engine = engine_of(TinyLM(), precision=precision, loss=lambda output, batch: output.sum() * float("inf"))
    assert not torch.isfinite(engine.train_step(batches(1)[0]))
    assert engine.step_count == 1


def test_a_step_that_raises_changes_nothing() -> None:
    calls = []

    def failing(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("the user's own")
        return loss(output, batch)

    for precision in ("fp32", "bf16"):
        calls.clear()
        model = TinyLM(dropout=0.0)
        engine, other = engine_of(model, loss=failing, micro_batches=2, precision=precision), None
        before = {name: one.clone() for name, one in engine.module.named_parameters()}
        with pytest.raises(ValueError, match="own"):
            engine.train_step(batches(1)[0])
        assert all(torch.equal(one, before[name]) for name, one in engine.module.named_parameters())
        assert engine.step_count == 0 and not engine.optimizer.state
        other = engine_of(model, micro_batches=2, precision=precision)
        assert torch.equal(engine.train_step(batches(1)[0]), other.train_step(batches(1)[0]))
        assert all(
            torch.equal(one, two)
            for one, two in zip(engine.module.parameters(), other.module.parameters(), strict=True)
        )


def test_gradients_of_the_users_own_backward_are_not_mixed_in() -> None:
    model, (batch,) = TinyLM(dropout=0.0), batches(1)
    engine, other = engine_of(model), engine_of(model)
    loss(engine.module(**batch), batch).backward()
    engine.train_step(batch)
    other.train_step(batch)
    assert all(torch.equal(a, b) for a, b in zip(engine.module.parameters(), other.module.parameters(), strict=True))


def test_transformers_model_trains_like_the_plain_loop() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=23, n_positions=8))

    def sum_loss(output: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    engine = engine_of(model, loss=sum_loss, inputs=lambda batch: {"input_ids": batch["ids"]})
    plain = copy.deepcopy(model).train()
    optimizer = adamw(plain.parameters())
    torch.manual_seed(3)
    expected = []
    for batch in batches(4):
        mean = sum_loss(plain(input_ids=batch["ids"]), batch) / count(batch)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(mean.detach())
    torch.manual_seed(3)
    assert [engine.train_step(batch).item() for batch in batches(4)] == [mean.item() for mean in expected]
    assert same_state(engine.module, plain)


def test_targets() -> None:
    assert list(TARGETS) == ["torch"]
    assert find_engine("torch") is TorchEngine and TorchEngine.target == "torch"
    engine = engine_of(TinyLM(), micro_batches=2)
    assert isinstance(engine, Engine)
    assert repr(engine) == "TorchEngine(TinyLM, 1,440 parameters, fp32, micro_batches=2, step 0)".replace(
        "1,440", f"{sum(parameter.numel() for parameter in engine.module.parameters()):,}"
    )


# Refusals in a step: parameters stay as they were


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": lambda batch: 0}, r"count\(batch\) is 0 for this batch, and the loss is divided by it"),
        ({"count": lambda batch: 2.5}, r"count\(batch\) returned 2.5; it is a whole number"),
        (
            {"loss": lambda output, batch: output},
            r"loss\(output, batch\) returned a tensor of \(6, 5, 23\) torch.float32",
        ),
        ({"loss": lambda output, batch: 1.0}, r"loss\(output, batch\) returned 1.0; it is the sum"),
        ({"loss": lambda output, batch: output.detach().sum()}, r"the loss has no gradient.*without detach\(\)"),
    ],
)
def test_refuses_in_a_step(options: dict[str, Any], message: str) -> None:
    engine = engine_of(TinyLM(), **options)
    before = {name: one.clone() for name, one in engine.module.named_parameters()}
    with pytest.raises(EngineError, match=message):
        engine.train_step(batches(1)[0])
    assert all(torch.equal(one, before[name]) for name, one in engine.module.named_parameters())
    assert engine.step_count == 0


def test_count_may_be_an_integer_tensor() -> None:
    engine = engine_of(TinyLM(), count=lambda batch: (batch["labels"] != -100).sum())
    other = engine_of(TinyLM())
    other.module.load_state_dict(engine.module.state_dict())
    assert torch.equal(engine.eval_step(batches(1)[0]), other.eval_step(batches(1)[0]))


# Refusals of factories


def leave_out(pairs: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return adamw(pairs[1:])


def twice(pairs: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    optimizer = adamw(pairs)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [pairs[0][1]]})
    return optimizer


def foreign(pairs: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for _, one in pairs] + [nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": leave_out},
            r"left out 1 of 6 trainable parameters: 'embed.weight'. They would never be trained",
        ),
        ({"optimizer": twice}, r"holds 'embed.weight' more than once"),
        ({"optimizer": foreign}, r"holds 1 parameters that are not the built module's trainable ones"),
        ({"optimizer": lambda pairs: None}, r"returned a NoneType, not a torch.optim.Optimizer"),
        ({"optimizer": partial(torch.optim.LBFGS, lr=0.1)}, r"LBFGS.step needs a closure"),
        ({"scheduler": lambda optimizer: optimizer.param_groups}, r"scheduler= returned a list without step\(\)"),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, r"ReduceLROnPlateau steps on a metric"),
    ],
)
def test_refuses_factories(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        engine_of(TinyLM(), **options)


def test_refuses_a_model_without_trainable_parameters() -> None:
    with pytest.raises(BuildError, match=r"no trainable parameter. Set requires_grad_\(True\)"):
        engine_of(TinyLM().requires_grad_(False))


def test_a_batch_of_two_without_inputs_says_what_to_write() -> None:
    sch = slapo.create_schedule(torch.nn.Linear(3, 2))

    def made(**options: Any) -> Engine:
        adam = partial(torch.optim.AdamW, lr=1e-3)
        return slapo.build(
            sch, target="torch", optimizer=adam, loss=lambda out, b: (out - b[1]).sum(), count=lambda b: 1, **options
        )

    batch = (torch.ones(4, 3), torch.ones(4, 2))
    with pytest.raises(TypeError) as caught:
        made().train_step(batch)
    assert any("build(..., inputs=...) chooses" in note for note in caught.value.__notes__)
    made(inputs=lambda b: ((b[0],), {})).train_step(batch)
