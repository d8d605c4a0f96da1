"""Public bug reports as inputs, each with the right result. The number of a case is its number in our list.

G01 pytorch#68190; G02 transformers#31958, pytorch#44498; G03 pytorch#51803; G11 OLMo-core#828, torchtitan#1323;
G12 pytorch#79887, ColossalAI#1761, fairscale#802; G13 pytorch#77224; G25 Modalities#357, accelerate#3668;
G17 slapo#58; G18 pocket-tts#278, mistral.rs#1867; G26 pytorch#99407.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from tests.running import differences, record


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x), 0.5, training=self.training)


@pytest.mark.parametrize("train_at_trace", [True, False])
@pytest.mark.parametrize("built", [True, False])
def test_g01_dropout_follows_the_mode(train_at_trace: bool, built: bool) -> None:
    model = FunctionalDropout()
    x = torch.randn(4, 8)
    model.train(train_at_trace)
    sch = slapo.create_schedule(model, example_inputs=(x,)).trace()
    module = slapo.build(sch) if built else sch.module
    for train in (True, False, True):
        assert not differences(record(model, {"x": x}, train), record(module, {"x": x}, train))
    assert sch.misses == 0


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, ids: Any = None, emb: Any = None, scale: float = 2.0, mask: Any = None) -> Tensor:
        h = self.fc(emb) * scale
        return h if mask is None else h.masked_fill(~mask, 0.0)


def test_g02_optional_arguments() -> None:
    model, emb = Optional(), torch.randn(2, 3, 8)
    keep = torch.ones(2, 3, 1, dtype=torch.bool)
    keep[:, -1] = False
    sch = slapo.create_schedule(model, example_inputs={"emb": emb}).trace()
    for kwargs in ({"emb": emb}, {"emb": emb, "scale": 3.0}, {"emb": emb, "mask": keep}):
        assert torch.equal(sch.module(**kwargs), model(**kwargs))
    assert torch.equal(sch.module(None, emb, 3.0, keep), model(None, emb, 3.0, keep))
    assert sch.misses == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        sch.module(emb=emb, wrong=1)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(16, 8), nn.Embedding(32, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))


def test_g03_a_length_from_the_input_is_not_frozen() -> None:
    model = Positions()
    sch = slapo.create_schedule(model, example_inputs=(torch.randint(16, (2, 5)),)).trace()
    for batch in (2, 3):
        for length in (5, 9, 1):
            ids = torch.randint(16, (batch, length))
            assert torch.equal(sch.module(ids), model(ids))
    assert sch.misses == 0


def test_g11_recompute_draws_the_same_mask() -> None:
    block = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 16))
    x = torch.randn(32, 16)
    sch = slapo.create_schedule(block)
    sch.checkpoint()
    grads = []
    for module in (block, sch.module):
        block.zero_grad()
        torch.manual_seed(7)
        loss = module(x).square().sum()
        after = torch.get_rng_state()
        torch.manual_seed(99)
        loss.backward()
        grads.append([loss.detach(), after, torch.get_rng_state(), *(p.grad.clone() for p in block.parameters())])  # type: ignore[union-attr]
    assert all(map(torch.equal, *grads))


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, h: Tensor, mask: Any = None, *, bias: Any = None, flag: bool = False) -> dict[str, Any]:
        y = self.fc(h) + (0 if bias is None else bias)
        if mask is not None:
            y = y.masked_fill(~mask, 0.0)
        return {"h": y, "aux": (y.mean(), None), "flag": flag}


@pytest.mark.parametrize("traced", [True, False])
def test_g12_keywords_and_nested_results_through_a_checkpoint(traced: bool) -> None:
    model = Keywords()
    h, bias = torch.randn(2, 3, 8), torch.randn(8)
    keep = torch.rand(2, 3, 1) > 0.3
    sch = slapo.create_schedule(model, example_inputs={"h": h, "bias": bias, "flag": True})
    sch.checkpoint()
    if traced:
        sch.trace()
    for kwargs in ({"h": h, "bias": bias, "flag": True}, {"h": h, "mask": keep}, {"h": h}):
        assert not differences(record(model, kwargs), record(sch.module, kwargs))
        ours, theirs = sch.module(**kwargs), model(**kwargs)
        assert list(ours) == list(theirs) and ours["flag"] is theirs["flag"] and ours["aux"][1] is None
        assert type(ours["aux"]) is tuple


def test_g13_a_checkpoint_changes_no_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    for module in (sch.module, slapo.build(sch)):
        assert list(module.state_dict()) == list(model.state_dict())
        assert [n for n, _ in module.named_parameters()] == [n for n, _ in model.named_parameters()]
        module.load_state_dict(model.state_dict(), strict=True)
        model.load_state_dict(module.state_dict(), strict=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.emb(ids))
        return out


def test_g25_a_tie_survives_the_schedule_and_the_build() -> None:
    model = Tied()
    ids = torch.randint(12, (2, 5))
    sch = slapo.create_schedule(model, example_inputs=(ids,))
    sch.trace()
    sch["emb"].checkpoint()
    built = slapo.build(sch)
    for module in (sch.module, built):
        assert module.head.weight is module.emb.weight
        assert torch.equal(module(ids), model(ids))
    assert built.emb.weight is not model.emb.weight
    with torch.device("meta"):
        on_meta = slapo.create_schedule(Tied(), example_inputs=(ids,)).trace()
    assert on_meta.module.head.weight is on_meta.module.emb.weight


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.aux = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("step", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.bn = nn.BatchNorm1d(4)
        self.aux.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        b = self.bn
        return F.batch_norm(self.fc(x), b.running_mean, b.running_var, b.weight, b.bias, False, 0.0, b.eps)


def test_g26_what_the_forward_does_not_use_stays() -> None:
    model = Unused()
    sch = slapo.create_schedule(model, example_inputs=(torch.randn(3, 4),)).trace()
    for module in (sch.module, slapo.build(sch)):
        assert list(module.state_dict()) == list(model.state_dict())
        assert [n for n, _ in module.named_buffers()] == [n for n, _ in model.named_buffers()]
        flags = [(n, p.requires_grad) for n, p in module.named_parameters()]
        assert flags == [(n, p.requires_grad) for n, p in model.named_parameters()]
        module.load_state_dict(model.state_dict(), strict=True)
        model.load_state_dict(module.state_dict(), strict=True)


class Tree(nn.Module):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return ((x + y) * (y - z)).relu() + (y - z) * (x + y)


def test_g17_both_branches_match_whichever_way_they_are_written() -> None:
    x, y, z = torch.randn(3, 4, 5).unbind()
    sch = slapo.create_schedule(Tree(), example_inputs=(x, y, z)).trace()
    found = sch.find(lambda a, b, c: (a + b) * (b - c))
    assert [len(match.nodes) for match in found] == [3, 3]
    sch.replace(lambda a, b, c: a * b - a * c + b * b - b * c, found)
    torch.testing.assert_close(sch.module(x, y, z), Tree()(x, y, z), atol=1e-6, rtol=0)
    assert sch.verify().grade == "rounding"


class Gelu(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.GELU(form)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_g18_the_forms_of_gelu_are_told_apart(form: str) -> None:
    sch = slapo.create_schedule(Gelu(form), example_inputs=(torch.randn(3, 4),)).trace()
    for other in ("none", "tanh"):
        pattern = {"none": lambda x, w, b: F.gelu(F.linear(x, w, b)), "tanh": _tanh_form}[other]
        assert len(sch.find(pattern)) == (form == other)


def _tanh_form(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def test_g18_verify_finds_the_wrong_form() -> None:
    sch = slapo.create_schedule(Gelu("none"), example_inputs=(torch.randn(3, 4),)).trace()
    sch.replace(_tanh_form, lambda x, w, b: F.gelu(F.linear(x, w, b)))
    with pytest.raises(slapo.VerificationError, match=r"It comes with step 2: sch.replace\("):
        sch.verify()
