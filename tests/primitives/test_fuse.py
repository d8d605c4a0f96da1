"""fuse by name: a registered kernel finds its own pattern, and what that needs is done first."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py import kernels
from slapo_py.errors import ArgumentError, NoMatchError, RegistryError
from slapo_py.scheduled import layers
from tests.models import ids, net, tiny_gpt2
from tests.patterns.functions import fused_gelu, fused_new_gelu, gelu_bias, new_gelu_bias
from tests.running import record

# Dynamo looks at .grad of whatever a compiled module is called with.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def closer(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    kernels.register_kernel(kernels.Kernel("bias_gelu_tanh", fused_new_gelu, new_gelu_bias, (new_gelu_bias,)))
    kernels.register_kernel(
        kernels.Kernel("gelu_after_bias", fused_gelu, gelu_bias, (lambda x, bias: F.silu(x + bias), gelu_bias))
    )
    yield
    for name in ("bias_gelu_tanh", "gelu_after_bias"):
        kernels.unregister_kernel(name)


def near(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        if value.is_floating_point():
            assert (value - b[name]).abs().max() <= 2e-6 * max(1.0, float(b[name].abs().max())), name


def test_what_the_pattern_needs_is_done_and_no_more() -> None:
    sch = slapo.create_schedule(tiny_gpt2(), inputs := {"input_ids": ids(2, 4)})
    sch.select("transformer.h.*.mlp").fuse("bias_gelu_tanh")
    assert [str(step) for step in sch.history] == [
        f'sch["transformer.h.{n}.mlp"].fuse("bias_gelu_tanh")' for n in range(2)
    ]
    for n in range(2):
        assert "fused_new_gelu(" in str(sch[f"transformer.h.{n}.mlp"])
        assert len(layers(sch[f"transformer.h.{n}.mlp.c_fc"].module)) == 1  # decomposed: its bias is in the kernel
        assert layers(sch[f"transformer.h.{n}.mlp.c_proj"].module) == ()  # as it was
    for train in (True, False):
        near(record(sch.module, inputs, train), record(sch.original, inputs, train))
    assert slapo.misses(sch.module) == {}
    printed = str(sch)
    sch.undo(2)
    sch.select("transformer.h.*.mlp").fuse("bias_gelu_tanh")
    assert str(sch) == printed


def test_a_traced_place_is_searched_as_it_is_first() -> None:
    sch = slapo.create_schedule(net(), {"ids": ids()})
    sch["blocks.0.up"].decompose()
    sch["blocks.0"].trace(flatten=True, leaves=["norm", "down", "drop"])
    before = sch["blocks.0"].graph
    sch["blocks.0"].fuse("gelu_after_bias")
    assert "fused_gelu(" in str(sch["blocks.0"])
    assert len(before.nodes) - 1 == len(sch["blocks.0"].graph.nodes)
    near(record(sch.module, {"ids": ids()}), record(sch.original, {"ids": ids()}))


def test_it_is_traced_anew_where_that_is_needed() -> None:
    sch = slapo.create_schedule(net(), {"ids": ids()})
    sch["blocks.0"].trace()
    sch["blocks.0"].fuse("gelu_after_bias")
    assert "fused_gelu(" in str(sch["blocks.0"])
    near(record(sch.module, {"ids": ids()}), record(sch.original, {"ids": ids()}))


def test_refusals_say_why_and_leave_nothing_behind() -> None:
    sch = slapo.create_schedule(net(), {"ids": ids()})
    printed = str(sch)
    with pytest.raises(NoMatchError, match="there is no kernel 'gelu_after_bia'. Did you mean 'gelu_after_bias'"):
        sch["blocks.0"].fuse("gelu_after_bia")
    with pytest.raises(NoMatchError, match="fuse\\('bias_gelu_tanh'\\) at \"blocks.0\": "):
        sch["blocks.0"].fuse("bias_gelu_tanh")
    with pytest.raises(NoMatchError, match="fuse\\('gelu_after_bias'\\) at \"blocks.0.drop\": "):
        sch["blocks.0.drop"].fuse("gelu_after_bias")
    with pytest.raises(ArgumentError, match="names a registered kernel, and compiler='inductor' compiles a match"):
        sch["blocks.0"].fuse("gelu_after_bias", compiler="inductor")
    assert str(sch) == printed
    sch["blocks.0"].trace().replace(closer, lambda x, y: x + y * 0.5 if False else x + y)
    with pytest.raises(
        NoMatchError, match="fuse\\('gelu_after_bias'\\) at \"blocks.0\""
    ):  # its graph can't be made anew
        sch["blocks.0"].fuse("gelu_after_bias")


def test_the_table_of_kernels() -> None:
    assert {"gelu_after_bias", "bias_gelu_tanh"} <= set(kernels.list_kernels())
    made: Any = kernels.find_kernel("gelu_after_bias")
    with pytest.raises(RegistryError, match="there is a kernel 'gelu_after_bias' already"):
        kernels.register_kernel(made)
    with pytest.raises(RegistryError, match="needs at least one pattern"):
        kernels.Kernel("none", fused_gelu, gelu_bias, ())
    with pytest.raises(RegistryError, match="must be a Python identifier"):
        kernels.Kernel("a b", fused_gelu, gelu_bias, (gelu_bias,))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning")  # torch's own import
def test_inductor_compiles_equal_matches_once() -> None:
    sch = slapo.create_schedule(net().eval(), {"ids": ids()})
    sch.select("blocks.*").trace()
    sch.select("blocks.*").fuse(lambda x, w, b: F.gelu(F.linear(x, w, b)), compiler="inductor")
    kinds = {type(one) for one in sch.module.modules() if type(one).__name__ == "Grouped"}
    assert len(kinds) == 1
    near(record(sch.module, {"ids": ids()}, train=False), record(sch.original, {"ids": ids()}, train=False))
    assert isinstance(sch["blocks.0.fused_0"].module, nn.Module)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), Twice()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


@pytest.mark.parametrize("hooked", ["fc", "act"])
def test_hooks_are_not_gone_past(hooked: str) -> None:
    model, seen = Small(), []
    model.get_submodule(hooked).register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(3, 4)
    sch = slapo.create_schedule(model, (x,))
    with pytest.raises(NoMatchError, match="fuse\\('gelu_after_bias'\\) at \"\""):
        sch.fuse("gelu_after_bias")
    sch.module(x)
    assert seen == [1]
