"""`replace(new)`: another module in the place of one, and all that has to survive."""

import copy
import functools
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import ArgumentError, StaleCursorError, StepError, TraceError
from slapo_py.history import History
from slapo_py.params import cat, split
from tests import models, replacing, running
from tests.fingerprint import changes, fingerprint
from tests.models import Block, Net, ids, net
from tests.replacing import FUSED, Attention, Fused, lm


class Same(nn.Module):
    """What a Linear computes."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(old.out_features, old.in_features))
        if old.bias is not None:
            self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(old.out_features))
        else:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor, factor: float = 1.0, *, shift: float = 0.0) -> Tensor:
        return nn.functional.linear(input, self.weight, self.bias)


class Mlp(nn.Module):
    """`tests.models.Block` with `up` and `down` in a child of its own, and a default argument."""

    def __init__(self, old: Block) -> None:
        super().__init__()
        width = old.norm.normalized_shape[0]
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(0.3)
        self.scale = old.scale

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        y = x + self.drop(self.inner(self.norm(x))) * self.scale
        return y if shift is None else y + shift


INNER = {
    f"inner.{index}.{one}": f"{name}.{one}" for index, name in ((0, "up"), (2, "down")) for one in ("weight", "bias")
}


class Wrapper(nn.Module):
    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.inner = old

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def schedule(model: nn.Module | None = None) -> slapo.Schedule:
    return slapo.create_schedule(model or net(), {"ids": ids()})


def states(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in module.state_dict().items()}


# What is put in, and what it becomes


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("path", "new", "params"),
    [("blocks.0.up", Same, None), ("head", Same, None), ("blocks.1", Mlp, INNER), ("blocks.0", Wrapper, None)],
    ids=["linear", "tied", "block", "wrapper"],
)
def test_replaced_by_the_same_is_bit_equal(path: str, new: Any, params: Any, train: bool) -> None:
    sch = schedule()
    before = fingerprint(sch.original)
    sch[path].replace(new, params=params)
    assert not changes(before, fingerprint(sch.original))
    found, wanted = (
        running.record(one, {"ids": ids()}, train=train) for one in (sch.module, copy.deepcopy(sch.original))
    )
    renamed = {f"gradient of {name}": one for name, one in _gradients(sch, found).items()}
    found = {**{name: one for name, one in found.items() if not name.startswith("gradient of")}, **renamed}
    assert not running.differences(dict(sorted(found.items())), dict(sorted(wanted.items())))
    assert {id(one) for one in sch.module.parameters()} == {id(one) for one in sch.original.parameters()}
    assert list(sch.module.state_dict()) == list(sch.original.state_dict())


def _gradients(sch: slapo.Schedule, found: dict[str, Tensor]) -> dict[str, Tensor]:
    from slapo_py.replacing.mapped_state import to_original

    prefix = "gradient of "
    return to_original(sch.module, {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)})


def test_each_parameter_is_the_old_object() -> None:
    model = net()
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[0].up.half()
    model.blocks[0].up.weight.tag = "kept"  # type: ignore[attr-defined]
    sch = schedule(model)
    sch["blocks.0.up"].replace(Same)
    new = sch["blocks.0.up"].module
    assert type(new) is Same
    assert new.weight is model.blocks[0].up.weight and new.bias is model.blocks[0].up.bias
    assert not new.weight.requires_grad and new.weight.dtype is torch.float16 and new.weight.tag == "kept"
    assert [name for name, _ in sch.module.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_ties_survive_and_a_nested_parent_is_no_problem() -> None:
    sch = schedule()
    sch["head"].replace(Same)
    sch["blocks.1.down"].replace(Same)
    assert sch.module.head.weight is sch.module.embed.weight
    built = slapo.build(sch)
    assert built.head.weight is built.embed.weight
    assert type(built.blocks[1].down) is Same


def test_a_module_is_a_template() -> None:
    """A module can be put at several places and in several schedules, and stays as it is."""
    sch, other = schedule(), schedule()
    template = Same(nn.Linear(8, 16))
    template.register_buffer("seen", torch.zeros(1), persistent=False)
    before = fingerprint(template)
    for place in (sch["blocks.0.up"], sch["blocks.1.up"], other["blocks.0.up"]):
        place.replace(template)
    one, two, three = (sch["blocks.0.up"].module, sch["blocks.1.up"].module, other["blocks.0.up"].module)
    assert len({id(m) for m in (one, two, three, template)}) == 4
    assert one.weight is sch.original.blocks[0].up.weight and two.weight is sch.original.blocks[1].up.weight
    one.seen.add_(1)
    assert two.seen.item() == 0 and template.seen.item() == 0
    assert not changes(before, fingerprint(template))


def test_shared_module_is_replaced_under_all_its_names() -> None:
    model = net()
    model.blocks[1].up = model.blocks[0].up
    model.again = model.blocks[0].up  # type: ignore[assignment]
    sch = schedule(model)
    sch["blocks.1.up"].replace(Same)
    new = sch.module.blocks[0].up
    assert type(new) is Same and sch.module.blocks[1].up is new and sch.module.again is new
    assert list(slapo.build(sch).state_dict()) == list(model.state_dict())
    with pytest.raises(ValueError, match="no"):
        slapo.create_schedule(model)["blocks.0.up"].replace(_failing)
    assert type(sch.undo()["again"].module) is nn.Linear


def test_shared_module_with_a_map() -> None:
    """The state has it under both names, and both load."""
    model = lm()
    model.blocks[1].attn = model.blocks[0].attn
    sch = slapo.create_schedule(model)
    sch["blocks.0.attn"].replace(Fused, params=FUSED)
    built = slapo.build(sch)
    assert list(built.state_dict()) == list(model.state_dict())
    built.load_state_dict(model.state_dict())
    engine = slapo.build(
        sch, target="torch", optimizer=functools.partial(torch.optim.AdamW, lr=0.1), loss=lambda o, b: o.square().sum(),
        count=lambda b: 1,
    )  # fmt: skip
    engine.train_step({"ids": torch.zeros(2, 3, dtype=torch.long)})
    state = engine.state_dict()
    assert torch.equal(state["blocks.0.attn.q.weight"], state["blocks.1.attn.q.weight"])


def test_whole_model() -> None:
    sch = schedule()
    cursor = sch["blocks.0.up"]
    sch.replace(Wrapper)
    assert type(sch.module) is Wrapper
    assert torch.equal(sch.module.eval()(ids()), copy.deepcopy(sch.original).eval()(ids()))
    assert list(slapo.build(sch).state_dict()) == list(sch.original.state_dict())
    with pytest.raises(StaleCursorError, match=r"sch\['blocks.0.up'\]: this place is gone: the step sch.replace"):
        cursor.module  # noqa: B018
    sch.undo()
    assert type(sch.module) is Net and cursor.module is sch.module.blocks[0].up


def _steps(new: Any) -> History:
    return History([slapo.Step("replace", "", (new,))])


class _Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


def test_a_failed_replay_brings_the_whole_model_back() -> None:
    sch = slapo.create_schedule(_Branching(), torch.ones(2))
    before, module = fingerprint(sch.module), sch.module
    with pytest.raises(slapo.errors.HistoryError, match="step 2"):
        History([*_steps(Wrapper), slapo.Step("trace", "inner")]).replay(sch)
    assert sch.module is module and not changes(before, fingerprint(sch.module)) and not sch.history


def test_a_factory_may_change_the_module_in_place() -> None:
    def other_activation(old: Block) -> Block:
        old.scale = 0.25
        old.extra = nn.Dropout(0.0)
        return old

    sch = schedule()
    sch["blocks.0"].replace(other_activation)
    assert sch["blocks.0"].module.scale == 0.25 and sch.original.blocks[0].scale == 0.5
    assert list(slapo.build(sch).state_dict()) == list(sch.original.state_dict())
    sch.undo()
    assert sch["blocks.0"].module.scale == 0.5


class Buffered(nn.Module):
    def __init__(self, lasting: bool = True, shape: int = 3, new: bool = False) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(shape), persistent=lasting)
        if new:
            self.register_buffer("table", torch.ones(2), persistent=False)
        else:
            self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return ids + self.count.sum()


def test_buffers_keep_object_and_persistence() -> None:
    for lasting in (True, False):
        model = nn.Sequential(Buffered(lasting))
        sch = slapo.create_schedule(model)
        sch["0"].replace(Buffered(not lasting, new=True))
        new = sch["0"].module
        assert new.count is model[0].count
        assert list(sch.module.state_dict()) == (["0.count"] if lasting else [])
        assert not hasattr(new, "cache") and new.table.tolist() == [1, 1]
        built = slapo.build(sch)
        assert list(built.state_dict()) == list(model.state_dict())
        built.load_state_dict(model.state_dict())


def test_a_passing_buffer_of_another_shape_is_the_new_modules_own() -> None:
    sch = slapo.create_schedule(nn.Sequential(Buffered(False)))
    sch["0"].replace(Buffered(False, shape=5))
    assert sch["0"].module.count.shape == (5,)


def test_a_buffer_can_be_mapped() -> None:
    class Halves(nn.Module):
        def __init__(self, old: nn.Module) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(1))
            self.register_buffer("b", torch.zeros(2))

        def forward(self, ids: Tensor) -> Tensor:
            return ids + self.a.sum() + self.b.sum()

    model = nn.Sequential(Buffered())
    model[0].count.copy_(torch.tensor([1.0, 2.0, 3.0]))
    sch = slapo.create_schedule(model)
    a, b = split("count", [1, 2])
    sch["0"].replace(Halves, params={"a": a, "b": b})
    assert sch["0"].module.b.tolist() == [2, 3]
    built = slapo.build(sch)
    assert built.state_dict()["0.count"].tolist() == [1, 2, 3]
    built.load_state_dict({"0.count": torch.tensor([4.0, 5.0, 6.0])})
    assert built[0].b.tolist() == [5, 6]


def test_own_tables_come_to_the_old_device() -> None:
    model = nn.Sequential(Buffered()).to("meta")
    sch = slapo.create_schedule(model)
    sch["0"].replace(Buffered(new=True))
    assert sch["0"].module.table.is_meta


def test_recurrent_weights_are_really_used() -> None:
    """An LSTM keeps its weights in a list as well."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(4, 4), nn.Identity())
    sch = slapo.create_schedule(model)
    sch["0"].replace(nn.LSTM(4, 4))
    x = torch.randn(3, 2, 4)
    assert torch.equal(sch["0"].module(x)[0], model[0](x)[0])


