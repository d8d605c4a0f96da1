"""Each scenario finds what the others can't see; what it can't say anything about is no bug."""

import os
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import ArgumentError, GuardError, VerificationError
from slapo_py.verify import Report
from tests.verify.lab import Attention, altering, inputs, lab


def forward(new: Any) -> Any:
    """A change that puts another forward in the place of a module's own."""

    def change(one: nn.Module) -> None:
        one.__class__ = type(type(one).__name__, (type(one),), {"forward": new})

    return change


def verified(model: nn.Module, given: Any, at: str, change: Any, **options: Any) -> Report:
    with altering():
        sch = slapo.create_schedule(model, given)
        sch[at].alter(change)
        return sch.verify(**options)


def bug(model: nn.Module, given: Any, at: str, change: Any, match: str) -> Any:
    with pytest.raises(VerificationError, match=match) as caught:
        verified(model, given, at, change)
    report = caught.value.report
    assert report.step == 1
    return report


class Wrapped(nn.Module):
    """A part below a model, so that it has a name."""

    part: Any

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.part(*args, **kwargs)


def test_large_values_show_a_softmax_that_overflows() -> None:
    def careless(self: Attention, x: Tensor, mask: Tensor | None = None) -> Tensor:
        powers = self.scores(x, mask).exp()
        weights = self.drop(powers / powers.sum(-1, keepdim=True))
        return self.out((weights @ self.heads(self.v(x))).transpose(1, 2).reshape(x.shape))

    report = bug(lab(), inputs(), "layers.0.attn", forward(careless), 'in the scenario "large values"')
    assert report.module == "layers.0.attn"
    assert {row.grade for row in report.rows[:-1]} == {"rounding"}


