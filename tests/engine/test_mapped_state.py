"""Training through a parameter map: state_dict, checkpoints and the optimizer's state go by the original's names."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import slapo_py as slapo
from slapo_py.backends.base import Engine
from slapo_py.build.conserve import check_conserved
from slapo_py.errors import BuildError, CheckpointError
from slapo_py.replacing.mapped_state import from_original, to_original
from slapo_py.schedule import Schedule
from tests import replacing, zoo
from tests.engine.models import batches, engine_of, fingerprint
from tests.replacing import FUSED, PARTED, TRANSPOSED, Attention, Fused, FusedBert, FusedLlama, Parted, Transposed, lm

DATA = batches(6, length=6)


def fused(model: nn.Module | None = None, new: Any = Fused, params: Any = FUSED) -> Schedule:
    sch = slapo.create_schedule(model or lm(), DATA[0])
    for block in sch.select("blocks.*"):
        block["attn"].replace(new, params=params)
    return sch


def parted() -> Schedule:
    return fused(lm(replacing.fused_attention), Parted, PARTED)


MAPS: dict[str, Callable[[], Schedule]] = {
    "fused": fused,
    "transposed": lambda: fused(None, Transposed, TRANSPOSED),
    "parted": parted,
}


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in engine.state_dict().items()}


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-4) -> bool:
    # the gradient of k's bias is 0 but for rounding, which AdamW blows up to whole steps; no output depends on it
    compared = [name for name in one if not name.endswith(("k.bias", "qkv.bias"))]
    return list(one) == list(other) and all(torch.allclose(one[n], other[n], atol=tolerance) for n in compared)


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_replaced_run_goes_on_in_the_original_and_back(kind: str, precision: str, tmp_path: Path) -> None:
    """Both runs from the same checkpoint: losses and all states stay together, whichever way it is carried over."""
    sch = MAPS[kind]()
    plain = slapo.create_schedule(copy.deepcopy(sch.original).eval())
    fusing = engine_of(sch, precision=precision)
    for module in fusing.module.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for batch in DATA[:3]:
        fusing.train_step(batch)
    fusing.save(tmp_path / "fused")
    going = engine_of(plain, precision=precision)
    for module in going.module.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    going.load(tmp_path / "fused")
    assert all(torch.equal(a, b) for a, b in zip(state_of(going).values(), state_of(fusing).values(), strict=True))
    tolerance = 1e-6 if precision == "fp32" else 2e-2
    for batch in DATA[3:5]:
        assert torch.allclose(going.train_step(batch), fusing.train_step(batch), rtol=tolerance)
    assert close(state_of(going), state_of(fusing), tolerance * 100)
    going.save(tmp_path / "plain")
    fusing.load(tmp_path / "plain")
    assert all(torch.equal(a, b) for a, b in zip(state_of(fusing).values(), state_of(going).values(), strict=True))
    assert torch.allclose(going.train_step(DATA[5]), fusing.train_step(DATA[5]), rtol=tolerance)
    fusing.save(tmp_path / "again")
    names = {one.split("/")[0] for one in _keys(tmp_path / "again")}
    assert names == {"model", "buffer", "optimizer"}


def _keys(folder: Path) -> list[str]:
    from slapo_py.backends import folder as saved

    return list(saved.find(folder)[1]["tensors"])


def test_moments_are_those_of_the_original(tmp_path: Path) -> None:
    """The checkpoint of a replaced schedule has exactly the keys, shapes and groups of the original's."""
    plain, fusing = engine_of(lm()), engine_of(fused())
    for engine, place in ((plain, "plain"), (fusing, "fused")):
        engine.train_step(DATA[0])
        engine.save(tmp_path / place)
    assert sorted(_keys(tmp_path / "plain")) == sorted(_keys(tmp_path / "fused"))
    rest = [torch.load(next((tmp_path / one).rglob("engine.pt")), weights_only=True) for one in ("plain", "fused")]
    assert rest[0]["optimizer"]["groups"] == rest[1]["optimizer"]["groups"]
    assert "optimizer/blocks.0.attn.q.weight/exp_avg" in _keys(tmp_path / "fused")


def test_two_groups_of_the_optimizer(tmp_path: Path) -> None:
    def grouped(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        weights = [one for one in named if not one[0].endswith("bias")]
        rest = [one for one in named if one[0].endswith("bias")]
        return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])

    fusing = engine_of(fused(), optimizer=grouped)
    fusing.train_step(DATA[0])
    fusing.save(tmp_path)
    going = engine_of(lm(), optimizer=grouped)
    going.load(tmp_path)
    assert torch.allclose(going.eval_step(DATA[1]), fusing.eval_step(DATA[1]), rtol=1e-5)


