"""The clone: new modules around the same tensors, and nothing of the original changed."""

import functools
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import slapo_py as slapo
from slapo_py import clone as structural
from slapo_py.clone import clone, copy_structure
from slapo_py.errors import CloneError
from tests.fingerprint import changes, fingerprint, global_state
from tests.models import Net, ids, net, tiny_gpt2


def albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertModel

    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "embedding_size": 8,
        "vocab_size": 31,
    }
    return AlbertModel(AlbertConfig(**sizes, num_hidden_layers=3, num_hidden_groups=1))


def parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parametrizations.weight_norm(model[0])
    parametrizations.orthogonal(model[1])
    return model


def cyclic() -> nn.Module:
    model = nn.Module()
    model.child = nn.Linear(2, 2)
    model.child.__dict__["parent"] = model
    model.child.__dict__["parent_ref"] = weakref.ref(model)
    model.everything = [model.child, {"top": model}]
    return model


def twice() -> nn.Module:
    inner = nn.Linear(3, 3)
    return nn.Sequential(inner, nn.ReLU(), inner, nn.Sequential(inner))


MODELS = {
    "net": net,
    "gpt2": tiny_gpt2,
    "albert": albert,
    "parametrized": parametrized,
    "cyclic": cyclic,
    "twice": twice,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_new_modules_same_tensors_untouched_original(make: Any) -> None:
    model = make()
    before, world = fingerprint(model), global_state()
    new = clone(model)
    assert changes(before, fingerprint(model)) == []
    assert changes(world, global_state()) == []
    old_modules = dict(model.named_modules(remove_duplicate=False))
    new_modules = dict(new.named_modules(remove_duplicate=False))
    assert list(old_modules) == list(new_modules)
    assert not {id(one) for one in old_modules.values()} & {id(one) for one in new_modules.values()}
    partition = {id(old_modules[name]): id(new_modules[name]) for name in old_modules}
    assert all(partition[id(old_modules[name])] == id(new_modules[name]) for name in old_modules)
    assert len(set(partition.values())) == len(partition)
    assert all(type(old_modules[name]) is type(new_modules[name]) for name in old_modules)
    assert list(model.state_dict(keep_vars=True)) == list(new.state_dict(keep_vars=True))
    for kind in ("named_parameters", "named_buffers"):
        old, copied = (dict(getattr(one, kind)(remove_duplicate=False)) for one in (model, new))
        assert list(old) == list(copied)
        assert all(old[name] is copied[name] for name in old)


def test_a_config_is_copied_once_and_shared_among_the_new_modules() -> None:
    model = tiny_gpt2()
    new = clone(model)
    assert new.config is not model.config
    assert new.config.to_dict() == model.config.to_dict()
    assert new.config is new.transformer.config
    assert new.config is new.transformer.h[0].attn.config


def test_plain_containers_are_copied() -> None:
    model = net()
    new = clone(model)
    assert isinstance(new, Net)
    new.config["nested"].append(3)
    new.blocks[0].flags.append("b")
    assert model.config["nested"] == [1, 2]
    assert model.blocks[0].flags == ["a"]


def test_references_back_lead_to_the_new_modules() -> None:
    model = cyclic()
    new = clone(model)
    assert new.child.parent is new
    assert new.child.parent_ref() is new
    assert new.everything[0] is new.child
    assert new.everything[1]["top"] is new


def test_modules_that_are_not_registered_are_cloned_without_copying_tensors() -> None:
    model = nn.Module()
    hidden = nn.Linear(2, 2)
    model.hidden = [hidden]
    model.loose = [nn.Parameter(torch.zeros(2)), torch.ones(2)]
    new = clone(model)
    assert new.hidden[0] is not hidden
    assert new.hidden[0].weight is hidden.weight
    assert new.loose[0] is model.loose[0]
    assert new.loose[1] is model.loose[1]


def test_hooks_are_kept_and_bound_methods_follow() -> None:
    class Counting(nn.Linear):
        calls = 0

        def count(self, module: nn.Module, args: Any, output: Any) -> None:
            self.calls += 1

    model = nn.Sequential(Counting(2, 2), nn.Linear(2, 2))
    seen: list[nn.Module] = []
    model[0].register_forward_hook(model[0].count)
    handle = model[1].register_forward_hook(lambda module, args, output: seen.append(module))
    model[1].register_load_state_dict_pre_hook(lambda module, *args: seen.append(module))
    new = clone(model)
    new(torch.zeros(1, 2))
    assert (model[0].calls, new[0].calls) == (0, 1)
    assert seen == [new[1]]
    new.load_state_dict(model.state_dict())
    assert seen == [new[1], new[1]]
    handle.remove()
    model(torch.zeros(1, 2))
    assert len(seen) == 2
    new(torch.zeros(1, 2))
    assert seen[2:] == [new[1]]


def test_what_can_not_be_copied_is_shared() -> None:
    class Holder:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.numbers = [1]

    class Outside:
        def method(self) -> int:
            return 1

    outside = Outside()
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    model.generator = torch.Generator()
    model.holder = Holder()
    model.act = outside.method
    model.both = [model.generator, model.lock, [1]]
    model.stream = (one for one in (1, 2))
    new = clone(model)
    assert new.lock is model.lock
    assert new.generator is model.generator
    assert new.holder is not model.holder
    assert new.holder.lock is model.holder.lock
    assert new.holder.numbers is not model.holder.numbers
    assert new.act.__self__ is outside
    assert new.both[0] is model.generator
    assert new.both[2] is not model.both[2]
    assert new.stream is model.stream


def test_a_bound_method_or_partial_of_a_module_follows() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.apply_first = functools.partial(nn.Module.__call__, model[0])
    model.first = model[0].extra_repr
    new = clone(model)
    assert new.apply_first.args[0] is new[0]
    assert new.first.__self__ is new[0]


def test_a_failed_copy_leaves_nothing_half_copied() -> None:
    class Stubborn:
        def __init__(self, other: Any) -> None:
            self.other = other

        def __deepcopy__(self, memo: Any) -> Any:
            memo[id(self.other)] = "half a copy"
            raise ValueError("no")

    model = nn.Linear(2, 2)
    config = {"a": [1]}
    model.stubborn = Stubborn(config)
    model.config = config
    new = clone(model)
    assert new.stubborn is model.stubborn
    assert new.config == {"a": [1]}
    assert new.config is not config


def test_temporary_objects_of_a_copy_are_kept_alive_outside_of_the_memo() -> None:
    """Freed, their ids would be given to other objects, which would then be taken for copied."""

    class Config:
        def __init__(self) -> None:
            self.numbers = [1]

    memo: dict[int, Any] = {}
    config = Config()
    structural._copied(config, memo)
    (kept,) = memo[structural.KEPT_ALIVE]
    assert any(one is config for one in kept)
    assert not any(value is kept for value in memo.values())


def test_a_graph_module_computes_the_same() -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    x = torch.randn(3, 2)
    before = fingerprint(model)
    new = clone(model)
    assert torch.equal(new(x), model(x))
    assert changes(before, fingerprint(model)) == []


def test_the_clone_of_a_net_computes_the_same() -> None:
    model = net().eval()
    assert torch.equal(clone(model)(ids()), model(ids()))


def test_copy_structure_keeps_tensors_and_modules() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = [torch.zeros(2)]
            self.owner = nn.Linear(2, 2)

    cache = Cache()
    new, tensors = copy_structure({"cache": cache})
    assert new["cache"] is not cache
    assert new["cache"].keys is not cache.keys
    assert new["cache"].keys[0] is cache.keys[0]
    assert new["cache"].owner is cache.owner
    assert any(one is cache.keys[0] for one in tensors)


def test_torchscript_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(DeprecationWarning):
        model.add_module("fast", torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)))
    with pytest.raises(CloneError, match=r"module at 'fast' is TorchScript .*Pass the plain nn.Module"):
        slapo.create_schedule(model)


def test_a_compiled_module_is_refused() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
    with pytest.raises(CloneError, match=r'module at \'0\' is the result of torch.compile.*sch\["0"\]\.compile\(\)'):
        slapo.create_schedule(model)


def test_a_ddp_wrapper_is_refused() -> None:
    model = object.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(model)
    with pytest.raises(CloneError, match="the model is wrapped in DistributedDataParallel. Pass the plain module"):
        clone(model)


def test_a_lazy_module_is_refused() -> None:
    with pytest.raises(CloneError, match=r"module at '0' \(LazyLinear\) has parameters that are not initialized"):
        clone(nn.Sequential(nn.LazyLinear(3)))


def test_a_module_that_is_a_list_is_refused() -> None:
    class Both(nn.Module, list):  # type: ignore[type-arg]
        __hash__ = nn.Module.__hash__

    with pytest.raises(CloneError, match=r"\(Both\) holds data outside its attributes"):
        clone(nn.Sequential(Both()))