def test_other_parameters_show_a_frozen_bias_of_zeros_that_is_dropped() -> None:
    model = Wrapped(nn.Linear(4, 4))
    nn.init.zeros_(model.part.bias).requires_grad_(False)
    dropped = forward(lambda self, x: F.linear(x, self.weight))
    bug(model, (torch.randn(3, 4),), "part", dropped, 'scenario "other parameters"')


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(1, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.lin(x[..., None]) * mask[..., None]


def test_a_padded_row_shows_a_mask_that_is_not_used() -> None:
    unmasked = forward(lambda self, x, mask: self.lin(x[..., None]) * (mask[..., None] | 1))
    given = {"x": torch.randn(2, 6), "mask": torch.ones(2, 6, dtype=torch.long)}
    bug(Wrapped(Masked()), given, "part", unmasked, 'scenario "a padded row"')


def test_twice_the_length_shows_a_table_that_is_too_short() -> None:
    short = forward(lambda self, x: F.embedding(x * (torch.arange(x.shape[1]) < 8), self.weight))
    bug(Wrapped(nn.Embedding(9, 4)), (torch.randint(1, 9, (2, 6)),), "part", short, 'scenario "twice the length"')


def test_small_values_show_an_eps() -> None:
    def eps(one: nn.LayerNorm) -> None:
        one.eps = 1e-9

    report = bug(Wrapped(nn.LayerNorm(8, eps=1e-8)), (torch.randn(3, 8),), "part", eps, "small values")
    assert report.module == "part"


def test_a_step_shows_weights_that_were_kept_without_gradients() -> None:
    def cached(self: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        held = self.__dict__.setdefault("held", self.weight.detach().clone())
        return F.linear(x, held, self.bias)

    bug(Wrapped(nn.Linear(4, 4)), (torch.randn(3, 4),), "part", forward(cached), 'scenario "1 optimizer step"')


def test_inference_mode_is_a_mode_of_its_own() -> None:
    def other(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * (2 if torch.is_inference_mode_enabled() else 1)

    said = 'scenario "inference_mode, then train"'
    bug(Wrapped(nn.Linear(4, 4)), (torch.randn(3, 4),), "part", forward(other), said)


def test_what_is_kept_from_inference_mode_and_used_in_training() -> None:
    def kept(self: Any, x: Tensor) -> Tensor:
        if not self.training:
            self.__dict__["kept"] = torch.ones(4) if torch.is_inference_mode_enabled() else None
        held = self.__dict__.get("kept")
        out = F.linear(x, self.weight, self.bias)
        return out if held is None else out * held

    said = 'scenario "inference_mode, then train", the scheduled model raises RuntimeError: Inference tensors'
    bug(Wrapped(nn.Linear(4, 4)), (torch.randn(3, 4),), "part", forward(kept), said)


def test_other_strides_show_what_takes_memory_for_granted() -> None:
    blind = forward(lambda self, x: torch.as_strided(x, x.shape, (x.shape[1], 1)) * 2)
    report = bug(Wrapped(Double()), (torch.randn(3, 4),), "part", blind, 'scenario "inputs with other strides"')
    assert report.module == "part"


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_an_output_that_lost_its_history_in_one_mode() -> None:
    def lost(self: Any, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out if self.training else out.detach()

    report = bug(lab(), inputs(), "layers.0.mlp.down", forward(lost), 'in the scenario "eval"')
    assert report.module == "layers.0.mlp.down"


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (lambda self, x: x + 0, "the sharing of the output is 'it is a tensor of its own'"),
        (lambda self, x: x.view_as(x), "the sharing of the output is 'it shares memory with an input'"),
    ],
    ids=["copy", "window"],
)
def test_an_output_that_is_the_input_itself(new: Any, said: str) -> None:
    bug(Wrapped(nn.Identity()), (torch.randn(3, 4),), "part", forward(new), said)


def test_two_outputs_that_were_one() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = x * 2
            return y, y

    apart = forward(lambda self, x: (x * 2, x * 2))
    bug(Wrapped(Twice()), (torch.randn(3, 4),), "part", apart, "it is one tensor at")


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (lambda self, x: [x * 2], "the output is a list; the original's is a tuple"),
        (lambda self, x: (x[:1] * 2,), r"has shape \(1, 4\); the original's has \(3, 4\)"),
        (lambda self, x: (x.double() * 2,), "has dtype float64; the original's has float32"),
        (lambda self, x: (x * 2, None), "is there in the scheduled model only"),
        (lambda self, x: (), "is missing in the scheduled model; the original has a tensor of shape"),
        (lambda self, x: ((x * 2).masked_fill(x > 1e9, 1).log(),), "has .* NaN; the original's has"),
        (lambda self, x: (x * 2 / (x != x.max()),), "has 1 infinities; the original's has 0"),
    ],
    ids=["container", "shape", "dtype", "more", "less", "nan", "inf"],
)
def test_the_form_of_outputs(new: Any, said: str) -> None:
    class Tuple(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x * 2,)

    bug(Wrapped(Tuple()), (torch.randn(3, 4),), "part", forward(new), said)


# What is not covered


def test_what_a_schedule_does_not_cover_is_said_and_is_no_bug() -> None:
    def guarded(self: Any, x: Tensor) -> Tensor:
        if x.dtype is torch.float16:
            raise GuardError("made for float32")
        return F.linear(x, self.weight, self.bias)

    report = verified(Wrapped(nn.Linear(4, 4)), (torch.randn(3, 4),), "part", forward(guarded))
    assert report.grade == "equal"
    grades = {row.scenario: row.grade for row in report.rows}
    assert grades.pop("model in float16") == "not covered"
    assert set(grades.values()) == {"equal"}
    assert "model in float16: the schedule does not cover this: made for float32" in str(report)


def test_a_schedule_that_covers_nothing_is_not_called_equal() -> None:
    def guarded(self: Any, x: Tensor) -> Tensor:
        raise GuardError("made for another model")

    with pytest.raises(VerificationError, match="covers none of the .* made for another model") as caught:
        verified(Wrapped(nn.Linear(4, 4)), (torch.randn(3, 4),), "part", forward(guarded))
    assert {row.grade for row in caught.value.report.rows} == {"not covered"}


