"""The zoo itself: every family builds, its paths are right, and its runs can be repeated to the bit."""

import pytest
import torch

from tests.running import differences, record, same
from tests.zoo import FAMILIES, Family, make

WANTED = {
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "phi3",
    "falcon", "bert", "roberta", "albert", "electra", "deberta_v2", "t5", "bart", "whisper", "vit", "clip", "mixtral",
    "mamba", "wide_resnet", "transformer_encoder",
}  # fmt: skip
SIZES = ((2, 16), (3, 24), (1, 8))


def test_the_list_is_whole() -> None:
    assert {family.name for family in FAMILIES} == WANTED


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_family_runs_and_repeats(family: Family) -> None:
    model = make(family.name)
    modules = dict(model.named_modules())
    assert set(family.paths.values()) <= set(modules)
    assert len({id(modules[path]) for path in family.paths.values()}) == 4, "four different places"

    before = {k: v.clone() for k, v in model.state_dict().items()}
    for size in SIZES:
        inputs = family.inputs(*size)
        assert same(list(_tensors(inputs)), list(_tensors(family.inputs(*size))))
        for train in (True, False):
            first = record(model, inputs, train=train)
            assert not differences(first, record(model, inputs, train=train))
            assert any(t.any() for name, t in first.items() if name.startswith("gradient"))
            if train and family.has_dropout:
                assert differences(first, record(model, inputs, train=True, seed=1)), "dropout is off"
    assert not differences(before, model.state_dict()), "record left traces"
    assert all(p.grad is None for p in model.parameters())


def test_a_difference_is_seen() -> None:
    model, inputs = make("gpt2"), {"input_ids": torch.tensor([[5, 6, 7]]), "use_cache": False}
    first = record(model, inputs)
    with torch.no_grad():
        model.lm_head.weight[7, 0] += 1e-3
    assert "output 0" in differences(first, record(model, inputs))
    assert not same([torch.tensor([0.0])], [torch.tensor([-0.0])])
    assert same([torch.tensor([float("nan"), 1.0])], [torch.tensor([float("nan"), 1.0])])
    assert not same([torch.tensor([float("nan"), 1.0])], [torch.tensor([1.0, float("nan")])])


def _tensors(inputs: dict[str, object]) -> list[torch.Tensor]:
    return [v for v in inputs.values() if isinstance(v, torch.Tensor)]
