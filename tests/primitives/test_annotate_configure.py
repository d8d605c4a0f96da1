"""annotate and configure: what they set, what they refuse."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py import Schedule
from slapo_py.errors import ArgumentError, StepError
from tests.fingerprint import changes, fingerprint
from tests.models import ids, net


@pytest.fixture
def sch() -> Schedule:
    return slapo.create_schedule(net())


def refused(sch: Schedule, path: str, name: str, *args: Any, **kwargs: Any) -> None:
    """A refusal that leaves everything as it was."""
    before, history = fingerprint(sch.module), sch.history
    try:
        getattr(sch[path], name)(*args, **kwargs)
    finally:
        assert changes(before, fingerprint(sch.module)) == []
        assert sch.history == history
        assert sch.annotations == {}


# annotate


def test_a_tag_belongs_to_the_parameter_and_all_its_ties(sch: Schedule) -> None:
    sch["head"].annotate("weight", "lr", 0.1)
    assert sch.root.annotations == {"embed.weight": {"lr": 0.1}}
    assert sch.annotations == {"embed.weight": {"lr": 0.1}, "head.weight": {"lr": 0.1}}
    assert sch["embed"].annotations == {"weight": {"lr": 0.1}}
    sch["embed"].annotate("weight", "decay", False)
    assert sch["head"].annotations == {"weight": {"lr": 0.1, "decay": False}}
    assert sch["blocks"].annotations == {}
    sch.undo()
    assert sch["head"].annotations == {"weight": {"lr": 0.1}}


def test_a_parameter_below(sch: Schedule) -> None:
    sch["blocks.0"].annotate("up.weight", "k", [1])
    assert sch["blocks.0.up"].annotations == {"weight": {"k": [1]}}


def test_the_same_tag_twice_is_refused(sch: Schedule) -> None:
    sch["head"].annotate("weight", "lr", 0.1)
    with pytest.raises(
        StepError,
        match=r"annotate at \"embed\": parameter 'embed.weight' carries 'lr' = 0.1 already\. Choose .*sch.undo",
    ):
        sch["embed"].annotate("weight", "lr", 0.2)
    with pytest.raises(StepError, match="the very same value"):
        sch["embed"].annotate("weight", "lr", 0.1)
    assert sch.annotations["head.weight"] == {"lr": 0.1}


ANNOTATE = {
    "name": (
        ("wieght", "k", 1),
        r'annotate at "blocks.0.up": there is no parameter \'wieght\' here. Parameters .*: \'weight\'',
    ),
    "nothing like it": (("q", "k", 1), "Parameters with such names: 'weight', 'bias'"),
    "no string": ((3, "k", 1), "there is no parameter 3 here"),
    "key": (("weight", 3, 1), r'the key must be a string, found 3. Write annotate\("weight", "lr", 0.1\)'),
}


@pytest.mark.parametrize(("args", "message"), ANNOTATE.values(), ids=ANNOTATE)
def test_annotate_refuses(sch: Schedule, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        refused(sch, "blocks.0.up", "annotate", *args)


def test_a_buffer_carries_no_tag(sch: Schedule) -> None:
    with pytest.raises(ArgumentError, match="It is a buffer; only parameters carry tags"):
        refused(sch, "norm", "annotate", "running_mean", "k", 1)


def test_annotating_a_module_without_parameters(sch: Schedule) -> None:
    with pytest.raises(ArgumentError, match="with such names: none"):
        refused(sch, "blocks.0.drop", "annotate", "p", "k", 1)


# configure


def test_configure_sets_the_copy_only(sch: Schedule) -> None:
    sch["blocks.0"].configure(scale=2.0).configure(flags=["b"])
    place = sch["blocks.0"]
    assert (place.module.scale, place.original.scale) == (2.0, 0.5)
    assert (place.module.flags, place.original.flags) == (["b"], ["a"])
    place.configure(scale=3.0)
    assert place.module.scale == 3.0
    assert [str(step) for step in sch.history][-1] == 'sch["blocks.0"].configure(scale=3.0)'
    sch.original.eval()
    sch.module.eval()
    assert not torch.equal(sch.module(ids()), sch.original(ids()))
    sch.undo(3)
    assert torch.equal(sch.module(ids()), sch.original(ids()))


def test_per_rank_is_recorded_and_changes_nothing_here(sch: Schedule) -> None:
    sch["blocks.0.up"].configure(out_features=slapo.per_rank("tp"))
    assert sch["blocks.0.up"].module.out_features == 16
    assert str(sch.history[0]) == 'sch["blocks.0.up"].configure(out_features=slapo.per_rank("tp"))'


def test_an_attribute_of_the_class() -> None:
    class Causal(nn.Module):
        causal = True

        def forward(self, x: Tensor) -> Tensor:
            return x if self.causal else -x

    sch = slapo.create_schedule(Causal())
    sch.configure(causal=False)
    assert not sch.module.causal
    assert sch.original.causal
    assert Causal.causal


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = 1
        self.mask = torch.ones(2)
        self.inner = nn.Linear(2, 2)
        self.__dict__["hidden"] = nn.Linear(2, 2)
        self.register_buffer("stat", torch.ones(2))

    @property
    def double(self) -> int:
        return 2 * self.plain

    def method(self) -> None: ...


CONFIGURE: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, r"configure at \"0\": needs at least one attribute, as in configure\(eps=1e-6\)"),
    "unknown": ({"plian": 1}, "Odd has no attribute 'plian'. Did you mean plain="),
    "far off": ({"zzz": 1}, "Odd has no attribute 'zzz'. Plain attributes here: plain"),
    "buffer": ({"stat": 1}, "'stat' is a buffer of Odd and can't be configured. Plain attributes here: plain"),
    "module": ({"inner": 1}, "'inner' is a module of Odd"),
    "loose module": ({"hidden": 1}, "'hidden' is a module of Odd"),
    "tensor": ({"mask": 1}, "'mask' is a tensor of Odd"),
    "method": ({"method": 1}, "'method' is a method or property of Odd"),
    "property": ({"double": 1}, "'double' is a method or property of Odd"),
    "forward": ({"forward": 1}, "'forward' is a method or property of Odd"),
    "training": (
        {"training": False},
        r"'training' is the training flag of Odd .* Use sch.module.train\(\) or .eval\(\)",
    ),
    "private": ({"_modules": {}}, "'_modules' is a private attribute of Odd"),
    "value tensor": ({"plain": torch.ones(1)}, "plain=Tensor would put a tensor or a module into the model"),
    "value module": ({"plain": nn.ReLU()}, "plain=ReLU would put a tensor or a module"),
    "all or nothing": ({"plain": 2, "zzz": 1}, "no attribute 'zzz'"),
}


@pytest.mark.parametrize(("attributes", "message"), CONFIGURE.values(), ids=CONFIGURE)
def test_configure_refuses(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        refused(slapo.create_schedule(nn.Sequential(Odd())), "0", "configure", **attributes)


def test_a_parameter_can_not_be_configured(sch: Schedule) -> None:
    with pytest.raises(ArgumentError, match="'weight' is a parameter of Linear"):
        refused(sch, "head", "configure", weight=1)


@pytest.mark.parametrize("name", ["scale", "flags"])
def test_per_rank_divides_an_int(sch: Schedule, name: str) -> None:
    with pytest.raises(ArgumentError, match=rf'{name}=slapo.per_rank\("tp"\) needs an int to divide over the ranks'):
        refused(sch, "blocks.0", "configure", **{name: slapo.per_rank("tp")})


def test_a_trace_is_told() -> None:
    told: list[str] = []

    class Tracer:
        def refresh(self, path: str) -> None:
            told.append(path)

    sch = slapo.create_schedule(net())
    sch.root._tracer = Tracer()  # type: ignore[assignment]
    sch["blocks.0"].configure(scale=1.0)
    assert told == ["blocks.0"]
