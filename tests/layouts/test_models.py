"""Every operation of the model families has a rule, but for a few that need none."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slapo_py.layouts.rules.labels import labelled
from slapo_py.layouts.rules.operation import Operation
from slapo_py.layouts.rules.shapes import is_move
from slapo_py.layouts.rules.signatures import signatures
from slapo_py.layouts.rules.table import canonical
from tests import zoo
from tests.layouts.oracle import results, spec, specified
from tests.layouts.plans import PLANS

FAMILIES = ("gpt2", "bert", "opt", "t5", "llama", "gemma2", "mixtral", "vit", "wide_resnet", "qwen3")

# Why whole values are enough for them.
WITHOUT_RULE = {
    "arange": "no tensor goes in: positions, made from sizes",
    "zeros": "no tensor goes in: a constant that is needed in parts is made in parts",
    "ones": "no tensor goes in",
    "new_ones": "the tensor lends only its dtype: a mask",
    "getitem": "a list as index: which rows of a mask are looked at",
}


class Operations(TorchFunctionMode):
    """Notes the operations that have no rule, and runs the rules of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.without: set[str] = set()
        self.split = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        value = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name == "__get__" or not isinstance(value, (Tensor, tuple, list)) or not results(value):
            return value
        with torch._C.DisableTorchFunction():
            made = tuple(spec(one) for one in results(value))
            operation = Operation(name, specified(tuple(args)), specified(kwargs), made)
            if not is_move(operation) and labelled(operation) is None:
                self.without.add(canonical(name))
            self.split += any(one.kind != "replicated" for one in signatures(operation, 2))
        return value


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_operations_of_a_family(name: str, attention: str) -> None:
    family = zoo.BY_NAME[name]
    torch.manual_seed(0)
    model, inputs = family.build(), family.inputs(2, 8)
    if hasattr(model, "set_attn_implementation") and not (name == "gemma2" and attention == "sdpa"):
        model.set_attn_implementation(attention)
    if name in ("gpt2", "llama", "qwen3", "mixtral", "opt", "t5", "gemma2"):
        inputs["labels"] = inputs.get("decoder_input_ids", inputs["input_ids"])
    with Operations() as seen, torch.no_grad():
        model(**inputs)
    assert seen.without <= set(WITHOUT_RULE)
    assert seen.split > 20


def test_every_family_that_is_split_is_here() -> None:
    assert set(PLANS) <= set(FAMILIES)
