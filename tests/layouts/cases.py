"""Calls of every operation that the table knows, at small sizes that divide and sizes that don't."""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.layouts.rules.table import CONSTANT, NONLINEAR, canonical
from tests.layouts.oracle import Case, case, integers

_GENERATOR = torch.Generator().manual_seed(0)


def t(*shape: int) -> Tensor:
    """Whole numbers in float64, so that sums are exact."""
    return integers(shape, _GENERATOR)


def distinct(*shape: int) -> Tensor:
    """No two equal, in random order: a maximum has one place."""
    return torch.randperm(t(*shape).numel(), generator=_GENERATOR).view(shape).double() + 1


def smooth(*shape: int) -> Tensor:
    """Positive, below 1."""
    return torch.rand(shape, generator=_GENERATOR, dtype=torch.float64) * 0.8 + 0.1


def real(*shape: int) -> Tensor:
    """Of both signs."""
    return torch.randn(shape, generator=_GENERATOR, dtype=torch.float64) * 3


def ids(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape, generator=_GENERATOR)


def mask(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_GENERATOR) > 0.4


def conv2d(*args: Any, **kwargs: Any) -> Tensor:
    return torch.conv2d(*args, **kwargs)


T = Tensor
LABELLED: list[Case] = [
    case("linear", F.linear, t(4, 6, 8), t(12, 8), t(12)),
    case("linear without bias", F.linear, t(4, 8), t(5, 8), None),
    case("linear by keyword", F.linear, t(4, 8), weight=t(6, 8), bias=t(6)),
    case("linear of a vector", F.linear, t(8), t(6, 8), t(6)),
    case("addmm", torch.addmm, t(12), t(4, 8), t(8, 12)),
    case("addmm of a matrix", torch.addmm, t(4, 12), t(4, 8), t(8, 12), beta=2, alpha=3),
    case("addmm of a number", torch.addmm, t(1), t(4, 8), t(8, 12)),
    case("baddbmm", torch.baddbmm, t(4, 5, 7), t(4, 5, 6), t(4, 6, 7)),
    case("bmm", torch.bmm, t(4, 5, 6), t(4, 6, 7)),
    case("mm", torch.mm, t(5, 6), t(6, 7)),
    case("matmul", torch.matmul, t(4, 6, 5, 8), t(4, 6, 8, 7)),
    case("matmul broadcasts", torch.matmul, t(4, 1, 5, 8), t(6, 8, 7)),
    case("matmul of a vector", torch.matmul, t(8), t(4, 8, 7)),
    case("matmul by a vector", torch.matmul, t(4, 5, 8), t(8)),
    case("matmul of vectors", torch.matmul, t(8), t(8)),
    case("@", operator.matmul, t(5, 6), t(6, 7)),
    case("einsum", torch.einsum, "bhqd,bhkd->bhqk", t(4, 6, 5, 8), t(4, 6, 7, 8)),
    case("einsum of a diagonal", torch.einsum, "ii,ij->j", t(6, 6), t(6, 5)),
    case("conv2d", conv2d, t(4, 6, 5, 5), t(8, 6, 3, 3), t(8), (1, 1), (1, 1)),
    case("conv1d", torch.conv1d, t(4, 6, 8), t(5, 6, 3), None),
    case("conv in groups", conv2d, t(4, 6, 5, 5), t(6, 3, 3, 3), t(6), groups=2),
    case("adaptive_avg_pool2d", F.adaptive_avg_pool2d, t(4, 6, 8, 8), 1),
    case("avg_pool2d", F.avg_pool2d, t(4, 6, 8, 8), 4, 3),
    case("max_pool2d", F.max_pool2d, distinct(4, 6, 8, 8), 4, 3),
    case("embedding", F.embedding, ids(12, 4, 5), t(12, 6)),
    case("embedding with padding", F.embedding, ids(12, 4, 5), t(12, 6), padding_idx=3),
    case("layer_norm", F.layer_norm, t(4, 6, 8), (8,), t(8), t(8)),
    case("layer_norm over two dims", F.layer_norm, t(4, 6, 8), (6, 8), t(6, 8), t(6, 8)),
    case("layer_norm of itself", F.layer_norm, t(4, 6, 8), (8,)),
    case("layer_norm without weight", F.layer_norm, t(4, 6, 8), (8,), None, t(8)),
    case("rms_norm", F.rms_norm, t(4, 6, 8), (8,), t(8)),
    case("batch_norm in training", F.batch_norm, t(4, 6, 5, 5), t(6), smooth(6), t(6), t(6), True, frozen=(1, 2)),
    case("batch_norm", F.batch_norm, t(4, 6, 5, 5), t(6), smooth(6), t(6), t(6), False, frozen=(1, 2)),
    case("batch_norm of rows", F.batch_norm, t(8, 6), t(6), smooth(6), weight=t(6), bias=t(6), frozen=(1, 2)),
    case("attention", F.scaled_dot_product_attention, t(4, 6, 5, 8), t(4, 6, 7, 8), t(4, 6, 7, 3), t(4, 1, 5, 7)),
    case("attention, boolean", F.scaled_dot_product_attention, t(4, 6, 5, 8), t(4, 6, 7, 8), t(4, 6, 7, 3), mask(5, 7)),
    case(
        "attention, causal", F.scaled_dot_product_attention, t(4, 6, 5, 8), t(4, 6, 5, 8), t(4, 6, 5, 3), is_causal=True
    ),
    case(
        "attention in groups",
        F.scaled_dot_product_attention,
        t(2, 12, 5, 8),
        t(2, 6, 7, 8),
        t(2, 6, 7, 8),
        None,
        enable_gqa=True,
    ),
    case("attention, one head of keys", F.scaled_dot_product_attention, t(2, 12, 5, 8), t(2, 1, 7, 8), t(2, 1, 7, 8)),
    case("cross_entropy", F.cross_entropy, t(6, 12), ids(12, 6)),
    case("cross_entropy, summed", F.cross_entropy, t(6, 12), ids(12, 6), reduction="sum"),
    case("cross_entropy of each", F.cross_entropy, t(6, 12), ids(12, 6), reduction="none"),
    case("cross_entropy of an image", F.cross_entropy, t(4, 12, 5), ids(12, 4, 5), reduction="none"),
    case("cross_entropy of an image, averaged", F.cross_entropy, t(4, 12, 5), ids(12, 4, 5)),
    case("cross_entropy of a row", F.cross_entropy, t(12), ids(12)),
    case("add", operator.add, t(4, 6, 8), t(8)),
    case("add a number", operator.add, t(4, 6), 1),
    case("add nothing", operator.add, 0, t(4, 6)),
    case("add_", T.add_, t(4, 6), t(6)),
    case("+=", operator.iadd, t(4, 6), t(6)),
    case("radd", T.__radd__, t(4, 6), t(6)),
    case("rsub", T.__rsub__, t(4, 6), t(6)),
    case("rmatmul", T.__rmatmul__, t(6, 7), t(5, 6)),
    case("add with alpha", torch.add, t(4, 6), t(4, 6), alpha=2),
    case("sub", operator.sub, t(4, 6), t(4, 1)),
    case("sub from a number", operator.sub, 1, t(4, 6)),
    case("mul", operator.mul, t(4, 6, 8), t(4, 6, 1)),
    case("mul a number", operator.mul, t(4, 6), 3),
    case("mul a scalar", torch.mul, t(4, 6), t()),
    case("mul by a mask", torch.mul, t(4, 6), mask(4, 6)),
    case("div", operator.truediv, t(4, 6), smooth(4, 6)),
    case("div by a number", operator.truediv, t(4, 6), 4),
    case("div of a number", operator.truediv, 3, smooth(4, 6)),
    case("rtruediv", T.__rtruediv__, smooth(4, 6), 3),
    case("div_", T.div_, t(4, 6), smooth(4, 1)),
    case("div rounds", torch.div, t(4, 6), 2, rounding_mode="floor"),
    case("neg", operator.neg, t(4, 6)),
    case("type_as", T.type_as, t(4, 6), t(4, 6)),
    case("where", torch.where, mask(4, 6), t(4, 6), t(6)),
    case("where with a number", torch.where, mask(4, 6), t(4, 6), -100.0),
    case("where with 0", torch.where, mask(4, 6), t(4, 6), 0.0),
    case("masked_fill", T.masked_fill, t(4, 6), mask(4, 6), -100.0),
    case("masked_fill with 0", T.masked_fill, t(4, 6), mask(4, 6), 0),
    case("addcmul", torch.addcmul, t(4, 6), t(4, 6), t(4, 6)),
    case("addcdiv", torch.addcdiv, t(4, 6), t(4, 6), smooth(4, 6)),
    case("pow", T.pow, t(4, 6), 2),
    case("gelu", F.gelu, t(4, 6)),
    case("silu", F.silu, t(4, 6)),
    case("relu", F.relu, t(4, 6)),
    case("tanh", torch.tanh, smooth(4, 6)),
    case("rsqrt", torch.rsqrt, smooth(4, 6)),
    case("dropout", F.dropout, t(4, 6), 0.0, True),
    case("abs", torch.abs, distinct(4, 6)),
    case("le", T.le, t(4, 1), t(6)),
    case("and", operator.and_, mask(4, 6), mask(4, 1)),
    case("maximum", torch.maximum, distinct(4, 6), distinct(4, 6) + 0.5),
    case("minimum", torch.minimum, distinct(4, 6), distinct(4, 6) + 0.5),
    case("min of two", torch.min, distinct(4, 6), distinct(4, 6) + 0.5),
    case("softmax", F.softmax, t(4, 6, 8), dim=-1),
    case("softmax along the first", torch.softmax, t(4, 6), 0),
    case("log_softmax", F.log_softmax, t(4, 6, 8), -1),
    case("cumsum", torch.cumsum, t(4, 6, 8), 1),
    case("cumprod", torch.cumprod, smooth(4, 6), 1),
    case("sort", torch.sort, distinct(4, 6), 1),
    case("argsort", torch.argsort, distinct(4, 6)),
    case("sort along an axis", torch.sort, distinct(4, 6), axis=0),
    case("topk", torch.topk, distinct(4, 6), 2),
    case("diff", torch.diff, t(4, 6), prepend=t(4, 1)),
    case("glu", F.glu, t(4, 6), 1),
    case("gather", torch.gather, t(4, 6), 1, ids(6, 4, 5)),
    case("gather from more rows", torch.gather, t(8, 6), 1, ids(6, 4, 5)),
    case("normalize", F.normalize, smooth(4, 6), 2.0, 1),
    case("sum", T.sum, t(4, 6, 8), 1),
    case("sum along an axis", torch.sum, t(4, 6, 8), axis=1, keepdim=True),
    case("sum keeps", T.sum, t(4, 6, 8), dim=(0, -1), keepdim=True),
    case("sum of all", T.sum, t(4, 6)),
    case("mean", T.mean, t(4, 6, 8), -1, True),
    case("amax", torch.amax, distinct(4, 6), 1),
    case("amin", torch.amin, distinct(4, 6), 0),
    case("max of all", torch.max, distinct(4, 6)),
    case("max along", torch.max, distinct(4, 6), 1),
    case("prod", torch.prod, smooth(4, 6), 1),
    case("min along", torch.min, distinct(4, 6), 1),
    case("argmin", torch.argmin, distinct(4, 6), 1),
    case("std", torch.std, smooth(4, 6), 1),
    case("any", torch.any, distinct(4, 6) > 20, 1),
    case("all", torch.all, distinct(4, 6) > 4, 1),
    case("argmax", torch.argmax, distinct(4, 6), 1),
    case("var", torch.var, smooth(4, 6), 1),
    case("logsumexp", torch.logsumexp, t(4, 6), 1),
    case("norm", torch.norm, smooth(4, 6), 2, 1),
    case("pad", F.pad, t(4, 6, 8), (0, 0, 1, 2)),
    case("pad with a number", F.pad, t(4, 6), (0, 1), value=-100),
    case("pad by reflection", F.pad, t(4, 6), (1, 1), mode="reflect"),
    case("rows", operator.getitem, t(6, 8), ids(6, 4, 5)),
    case("columns", operator.getitem, t(4, 6, 8), (slice(None), ids(6, 5))),
    case("index_select", torch.index_select, t(4, 6, 8), 1, ids(6, 5)),
]