def test_state_that_has_no_map(tmp_path: Path) -> None:
    """Adafactor keeps rows and columns of a matrix: they are not those of its parts."""
    fusing = engine_of(fused(), optimizer=partial(torch.optim.Adafactor, lr=1e-2))
    fusing.train_step(DATA[0])
    with pytest.raises(CheckpointError, match="the optimizer's 'row_var' can't be taken through the params of replace"):
        fusing.save(tmp_path)


def test_parts_trained_apart_do_not_fit_one_parameter(tmp_path: Path) -> None:
    """SGD with momentum of q only: k has no state, and the fused parameter can't have half of one."""
    plain = engine_of(lm(), optimizer=partial(torch.optim.SGD, lr=1e-2, momentum=0.9))
    plain.train_step(DATA[0])
    name = dict(plain.module.named_parameters())["blocks.0.attn.k.weight"]
    del plain.optimizer.state[name]
    plain.save(tmp_path)
    fusing = engine_of(fused(), optimizer=partial(torch.optim.SGD, lr=1e-2, momentum=0.9))
    before = state_of(fusing)
    with pytest.raises(CheckpointError, match="'blocks.0.attn.k.weight' is missing|'k.weight' is missing"):
        fusing.load(tmp_path)
    assert close(before, state_of(fusing), 0)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_transformers_models(family: str, tmp_path: Path) -> None:
    original = zoo.make(family)
    inputs = zoo.BY_NAME[family].inputs(2, 8)
    path = {"llama": "model.layers.*.self_attn", "bert": "encoder.layer.*.attention.self"}[family]
    new, params = {"llama": (FusedLlama, replacing.LLAMA), "bert": (FusedBert, replacing.BERT)}[family]
    for config in (original.config,):
        config.attention_dropout = config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    for module in original.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    sch = slapo.create_schedule(original, inputs)
    for place in sch.select(path):
        place.replace(new, params=params)

    def loss(output: Any, batch: Any) -> torch.Tensor:
        value = output.logits if family == "llama" else output.last_hidden_state
        return (value.float() ** 2).sum()

    def engine(schedule: Schedule) -> Engine:
        options = {"loss": loss, "count": lambda batch: 16, "optimizer": partial(torch.optim.AdamW, lr=1e-3)}
        return slapo.build(schedule, target="torch", **options)  # type: ignore[call-overload, no-any-return]

    fusing = engine(sch)
    for _ in range(3):
        fusing.train_step(inputs)
    fusing.save(tmp_path)
    plain = copy.deepcopy(original)
    plain.load_state_dict(fusing.state_dict())
    going = engine(slapo.create_schedule(plain, inputs))
    assert torch.allclose(going.eval_step(inputs), fusing.eval_step(inputs), rtol=1e-5)
    going.load(tmp_path)
    for _ in range(2):
        assert torch.allclose(going.train_step(inputs), fusing.train_step(inputs), rtol=1e-5)
    assert not fusing.misses
    assert list(fusing.state_dict()) == list(original.state_dict())
    if family == "llama":
        fusing.module.save_pretrained(tmp_path / "pretrained")
        again = hf.LlamaForCausalLM.from_pretrained(tmp_path / "pretrained").state_dict()
        assert all(torch.equal(one, again[name]) for name, one in fusing.state_dict().items())


