"""rms_norm: values, gradients, and where fuse finds it."""

import abc
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import NoMatchError
from slapo_py.kernels.rms_norm import functional_rms_norm, rms_norm
from tests.kernels.lab import DEVICE, Args, Draw, KernelTests, cpu_only, same

module = sys.modules[rms_norm.__module__]


class Norm(nn.Module, abc.ABC):
    """A norm as a model writes it: `compute` with its own weight and eps."""

    initial, eps = 1.0, 1e-5

    def __init__(self, width: int = 16, dtype: torch.dtype = torch.float32, weight: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(self.initial + 0.1 * torch.randn(width, dtype=weight or dtype))

    @staticmethod
    @abc.abstractmethod
    def compute(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The formula."""

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight, self.eps)


class LlamaNorm(Norm):
    @staticmethod
    def compute(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        input_dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + eps)
        return weight * x.to(input_dtype)


class T5Norm(Norm):
    @staticmethod
    def compute(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + eps)
        if weight.dtype in [torch.float16, torch.bfloat16]:
            x = x.to(weight.dtype)
        return weight * x


class GemmaNorm(Norm):
    initial = 0.0

    @staticmethod
    def compute(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        normed = normed * (1.0 + weight.float())
        return normed.type_as(x)


class TorchNorm(Norm):
    @staticmethod
    def compute(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)


class LateNorm(Norm):
    """The numbers of F.rms_norm, without its warning where the dtypes of x and weight differ."""

    @staticmethod
    def compute(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


class TestRmsNorm(KernelTests):
    name = "rms_norm"

    def inputs(self, draw: Draw) -> Args:
        shape = draw.shape()
        weight = draw.tensor(shape[-1:], dtype=draw.one_of(draw.dtype, draw.dtype, torch.float32, torch.bfloat16))
        casting = draw.one_of("early", "late"), draw.one_of(None, weight.dtype, torch.float32)
        return draw.tensor(shape), weight, draw.one_of(1e-6, 1e-2, 0.0), draw.one_of(0.0, 0.0, 1.0), *casting

    def oracle(
        self, x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0, casting: str = "early",
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        if x.dtype == torch.float64:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if casting == "late":
            return (normed * (offset + weight.float())).to(dtype or x.dtype)
        return (offset + weight if offset else weight) * normed.to(dtype or x.dtype)


@pytest.mark.triton
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("casting", ["early", "late"])
def test_it_rounds_where_the_model_does(casting: str, offset: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 500, device=DEVICE).bfloat16(), torch.randn(500, device=DEVICE).bfloat16()
    made = [function(x, weight, 1e-5, offset, casting, None) for function in (rms_norm, module.reference)]
    assert (made[0] == made[1]).float().mean() > 0.99


@pytest.mark.triton
def test_a_large_mean_costs_the_gradient_no_digits() -> None:
    """What the gradient is then is the small rest of a difference, which torch gives with thrice the error."""
    torch.manual_seed(0)
    x, weight, grad = (30 + torch.randn(size, device=DEVICE) for size in ((16, 257), (257,), (16, 257)))
    found = []
    for function, dtype in ((rms_norm, torch.float32), (F.rms_norm, torch.float32), (F.rms_norm, torch.float64)):
        wide = x.to(dtype).requires_grad_()
        shape = () if function is rms_norm else ((257,),)
        made = function(wide, *shape, weight.to(dtype), 1e-6)
        found.append(torch.autograd.grad(made, wide, grad.to(dtype))[0])
    errors = [(one - found[2]).square().mean().sqrt() for one in found[:2]]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.triton
@pytest.mark.parametrize("rows", [1, 4, 13])
def test_programs_that_take_many_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRAMS", 3)
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 2048, device=DEVICE), torch.randn(2048, device=DEVICE)
    found = []
    for function in (rms_norm, lambda x, weight: F.rms_norm(x, (2048,), weight, 1e-6)):
        args = [one.clone().requires_grad_() for one in (x, weight)]
        found.append(torch.autograd.grad(function(*args).sin().sum(), args))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


PAIRS = [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float16, torch.float32), (torch.float32, torch.bfloat16)]


@cpu_only
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("form", [LlamaNorm, T5Norm, GemmaNorm, LateNorm])
def test_each_form_is_its_model_bit_by_bit(form: type[Norm], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(5, 33, dtype=dtypes[0])).requires_grad_()
    weight = torch.randn(33, dtype=dtypes[1]).requires_grad_()
    given: dict[type[Norm], tuple[Any, ...]] = {
        LlamaNorm: (), T5Norm: (0.0, "early", dtypes[1]), GemmaNorm: (1.0, "late"), LateNorm: (0.0, "late"),
    }  # fmt: skip
    made = [form.compute(x, weight, 1e-5), rms_norm(x, weight, 1e-5, *given[form])]
    same(*([one] for one in made))
    if form is not T5Norm or dtypes[0] == torch.float32:  # its gradient of x is the sum of two that are rounded
        grad = torch.randn_like(made[0])
        same(*(list(torch.autograd.grad(one, (x, weight), grad)) for one in made))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [torch.nn.RMSNorm(8), torch.nn.RMSNorm(8, eps=0.1)], ids=["no eps", "eps"])
def test_functional_rms_norm_is_torchs(affine: nn.RMSNorm, dtype: torch.dtype) -> None:
    x = (1e-3 * torch.randn(5, 8, dtype=dtype, device=DEVICE)).requires_grad_()
    weight = torch.randn(8, dtype=dtype, device=DEVICE)
    made = functional_rms_norm(x, weight, affine.eps)
    torch.testing.assert_close(made, F.rms_norm(x, affine.normalized_shape, weight, affine.eps))
    wide = torch.randn(4, 3, 8)  # over two dims: the kernel has one
    assert torch.equal(functional_rms_norm(wide, wide[0], None), F.rms_norm(wide, (3, 8), wide[0]))


class Block(nn.Module):
    def __init__(self, norm: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.fc = norm, nn.Linear(16, 16, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.fc(x)))


def calls(sch: slapo.Schedule, name: str) -> list[Any]:
    """The nodes of a graph that call a function."""
    return [node for node in sch.graph.nodes if getattr(node.target, "__name__", "") == name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("form", "name", "given"),
    [
        (LlamaNorm, "rms_norm", {"eps": 1e-5}),
        (T5Norm, "rms_norm", {"eps": 1e-5}),
        (GemmaNorm, "rms_norm", {"eps": 1e-5, "offset": 1.0, "casting": "late"}),
        (TorchNorm, "functional_rms_norm", {"eps": 1e-5}),
        (nn.RMSNorm, "functional_rms_norm", {"eps": None}),
    ],
)
def test_fuse_finds_every_form(form: type[nn.Module], name: str, given: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, dtype=dtype)
    sch = slapo.create_schedule(Block(form(16, dtype=dtype), dtype), example_inputs=(x,))
    sch.fuse("rms_norm")
    (node,) = calls(sch, name)
    assert given.items() <= node.kwargs.items()
    assert str(node.args[1].target) == "norm.weight"
    assert not {"rsqrt", "pow", "rms_norm"} & {node.target for node in sch.graph.nodes}
    assert sch.verify().grade in ("equal", "rounding")
    assert slapo.misses(sch.module) == {}


def test_a_weight_of_another_dtype_keeps_the_models_dtype() -> None:
    """T5 leaves bfloat16 there, and Gemma does not."""
    for form, dtype in ((T5Norm, torch.float32), (LlamaNorm, torch.float32), (GemmaNorm, torch.bfloat16)):
        norm = form(16, weight=torch.float32)
        x = torch.randn(3, 16, dtype=torch.bfloat16)
        sch = slapo.create_schedule(norm, example_inputs=(x,))
        sch.fuse("rms_norm")
        assert sch.module(x).dtype == norm(x).dtype == dtype
        assert torch.equal(sch.module(x), norm(x))


class EpsOutside(Norm):
    @staticmethod
    def compute(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float32)
        return weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype)


class AnotherDim(Norm):
    @staticmethod
    def compute(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float32)
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + eps)).to(x.dtype)


class OwnStatistics(Norm):
    @staticmethod
    def compute(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(x.dtype) + scale


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (EpsOutside, "the graph has no rms_norm; it has .* no nearer"),
        (AnotherDim, "llama_form .* does not match: .*mean"),
        (OwnStatistics, "llama_form .* is used outside"),
    ],
)
def test_what_only_looks_like_it_stays(form: type[Norm], reason: str) -> None:
    sch = slapo.create_schedule(form(16), example_inputs=(torch.randn(2, 3, 16),))
    with pytest.raises(NoMatchError, match=reason):
        sch.fuse("rms_norm")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight": torch.ones(1)}, r"rms_norm: weight must have the shape of a row, \(4,\), found \(1,\)"),
        ({"casting": "never"}, "rms_norm: casting must be .* found 'never'"),
        ({"dtype": torch.int32}, "rms_norm: dtype must be a floating dtype or None, found torch.int32"),
    ],
)
def test_what_it_cannot_take_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(torch.ones(2, 4), **{"weight": torch.ones(4), **given})