def test_extra_state_moves_on() -> None:
    model = nn.Sequential(_Extra(), nn.Identity())
    model[0].kept = "old"
    sch = slapo.create_schedule(model)
    sch["0"].replace(_Extra())
    assert sch["0"].module.kept == "old"
    assert sch.module.state_dict() == model.state_dict()
    for model, new in ((nn.Sequential(_Extra()), nn.Identity()), (nn.Sequential(nn.Identity()), _Extra())):
        with pytest.raises(ArgumentError, match="would (lose|also have) '_extra_state', what get_extra_state returns"):
            slapo.create_schedule(model)["0"].replace(new)


class _Extra(nn.Module):
    kept: Any = "new"

    def forward(self, x: Tensor) -> Tensor:
        return x

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


# What is refused: parameters


class Custom(nn.Module):
    """A module of these parameters and lasting buffers (written "name!")."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            if name.startswith("buffer"):
                self.register_buffer(name, torch.zeros(shape))
            else:
                self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, input: Tensor) -> Tensor:
        return input


W, B = (16, 8), (16,)


@pytest.mark.parametrize(
    ("new", "params", "message"),
    [
        (Custom(weight=W), None, r"the new module has no place for parameter 'bias' \(16,\), which would be lost"),
        (
            Custom(weight=W, bias=B, gain=(8,)),
            None,
            r"parameter 'gain' \(8,\) of the new module is not one of the old module's, and nothing is initialized in "
            r"silence. Say where it comes from: params=\{\"gain\": ...\}",
        ),
        (
            Custom(weight=W, shift=B),
            None,
            r"Say where it comes from: params=\{\"shift\": \"bias\"\}",
        ),
        (
            Custom(weight=(8, 16), bias=B),
            None,
            r"parameter 'weight' has shape \(16, 8\) in the old module and \(8, 16\) in the new one",
        ),
        (Custom(weight=W, bias=B, buffer=(1,)), None, "buffer 'buffer' .* is not one of the old module's"),
        (Custom(weight=W, bias=B), {"gain": "bias"}, "params names 'gain', and the new module has no such parameter"),
        (Custom(weight=W, gain=B), {"gain": "bais"}, "uses 'bais', and there is no such parameter here. There are"),
        (Custom(weight=W, gain=B), {"gain": 3}, "params\\['gain'\\] must be the name of an old parameter, .* found 3"),
        (Custom(weight=W, gain=B), ["bias"], r"params must be a dict by the names of new parameters, found \['bias'\]"),
        (Custom(weight=W, buffer=B), {"buffer": "bias"}, "would make a buffer of the parameter 'bias'"),
        (Custom(weight=W, gain=(8,)), {"gain": "bias"}, r"'gain' of the new module has shape \(8,\), and"),
        (
            Custom(weight=W, bias=B, gain=B),
            {"gain": "bias"},
            "parameter 'bias' is used in params, and the new module has one of that name as well",
        ),
        (
            Custom(weight=W, gain=(8,)),
            {"gain": split("bias", 2)[0]},
            r"8 of the 16 elements of 'bias' \(16,\) are in no new parameter",
        ),
    ],
    ids=[
        "lost", "new", "renamed", "shape", "buffer", "unknown_new", "unknown_old", "no_source", "no_dict", "kind",
        "shapes", "both", "half",
    ],
)  # fmt: skip
def test_parameters_that_do_not_fit(new: nn.Module, params: Any, message: str) -> None:
    _refused(ArgumentError, message, "blocks.0.up", new, params=params)


def _refused(error: type[Exception], message: str, path: str, *args: Any, model: Any = None, **kwargs: Any) -> None:
    sch = schedule(model)
    before, original, history = fingerprint(sch.module), fingerprint(sch.original), sch.history
    with pytest.raises(error, match=message):
        sch[path].replace(*args, **kwargs)
    assert not changes(before, fingerprint(sch.module))
    assert not changes(original, fingerprint(sch.original))
    assert sch.history == history


def test_more_parameters_that_do_not_fit() -> None:
    def tied(old: nn.Module) -> nn.Module:
        made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        made[1].weight = made[0].weight
        return made

    model = net()
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))])  # type: ignore[assignment]
    _refused(ArgumentError, "'0.weight' and '1.weight' are one tensor in the new module, and two in", "blocks.0",
             tied, model=model)  # fmt: skip
    _refused(ArgumentError, "parameter 'weight' of the new module is not initialized yet", "blocks.0.up",
             lambda old: nn.LazyLinear(16))  # fmt: skip
    _refused(ArgumentError, "the new module can't be used: create_schedule: .* not initialized", "blocks.0.up",
             nn.LazyLinear(16))  # fmt: skip

    def in_a_list(old: nn.Module) -> nn.Module:
        made = Custom(weight=W, bias=B)
        made.plain = [made.weight]  # type: ignore[assignment]
        return made

    _refused(ArgumentError, "the new module also holds its own 'weight' in the attribute 'blocks.0.up.plain'",
             "blocks.0.up", in_a_list)  # fmt: skip


def qkv(**changes: Any) -> nn.Module:
    model = lm()
    for name, change in changes.items():
        change(model.blocks[0].attn.get_submodule(name))
    return model


def _tie(model: nn.Module) -> nn.Module:
    model.blocks[1].attn.k.weight = model.blocks[0].attn.k.weight  # type: ignore[union-attr, index]
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: qkv(k=lambda k: k.weight.requires_grad_(False)), "differ in requires_grad: True and False"),
        (lambda: qkv(k=lambda k: k.bfloat16()), "'q.weight' and 'k.weight', which differ in dtype: torch.float32 and"),
        (lambda: qkv(k=lambda k: k.to("meta")), "differ in device: cpu and meta"),
        (lambda: qkv(k=lambda k: setattr(k.weight, "lr", 0.1)), "differ in attributes"),
        (lambda: qkv(k=lambda k: k.weight.register_hook(abs)), "there is a hook on the tensor 'k.weight'"),
        (lambda: _tie(lm()), "'k.weight' is tied: 'blocks.0.attn.k.weight', 'blocks.1.attn.k.weight' are one tensor"),
    ],
    ids=["frozen", "dtype", "device", "attributes", "hook", "tied"],
)
def test_sources_that_can_not_be_one(model: Callable[[], nn.Module], message: str) -> None:
    sch = slapo.create_schedule(model())
    before = fingerprint(sch.module)
    with pytest.raises(StepError, match=message):
        sch["blocks.0.attn"].replace(Fused, params=FUSED)
    assert not changes(before, fingerprint(sch.module))


def test_what_agrees_moves_on() -> None:
    model = lm()
    for name in "qkv":
        linear = model.blocks[0].attn.get_submodule(name).double()
        linear.weight.requires_grad_(False)
        linear.weight.lr = 0.1
    sch = slapo.create_schedule(model)
    sch["blocks.0.attn"].replace(Fused, params=FUSED)
    new = sch["blocks.0.attn.qkv"].module
    assert new.weight.dtype is torch.float64 and not new.weight.requires_grad and new.weight.lr == 0.1
    assert new.bias.requires_grad
    built = slapo.build(sch)
    assert built.blocks[0].attn.qkv.weight.lr == 0.1 and not built.blocks[0].attn.qkv.weight.requires_grad


def test_mapped_parameters_are_copies_until_build() -> None:
    sch = slapo.create_schedule(lm())
    before = fingerprint(sch.original)
    sch["blocks.0.attn"].replace(Fused, params=FUSED)
    with torch.no_grad():
        sch["blocks.0.attn.qkv"].module.weight.zero_()
    assert not changes(before, fingerprint(sch.original))


# Annotations, flags, hooks


def test_annotations_move_on() -> None:
    sch = slapo.create_schedule(lm())
    place = sch["blocks.0.attn"]
    for name in "qkv":
        place.annotate(f"{name}.weight", "lr", 0.1)
    place.annotate("o.weight", "wd", 0.0)
    sch.annotate("embed.weight", "lr", 0.2)
    place.replace(Fused, params=FUSED)
    assert sch.annotations == {
        "embed.weight": {"lr": 0.2}, "head.weight": {"lr": 0.2}, "blocks.0.attn.o.weight": {"wd": 0.0},
        "blocks.0.attn.qkv.weight": {"lr": 0.1},
    }  # fmt: skip
    other = slapo.create_schedule(lm())
    other["blocks.0.attn"].annotate("q.weight", "lr", 0.1)
    with pytest.raises(StepError, match="'q.weight' and 'k.weight', whose annotations differ: {'lr': 0.1} and {}"):
        other["blocks.0.attn"].replace(Fused, params=FUSED)
    assert other.annotations == {"blocks.0.attn.q.weight": {"lr": 0.1}}


def test_training_flags() -> None:
    model = net()
    model.eval()
    model.blocks[0].train()
    model.blocks[0].drop.eval()
    sch = schedule(model)
    sch["blocks.0"].replace(Mlp, params=INNER)
    sch["blocks.1"].replace(Mlp, params=INNER)
    flags = {name: one.training for name, one in sch.module.named_modules() if name.startswith("blocks.")}
    assert flags["blocks.0"] and flags["blocks.0.inner.0"] and not flags["blocks.0.drop"]
    assert not any(on for name, on in flags.items() if name.startswith("blocks.1"))
    wrapped = schedule(model)
    wrapped["blocks.0"].replace(Wrapper)
    assert not wrapped["blocks.0.inner.drop"].module.training and wrapped["blocks.0.inner"].module.training


def test_hooks_of_all_kinds_move_on() -> None:
    seen: list[str] = []

    def note(what: str) -> Callable[..., None]:
        def hook(module: nn.Module, *rest: Any) -> None:
            seen.append(f"{what} {type(module).__name__} {len(rest)}")

        return hook

    model = net()
    old = model.blocks[0]
    old.register_forward_pre_hook(note("pre"))
    old.register_forward_pre_hook(note("pre kwargs"), with_kwargs=True)
    old.register_forward_hook(note("post"))
    old.register_forward_hook(note("post kwargs"), with_kwargs=True)
    old.register_forward_hook(note("always"), always_call=True)
    old.register_full_backward_pre_hook(note("backward pre"))
    old.register_full_backward_hook(note("backward"))
    sch = schedule(model)
    handle = old.register_forward_hook(note("of the original"))
    sch["blocks.0"].replace(Mlp, params=INNER)
    for module in (sch.module, slapo.build(sch)):
        seen.clear()
        module(ids()).sum().backward()
        assert seen == [
            "pre Mlp 1", "pre kwargs Mlp 2", "post Mlp 2", "post kwargs Mlp 3", "always Mlp 2", "backward pre Mlp 1",
            "backward Mlp 2",
        ]  # fmt: skip
    handle.remove()
    seen.clear()
    with pytest.raises(TypeError, match="unexpected|argument"):
        sch.module.blocks[0](torch.zeros(1, 2, 8), torch.zeros(1))
    assert "always Mlp 2" in seen


def test_order_of_hooks_from_outside_and_the_modules_own() -> None:
    """From outside, the module is what it does with its own hooks."""
    seen: list[str] = []

    def hooked(old: nn.Module) -> nn.Module:
        made = Same(old)  # type: ignore[arg-type]
        made.register_forward_pre_hook(lambda *_: seen.append("own pre"))
        made.register_forward_hook(lambda *_: seen.append("own post"))
        return made

    model = net()
    model.blocks[0].up.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.blocks[0].up.register_forward_hook(lambda *_: seen.append("post"))
    sch = schedule(model)
    sch["blocks.0.up"].replace(hooked)
    sch.module(ids())
    assert seen == ["pre", "own pre", "own post", "post"]


def test_hooks_below_move_on_by_name() -> None:
    seen: list[str] = []
    model = net()
    model.blocks[0].norm.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    sch = schedule(model)
    sch["blocks.0"].replace(Mlp, params=INNER)
    sch.module(ids())
    assert seen == ["LayerNorm"]
    wrapped = schedule(model)
    wrapped["blocks.0"].replace(Wrapper)
    wrapped.module(ids())
    assert seen == ["LayerNorm", "LayerNorm"]
    model.blocks[0].up.register_forward_hook(lambda *_: None)
    _refused(StepError, r"there are hooks on 'up' \(forward_hooks\), and the new module has no submodule of that name",
             "blocks.0", Mlp, params=INNER, model=model)  # fmt: skip


def test_hooks_of_a_wrapped_module_are_around_the_wrapper() -> None:
    seen: list[str] = []
    model = net()
    model.blocks[0].register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    sch = schedule(model)
    sch["blocks.0"].replace(Wrapper)
    sch.module(ids())
    assert seen == ["Wrapper"]


def test_a_copy_of_the_old_module_runs_its_hooks_once() -> None:
    seen: list[str] = []
    model = net()
    model.blocks[0].register_forward_hook(lambda *_: seen.append("hook"))
    sch = schedule(model)
    sch["blocks.0"].replace(copy.deepcopy)
    sch.module(ids())
    assert seen == ["hook"]


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 16)
        self.register_forward_hook(self.look)

    def look(self, *_: Any) -> None:
        pass


def test_hooks_that_can_not_move() -> None:
    model = net()
    model.blocks[0].up = Hooked()
    _refused(StepError, "the hook look is a method of the module that leaves", "blocks.0.up", Same, model=model)
    model = net()
    model.blocks[0].up.register_full_backward_hook(lambda *_: None)

    def plain_backward(old: nn.Module) -> nn.Module:
        made = Same(old)  # type: ignore[arg-type]
        made.register_backward_hook(lambda *_: None)
        return made

    _refused(StepError, "the old module has full backward hooks and the new one backward hooks", "blocks.0.up",
             plain_backward, model=model)  # fmt: skip


# Where it can't be done


def _failing(old: nn.Module) -> nn.Module:
    old.register_parameter("left_over", nn.Parameter(torch.zeros(1)))
    raise ValueError("no")


def test_a_factory_that_raises() -> None:
    state = torch.get_rng_state()

    def draws(old: nn.Linear) -> nn.Module:
        return Same(nn.Linear(old.in_features, old.out_features))

    _refused(ValueError, "no", "blocks.0.up", _failing)
    sch = schedule()
    torch.set_rng_state(state)
    sch["blocks.0.up"].replace(draws)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(TypeError) as caught:
        sch["blocks.1.up"].replace(torch.nn.functional.gelu)
    assert 'replace at "blocks.1.up": gelu was called with the old module, a Linear' in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        ("blocks.0.up", 3, "needs a module, or a factory that makes one of the old module, found 3"),
        ("blocks.0.up", lambda old: None, r'the factory returned NoneType and not a module. .* slapo.call\("up", x\)'),
        ("blocks.0.up", lambda old: nn.ModuleList(), "ModuleList has no forward, and the module that was there is"),
    ],
    ids=["number", "nothing", "container"],
)
def test_no_module(path: str, new: Any, message: str) -> None:
    _refused(ArgumentError, message, path, new)


def test_a_module_that_is_elsewhere() -> None:
    sch = schedule()
    with pytest.raises(ArgumentError, match="the new module is the module at 'blocks.1.up' of the model"):
        sch["blocks.0.up"].replace(lambda old: sch.module.blocks[1].up)
    with pytest.raises(ArgumentError, match="the new module is the module at 'blocks.0.up' of the original"):
        sch["blocks.0.up"].replace(lambda old: sch.original.blocks[0].up)
    with pytest.raises(ArgumentError, match="the new module holds, as 'inner', the module at '' of the model"):
        sch["blocks.0.up"].replace(lambda old: Wrapper(sch.module))


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda sch: sch["blocks.0"].trace(), r'would be lost: sch\["blocks.0"\].trace\(\). Replace first'),
        (lambda sch: sch["blocks.0.up"].checkpoint(), r'would be lost: sch\["blocks.0.up"\].checkpoint\(\)'),
        (lambda sch: sch["blocks.0"].replace(Wrapper), r"would be lost: sch\[\"blocks.0\"\].replace\("),
        (lambda sch: sch["blocks.0"].configure(scale=slapo.per_rank("tp")), "would be lost: .*per_rank"),
    ],
    ids=["trace", "below", "replace", "per_rank"],
)
def test_steps_that_would_be_lost(do: Callable[[slapo.Schedule], Any], message: str) -> None:
    model = net()
    model.blocks[0].scale = 2  # type: ignore[assignment]
    sch = schedule(model)
    do(sch)
    before = fingerprint(sch.module)
    with pytest.raises(StepError, match=message):
        sch["blocks.0"].replace(Mlp, params=INNER)
    assert not changes(before, fingerprint(sch.module))


def test_layers_without_a_step_would_be_lost_too() -> None:
    sch = schedule()
    sch["blocks.0"].checkpoint()
    again = slapo.create_schedule(slapo.build(sch))
    with pytest.raises(StepError, match=r"would be lost: 'blocks.0' \(checkpoint\)"):
        again["blocks.0"].replace(Mlp, params=INNER)


def test_configured_and_annotated_places_can_be_replaced() -> None:
    sch = schedule()
    sch["blocks.0"].configure(scale=0.25)
    sch["blocks.0"].annotate("up.weight", "lr", 0.1)
    sch["blocks.0"].replace(Mlp, params=INNER)
    assert sch["blocks.0"].module.scale == 0.25
    assert sch.annotations == {"blocks.0.inner.0.weight": {"lr": 0.1}}


@pytest.mark.parametrize(
    "refer",
    [
        lambda m: m.__dict__.update(plain=[m.blocks[0].up]),
        lambda m: m.__dict__.update(plain=m.blocks[0].up.forward),
        lambda m: m.__dict__.update(plain=weakref.ref(m.blocks[0].up)),
        lambda m: m.__dict__.update(plain={"k": m.blocks[0].up}),
    ],
    ids=["list", "method", "weak", "dict"],
)
def test_other_references(refer: Callable[[Any], None]) -> None:
    model = net()
    refer(model)
    _refused(StepError, "'plain' refers to 'Linear' other than as a child, parameter or buffer", "blocks.0.up", Same,
             model=model)  # fmt: skip


def test_what_is_refused_late_is_put_back_under_all_names() -> None:
    model = net()
    model.blocks[1].up = model.blocks[0].up
    model.plain = [model.blocks[0].up]  # type: ignore[assignment]
    _refused(StepError, "'plain' refers to 'Linear'", "blocks.0.up", Same, model=model)


def test_a_reference_to_a_mapped_parameter() -> None:
    model = lm()
    model.flat = [model.blocks[0].attn.q.weight]  # type: ignore[assignment]
    sch = slapo.create_schedule(model)
    with pytest.raises(StepError, match="'flat' refers to 'q.weight' other than as a child"):
        sch["blocks.0.attn"].replace(Fused, params=FUSED)


def test_a_hook_elsewhere_that_is_a_method_of_the_old_module() -> None:
    model = net()
    model.blocks[0].up = Hooked()
    model.blocks[1].register_forward_hook(model.blocks[0].up.look)
    model.blocks[0].up._forward_hooks.clear()
    _refused(StepError, "'blocks.1._forward_hooks' refers to 'Hooked'", "blocks.0.up", Same, model=model)


# Cursors and traces


def test_cursors_below_that_vanish() -> None:
    sch = schedule()
    up, norm = sch["blocks.0.up"], sch["blocks.0.norm"]
    sch["blocks.0"].replace(Mlp, params=INNER)
    assert type(sch["blocks.0"].module) is Mlp and norm.module is sch.module.blocks[0].norm
    with pytest.raises(StaleCursorError, match=r"this place is gone: the step sch\[\"blocks.0\"\].repl"):
        up.module  # noqa: B018
    assert type(sch["blocks.0.inner.0"].module) is nn.Linear
    sch.undo()
    assert type(up.module) is nn.Linear


def test_a_traced_parent_calls_the_new_module() -> None:
    sch = schedule()
    sch["blocks.0"].trace()
    sch["blocks.0.up"].replace(Same)
    sch["blocks.0.up"].trace()
    sch.module(ids())
    assert sch["blocks.0"].misses == 0 and sch["blocks.0.up"].misses == 0
    assert any(node.target == "up" for node in sch["blocks.0"].graph.nodes)
    found, wanted = (running.record(one, {"ids": ids()}) for one in (sch.module, copy.deepcopy(sch.original)))
    assert not running.differences(found, wanted)


class Asks(nn.Module):
    """Its forward reads an attribute of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.child.factor = 2.0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) * self.child.factor


