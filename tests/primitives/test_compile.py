"""compile: regional, one compilation for identical modules."""

from typing import Any

import pytest
import torch
from torch import nn

import slapo_py as slapo
from slapo_py.errors import ArgumentError, StepError
from tests.fingerprint import changes, fingerprint
from tests.models import Block, ids, net, tiny_gpt2
from tests.running import equal, run

# Dynamo itself asks for .grad of an input that is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

compiled: list[torch.fx.GraphModule] = []


def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    compiled.append(graph)
    return graph.forward


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    compiled.clear()


def test_identical_layers_compile_once() -> None:
    sch = slapo.create_schedule(net())
    sch.select("blocks.*").compile(backend=counting)
    assert compiled == []
    sch.module(ids())
    assert len(compiled) == 1
    assert type(sch["blocks.0"].module) is type(sch["blocks.1"].module)


def test_identical_transformer_layers_compile_once() -> None:
    model = tiny_gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    sch = slapo.create_schedule(model)
    sch.select("transformer.h.*").compile(backend=counting)
    given = {"input_ids": torch.ones(1, 4, dtype=torch.long), "use_cache": False}
    for a, b in zip(run(sch.module, given), run(model, given)):
        assert equal(a, b)
    assert len(compiled) == 1


def test_the_order_of_options_means_nothing() -> None:
    sch = slapo.create_schedule(net())
    sch["blocks.0"].compile(backend=counting, dynamic=False)
    sch["blocks.1"].compile(dynamic=False, backend=counting)
    assert type(sch["blocks.0"].module) is type(sch["blocks.1"].module)
    assert sch.history[0].kwargs == sch.history[1].kwargs


def test_other_layers_compile_on_their_own() -> None:
    sch = slapo.create_schedule(net())
    sch["blocks.0"].compile(backend=counting)
    sch["blocks.1"].configure(scale=0.25).compile(backend=counting, dynamic=False)
    sch.module(ids())
    assert len(compiled) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_results_are_those_of_the_original(backend: str) -> None:
    model = net().eval()
    sch = slapo.create_schedule(model)
    sch.select("blocks.*").compile(backend=backend)
    for a, b in zip(run(sch.module, {"ids": ids()}, train=False), run(model, {"ids": ids()}, train=False)):
        torch.testing.assert_close(a, b)
    assert list(sch.module.state_dict()) == list(model.state_dict())


def test_compiled_and_checkpointed_commute() -> None:
    model = net()
    results = []
    for order in (("compile", "checkpoint"), ("checkpoint", "compile")):
        sch = slapo.create_schedule(model)
        for name in order:
            getattr(sch.select("blocks.*"), name)(**({"backend": "eager"} if name == "compile" else {}))
        assert "blocks" in str(sch)
        assert "<- compile(backend='eager'), checkpoint" in str(sch)
        results.append(run(sch.module, {"ids": ids()}))
    results.append(run(model, {"ids": ids()}))
    for a, b, c in zip(*results):
        assert equal(a, b)
        assert equal(a, c)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_compiled_around_checkpoints(backend: str) -> None:
    model = nn.Sequential(Block(), Block()).eval()
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    sch["1"].checkpoint(policy=["aten.addmm"])
    x = torch.randn(3, 8)
    output, expected = torch.compile(sch.module, backend=backend, fullgraph=True)(x), model(x)
    torch.testing.assert_close(output, expected)
    gradients = torch.autograd.grad(output.square().sum(), list(sch.module.parameters()))
    for a, b in zip(gradients, torch.autograd.grad(expected.square().sum(), list(model.parameters()))):
        torch.testing.assert_close(a, b)


def test_options_are_recorded_and_undone() -> None:
    sch = slapo.create_schedule(net())
    cls = type(sch["blocks.0"].module)
    sch["blocks.0"].compile(backend=counting, options={"b": 1, "a": 2}, fullgraph=True)
    assert str(sch.history[0]) == (
        'sch["blocks.0"].compile(backend=tests.primitives.test_compile.counting, '
        'options={"b": 1, "a": 2}, fullgraph=True)'
    )
    sch.undo()
    assert type(sch["blocks.0"].module) is cls


def test_compiled_twice_is_refused() -> None:
    sch = slapo.create_schedule(net())
    sch["blocks.0"].compile(backend="eager")
    before = fingerprint(sch.module)
    with pytest.raises(
        StepError,
        match=r'compile at "blocks.0": this module is compiled already \(compile\(backend=\'eager\'\)\). .*sch.undo',
    ):
        sch["blocks.0"].compile()
    assert changes(before, fingerprint(sch.module)) == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "option": (
        {"fulgraph": True},
        r"torch.compile has no option 'fulgraph'. Did you mean fullgraph=\? Options: fullgraph, dynamic",
    ),
    "option far off": ({"zzz": True}, "torch.compile has no option 'zzz'. Options: "),
    "model": ({"model": 1}, "torch.compile has no option 'model'"),
    "backend": ({"backend": "eagr"}, "torch.compile knows no backend 'eagr'. Did you mean backend='eager'"),
    "backend far off": ({"backend": 3}, "knows no backend 3. Known: "),
    "mode": ({"mode": "max-autotun"}, "knows no mode 'max-autotun'. Did you mean mode='max-autotune'"),
    "mode and options": ({"mode": "default", "options": {}}, "takes either mode= or options=, not both"),
    "options": ({"options": 3}, "options=3 must be a dict"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    sch = slapo.create_schedule(net())
    before = fingerprint(sch.module)
    with pytest.raises(ArgumentError, match=f'compile at "head": .*{message}'):
        sch["head"].compile(**options)
    assert changes(before, fingerprint(sch.module)) == []
    assert len(sch.history) == 0


@pytest.mark.parametrize("name", ["compile", "checkpoint"])
def test_a_container_is_never_called(name: str) -> None:
    sch = slapo.create_schedule(net())
    with pytest.raises(
        ArgumentError, match=rf'{name} at "blocks": ModuleList is a container .*sch.select\("blocks.\*"\).{name}\('
    ):
        getattr(sch["blocks"], name)()


@pytest.mark.parametrize("name", ["compile", "checkpoint"])
def test_a_forward_on_the_object_would_hide_the_step(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ArgumentError, match=rf'{name} at "0": this Linear has a forward that was set on the object'):
        getattr(slapo.create_schedule(model)["0"], name)()


def test_a_step_that_runs_the_model_compiles_nothing() -> None:
    sch = slapo.create_schedule(net(), example_inputs={"ids": ids()})
    sch["blocks.0"].compile(backend=counting)
    before = fingerprint(sch.original)
    sch["blocks.1"].trace()
    assert compiled == []
    assert changes(before, fingerprint(sch.original)) == []
    sch.module(ids())
    assert len(compiled) == 1
