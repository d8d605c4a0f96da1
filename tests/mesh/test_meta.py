"""Models on "meta": drawn alike at every world size, read part by part from safetensors, and never left empty."""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.build.facts import facts_of
from slapo_py.build.slicing import part_of
from slapo_py.distributed.mesh import Mesh
from slapo_py.errors import BuildError, CheckpointError
from tests.fingerprint import fingerprint
from tests.layouts.plans import PLANS
from tests.mesh.conftest import Run
from tests.mesh.memory import peak_of
from tests.mesh.whole import first_tensor, together
from tests.slow import slow_but

FAMILIES = ("llama", "gpt2", "t5")


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return PLANS[name].build(PLANS[name].attention).eval()


def inputs_of(name: str) -> dict[str, Any]:
    """Without padding: the values of a mask are not looked at where a model on "meta" is recorded."""
    return {key: one for key, one in PLANS[name].inputs().items() if key != "attention_mask"}


def split(name: str, model: nn.Module, ranks: int) -> slapo.Schedule:
    sch = slapo.create_schedule(model, inputs_of(name))
    if ranks == 1:
        return sch
    PLANS[name].split(sch)
    return sch.auto_sync("tp", ranks=ranks)


def hashes(built: nn.Module, mesh: Mesh | None = None) -> dict[str, str]:
    wholes = {name: one.detach() for name, one in [*built.named_parameters(), *built.named_buffers()]}
    if mesh is not None:
        wholes |= together(built, mesh)
    return {
        name: hashlib.sha256(one.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, one in wholes.items()
    }


# Drawn


@pytest.mark.parametrize("name", slow_but(["gpt2"], FAMILIES))
def test_the_same_weights_at_every_world_size(name: str, on_ranks: Run) -> None:
    torch.manual_seed(5)
    model = on_meta(name)
    alone = hashes(slapo.build(slapo.create_schedule(model), init=slapo.own_init(model)))
    assert len(set(alone.values())) > 10
    for sizes in ({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}):
        for found in on_ranks(4 if "dp" in sizes else sizes["tp"], _drawn, name, sizes):
            assert found == alone


def _drawn(name: str, sizes: dict[str, int]) -> dict[str, str]:
    mesh = Mesh.of(sizes)
    torch.manual_seed(5 + mesh.coordinate("tp"))  # ranks that draw differently, as for dropout
    before = torch.get_rng_state()
    model = on_meta(name)
    built = slapo.build(split(name, model, sizes["tp"]), mesh=mesh, init=slapo.own_init(model))
    assert torch.equal(torch.get_rng_state(), before)
    return hashes(built, mesh)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(4, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).split([4, 8], -1)
        return a.sum(-1, keepdim=True) + b


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sum(-1, keepdim=True) + self.b(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Two(), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))


def _fused(model: nn.Module) -> slapo.Schedule:
    sch = slapo.create_schedule(model, (torch.ones(3, 4),))
    both = {"both.weight": slapo.params.cat("a.weight", "b.weight")}
    return sch["inner"].replace(lambda old: Fused(), params=both) and sch


def _outer_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Outer()


def test_a_replaced_module_is_made_of_the_same_weights(tmp_path: Path) -> None:
    model = _outer_on_meta()
    plain = slapo.build(slapo.create_schedule(model), init=slapo.own_init(model))
    save_model(plain, str(tmp_path / "model.safetensors"))
    for given in ({"init": slapo.own_init(model)}, {"checkpoint": tmp_path}):
        built = slapo.build(_fused(model), **given)
        state, wanted = built.state_dict(), plain.state_dict()
        assert list(state) == list(wanted)
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)
        assert torch.equal(built.inner.both.weight[4:], plain.inner.b.weight)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def test_a_map_may_keep_the_name(tmp_path: Path) -> None:
    eager, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    save_model(eager, str(tmp_path / "model.safetensors"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    sch = slapo.create_schedule(model, (x,))
    params = {"weight": slapo.params.transpose("weight", 0, 1), "bias": "bias"}
    sch["0"].replace(lambda old: Transposed(), params=params)
    built = slapo.build(sch, checkpoint=tmp_path)
    assert torch.equal(built.get_parameter("0.weight"), eager[0].weight.t())
    assert torch.allclose(built(x), eager(x))


@pytest.mark.parametrize("given", ["init", "checkpoint"])
def test_split_buffers_are_filled(given: str, on_ranks: Run, tmp_path: Path) -> None:
    model = PLANS["wide_resnet"].model()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape))
    save_model(model, str(tmp_path / "model.safetensors"))
    wanted = {name: one.detach() for name, one in model.named_buffers()}
    for splits, wrong in on_ranks(2, _buffers, str(tmp_path), given, wanted):
        assert splits
        assert not wrong