MOVES: list[Case] = [
    case("to", T.to, t(4, 6), torch.float64),
    case("to another", T.to, t(4, 6), t()),
    case("contiguous", T.contiguous, t(4, 6)),
    case("clone", torch.clone, t(4, 6)),
    case("view heads", T.view, t(4, 5, 24), 4, 5, -1, 4),
    case("view written", T.view, t(4, 5, 24), (4, 5, 6, 4)),
    case("view merges", T.reshape, t(4, 6, 8), 24, 8),
    case("view merges heads", T.reshape, t(4, 5, 6, 4), 4, 5, -1),
    case("view of six dims", T.view, t(4, 8, 24), 2, 2, 4, 2, 6, 4),
    case("view splits unevenly", T.view, t(15, 4), 3, 5, 4),
    case("view across", T.view, t(4, 6), 6, 4),
    case("ravel", torch.ravel, t(4, 6)),
    case("reshape_as", T.reshape_as, t(24), t(4, 6)),
    case("flatten", torch.flatten, t(4, 6, 3, 2), 1),
    case("unflatten", T.unflatten, t(4, 24), 1, (6, -1)),
    case("unflatten written", T.unflatten, t(4, 24), 1, (6, 4)),
    case("unsqueeze", T.unsqueeze, t(4, 6), 1),
    case("squeeze", T.squeeze, t(4, 1, 6), 1),
    case("view_as", T.view_as, t(24), t(4, 6)),
    case("transpose", T.transpose, t(4, 6, 8), 1, 2),
    case("swapaxes by keyword", torch.swapaxes, t(4, 6, 8), axis0=0, axis1=1),
    case("swapaxes", torch.swapaxes, t(4, 6, 8), 0, -1),
    case("permute", T.permute, t(4, 6, 8), 2, 0, 1),
    case("permute of a tuple", torch.permute, t(4, 6, 8), (1, 2, 0)),
    case("t", T.t, t(4, 6)),
    case("movedim", torch.movedim, t(4, 6, 8), 0, 2),
    case("expand", T.expand, t(6, 1), 4, -1, 8),
    case("expand written", T.expand, t(6, 1), 4, 6, 8),
    case("expand_as", T.expand_as, t(6, 1), t(6, 8)),
    case("broadcast_to", torch.broadcast_to, t(6, 1), (4, 6, 8)),
    case("repeat", T.repeat, t(4, 6), 3, 2, 1),
    case("repeat_interleave", torch.repeat_interleave, t(4, 6), 3, dim=1),
    case("split", torch.split, t(4, 24), 8, dim=1),
    case("split in three sizes", torch.split, t(4, 12), [8, 2, 2], dim=1),
    case("split unevenly", torch.split, t(4, 10), 4, 1),
    case("chunk", torch.chunk, t(4, 12), 2, dim=-1),
    case("chunk of eight", torch.chunk, t(4, 16), 2, 1),
    case("chunk unevenly", torch.chunk, t(4, 10), 4, 1),
    case("unbind", torch.unbind, t(4, 3, 6), 1),
    case("getitem", operator.getitem, t(4, 6, 8), (slice(None), None, slice(0, 8), slice(None, 4))),
    case("getitem of a row", operator.getitem, t(4, 6, 8), (Ellipsis, 0, slice(None))),
    case("getitem from the first", operator.getitem, t(4, 6, 8), 1),
    case("getitem steps", operator.getitem, t(4, 6), (slice(None, None, 2), slice(-2, None))),
    case("select", torch.select, t(4, 6, 8), 1, 3),
    case("narrow", torch.narrow, t(4, 6), 1, 2, 3),
    case("flip", torch.flip, t(4, 6), (1,)),
    case("roll", torch.roll, t(4, 6), 2, 1),
    case("roll of all", torch.roll, t(4, 6), 2),
    case("cat", torch.cat, (t(4, 6), t(4, 6)), dim=1),
    case("cat along an axis", torch.cat, (t(4, 6), t(4, 6)), axis=1),
    case("cat of sizes", torch.cat, [t(4, 8), t(4, 4), t(4, 4)], -1),
    case("cat of five", torch.cat, tuple(t(2) for _ in range(5)), 0),
    case("stack", torch.stack, (t(4, 6), t(4, 6)), 1),
]

