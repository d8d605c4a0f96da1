"""Every signature of every rule is sound, and no sound one is missing."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.errors import PlacementError
from slapo_py.kernels import find_kernel, list_kernels
from slapo_py.layouts.placement import P, Partial, Placement, R, S
from slapo_py.layouts.rules.labels import Labelled, labelled
from slapo_py.layouts.rules.lines import rule_for
from slapo_py.layouts.rules.operation import Operation, TensorSpec
from slapo_py.layouts.rules.shapes import is_move, rank_arguments
from slapo_py.layouts.rules.signatures import Signature, from_labels, signatures
from slapo_py.layouts.rules.table import (
    ALIASES,
    ALONG,
    CONSTANT,
    EXTREMES,
    IDENTITY,
    LINEAR,
    MOVES,
    NONLINEAR,
    OVER,
    RESHAPE,
    RULES,
    canonical,
)
from tests.layouts import cases
from tests.layouts.cases import LABELLED, t
from tests.layouts.oracle import Case, case, fault, legal, spec

CASES = [*LABELLED, *cases.MOVES]
PATTERNS = (1, 2, 3, (2, 6), (4, 8), (8, 2, 2), (3, 5, 8), (2, 1, 1), (2, 4))
name_of = lambda one: one.name


# ---------------------------------------------------------------- soundness


@pytest.mark.parametrize("one", CASES, ids=name_of)
def test_parts_give_the_whole(one: Case) -> None:
    operation, wrong = one.operation, []
    for ranks in (2, 3, 4):
        for signature in signatures(operation, ranks, PATTERNS, one.line):
            found = fault(one, signature, ranks)
            if found:
                wrong.append(f"{ranks} ranks, {signature}: {found}")
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------- completeness

# Sound, and left out on purpose: (case, inputs -> results) and why.
AFFINE = "the weight and bias of a norm, both partial: no schedule makes them so"
LEFT_OUT = {
    "layer_norm": AFFINE,
    "layer_norm over two dims": AFFINE,
    "batch_norm in training": AFFINE + "; the running statistics don't matter in training",
    "batch_norm": AFFINE,
    "batch_norm of rows": AFFINE,
    "type_as": "the second lends only its dtype: it is asked to lie like the first, which it does in models",
    "to another": "the second lends only its dtype",
    "view_as": "the second lends only its shape",
    "expand_as": "the second lends only its shape",
    "dropout": "with p = 0 only",
    "expand": "every rank may expand to its part: nothing in a model wants a split to begin there",
    "expand written": "the same",
    "broadcast_to": "the same",
    "reshape_as": "the second lends only its shape",
    "rmatmul": "operands the other way round: the table doesn't know it",
    **{
        f"every {name}": "constant for these inputs"
        for name in "zeros_like ones_like full_like bool isnan isinf isfinite".split()
    },
    "every eq": "constant for these inputs",
    "every ne": "constant for these inputs",
    "getitem steps": "by chance: the step divides the parts of this size",
}


@pytest.mark.parametrize("one", CASES, ids=name_of)
def test_no_legal_combination_is_missing(one: Case) -> None:
    mine = {(signature.inputs, signature.outputs) for signature in signatures(one.operation, 2, (1,), one.line)}
    missing = legal(one, 2) - mine
    written = [f"{', '.join(map(str, ins))} -> {', '.join(map(str, outs))}" for ins, outs in missing]
    assert bool(missing) == (one.name in LEFT_OUT), written


def test_every_name_of_the_table_has_a_case() -> None:
    called = {canonical(one.operation.name) for one in CASES}
    rules = {name.split(",")[0].split(" ")[0] for name in RULES} - {"conv"}
    known = {*rules, *LINEAR, *EXTREMES, *ALONG, *OVER, *NONLINEAR, *MOVES, *RESHAPE}
    assert {ALIASES.get(name, name) for name in known} <= called
    assert len(IDENTITY & called) >= 3  # they are one rule


# ---------------------------------------------------------------- mutants


def mutants(op: Labelled) -> Iterator[tuple[str, Labelled]]:
    """The rule with one thing wrong: a label dropped or swapped, made linear, or a capital made small."""
    for side in ("operands", "results"):
        tensors = getattr(op, side)
        for i, labels in enumerate(tensors):
            changed = lambda new, i=i, side=side, tensors=tensors: replace(
                op, **{side: (*tensors[:i], new, *tensors[i + 1 :])}
            )
            for j, label in enumerate(labels):
                if label is not None:
                    yield f"{label} dropped from {side} {i}", changed((*labels[:j], None, *labels[j + 1 :]))
            for j in range(len(labels) - 1):
                swapped = (*labels[:j], labels[j + 1], labels[j], *labels[j + 2 :])
                yield f"dims {j} and {j + 1} of {side} {i} swapped", changed(swapped)
    count = range(len(op.operands))
    for terms in dict.fromkeys((*(((i,),) for i in count), tuple((i,) for i in count), (tuple(count),))):
        yield f"linear in {terms}", replace(op, terms=terms)
    for capital in sorted({one for labels in op.operands for one in labels if one and one[0].isupper()}):
        small = lambda labels, capital=capital: tuple(f"small {one}" if one == capital else one for one in labels)
        changed_ = replace(op, operands=tuple(map(small, op.operands)), results=tuple(map(small, op.results)))
        yield f"{capital} made small", changed_


def fate(one: Case, op: Labelled, mutant: Labelled) -> str:
    """How a mutant dies: "unsound" or "incomplete"; "the same" if it is the rule itself, else "survives"."""
    specs, made = [spec(tensor) for tensor in one.tensors], one.operation.results
    mine, other = (set(from_labels(rule, specs, made, 2, (1,))) for rule in (op, mutant))
    if mine == other:
        return "the same"
    if any(fault(one, signature, 2, seed) for signature in other - mine for seed in (0, 1)):
        return "unsound"
    # The test above would miss these: every combination that is legal forward must be there.
    pairs = lambda found: {(signature.inputs, signature.outputs) for signature in found}
    return "incomplete" if pairs(mine) - pairs(other) else "survives"


# In place of a case whose numbers hide a mutant.
DROPS = case("dropout", F.dropout, t(4, 6), 0.5, True)


def test_every_mutant_of_every_rule_dies() -> None:
    fates: dict[str, list[str]] = {"unsound": [], "incomplete": [], "the same": [], "survives": []}
    for one in LABELLED:
        op = labelled(one.operation, one.line)
        if op is None or one.operation.name in CONSTANT:  # of no value at all, so that linear is as good
            continue
        for what, mutant in mutants(op):
            fates[fate(DROPS if one.name == "dropout" else one, op, mutant)].append(f"{one.name}: {what}")
    dead = len(fates["unsound"]) + len(fates["incomplete"])
    print({name: len(found) for name, found in fates.items()}, dead, "dead")
    assert fates["survives"] == []
    assert len(fates["unsound"]) >= 850 and dead >= 1600


# ---------------------------------------------------------------- tables written out


def written(signature: Signature) -> str:
    """As in DESIGN section 9: inputs | result | gradient of the result | gradients of the inputs."""
    one = lambda placements: " ".join("-" if put is None else str(put) for put in placements)
    parts = (signature.inputs, signature.outputs, signature.output_gradients, signature.gradients)
    return " | ".join(one(part) for part in parts) + (f" | {signature.needs}" if signature.needs else "")


def table(name: str, *operands: object, results: tuple[TensorSpec, ...], **kwargs: object) -> list[str]:
    return [written(one) for one in signatures(Operation(name, operands, kwargs, results), 2)]


def F32(*shape: int) -> TensorSpec:
    return TensorSpec(shape)


def whole(*shape: int) -> TensorSpec:
    return TensorSpec(shape, is_floating=False)


def test_linear_is_the_table_of_the_design() -> None:
    found = table("linear", F32(4, 6, 8), F32(12, 8), F32(12), results=(F32(4, 6, 12),))
    assert found == [
        "S(0) R R | S(0) | S(0) | S(0) P P",
        "S(1) R R | S(1) | S(1) | S(1) P P",
        "R S(0) S(0) | S(2) | S(2) | P S(0) S(0)",
        "S(2) S(1) P | P | R | S(2) S(1) R",
        "P R P | P | R | R P R",
        "R P P | P | R | P R R",
        "R R R | R | - | - - -",
    ]


def test_a_product_makes_the_other_gradient_partial() -> None:
    assert "P R | P | R | R P" in table("mul", F32(4, 6), F32(4, 6), results=(F32(4, 6),))
    assert "P | P | - | -" in table("mul", F32(4, 6), 3, results=(F32(4, 6),))


@pytest.mark.parametrize(
    "name, operands",
    [
        ("add", (F32(4, 6), 1)),
        ("sub", (1, F32(4, 6))),
        ("relu", (F32(4, 6),)),
        ("dropout", (F32(4, 6), 0.1, True)),
        ("maximum", (F32(4, 6), F32(4, 6))),
        ("rdiv", (F32(4, 6), 3)),
        ("an_unknown_op", (F32(4, 6),)),
        ("softmax", (F32(4, 6), -1)),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_sum_does_not_pass(name: str, operands: tuple[object, ...]) -> None:
    found = signatures(Operation(name, operands, {}, (F32(4, 6),)), 2)
    assert all(P not in one.inputs for one in found)


def test_division_passes_a_sum_in_its_numerator_only() -> None:
    found = signatures(Operation("truediv", (F32(4, 6), F32(4, 6)), {}, (F32(4, 6),)), 2)
    assert [one.inputs for one in found if P in one.inputs] == [(P, R)]


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_maximum_passes_moves_and_its_own_kind_only(op: str) -> None:
    passing: dict[str, set[str]] = {}
    for one in LABELLED:
        for signature in signatures(one.operation, 2):
            if Partial(op) in signature.inputs:
                passing.setdefault(one.name, set()).add(signature.needs)
    own = {"max": {"maximum"}, "min": {"minimum", "min of two"}}[op]
    # Its gradient goes to the rank that has it: no rule for that is local.
    assert passing == dict.fromkeys(own, {"no_grad"})
    for one in cases.MOVES:
        assert is_move(one.operation) and any(Partial(op) in found.inputs for found in signatures(one.operation, 2))


def test_a_maximum_over_a_split_dim_is_a_partial_one() -> None:
    assert "S(1) | P(max) | - | - | no_grad" in table("amax", F32(4, 6), 1, results=(F32(4),))


def test_batch_norm_in_training_blocks_the_batch() -> None:
    shape = (F32(4, 6, 5, 5), F32(6), F32(6), F32(6), F32(6))
    training = table("batch_norm", *shape, True, results=(F32(4, 6, 5, 5),))
    assert [one for one in training if one.startswith("S(0) R")] == []
    assert "S(0) R R R R | S(0) | S(0) | S(0) P P P P" in table("batch_norm", *shape, results=(F32(4, 6, 5, 5),))


def test_an_operation_without_a_rule_takes_whole_values() -> None:
    assert table("an_unknown_op", F32(4, 6), F32(4, 6), results=(F32(4, 6),)) == ["R R | R | - | - -"]


def test_embedding_and_cross_entropy_name_their_local_implementation() -> None:
    lookup = table("embedding", whole(4, 6), F32(12, 8), results=(F32(4, 6, 8),))
    assert "R S(0) | P | R | P S(0) | embedding" in lookup
    assert "R S(1) | S(2) | S(2) | P S(1)" in lookup
    loss = table("cross_entropy", F32(8, 12), whole(8), results=(F32(),))
    assert loss == ["S(1) R | R | R | S(1) P | cross_entropy", "R R | R | - | - -"]
    assert "S(0) S(0) | P | R | S(0) S(0)" in table(
        "cross_entropy", F32(8, 12), whole(8), reduction="sum", results=(F32(),)
    )


@pytest.mark.parametrize(
    "name, operands, kwargs",
    [
        ("embedding", (whole(4), F32(12, 8)), {"max_norm": 1.0}),
        ("embedding", (whole(4), F32(12, 8)), {"scale_grad_by_freq": True}),
        ("cross_entropy", (F32(8, 12), whole(8)), {"label_smoothing": 0.1}),
        ("cross_entropy", (F32(8, 12), F32(8, 12)), {}),
        ("cross_entropy", (F32(8, 12), whole(8), F32(12)), {}),
        ("softmax", (F32(4, 6),), {}),
        ("linear", (F32(4, 6), F32(6)), {}),
        ("add", (F32(4, 6), F32(4, 6)), {"out": F32(4, 6)}),
        ("getitem", (F32(4, 6), TensorSpec((4,), False, True)), {}),
        ("repeat_interleave", (F32(4, 6), whole(4)), {"dim": 0}),
        ("view", (F32(4, 6), "a dtype"), {}),
        ("einsum", ("ij,jk", F32(4, 6), F32(6, 5)), {}),
        ("conv2d", (F32(6, 5, 5), F32(8, 6, 3, 3)), {}),
        ("rms_norm", (F32(4, 6), 6), {}),
        ("where", (whole(4, 6),), {}),
        ("transpose", (F32(4, 6),), {"out": F32(6, 4), "dim0": 0, "dim1": 1}),
    ],
)
def test_unusual_calls_take_whole_values(name: str, operands: tuple[object, ...], kwargs: dict[str, object]) -> None:
    found = signatures(Operation(name, operands, kwargs, (F32(4, 6),)), 2)
    assert [one.kind for one in found] == ["replicated"]


def test_blocks_are_tried_where_they_fit() -> None:
    gelu = Operation("gelu", (F32(4, 12),), {}, (F32(4, 12),))
    found = [one.inputs[0] for one in signatures(gelu, 2, (3, 5, (8, 4)))]
    assert found == [S(0), S(1), S(1, 3), S(1, (8, 4)), R]
    assert [one.inputs[0] for one in signatures(gelu, 8)] == [S(1), R]  # every rank has a part


def test_a_dim_of_no_elements_is_not_split() -> None:
    view = Operation("view", (F32(0, 6), 0, 2, 3), {}, (F32(0, 2, 3),))
    assert {one.kind for one in signatures(view, 2)} == {"partial", "replicated"}


def test_attention_passes_a_sum_of_values_without_dropout_only() -> None:
    heads = (F32(4, 6, 5, 8),) * 3
    for p, kinds in ((0.0, {"split", "partial", "replicated"}), (0.1, {"split", "replicated"})):
        op = Operation("scaled_dot_product_attention", heads, {"dropout_p": p}, heads[:1])
        assert {one.kind for one in signatures(op, 2)} == kinds


def test_a_local_implementation_knows_one_range() -> None:
    lookup = Operation("embedding", (whole(4), F32(12, 8)), {}, (F32(4, 8),))
    assert [one.inputs[1] for one in signatures(lookup, 2, (2,)) if one.needs] == [S(0)]


# ---------------------------------------------------------------- fused kernels


def kernel_case(name: str) -> Case:
    kernel = find_kernel(name)
    assert kernel.example is not None
    torch.manual_seed(0)
    given = kernel.example(4, 8, torch.float64, "cpu")
    # Without dropout: masks of parts are another matter.
    args = [one.detach() if isinstance(one, Tensor) else 0.0 if one == 0.1 else one for one in given]
    return Case(name, kernel.op, tuple(args), line=rule_for(kernel.op, args, {}), called=name, tolerance=1e-5)


@pytest.mark.parametrize("name", list_kernels())
def test_lines_of_fused_kernels_are_sound(name: str) -> None:
    one = kernel_case(name)
    for ranks in (2, 3, 4):
        for signature in signatures(one.operation, ranks, (1, 2), one.line):
            assert fault(one, signature, ranks) == "", signature


def test_lines_of_fused_kernels_split_what_they_name() -> None:
    kinds = {
        name: {written(sig) for sig in signatures(kernel_case(name).operation, 2, (1,), kernel_case(name).line)}
        for name in ("bias_gelu", "rms_norm", "rope", "cross_entropy")
    }
    assert "S(1) S(0) | S(1) | S(1) | S(1) S(0)" in kinds["bias_gelu"]
    assert kinds["rms_norm"] == {"S(0) R | S(0) | S(0) | S(0) P", "R R | R | - | - -"}
    # Heads of queries and of keys are split together or not at all: else one result would be whole beside a part.
    assert "S(1) S(1) R R | S(1) S(1) | S(1) S(1) | S(1) S(1) P P" in kinds["rope"]
    assert not any(one.startswith(("S(1) R", "R S(1)")) for one in kinds["rope"])
    assert kinds["cross_entropy"] == {"S(1) R | R | R | S(1) P | cross_entropy", "R R | R | - | - -"}


def test_a_line_whose_label_no_result_has_is_a_sum() -> None:
    op = Operation("weighted", (F32(4, 6), F32(6)), {}, (F32(4),))
    assert "S(1) S(0) | P | R | S(1) S(0)" in [written(one) for one in signatures(op, 2, line="...h, h -> ...")]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "line, message",
    [
        ("...h, h", "is no line of labels: it needs one ->"),
        ("...h -> h -> h", "is no line of labels: it needs one ->"),
        ("...h1, h -> ...h", "'...h1' are no labels. Write one letter a dim"),
        ("...h, h -> ...k", "a result has the label 'k', which no operand has. Write a capital"),
        ("...abch, h -> ...h", "'...abch' needs 4 dims or more, found 2"),
        ("h, h -> h", "'h' labels 1 dims, the tensor has 2. Write ... for more"),
        ("...h -> ...h", "labels 1 operands, but gated has a tensor at 1. Pass it by position, and add its labels"),
        ("...h, - -> ...h", r"operand 1 is a plain value, but gated has a tensor of shape (6,) there"),
        ("...h, h -> ...h, ...h", "labels 2 results, but gated has 1"),
    ],
)
def test_a_line_that_does_not_fit_is_refused(line: str, message: str) -> None:
    op = Operation("gated", (F32(4, 6), F32(6)), {}, (F32(4, 6),))
    with pytest.raises(PlacementError, match=re.escape(message)):
        signatures(op, 2, line=line)


def test_a_tensor_by_keyword_is_refused_in_a_line() -> None:
    op = Operation("gated", (F32(4, 6),), {"bias": F32(6)}, (F32(4, 6),))
    with pytest.raises(PlacementError, match="has a tensor at 'bias'. Pass it by position"):
        signatures(op, 2, line="...h, h -> ...h")


def test_sizes_of_a_rank_need_a_placement_a_result() -> None:
    op = Operation("view", (F32(4, 6), 24), {}, (F32(24),))
    with pytest.raises(PlacementError, match="view has 1 results, found 2 placements. Give one a result"):
        rank_arguments(op, (R, R), 2, 0)


@pytest.mark.parametrize(
    "operation, outputs, expected",
    [
        (Operation("view", (F32(4, 24), 4, 6, 4), {}, (F32(4, 6, 4),)), (S(1),), (4, 3, 4)),
        (Operation("view", (F32(4, 24), (4, -1, 4)), {}, (F32(4, 6, 4),)), (S(1),), ((4, -1, 4),)),
        (Operation("view", (F32(4, 25), (4, 5, 5)), {}, (F32(4, 5, 5),)), (S(1),), ((4, 3, 5),)),
        (Operation("split", (F32(4, 12), 4, 1), {}, (F32(4, 4),) * 3), (S(1),) * 3, (2, 1)),
        (Operation("split", (F32(4, 12), [8, 4], 1), {}, (F32(4, 8), F32(4, 4))), (S(1),) * 2, ((4, 2), 1)),
        (Operation("expand", (F32(6, 1), 6, 8), {}, (F32(6, 8),)), (S(0),), (3, 8)),
        (Operation("unflatten", (F32(4, 24), 1, (6, 4)), {}, (F32(4, 6, 4),)), (S(1),), (1, (3, 4))),
        (Operation("softmax", (F32(4, 6), -1), {}, (F32(4, 6),)), (S(0),), (-1,)),
    ],
)
def test_a_rank_writes_sizes_of_its_parts(
    operation: Operation, outputs: tuple[Placement, ...], expected: tuple[object, ...]
) -> None:
    assert rank_arguments(operation, outputs, 2, 0)[0][1:] == expected


def test_a_rank_writes_sizes_by_keyword() -> None:
    op = Operation("reshape", (F32(4, 24),), {"shape": (4, 6, 4)}, (F32(4, 6, 4),))
    assert rank_arguments(op, (S(1),), 2, 0)[1] == {"shape": (4, 3, 4)}
    op = Operation("split", (F32(12, 4),), {"split_size": 4}, (F32(4, 4),) * 3)
    assert rank_arguments(op, (S(0),) * 3, 2, 0)[1] == {"split_size": 2}