def _buffers(folder: str, given: str, wanted: dict[str, Tensor]) -> tuple[int, list[str]]:
    def init(name: str, tensor: Tensor) -> None:
        tensor.copy_(wanted[name]) if name in wanted else nn.init.ones_(tensor)

    mesh = Mesh.of({"tp": 2})
    sch = split("wide_resnet", on_meta("wide_resnet").train(), 2)
    built = slapo.build(sch, mesh=mesh, **({"init": init} if given == "init" else {"checkpoint": folder}))
    facts, wrong, splits = facts_of(built), [], 0
    for name, one in built.named_buffers():
        placements = facts[name].placements if name in facts else {}
        splits += bool(placements)
        if not torch.equal(one, part_of(wanted[name], placements, mesh)):
            wrong.append(name)
    return splits, wrong


def test_names_draw_apart_and_builds_alike() -> None:
    model = on_meta("llama")
    first, again = (slapo.build(slapo.create_schedule(model), init=slapo.own_init(model)) for _ in range(2))
    assert hashes(first) == hashes(again)
    layers = first.model.layers
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)
    torch.manual_seed(1)
    assert hashes(slapo.build(slapo.create_schedule(model), init=slapo.own_init(model))) != hashes(first)


def test_init_sees_whole_tensors_under_their_first_names(on_ranks: Run) -> None:
    for seen, tied in on_ranks(2, _seen):
        assert ("transformer.wte.weight", (96, 32)) in seen
        assert "lm_head.weight" not in dict(seen)
        assert tied


def _seen() -> tuple[list[tuple[str, tuple[int, ...]]], bool]:
    seen = []

    def init(name: str, tensor: Tensor) -> None:
        seen.append((name, tuple(tensor.shape)))
        nn.init.normal_(tensor)

    built = slapo.build(split("gpt2", on_meta("gpt2"), 2), mesh={"tp": 2}, init=init)
    return seen, built.lm_head.weight is built.transformer.wte.weight


# The model's own initialisation, and what is computed


@pytest.mark.parametrize("name", PLANS)
def test_own_init_is_that_of_the_model(name: str) -> None:
    model = on_meta(name)
    before = fingerprint(model)
    built = slapo.build(slapo.create_schedule(model), init=slapo.own_init(model))
    assert fingerprint(model) == before
    torch.manual_seed(0)
    eager = PLANS[name].build(PLANS[name].attention)
    buffers = dict(built.named_buffers(remove_duplicate=False))
    for key, wanted in eager.named_buffers(remove_duplicate=False):
        assert torch.equal(buffers[key], wanted), key
    parameters = dict(built.named_parameters())
    for key, wanted in eager.named_parameters():
        found = parameters[key].detach()
        if wanted.std() == 0 or wanted.numel() == 1:
            assert torch.equal(found, wanted), key  # ones and zeros
        elif wanted.numel() >= 256:
            assert abs(found.std() / wanted.std() - 1) < 0.2, key
            assert not torch.equal(found, wanted)
    if name == "gpt2":  # what a model writes to modules below another one comes last
        ratio = parameters["transformer.h.0.mlp.c_proj.weight"].std() / parameters["transformer.wte.weight"].std()
        assert 0.4 < ratio < 0.6


def test_own_init_changes_no_model_with_values() -> None:
    model = Outer()
    before = fingerprint(model)
    weight = torch.full((4, 4), 7.0)
    slapo.own_init(model)("inner.a.weight", weight)
    assert fingerprint(model) == before
    assert weight.abs().max() <= 0.5


class Table(nn.Module):
    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.table


