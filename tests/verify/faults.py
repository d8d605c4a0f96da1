"""Planted faults: what verify has to find, where, and in which step.

A fault is one step, `sch[at].alter(change)`, among innocent ones. Each kind shows in one kind of thing only, as far as
that can be: in a value, a gradient, a buffer, a random state, in one mode, dtype or batch size, or from the second
call on.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.verify.lab import Attention, Mix, Mlp

Change = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """`module` is where the first difference is, if not at the place itself."""

    kind: str
    name: str
    at: str
    change: Change
    module: str | None = None

    @property
    def expected(self) -> str:
        return self.at if self.module is None else self.module


FAULTS: list[Fault] = []


def fault(kind: str, at: str, module: str | None = None) -> Callable[[Change], Change]:
    """The function below changes the module at a place; its name is the fault's."""

    def note(change: Change) -> Change:
        FAULTS.append(Fault(kind, change.__name__, at, change, module))
        return change

    return note


def forward(kind: str, at: str, module: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function below becomes the forward; `super_of(self)` is the right one."""

    def note(new: Callable[..., Any]) -> Callable[..., Any]:
        def change(one: nn.Module) -> None:
            one.__class__ = type(type(one).__name__, (type(one),), {"forward": new})

        FAULTS.append(Fault(kind, new.__name__, at, change, module))
        return new

    return note


def right(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the module would have given without the fault."""
    return type(module).__mro__[1].forward(module, *args, **kwargs)


# Values


@forward("value", "layers.0.mlp.up")
def bias_dropped(self: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, self.weight) + 0 * self.bias


@forward("value", "layers.1.mlp")
def gelu_of_the_other_form(self: Mlp, x: Tensor) -> Tensor:
    return self.drop(self.down(F.gelu(self.up(x), approximate="tanh")))


@fault("value", "layers.0.norm1")
def eps_changed(one: nn.LayerNorm) -> None:
    one.eps = 1e-6


@fault("value", "layers.1.norm2")
def eps_ten_times_larger(one: nn.LayerNorm) -> None:
    one.eps = 1e-4


@fault("value", "layers.1.attn")
def scale_off_by_one_percent(one: Attention) -> None:
    one.scale = one.scale * 1.01


@fault("value", "layers.0.mlp.drop")
def dropout_p_changed(one: nn.Dropout) -> None:
    one.p = 0.31


@forward("value", "layers.0.attn")
def masked_rows_are_nan(self: Attention, x: Tensor, mask: Tensor) -> Tensor:
    out = right(self, x, mask)
    return out.masked_fill(~mask[:, :, None], float("nan"))


@forward("value", "layers.1.attn")
def keys_and_values_swapped(self: Attention, x: Tensor, mask: Tensor) -> Tensor:
    scores = self.heads(self.q(x)) @ self.heads(self.v(x)).transpose(-1, -2) * self.scale
    scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
    weights = self.drop(scores.softmax(-1))
    return self.out((weights @ self.heads(self.k(x))).transpose(1, 2).reshape(x.shape))


@forward("value", "layers.0")
def residual_lost(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    x = x + self.attn(self.norm1(x), mask)
    return self.mix(self.mlp(self.norm2(x)), gain=self.gain, shift=self.shift)


@forward("value", "layers.1.mix")
def kwargs_swapped_under_a_checkpoint(self: Mix, x: Tensor, *, gain: Tensor, shift: Tensor) -> Tensor:
    def positional(x: Tensor, shift: Tensor, gain: Tensor) -> Tensor:
        return right(self, x, gain=gain, shift=shift)

    return checkpoint(positional, x, gain, shift, use_reentrant=False)


@forward("value", "")
def a_list_for_a_tuple(self: nn.Module, ids: Tensor, features: Tensor, mask: Tensor) -> Any:
    out = right(self, ids, features, mask)
    return {**out, "hidden": list(out["hidden"])}


# Gradients


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.by, None


def scaled_gradient(x: Tensor, by: float) -> Tensor:
    return _Scaled.apply(x, by)  # type: ignore[no-any-return]


@forward("gradient", "layers.1.mlp.up")
def input_detached(self: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x.detach(), self.weight, self.bias)


@forward("gradient", "layers.0.mlp")
def gradient_doubled(self: Mlp, x: Tensor) -> Tensor:
    return right(self, scaled_gradient(x, 2.0))


@forward("gradient", "layers.1")
def gradient_of_a_layer_off_by_one_percent(self: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return right(self, scaled_gradient(x, 1.01), mask)


@forward("gradient", "layers.0.attn.q")
def gradient_of_a_weight_lost(self: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, self.weight.detach(), self.bias)


@forward("gradient", "layers.1.attn.out")
def zeros_instead_of_the_gradient_of_a_bias(self: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, self.weight, scaled_gradient(self.bias, 0.0))


@forward("gradient", "layers.1.norm1")
def gradient_of_a_norm_negated(self: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, self.normalized_shape, scaled_gradient(self.weight, -1.0), self.bias, self.eps)


@forward("gradient", "")
def features_detached(self: nn.Module, ids: Tensor, features: Tensor, mask: Tensor) -> Any:
    return right(self, ids, features.detach(), mask)


# Buffers


@forward("buffer", "batch_norm")
def batch_norm_counted_twice(self: nn.BatchNorm1d, x: Tensor) -> Tensor:
    if self.training:
        right(self, x.detach())
    return right(self, x)


@fault("buffer", "batch_norm")
def momentum_changed(one: nn.BatchNorm1d) -> None:
    one.momentum = 0.11


@forward("buffer", "batch_norm")
def statistics_not_updated(self: nn.BatchNorm1d, x: Tensor) -> Tensor:
    if not self.training:
        return right(self, x)
    return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.1, self.eps)


@forward("buffer", "batch_norm")
def only_the_counter_moves_twice(self: nn.BatchNorm1d, x: Tensor) -> Tensor:
    if self.training and self.num_batches_tracked is not None:
        self.num_batches_tracked += 1
    return right(self, x)


# Random states


@forward("random", "layers.1.mlp")
def one_draw_too_many(self: Mlp, x: Tensor) -> Tensor:
    out = right(self, x)
    if self.training:
        torch.rand(1)
    return out


@forward("random", "layers.0.norm2")
def a_draw_of_python(self: nn.Module, x: Tensor) -> Tensor:
    random.random()
    return right(self, x)


@forward("random", "layers.0.norm1")
def a_draw_of_numpy(self: nn.Module, x: Tensor) -> Tensor:
    numpy.random.rand()
    return right(self, x)


@forward("random", "layers.0.attn")
def masks_drawn_in_another_order(self: Attention, x: Tensor, mask: Tensor) -> Tensor:
    if self.training:
        torch.rand(3)
    return right(self, x, mask)


# Ties and flags


@fault("tie or flag", "head")
def tie_lost(one: nn.Linear) -> None:
    one.weight = nn.Parameter(one.weight.detach().clone())


@fault("tie or flag", "layers.0.norm1")
def parameter_frozen(one: nn.LayerNorm) -> None:
    one.weight = nn.Parameter(one.weight.detach().clone(), requires_grad=False)


@fault("tie or flag", "layers.1.mlp.down")
def parameter_drawn_anew(one: nn.Linear) -> None:
    one.weight = nn.Parameter(torch.randn_like(one.weight) * 0.1)


@fault("tie or flag", "")
def buffer_not_saved(one: nn.Module) -> None:
    held = one._buffers.pop("offset")
    one.register_buffer("offset", held, persistent=False)


@fault("tie or flag", "layers.0.attn")
def order_of_names_changed(one: Attention) -> None:
    one._modules["q"] = one._modules.pop("q")


@fault("tie or flag", "layers.1.norm2")
def left_in_eval_mode(one: nn.Module) -> None:
    one.eval()


@fault("tie or flag", "layers.0.mlp.up")
def parameter_in_another_dtype(one: nn.Linear) -> None:
    one.bias = nn.Parameter(one.bias.detach().to(torch.float64))
    one.__class__ = type("Linear", (nn.Linear,), {"forward": lambda s, x: F.linear(x, s.weight, s.bias.to(x.dtype))})


# One mode alone


@forward("mode", "layers.0.mlp.drop")
def dropout_active_in_eval(self: nn.Dropout, x: Tensor) -> Tensor:
    return F.dropout(x, self.p, True)


@forward("mode", "layers.1.attn.drop")
def no_dropout_in_training(self: nn.Dropout, x: Tensor) -> Tensor:
    if self.training:
        F.dropout(x, self.p, True)
    return x


@forward("mode", "layers.1.mlp")
def wrong_in_training(self: Mlp, x: Tensor) -> Tensor:
    return right(self, x) * (1.001 if self.training else 1.0)


@forward("mode", "layers.0.mlp")
def wrong_in_eval(self: Mlp, x: Tensor) -> Tensor:
    return right(self, x) * (1.0 if self.training else 1.001)


@forward("mode", "layers.1.norm1")
def wrong_without_gradients(self: nn.Module, x: Tensor) -> Tensor:
    return right(self, x) * (1.0 if torch.is_grad_enabled() else 1.001)


@forward("mode", "layers.1.mlp.down")
def wrong_in_eval_without_gradients(self: nn.Module, x: Tensor) -> Tensor:
    return right(self, x) * (1.0 if self.training or torch.is_grad_enabled() else 1.001)


# One dtype alone


@forward("dtype", "layers.0.mlp.down")
def wrong_in_bfloat16(self: nn.Module, x: Tensor) -> Tensor:
    return right(self, x) * (1.05 if x.dtype is torch.bfloat16 else 1.0)


@forward("dtype", "layers.1.norm2")
def raises_in_float16(self: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps) @ torch.eye(x.shape[-1]).to(
        torch.float32 if x.dtype is torch.float16 else x.dtype
    )


@forward("dtype", "layers.1.mlp.up")
def wrong_under_autocast(self: nn.Module, x: Tensor) -> Tensor:
    return right(self, x) * (1.05 if torch.is_autocast_enabled("cpu") else 1.0)


@forward("dtype", "layers.0.norm2")
def computed_in_bfloat16(self: nn.LayerNorm, x: Tensor) -> Tensor:
    low = [one.to(torch.bfloat16) for one in (x, self.weight, self.bias)]
    return F.layer_norm(low[0], self.normalized_shape, low[1], low[2], self.eps).to(x.dtype)


@forward("dtype", "layers.0.attn")
def softmax_without_its_maximum_in_float16(self: Attention, x: Tensor, mask: Tensor) -> Tensor:
    scores = self.scores(x, mask)
    if x.dtype is torch.float16:
        scores = scores * 1.05
    return self.out((self.drop(scores.softmax(-1)) @ self.heads(self.v(x))).transpose(1, 2).reshape(x.shape))


# One batch size alone


@forward("batch size", "layers.0.attn")
def wrong_for_a_batch_of_one(self: Attention, x: Tensor, mask: Tensor) -> Tensor:
    out = right(self, x, mask)
    return out * 1.001 if x.shape[0] == 1 else out


@forward("batch size", "layers.1.mlp")
def batch_written_down(self: Mlp, x: Tensor) -> Tensor:
    return right(self, x).view(4, -1, x.shape[-1])


@forward("batch size", "layers.1.attn")
def only_four_rows_are_right(self: Attention, x: Tensor, mask: Tensor) -> Tensor:
    out = right(self, x, mask)
    return torch.cat([out[:4], out[4:] * 1.01])


@forward("batch size", "layers.0.mlp")
def length_written_down(self: Mlp, x: Tensor) -> Tensor:
    out = right(self, x)
    return out * (x.shape[1] / 5)


# From the second call on


@forward("second call", "layers.1.mlp")
def first_result_is_kept(self: Any, x: Tensor) -> Tensor:
    out = right(self, x)
    if "kept" not in self.__dict__ and self.training:
        self.__dict__["kept"] = out.detach()
    kept = self.__dict__.get("kept")
    return out if kept is None or kept.shape != out.shape or not self.training else out - out.detach() + kept


@forward("second call", "layers.0.mlp.up")
def weights_are_cached(self: Any, x: Tensor) -> Tensor:
    if "cached" not in self.__dict__:
        self.__dict__["cached"] = self.weight.detach().clone()
    if self.__dict__["cached"].dtype is not x.dtype:
        return right(self, x)
    return F.linear(x, self.weight - self.weight.detach() + self.__dict__["cached"], self.bias)


@forward("second call", "layers.0.attn.v")
def gradients_overwritten(self: Any, x: Tensor) -> Tensor:
    def overwrite(parameter: Tensor) -> None:
        first = self.__dict__.setdefault("first", parameter.grad.clone())
        parameter.grad = first.clone()

    if "hooked" not in self.__dict__:
        self.__dict__["hooked"] = self.weight.register_post_accumulate_grad_hook(overwrite)
    return right(self, x)


@forward("second call", "layers.1.norm2")
def grows_from_call_to_call(self: Any, x: Tensor) -> Tensor:
    self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
    return right(self, x) * 1.001 ** (self.__dict__["calls"] - 1)


@forward("second call", "layers.1.attn")
def mask_of_the_first_batch(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    first = self.__dict__.setdefault("mask", mask.clone())
    return right(self, x, first if first.shape == mask.shape else mask)


# Global state and inputs


@forward("global state", "layers.0.norm1")
def default_dtype_left(self: nn.Module, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return right(self, x)


@forward("global state", "layers.1.mlp")
def deterministic_mode_left(self: nn.Module, x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    return right(self, x)


@forward("global state", "layers.1.norm1")
def environment_changed(self: nn.Module, x: Tensor) -> Tensor:
    os.environ["LEFT_BY_A_MODULE"] = "1"
    return right(self, x)


@forward("global state", "layers.0.mlp.down")
def matmul_precision_left(self: nn.Module, x: Tensor) -> Tensor:
    torch.set_float32_matmul_precision("high")
    return right(self, x)


@forward("input", "")
def features_written(self: nn.Module, ids: Tensor, features: Tensor, mask: Tensor) -> Any:
    out = right(self, ids, features, mask)
    with torch.no_grad():
        features.detach().add_(1)
    return out


@forward("input", "layers.1")
def mask_written(self: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    out = right(self, x, mask)
    mask.fill_(True)
    return out


@forward("input", "")
def ids_written(self: nn.Module, ids: Tensor, features: Tensor, mask: Tensor) -> Any:
    out = right(self, ids.clone(), features, mask)
    ids.zero_()
    return out