# Element by element, and alike in everything but the formula: what each is called with, where it isn't one tensor.
_CALLED: dict[str, tuple[Any, ...]] = {
    "pow": (3,),
    "clamp": (-1, 2),
    "clamp_min": (0,),
    "clamp_max": (0,),
    "clip": (-1, 2),
    "hardtanh": (),
    "dropout": (0.0, True),
    "full_like": (7,),
    "rdiv": (3,),
    "floordiv": (2,),
    "floor_divide": (2,),
    "remainder": (3,),
    "mod": (3,),
    "fmod": (3,),
}
_OF_POSITIVE = "sqrt rsqrt log log2 log1p rdiv".split()
_COMPARE = "gt lt ge le eq ne atan2".split()
_BOOLEAN = "logical_and logical_or logical_not logical_xor and or xor not invert".split()


def _elementwise(name: str) -> Case:
    where: tuple[Any, ...] = (T, torch, F, operator)
    function = next((getattr(one, name) for one in where if hasattr(one, name)), None)
    if function is None:
        function = {"and": T.__and__, "or": T.__or__, "xor": T.__xor__, "not": torch.logical_not}.get(
            name, T.__rtruediv__
        )
    if name in _BOOLEAN:
        args = (mask(4, 6),) if name in ("logical_not", "not", "invert") else (mask(4, 6), mask(4, 1))
    elif name in _COMPARE:
        args = (real(4, 10), real(10))
    else:
        positive = name in _OF_POSITIVE
        args = (smooth(4, 6) * 6 if positive else real(4, 6), *_CALLED.get(name, ()))
    return Case(
        f"every {name}", function, args, called=name, frozen=(0,) if name in ("floordiv", "floor_divide") else ()
    )


def _every_elementwise() -> list[Case]:
    known = {canonical(one.operation.name) for one in LABELLED}
    return [_elementwise(name) for name in sorted(NONLINEAR | CONSTANT) if name not in known]


LABELLED += _every_elementwise()