class Resets(Table):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_a_computed_buffer_is_computed_or_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        plain, resets, persistent = Table(), Resets(), Table(persistent=True)
    save_file({"weight": torch.ones(4)}, tmp_path / "m.safetensors")
    fills: dict[str, Any] = {"init": lambda name, tensor: nn.init.normal_(tensor)}
    for given in (fills, {"checkpoint": tmp_path / "m.safetensors"}):
        with pytest.raises(BuildError, match=r"at 'table': this buffer is on 'meta'.*Compute it.*model.table = ..."):
            slapo.build(slapo.create_schedule(plain), **given)
        assert torch.equal(slapo.build(slapo.create_schedule(resets), **given).table, torch.arange(4.0))
    plain.table = torch.arange(4.0)  # as the message says
    assert torch.equal(slapo.build(slapo.create_schedule(plain), **fills).table, torch.arange(4.0))
    assert slapo.build(slapo.create_schedule(persistent), **fills).table.std() > 0


def test_refuses_a_buffer_of_a_module_that_a_step_put_in() -> None:
    class New(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1), persistent=False)

    model = _outer_on_meta()
    sch = slapo.create_schedule(model, (torch.ones(3, 4),))
    with torch.device("meta"):
        sch["inner"].replace(New())
    with pytest.raises(BuildError, match=r"at 'inner.scale': this buffer is on 'meta'"):
        slapo.build(sch, init=slapo.own_init(model))


# From a checkpoint


@pytest.mark.parametrize("name", slow_but(["gpt2"], FAMILIES))
@pytest.mark.parametrize("meta", [True, False], ids=["meta", "values"])
def test_a_checkpoint_is_read_part_by_part(name: str, meta: bool, on_ranks: Run, tmp_path: Path) -> None:
    model = PLANS[name].model().double().eval()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    expected = first_tensor(model(**inputs_of(name))).detach()
    wanted = {key: one.detach() for key, one in model.named_parameters()}
    for sizes in ({"tp": 2}, {"tp": 4}):
        for found in on_ranks(sizes["tp"], _loaded, name, sizes, meta, str(tmp_path), wanted):
            assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    built = slapo.build(slapo.create_schedule(on_meta(name).double()), checkpoint=tmp_path)
    assert torch.equal(first_tensor(built(**inputs_of(name))), expected)


def _loaded(name: str, sizes: dict[str, int], meta: bool, folder: str, wanted: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(3)
    model = (on_meta(name) if meta else PLANS[name].build(PLANS[name].attention)).double().eval()
    mesh = Mesh.of(sizes)
    built = slapo.build(split(name, model, sizes["tp"]), mesh=mesh, checkpoint=folder)
    for key, one in built.named_parameters():
        assert torch.equal(one, part_of(wanted[key], facts_of(built)[key].placements, mesh)), key
    return first_tensor(built(**inputs_of(name))).detach()


def large(device: str) -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=32,
    )  # fmt: skip
    with torch.device(device):
        return hf.LlamaForCausalLM(config).eval()


@pytest.mark.slow
def test_a_rank_needs_no_more_than_its_shard_and_one_tensor(on_ranks: Run, tmp_path: Path) -> None:
    model = large("cpu")
    model.save_pretrained(tmp_path)
    every = sum(one.numel() * 4 for one in model.parameters())
    largest = max(one.numel() * 4 for one in model.parameters())
    for shard, peak, anonymous in on_ranks(4, _peak, str(tmp_path)):
        assert shard < every / 3.9
        assert shard + largest < every / 2
        assert shard <= peak <= shard + 2**20  # nothing is read whole; a dim of the largest has 64 KiB of indexes
        assert shard / 2 < anonymous <= shard + largest
    with torch.device("cpu"):
        _, peak, _ = peak_of(lambda: slapo.build(slapo.create_schedule(large("meta")), checkpoint=tmp_path))
    assert every <= peak <= every + largest  # that the whole is counted where it is read


def _peak(folder: str) -> tuple[int, int, int]:
    sch = slapo.create_schedule(large("meta"), PLANS["llama"].inputs())
    PLANS["llama"].split(sch)
    sch.auto_sync("tp", ranks=4)
    built, peak, anonymous = peak_of(lambda: slapo.build(sch, mesh={"tp": 4}, checkpoint=folder))
    shard = sum(one.numel() * one.element_size() for one in built.parameters())
    return shard, peak, anonymous


