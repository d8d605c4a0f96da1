"""The label lines of fused kernels are sound: parts against the whole, forward and every gradient, in every form."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slapo_py.errors import PlacementError
from slapo_py.kernels import Form, Kernel, find_kernel, list_kernels, register_kernel, unregister_kernel
from slapo_py.kernels.rope import rope_by_broadcast
from slapo_py.layouts.rules.labels import labelled
from slapo_py.layouts.rules.lines import has_line, rule_for
from slapo_py.layouts.rules.signatures import from_labels, signatures
from tests.layouts.cases import ids, mask, real, t
from tests.layouts.oracle import Case, fault, spec

norm, add_norm, drop_norm = (find_kernel(name) for name in ("layer_norm", "add_layer_norm", "dropout_add_layer_norm"))


def op(kernel: str, form: str) -> Any:
    """What stands for one form of a kernel, by the name of its function."""
    return next(one.op for one in find_kernel(kernel).forms if one.op is not None and one.op.__name__ == form)


def case(function: Any, *args: Any, called: str = "", **kwargs: Any) -> Case:
    rule = rule_for(function, args, kwargs)
    return Case(called or function.__name__, function, args, kwargs, rule, function.__name__, tolerance=1e-5)


X, Y, W, B = real(4, 6, 8), real(4, 6, 8), real(8), real(8)
SCORES = real(4, 6, 5, 8)
LABELS, IN_RANGE = torch.tensor([0, 7, -100, 3]), torch.tensor([0, 7, 3, 1])
Q, K = real(2, 12, 5, 8), real(2, 6, 5, 8)
ANGLES = (real(2, 5, 8), real(2, 5, 8))
CASES = [
    case(find_kernel("bias_gelu").op, X, B),
    case(find_kernel("bias_gelu").op, X, B, "tanh", called="bias_gelu, tanh"),
    case(find_kernel("bias_dropout_add").op, X, B, Y, 0.0),
    case(find_kernel("swiglu").op, X, Y),
    case(find_kernel("geglu").op, X, Y, "tanh"),
    case(find_kernel("softcap").op, X, 3.0),
    case(norm.op, X, W, B),
    case(norm.op, X, None, None, normalized_shape=8, called="layer_norm without weight"),
    case(norm.op, X, None, None, normalized_shape=(6, 8), called="layer_norm over two dims"),
    case(norm.op, X, real(6, 8), real(6, 8), called="layer_norm over two dims, with weight"),
    case(add_norm.op, X, Y, W, B),
    case(op("add_layer_norm", "add_layer_norm_alone"), X, Y, W, B),
    case(op("add_layer_norm", "add_layer_norm_viewed"), X, Y, W, B, shape=(24, 8)),
    case(op("add_layer_norm", "add_layer_norm_flat"), real(24, 8), real(24, 8), W, B, rows=24),
    case(drop_norm.op, X, Y, W, B, 0.0),
    case(op("dropout_add_layer_norm", "dropout_add_layer_norm_alone"), X, Y, W, None, 0.0),
    case(find_kernel("rms_norm").op, X, W),
    case(find_kernel("rms_norm").op, X, W, 1e-6, 1.0, "late", called="rms_norm of Gemma"),
    case(op("rms_norm", "functional_rms_norm"), X, W, 1e-6),
    case(find_kernel("add_rms_norm").op, X, Y, W),
    case(op("add_rms_norm", "functional_add_rms_norm"), X, Y, W, 1e-6),
    case(find_kernel("rope").op, Q, K, *ANGLES),
    case(find_kernel("rope").op, Q, K, *ANGLES, True, called="rope, interleaved"),
    case(rope_by_broadcast, Q, K, *(one[:, None] for one in ANGLES)),
    case(rope_by_broadcast, Q, K, real(2, 1, 5, 8), real(5, 8), called="rope of two shapes"),
    case(find_kernel("cross_entropy").op, real(4, 9), LABELS),
    case(find_kernel("cross_entropy").op, real(4, 9), LABELS, reduction="none", called="cross_entropy of each"),
    case(
        find_kernel("cross_entropy").op,
        real(4, 9),
        IN_RANGE,
        ignore_index=3,
        reduction="sum",
        called="cross_entropy, summed",
    ),
    case(find_kernel("cross_entropy").op, real(9), LABELS[1], called="cross_entropy of a row"),
    case(find_kernel("cross_entropy").op, real(4, 9, 2), ids(9, 4, 2), called="cross_entropy of images"),
    case(find_kernel("cross_entropy").op, real(4, 9), LABELS, label_smoothing=0.1, called="cross_entropy, smoothed"),
    case(find_kernel("cross_entropy").op, real(4, 9), LABELS, z_loss=0.1, called="cross_entropy with z loss"),
    case(find_kernel("masked_softmax").op, SCORES, real(4, 1, 5, 8)),
    case(find_kernel("masked_softmax").op, SCORES, mask(4, 1, 5, 8), None, 0.5, called="masked_softmax, boolean"),
    case(find_kernel("masked_softmax").op, SCORES, None, None, 0.5, called="softmax"),
    case(find_kernel("masked_softmax").op, SCORES, real(4, 1, 5, 8), real(1, 6, 5, 8), called="masked_softmax, biased"),
    case(find_kernel("masked_softmax").op, SCORES, None, None, 1.0, True, called="masked_softmax, causal"),
]
name_of = lambda one: one.name


@pytest.mark.parametrize("one", CASES, ids=name_of)
def test_parts_give_the_whole(one: Case) -> None:
    operation = one.operation
    for ranks in (2, 3, 4):
        for signature in signatures(operation, ranks, (1, 2), one.line):
            assert fault(one, signature, ranks) == "", f"{ranks} ranks, {signature}"


@pytest.mark.parametrize("one", [one for one in CASES if "H" in str(one.line) or "K" in str(one.line)], ids=name_of)
def test_a_dim_that_is_said_not_to_split_does_not(one: Case) -> None:
    """The proof would see it: with its capital made small, a line is unsound."""
    rule = labelled(one.operation, one.line)
    assert rule is not None
    small = lambda labels: tuple(f"small {label}" if label in ("H", "K") else label for label in labels)
    mutant = replace(rule, operands=tuple(map(small, rule.operands)), results=tuple(map(small, rule.results)))
    specs, made = [spec(tensor) for tensor in one.tensors], one.operation.results
    more = set(from_labels(mutant, specs, made, 2, (1,))) - set(from_labels(rule, specs, made, 2, (1,)))
    assert more and all(fault(one, signature, 2) for signature in more)


def test_every_line_is_proved() -> None:
    proved = {id(one.function) for one in CASES}
    every = [form.op for name in list_kernels() for form in find_kernel(name).forms if form.placement]
    assert {one.__name__ for one in every if one is not None and id(one) not in proved} == set()


def test_where_a_line_does_not_hold_only_whole_values_are_taken() -> None:
    whole = [
        one for one in CASES if {sig.kind for sig in signatures(one.operation, 2, (1,), one.line)} == {"replicated"}
    ]
    assert [one.name for one in whole] == [
        "layer_norm over two dims", "layer_norm over two dims, with weight", "add_layer_norm_viewed",
        "add_layer_norm_flat", "cross_entropy of images", "cross_entropy, smoothed", "cross_entropy with z loss",
        "masked_softmax, causal",
    ]  # fmt: skip
    assert rule_for(find_kernel("softcap").op, (X, torch.tensor(3.0)), {}).line == ""
    assert rule_for(find_kernel("masked_softmax").op, (SCORES, None, None, torch.tensor(3.0)), {}).line == ""


def doubled(x: Tensor) -> Tensor:
    return x + x


def tripled(x: Tensor) -> Tensor:
    return x * 3


def test_a_kernel_gives_its_lines_and_takes_them_away() -> None:
    forms = (lambda x: x + x, Form(lambda x: x * 3, op=tripled, placement=""))
    register_kernel(Kernel("doubled", doubled, doubled, forms, placement="...h -> ...h"))
    try:
        assert rule_for(doubled, (t(2),), {}).line == "...h -> ...h" and rule_for(tripled, (t(2),), {}).line == ""
    finally:
        unregister_kernel("doubled")
    assert not has_line(doubled) and not has_line(tripled)


def test_a_kernel_takes_no_line_of_another_away() -> None:
    first = Kernel("first_doubled", doubled, doubled, (lambda x: x + x,), placement="...h -> ...h")
    forms = (Form(lambda x: x * 3, op=tripled), Form(lambda x: x * 2, op=doubled, placement="h... -> h..."))
    register_kernel(first)
    try:
        register_kernel(Kernel("second_doubled", tripled, tripled, forms))
        assert rule_for(doubled, (t(2),), {}).line == "h... -> h..."
        unregister_kernel("second_doubled")
        assert rule_for(doubled, (t(2),), {}).line == "...h -> ...h" and not has_line(tripled)
    finally:
        unregister_kernel("first_doubled")
    assert not has_line(doubled)


def test_a_line_that_does_not_fit_is_refused() -> None:
    one = case(find_kernel("swiglu").op, X, Y)
    with pytest.raises(PlacementError, match="labels 1 operands, but swiglu has a tensor at 1"):
        signatures(one.operation, 2, (1,), "...h -> ...h")