def other_factor(old: nn.Module) -> nn.Module:
    made = copy.deepcopy(old)
    made.factor = 3.0  # type: ignore[assignment]
    return made


def test_a_trace_that_had_read_the_old_module_is_made_anew() -> None:
    x = torch.randn(2, 4)
    sch = slapo.create_schedule(Asks(), x)
    sch.trace()
    assert torch.equal(sch.module(x), sch.original(x))
    sch["child"].replace(other_factor)
    assert torch.equal(sch.module(x), sch.original.child(x) * 3.0)
    assert sch.misses == 0
    sch.undo()
    with pytest.raises((TraceError, AttributeError), match="factor"):
        sch["child"].replace(nn.Linear(4, 4))
    assert sch["child"].module.factor == 2.0


def test_recorded_call_must_fit_the_new_forward() -> None:
    class NoShift(Mlp):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return x

    sch = schedule()
    sch["blocks.1"].trace()
    with pytest.raises(ArgumentError, match=r"is called with \(...\), which NoShift.forward\(x.*does not take"):
        sch["blocks.0"].replace(NoShift, params=INNER)


def test_default_arguments_are_no_problem() -> None:
    sch = schedule()
    sch["blocks.0"].trace()
    sch["blocks.0.up"].replace(Same)  # its forward has two arguments with defaults
    assert torch.equal(sch.module.eval()(ids()), copy.deepcopy(sch.original).eval()(ids()))