# state_dict of the module itself


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("what", ["copy", "built", "deepcopy", "pickle", "torch.save"])
def test_state_dict_is_the_originals(kind: str, what: str) -> None:
    sch = MAPS[kind]()
    module = sch.module if what == "copy" else slapo.build(sch)
    if what == "deepcopy":
        module = copy.deepcopy(module)
    elif what == "pickle":
        module = pickle.loads(pickle.dumps(module))
    elif what == "torch.save":
        stream = io.BytesIO()
        torch.save(module, stream)
        stream.seek(0)
        module = torch.load(stream, weights_only=False)
    before = fingerprint(sch.original)
    wanted, found = sch.original.state_dict(), module.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype for name in wanted)
    assert found._metadata == wanted._metadata  # type: ignore[attr-defined]
    one = sch.original.get_submodule("blocks.1").state_dict(prefix="here.")
    assert list(module.get_submodule("blocks.1").state_dict(prefix="here.")) == list(one)
    assert fingerprint(sch.original) == before


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_load_state_dict_both_ways(kind: str, assign: bool) -> None:
    sch = MAPS[kind]()
    built = slapo.build(sch).eval()
    other = {name: torch.rand_like(one.float()).to(one.dtype) for name, one in sch.original.state_dict().items()}
    other["head.weight"] = other["embed.weight"]
    result = built.load_state_dict({name: one.clone() for name, one in other.items()}, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    plain = copy.deepcopy(sch.original).eval()
    plain.load_state_dict(built.state_dict(), assign=assign)
    assert all(torch.equal(one, other[name]) for name, one in plain.state_dict().items())
    assert torch.allclose(plain(DATA[0]["ids"]), built(DATA[0]["ids"]), atol=1e-5)
    assert all(one.requires_grad for one in built.parameters())


def test_loading_says_what_is_wrong_by_the_original_names() -> None:
    built = slapo.build(fused())
    state = {name: one.clone() for name, one in built.state_dict().items()}
    short = {name: one for name, one in state.items() if name != "blocks.0.attn.k.weight"}
    more = {**state, "blocks.0.attn.qkv.weight": torch.zeros(24, 8)}
    wrong = {**state, "blocks.0.attn.k.weight": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "blocks.0.attn.k.weight". $'):
        built.load_state_dict(short)
    for part in "qv":
        del short[f"blocks.0.attn.{part}.weight"]
    parts = ", ".join(f'"blocks.0.attn.{part}.weight"' for part in "qkv")
    with pytest.raises(RuntimeError, match=rf"Missing key\(s\) in state_dict: {parts}. $"):
        built.load_state_dict(short)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "blocks.0.attn.qkv.weight"'):
        built.load_state_dict(more)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks.0.attn.k.weight: the checkpoint has \(3,\)"):
        built.load_state_dict(wrong)
    # not strictly: what is there is taken, what is not stays
    changed = {"blocks.0.attn.k.weight": torch.full((8, 8), 7.0)}
    result = built.load_state_dict(changed, strict=False)
    assert "blocks.0.attn.q.weight" in result.missing_keys or not result.unexpected_keys
    now = built.state_dict()
    assert torch.equal(now["blocks.0.attn.k.weight"], changed["blocks.0.attn.k.weight"])
    assert torch.equal(now["blocks.0.attn.q.weight"], state["blocks.0.attn.q.weight"])


def test_hooks_of_the_user_on_the_state() -> None:
    """They see the original's names: when the state is taken after the map, when it is loaded before it."""
    model = lm()
    seen: list[Any] = []

    def saved(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "extra"] = state[prefix + "q.weight"].sum()
        seen.append((type(module).__name__, [name for name in state if name.startswith(prefix)]))

    def loading(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        state.pop(prefix + "extra", None)
        state[prefix + "q.weight"] = state.pop(prefix + "old_q", state[prefix + "q.weight"])
        seen.append(type(module).__name__)

    def after(module: nn.Module, incompatible: Any) -> None:
        seen.append(("after", type(module).__name__))

    def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        seen.append(("before", type(module).__name__))

    attention = model.blocks[0].attn
    attention.register_state_dict_post_hook(saved)
    attention.register_load_state_dict_pre_hook(loading)
    attention.register_load_state_dict_post_hook(after)
    attention.register_state_dict_pre_hook(before)
    wanted = model.state_dict()
    built = slapo.build(fused(model))
    seen.clear()
    state = built.state_dict()
    assert list(state) == list(wanted)
    assert seen[0] == ("before", "Fused")
    assert seen[1][0] == "Fused" and seen[1][1][0] == "blocks.0.attn.calls"
    seen.clear()
    state["blocks.0.attn.old_q"] = torch.ones(8, 8)
    built.load_state_dict(state)
    assert seen == ["Fused", ("after", "Fused")]
    assert built.state_dict()["blocks.0.attn.q.weight"].eq(1).all()
    copied = copy.deepcopy(built)
    copied.load_state_dict(state)
    assert copied.state_dict()["blocks.0.attn.q.weight"].eq(1).all()


def test_hooks_of_the_new_module_on_its_state() -> None:
    """They see the new names."""
    seen: list[bool] = []

    def hooked(old: Any) -> nn.Module:
        made = Fused(old)
        made.register_state_dict_post_hook(lambda m, state, prefix, _: seen.append(f"{prefix}qkv.weight" in state))
        made.register_load_state_dict_pre_hook(lambda m, state, prefix, *_: seen.append(f"{prefix}qkv.weight" in state))
        return made

    module = fused(new=hooked).module
    seen.clear()
    module.load_state_dict(module.state_dict())
    assert seen == [True] * 4


class OuterNew(nn.Module):
    """In the place of a block: the norm's weight and bias lie in one parameter, and the attention has another name."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.attention = Attention(8)
        self.norm = nn.Parameter(torch.zeros(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(nn.functional.layer_norm(x, (8,), *self.norm))


class Stacked(OuterNew):
    def __init__(self, old: nn.Module) -> None:
        super().__init__(old)
        self.norm = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(nn.functional.layer_norm(x, (8,), self.norm[:8], self.norm[8:]))


def test_nested_maps() -> None:
    """A replaced module inside a replaced module."""
    sch = slapo.create_schedule(lm(), DATA[0])
    inner = list(sch.original.blocks[0].attn.state_dict())
    params = {"norm": slapo.params.cat("norm.weight", "norm.bias"), **{f"attention.{n}": f"attn.{n}" for n in inner}}
    sch["blocks.0"].replace(Stacked, params=params)
    sch["blocks.0.attention"].replace(Fused, params=FUSED)
    built = slapo.build(sch).eval()
    wanted = sch.original.state_dict()
    assert list(built.state_dict()) == list(wanted)
    assert all(torch.equal(built.state_dict()[name], wanted[name]) for name in wanted)
    assert torch.allclose(built(DATA[0]["ids"]), copy.deepcopy(sch.original).eval()(DATA[0]["ids"]), atol=1e-5)
    other = lm()
    nn.init.normal_(other.blocks[0].attn.v.weight)
    built.load_state_dict(other.state_dict())
    assert all(torch.equal(built.state_dict()[name], one) for name, one in other.state_dict().items())
    fused_weight = dict(built.named_parameters())["blocks.0.attention.qkv.weight"]
    assert torch.equal(fused_weight[16:], other.blocks[0].attn.v.weight)


def test_gradients_through_the_map() -> None:
    sch = fused()
    built, plain = slapo.build(sch).eval(), copy.deepcopy(sch.original).eval()
    for module in (built, plain):
        module(DATA[0]["ids"]).square().sum().backward()
    found = to_original(built, {name: one.grad for name, one in built.named_parameters()})
    wanted = {name: one.grad for name, one in plain.named_parameters()}
    assert list(found) == list(wanted)
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-4, atol=1e-3) for name in wanted)
    back = from_original(built, found)
    assert all(torch.equal(back[name], one.grad) for name, one in built.named_parameters())


# build compares through the map


def test_build_finds_what_the_map_lost() -> None:
    sch = fused()
    built = slapo.build(sch)
    built.blocks[0].attn.qkv.weight.requires_grad_(False)
    with pytest.raises(BuildError, match="build at 'blocks.0.attn.q.weight': this parameter was .* trainable and is"):
        check_conserved(sch.original, built)
    built = slapo.build(sch)
    built.head.weight = nn.Parameter(built.head.weight.detach().clone())
    with pytest.raises(BuildError, match="a tie was lost or made"):
        check_conserved(sch.original, built)
    built = slapo.build(sch)
    built.blocks[0].attn._state_dict_hooks.clear()
    with pytest.raises(BuildError, match="lost the original's parameter 'blocks.0.attn.q.weight'"):
        check_conserved(sch.original, built)


def test_weights_loaded_into_the_original_after_the_step() -> None:
    sch = fused()
    with torch.no_grad():
        sch.original.blocks[0].attn.q.weight.add_(1)
    with pytest.raises(BuildError, match="the values that it was made of have changed in the original since the step"):
        slapo.build(sch)
    fresh = slapo.create_schedule(sch.original, DATA[0])
    sch.history.replay(fresh)
    assert torch.equal(slapo.build(fresh).state_dict()["blocks.0.attn.q.weight"], sch.original.blocks[0].attn.q.weight)


def test_donated() -> None:
    sch = fused()
    wanted = {name: one.clone() for name, one in sch.original.state_dict().items()}
    built = slapo.build(sch, donate=True)
    assert all(torch.equal(built.state_dict()[name], one) for name, one in wanted.items())


def test_a_schedule_of_a_built_module() -> None:
    built = slapo.build(fused())
    again = slapo.build(slapo.create_schedule(built, DATA[0]))
    assert list(again.state_dict()) == list(lm().state_dict())
    with pytest.raises(slapo.errors.StepError, match="this Fused were mapped when the model was built"):
        slapo.create_schedule(built)["blocks.0.attn"].replace(lambda old: Parted(old), params=PARTED)


class Counting(nn.Module):
    """Passing buffers: one that both have, one that only the old or only the new module has."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.name = name
        self.register_buffer("shared", torch.zeros(1), persistent=False)
        self.register_buffer(name, torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        with torch.no_grad():
            self.shared.add_(1)
            getattr(self, self.name).add_(1)
        return self.lin(x)


def counting(width: int) -> Counting:
    return Counting("old_one")


def new_counting(old: nn.Module) -> Counting:
    return Counting("new_one")


def test_passing_buffers_of_one_side(tmp_path: Path) -> None:
    sch = fused(lm(counting), new_counting, None)
    fusing, going = engine_of(sch), engine_of(lm(counting))
    fusing.train_step(DATA[0])
    fusing.save(tmp_path / "new")
    again = engine_of(sch)
    again.load(tmp_path / "new")
    assert again.module.blocks[0].attn.new_one.tolist() == [1, 1]
    going.load(tmp_path / "new")
    assert going.module.blocks[0].attn.shared.tolist() == [1]
    assert going.module.blocks[0].attn.old_one.tolist() == [0, 0]
    going.save(tmp_path / "old")
    fusing.load(tmp_path / "old")