def test_init_holds_one_whole_tensor_at_a_time(on_ranks: Run) -> None:
    largest, small = 8192 * 512 * 4, 2**16
    for shard, peak in on_ranks(4, _drawing_peak):
        assert shard < peak <= shard + largest + small


def _drawing_peak() -> tuple[int, int]:
    sch = slapo.create_schedule(large("meta"), PLANS["llama"].inputs())
    PLANS["llama"].split(sch)
    sch.auto_sync("tp", ranks=4)
    init = lambda name, tensor: nn.init.constant_(tensor, 1.0)  # noqa: E731
    built, peak, _ = peak_of(lambda: slapo.build(sch, mesh={"tp": 4}, init=init))
    return sum(one.numel() * one.element_size() for one in built.parameters()), peak


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.emb(ids))))


def tied_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied()


def test_g25_a_tie_on_meta_is_filled_once_and_loaded(tmp_path: Path) -> None:
    eager, ids = Tied(), torch.randint(12, (2, 5))
    filled: list[str] = []

    def init(name: str, tensor: Tensor) -> None:
        filled.append(name)
        nn.init.normal_(tensor)

    sch = slapo.create_schedule(tied_on_meta(), (ids,)).trace()
    built = slapo.build(sch, init=init)
    assert built.head.weight is built.emb.weight
    assert filled == ["emb.weight", "mid.weight", "mid.bias"]
    state = eager.state_dict()
    for lost in (None, "emb.weight", "head.weight"):  # either name is fine
        save_file({name: one.clone() for name, one in state.items() if name != lost}, tmp_path / "m.safetensors")
        built = slapo.build(sch, checkpoint=tmp_path / "m.safetensors")
        assert built.head.weight is built.emb.weight
        assert torch.equal(built(ids), eager(ids))
    built = slapo.build(sch, init=init)
    built.load_state_dict(state)
    assert torch.equal(built(ids), eager(ids))
    state["head.weight"] = state["head.weight"] + 1
    save_file({name: one.clone() for name, one in state.items()}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"other values for 'head.weight' than for 'emb.weight'.*one tensor"):
        slapo.build(sch, checkpoint=tmp_path / "m.safetensors")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_engine_trains_what_was_drawn(precision: str) -> None:
    model = tied_on_meta()
    engine = slapo.build(
        slapo.create_schedule(model), target="torch", init=slapo.own_init(model), precision=precision,
        optimizer=partial(torch.optim.AdamW, lr=0.1), inputs=lambda batch: ((batch,), {}),
        loss=lambda output, batch: nn.functional.cross_entropy(output.flatten(0, 1), batch.flatten(), reduction="sum"),
        count=lambda batch: batch.numel(),
    )  # fmt: skip
    ids = torch.arange(12).view(3, 4)
    losses = [engine.train_step(ids).item() for _ in range(8)]
    assert losses[-1] < losses[0] / 2
    assert engine.module.head.weight is engine.module.emb.weight


def test_a_wider_dtype_takes_a_narrower_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({name: one.bfloat16().clone() for name, one in Tied().state_dict().items()}, file)
    built = slapo.build(slapo.create_schedule(tied_on_meta()), checkpoint=file)
    assert built.mid.weight.dtype == torch.float32
    assert torch.equal(built.mid.weight, built.mid.weight.bfloat16().float())
    half = slapo.create_schedule(tied_on_meta().half())
    with pytest.raises(CheckpointError, match=r"has 'emb.weight' in bfloat16, which the model's float16 would round"):
        slapo.build(half, checkpoint=file)


def test_init_fills_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    file, state = tmp_path / "m.safetensors", Tied().state_dict()
    save_file({name: state[name].clone() for name in ("emb.weight", "mid.bias")}, file)
    sch = slapo.create_schedule(tied_on_meta())
    built = slapo.build(sch, checkpoint=file, init=lambda name, tensor: nn.init.constant_(tensor, 3.0))
    assert torch.equal(built.emb.weight, state["emb.weight"])
    assert (built.mid.weight == 3.0).all()
    with pytest.raises(CheckpointError, match=r"misses 'mid.weight'.*original's names"):
        slapo.build(sch, checkpoint=file)


# Refusals


