"""linear_cross_entropy in the place of head and loss of whole models, inside their own loss functions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import NoMatchError
from tests import families
from tests.kernels.test_families import count
from tests.slow import slow_but


class Loss(nn.Module):
    """A model that gives its loss alone: the logits are nobody's output, so they need not be held."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]


MODELS = {
    "llama": (families.llama, families.decoder),
    "qwen3": (families.qwen3, families.decoder),
    "gemma2": (families.gemma2, families.decoder),
    "gpt2": (families.gpt2, families.decoder),
    "opt": (families.opt, families.decoder),
    "bert": (families.bert, families.padded),
    "t5": (families.t5, families.pair),
}


def batch(inputs: dict[str, Any]) -> dict[str, Any]:
    labels = inputs.get("decoder_input_ids", inputs["input_ids"]).clone()
    labels[0, :2] = -100
    return {**inputs, "labels": labels}


@pytest.mark.filterwarnings("ignore:.*loss_type.*:UserWarning")
@pytest.mark.parametrize("name", slow_but(["llama", "gpt2"], MODELS))
@pytest.mark.parametrize("kernel", ["linear_cross_entropy", pytest.param("cross_entropy", marks=pytest.mark.slow)])
def test_the_loss_of_a_whole_model(name: str, kernel: str) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    sch = slapo.create_schedule(Loss(build("eager" if name == "gemma2" else "sdpa")), batch(inputs()))
    sch.fuse(kernel)
    assert count(sch, kernel) == 1
    assert not any("blocks" in node.name or "layers" in node.name for node in sch.graph.nodes)  # the rest stays closed
    assert sch.verify().grade in ("equal", "rounding")


def test_logits_that_are_given_back_are_refused() -> None:
    sch = slapo.create_schedule(families.llama("sdpa"), batch(families.decoder()))
    with pytest.raises(NoMatchError, match="is used outside"):
        sch.fuse("linear_cross_entropy")