def test_an_error_in_the_scheduled_model_alone() -> None:
    def broken(self: Any, x: Tensor) -> Tensor:
        raise KeyError("lost")

    report = bug(Wrapped(nn.Linear(4, 4)), (torch.randn(3, 4),), "part", forward(broken), "raises KeyError: 'lost'")
    assert report.module == "part"


class FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(3, 4) * 2


def test_another_error_than_the_originals() -> None:
    def other(self: Any, x: Tensor) -> Tensor:
        if x.shape[0] != 3:
            raise KeyError("batch")
        return x.view(3, 4) * 2

    said = "raises KeyError: 'batch'; the original raises RuntimeError"
    bug(Wrapped(FixedBatch()), (torch.randn(3, 4),), "part", forward(other), said)


def test_sizes_that_only_the_original_refuses() -> None:
    twice = forward(lambda self, x: x * 2)
    report = verified(Wrapped(FixedBatch()), (torch.randn(3, 4),), "part", twice)
    assert '"batch of 1" was left out: the original raises RuntimeError' in str(report)


# Without a reference


class OnlyFloat32(nn.Module):
    """An original that can't be run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise TypeError("no float64 here")
        return self.lin(x)


def _other_order(self: Any, x: Tensor) -> Tensor:
    return F.linear(x.flip(-1), self.weight.flip(-1), self.bias)


def test_rounding_where_the_original_has_no_float64() -> None:
    report = verified(OnlyFloat32(), (torch.randn(16, 64),), "lin", forward(_other_order))
    assert report.grade == "rounding"
    assert "does not run in float64 (TypeError: no float64 here)" in str(report)
    wrong = forward(lambda self, x: F.linear(x, self.weight, self.bias) * (1 + 1e-5))
    bug(OnlyFloat32(), (torch.randn(16, 64),), "lin", wrong, "the output has other values")


def test_an_index_may_follow_the_rounding() -> None:
    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(64, 8)
            with torch.no_grad():
                self.lin.weight.copy_(self.lin.weight[:1].expand(8, 64))  # eight ways to the same sum
                self.lin.bias.zero_()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.lin(x)
            return y, y[:, :1] > y[:, 1:]

    def shuffled(self: Any, x: Tensor) -> Tensor:
        columns = [torch.randperm(64, generator=torch.Generator().manual_seed(i)) for i in range(8)]
        out = torch.stack([x[:, one] @ row[one] for one, row in zip(columns, self.weight)], -1)
        return out + self.bias.to(out.dtype)

    report = verified(Largest(), (torch.randn(4, 64),), "lin", forward(shuffled))
    assert report.grade == "rounding"
    always = forward(lambda self, x: (self.lin(x), torch.ones(x.shape[0], 7, dtype=torch.bool)))
    model = Wrapped(Largest())
    with torch.no_grad():
        model.part.lin.bias.copy_(torch.arange(8.0))
    bug(model, (torch.randn(4, 64),), "part", always, "differs in 28 of 28 elements")


# Places


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.int64:
            raise ValueError("floats, please")
        return self.lin(self.lin(x)) if self.training else x


def test_a_place_that_is_called_in_training_only() -> None:
    sch = slapo.create_schedule(Sometimes(), (torch.randn(3, 4),))
    sch["lin"].checkpoint()
    assert sch["lin"].verify().grade == "equal"


def test_a_place_of_an_original_that_does_not_run() -> None:
    sch = slapo.create_schedule(Sometimes(), (torch.ones(3, 4, dtype=torch.int64),))
    with pytest.raises(ArgumentError, match='verify at "lin": the original does not run.*ValueError: floats, please'):
        sch["lin"].verify()


def test_hooks_before_a_place_act_once() -> None:
    model = Sometimes()
    seen: list[float] = []
    model.lin.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.lin.register_forward_hook(lambda module, args, out: seen.append(float(args[0].max())))
    slapo.create_schedule(model, (torch.ones(3, 4),))["lin"].verify(steps=0)
    assert seen[2] == 2.0  # after the two of the run that shows what the place is called with


# Steps


def test_the_first_of_many_steps_is_found() -> None:
    def gelu(self: Any, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x), approximate="tanh")))

    with altering():
        sch = slapo.create_schedule(lab(), inputs())
        for number in range(3):
            sch["embed"].annotate("weight", f"n{number}", 1)
        sch["layers.1.mlp"].alter(forward(gelu))
        for number in range(4):
            sch["head"].annotate("weight", f"m{number}", 1)
        with pytest.raises(VerificationError, match="step 4") as caught:
            sch.verify()
        assert (caught.value.report.module, caught.value.report.step) == ("layers.1.mlp", 4)
        assert len(sch.history) == 8


class Unsteady(nn.Module):
    """Gives other numbers in each run, as a sum over threads does: by a thousandth. No copy starts them anew."""

    draw: random.Random

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        type(self).draw = random.Random(seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (1 + self.draw.uniform(-1e-3, 1e-3))


@pytest.mark.parametrize("seed", [0, 1, 13, 19, 29])
def test_an_original_that_differs_from_itself_hides_no_bug_larger_than_that(seed: int) -> None:
    """Of all but the first seed, six runs of the original spread less than the schedule's."""

    def off(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + 0.1

    def same(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    x = torch.randn(5, 4)
    bug(Unsteady(seed), (x,), "fc", forward(off), "the output has other values")
    report = verified(Unsteady(seed), (x,), "fc", forward(same))
    assert report.grade == "rounding"
    assert "two runs of the original itself differ" in str(report)


class Counting(nn.Module):
    """Positions are counted in floats and taken for indexes, as transformers does where no mask is given."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.fc = nn.Embedding(9, 8), nn.Embedding(9, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.ones(ids.shape)
        places = (mask.cumsum(1) * mask - 1).long() + 2
        return self.fc(self.words(ids) + self.places(places))


def test_whole_numbers_are_exact_in_every_run() -> None:
    def off(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 1.01

    def other_order(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x[..., ::2], self.weight[:, ::2]) + F.linear(x[..., 1::2], self.weight[:, 1::2], self.bias)

    ids = torch.arange(10).view(2, 5) % 9
    bug(Counting(), (ids,), "fc", forward(off), "the output has other values")
    assert verified(Counting(), (ids,), "fc", forward(other_order)).grade == "rounding"


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_model_in_float64_is_given_its_own_rounding(scale: float) -> None:
    def off(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * (1 + 1e-14)

    def other_order(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x[..., ::2], self.weight[:, ::2]) + F.linear(x[..., 1::2], self.weight[:, 1::2], self.bias)

    for seed in range(5):
        torch.manual_seed(seed)
        model, x = Wrapped(nn.Linear(32, 32)).double(), torch.randn(6, 32, dtype=torch.float64) * scale
        assert verified(model, (x,), "part", forward(other_order)).grade == "rounding"
    bug(model, (x,), "part", forward(off), "the output has other values")


def test_a_changed_environment_is_named_and_its_values_are_not_printed() -> None:
    def leaves(name: str) -> Any:
        def left(self: nn.Linear, x: Tensor) -> Tensor:
            os.environ[name] = "hush"
            return F.linear(x, self.weight, self.bias)

        return forward(left)

    x = torch.randn(3, 4)
    report = bug(Wrapped(nn.Linear(4, 4)), (x,), "part", leaves("A_TOKEN"), "environment variable A_TOKEN is there in")
    assert "hush" not in str(report.rows[-1].differences)
    assert "A_TOKEN" not in os.environ
    assert verified(Wrapped(nn.Linear(4, 4)), (x,), "part", leaves("TORCHINDUCTOR_CACHE_DIR")).grade == "equal"