Edit = Callable[[dict[str, Tensor]], Any]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state.pop("mid.bias"), r"misses 'mid.bias': it is of another model"),
        (lambda state: state.update(extra=torch.ones(1)), r"also has 'extra'"),
        (lambda state: state.update({"mid.bias": torch.ones(3)}), r"'mid.bias' in shape \(3,\), and the model needs"),
        (lambda state: state.update({"mid.bias": torch.ones(8).double()}), r"'mid.bias' in float64, which the model's"),
        (lambda state: state.update({"mid.bias": torch.ones(8).long()}), r"'mid.bias' in int64"),
        (lambda state: state.update({"mid.bias": torch.ones(8).to(torch.float8_e5m2)}), r"'mid.bias' in float8_e5m2"),
    ],
)
def test_refuses_a_checkpoint_that_does_not_fit(edit: Edit, message: str, tmp_path: Path) -> None:
    state = {name: one.clone() for name, one in Tied().state_dict().items()}
    edit(state)
    save_file(state, tmp_path / "model.safetensors")
    for model in (tied_on_meta(), Tied()):
        with pytest.raises(CheckpointError, match=message):
            slapo.build(slapo.create_schedule(model), checkpoint=tmp_path)


def test_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    sch = slapo.create_schedule(tied_on_meta())
    with pytest.raises(CheckpointError, match=r"is no file, and no folder with model.safetensors"):
        slapo.build(sch, checkpoint=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"can't be read as safetensors"):
        slapo.build(sch, checkpoint=tmp_path)
    save_model(Tied(), str(tmp_path / "model.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index.json' is damaged"):
        slapo.build(sch, checkpoint=tmp_path)
    index.write_text(json.dumps({"weight_map": {"gone": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'model.safetensors' does not have 'gone', which the index says"):
        slapo.build(sch, checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (3, r"init= takes a function.*init=slapo.own_init\(model\)"),
        (lambda name, tensor: torch.ones(tensor.shape), r"at 'emb.weight': init\('emb.weight', tensor\) left all of"),
        (lambda name, tensor: tensor[0].fill_(1.0), r"at 'emb.weight': init\('emb.weight', tensor\) left elements of"),
    ],
)
def test_refuses_an_init_that_leaves_something_empty(init: Any, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        slapo.build(slapo.create_schedule(tied_on_meta()), init=init)


def test_refuses_a_count_that_is_not_filled() -> None:
    def init(name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            nn.init.ones_(tensor)

    with pytest.raises(BuildError, match=r"at 'norm.num_batches_tracked'.*left all of \(\)"):
        slapo.build(slapo.create_schedule(_outer_on_meta()), init=init)


def test_an_error_in_init_names_the_tensor() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        slapo.build(slapo.create_schedule(tied_on_meta()), init=lambda name, tensor: 1 / 0)
    assert "init('emb.weight', tensor of (12, 8)" in raised.value.__notes__[0]


def test_refuses_init_of_a_model_with_values() -> None:
    with pytest.raises(BuildError, match=r"init= fills what is on 'meta', and this model has values"):
        slapo.build(slapo.create_schedule(Tied()), init=slapo.own_init(Tied()))


def test_own_init_refuses_a_name_of_another_model() -> None:
    with pytest.raises(BuildError, match=r"no parameter or buffer 'emb.weight'. Give own_init the scheduled model"):
        slapo.build(slapo.create_schedule(tied_on_meta()), init=slapo.own_init(Two()))


def test_refuses_windows_onto_one_memory(tmp_path: Path) -> None:
    model = Two()
    both = torch.ones(2, 4, 4)
    model.a.weight, model.b.weight = nn.Parameter(both[0]), nn.Parameter(both.view(8, 4))
    save_file({"a.weight": torch.ones(4, 4), "b.weight": torch.ones(8, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(BuildError, match=r"at 'a.weight': it shares memory with 'b.weight' without being the same"):
        slapo.build(slapo.create_schedule(model), checkpoint=tmp_path)


def test_a_split_model_on_meta_is_refused_without_values(on_ranks: Run) -> None:
    assert on_ranks(2, _without_values) == [True, True]


def _without_values() -> bool:
    with pytest.raises(BuildError, match=r"on device 'meta' has no values. Write slapo.build\(sch, init="):
        slapo.build(split("llama", on_meta("llama"), 2), mesh={"tp": 2})
    return True