def test_the_line_to_write_is_one_that_fits() -> None:
    sch = slapo.create_schedule(lm(), {"ids": ids()})
    for given, line in (
        (None, r'params=\{"qkv.weight": slapo.params.cat\("q.weight", "k.weight", "v.weight"\)\}'),
        (
            {"qkv.weight": FUSED["qkv.weight"]},
            r'params=\{"qkv.bias": slapo.params.cat\("q.bias", "k.bias", "v.bias"\)\}',
        ),
    ):
        with pytest.raises(ArgumentError, match=line):
            sch["blocks.0.attn"].replace(Fused, params=given)


# History


def test_history_is_replayed_saved_and_undone(tmp_path: Path) -> None:
    sch = slapo.create_schedule(lm(), {"ids": ids()})
    sch["blocks.0.attn"].replace(Fused, params=FUSED)
    sch["blocks.1.attn"].replace(replacing.Transposed, params=replacing.TRANSPOSED)
    sch["blocks.1.attn"].trace()
    assert str(sch.history).splitlines()[-3] == (
        '    sch["blocks.0.attn"].replace(tests.replacing.Fused, params={"qkv.weight": slapo.params.cat("q.weight", '
        '"k.weight", "v.weight"), "qkv.bias": slapo.params.cat("q.bias", "k.bias", "v.bias")})'
    )
    sch.history.save(tmp_path / "history.json")
    loaded = History.load(tmp_path / "history.json", allow=["tests"])
    assert loaded == sch.history
    other = slapo.create_schedule(lm(), {"ids": ids()})
    loaded.replay(other)
    assert str(other) == str(sch)
    for one, two in zip(sch.module.state_dict().values(), other.module.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(sch.module.eval()(ids()), other.module.eval()(ids()))
    sch.undo(2)
    assert type(sch["blocks.1.attn"].module) is Attention and type(sch["blocks.0.attn"].module) is Fused
    assert sch.history == loaded[:1]
    namespace: dict[str, Any] = {}
    exec(str(loaded), namespace)
    again = slapo.create_schedule(lm(), {"ids": ids()})
    namespace["schedule"](again)
    assert again.history == loaded


def test_an_instance_replays_in_this_process() -> None:
    sch = schedule()
    sch["blocks.0.up"].replace(Same(nn.Linear(8, 16)))
    sch["blocks.0.up"].trace()
    other = schedule()
    sch.history.replay(other)
    assert type(other["blocks.0.up"].module).__name__ == "Same"
    assert other["blocks.0.up"].module.weight is other.original.blocks[0].up.weight
    sch.undo()
    assert slapo_trace(sch["blocks.0.up"].module) is None


def slapo_trace(module: nn.Module) -> Any:
    from slapo_py.tracing import trace_of

    return trace_of(module)


def test_selection_and_pickle() -> None:
    sch = slapo.create_schedule(lm(), {"ids": ids()})
    sch.select("blocks.*.attn").replace(Fused, params=FUSED)
    built = pickle.loads(pickle.dumps(slapo.build(sch))).eval()
    assert torch.allclose(built(ids()), copy.deepcopy(sch.original).eval()(ids()), atol=1e-5)


def test_transformers_layers() -> None:
    model = models.tiny_gpt2()
    sch = slapo.create_schedule(model, {"input_ids": ids()})
    sch.select("transformer.h.*.ln_1").replace(lambda old: nn.LayerNorm(old.normalized_shape, eps=old.eps))
    sch.select("transformer.h.*").trace()
    found, wanted = (running.record(one, {"input_ids": ids()}) for one in (sch.module, copy.deepcopy(model)))
    assert not running.differences(found, wanted)
    assert not slapo.misses(sch.module)


def test_cat_of_one_is_a_rename() -> None:
    sch = schedule()
    sch["head"].replace(lambda old: Custom(table=(11, 8)), params={"table": cat("weight")})
    assert sch["head"].module.table is sch.original.embed.weight
