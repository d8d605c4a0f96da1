"""From an operation to its signatures: every legal combination of the placements of its inputs and results on one mesh
axis, and of their gradients.

Four general rules give them from the labels of `table.py`. For a label that may be split,

- in every result: operands with it are S, others R; results S. Gradients: of operands with it S, of others P.
- in no result: operands with it are S; a term of its own without it (a bias) is P, added once; other operands R.
  Results are P. The results' gradients must be R; gradients: S, R of such a term, P of other operands.

For an operation that is linear in some arguments,

- one operand of each term is P, others R; results P. The results' gradients must be R, unless each term is that one
  operand; gradients: R of the partial operands, P of the others.

And always,

- all R; results R. The gradients are as the results' are, R or P: a vector-Jacobian product is linear.

Only what has a gradient (floating point) is ever partial. A partial maximum passes operations that only move elements,
and `maximum` (a minimum `minimum`); one arises from `amax` over a split dim. Operations that only move elements have
their signatures from `shapes.py`. An operation without a rule has the last signature alone: nothing is guessed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from slapo_py.layouts.placement import P, Partial, Placement, R, Shard
from slapo_py.layouts.rules.labels import Labelled, Labels, labelled
from slapo_py.layouts.rules.operation import Operation, TensorSpec
from slapo_py.layouts.rules.shapes import Blocks, divides, is_move, moves, takes_all
from slapo_py.layouts.rules.table import Rule


@dataclass(frozen=True)
class Signature:
    """One legal combination.

    kind: "replicated", "split" (a label of the results), "contracted" (a label summed over), "partial" (partial in,
        partial out), "moved" (elements only move) or "local" (a local implementation reduces by itself).
    inputs: the placement of each tensor argument, in the order of `Operation.slots`. outputs: of each result.
    gradients: of the gradient of each input. None: as the results' gradients are, R or P, all of them alike.
    output_gradients: what the gradient of each result must be. None: R or P.
    needs: the local implementation that must stand in for the operation ("embedding", "cross_entropy"), or "no_grad":
        only where nothing needs a gradient. Empty: the operation itself, at the local sizes.
    """

    kind: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    gradients: tuple[Placement | None, ...]
    output_gradients: tuple[Placement | None, ...]
    needs: str = ""


def signatures(
    operation: Operation, ranks: int, blocks: Iterable[Blocks] = (1,), line: str | Rule | None = None
) -> list[Signature]:
    """Every legal signature of an operation over `ranks` ranks; the replicated one comes last.

    blocks: the block patterns to try for a split dim, besides a plain one: those that the inputs have.
    line: the labels of an operation that the table doesn't know (a fused kernel's `placement`), or its rule.
    Raises `PlacementError` if that line doesn't fit.
    """
    patterns = list(dict.fromkeys((1, *blocks)))
    specs = [spec for _, spec in operation.slots()]
    found: list[Signature] = []
    if line is None and is_move(operation):
        found += _moved(operation, specs, ranks, patterns)
    else:
        labels = labelled(operation, line)
        if labels is not None:
            found += from_labels(labels, specs, operation.results, ranks, patterns)
    found.append(_replicated(len(specs), len(operation.results)))
    return list(dict.fromkeys(found))


def _replicated(inputs: int, outputs: int) -> Signature:
    return Signature("replicated", (R,) * inputs, (R,) * outputs, (None,) * inputs, (None,) * outputs)


# ---------------------------------------------------------------- from labels


def from_labels(
    op: Labelled, specs: Sequence[TensorSpec], results: Sequence[TensorSpec], ranks: int, blocks: Sequence[Blocks]
) -> Iterator[Signature]:
    """The signatures of a labelled operation, but for the replicated one."""
    for together in _together(op):
        for pattern in blocks if len(together) == 1 else (1,):
            if all(_fits(op, label, specs, results, ranks, pattern) for label in together):
                yield _split(op, together, pattern)
    for label in op.splittable:
        if any(label in one for one in op.results):
            continue
        for pattern in blocks:
            if _fits(op, label, specs, results, ranks, pattern):
                yield from _contracted(op, label, results, pattern)
    yield from _partial(op, specs, results)
    if op.extreme and all(one.is_floating for one in (*specs, *results)):
        yield _extreme(len(specs), len(results), op.extreme)


def _together(op: Labelled) -> Iterator[tuple[str, ...]]:
    """Labels that are split at once, so that every result is split: one label, or one of each result's own."""
    free = [[one for one in labels if one in op.splittable] for labels in op.results]
    seen = set()
    for choice in product(*free):
        together = tuple(sorted({one for one in choice if one}))
        tensors = (*op.operands, *op.results)
        if (
            together
            and together not in seen
            and all(sum(labels.count(one) for one in together) <= 1 for labels in tensors)
        ):
            seen.add(together)
            yield together


def _at(labels: Labels, label: str, pattern: Blocks) -> Shard | None:
    return Shard(labels.index(label), pattern) if label in labels else None


def _fits(
    op: Labelled, label: str, specs: Sequence[TensorSpec], results: Sequence[TensorSpec], ranks: int, pattern: Blocks
) -> bool:
    """Whether every dim of this label has these blocks, each rank has a part of it, and all parts correspond."""
    tensors = zip((*op.operands, *op.results), (*specs, *results))
    sizes = {spec.shape[labels.index(label)] for labels, spec in tensors if label in labels}
    if len(sizes) > 1:  # heads in groups: rank by rank only where all divide
        return op.grouped and pattern == 1 and all(size % ranks == 0 for size in sizes)
    if pattern != 1 and label in op.local:
        return False  # a local implementation knows one range
    return divides(sizes.pop(), pattern, ranks)


def _split(op: Labelled, together: Sequence[str], pattern: Blocks) -> Signature:
    def find(labels: Labels) -> Shard | None:
        return next((one for label in together if (one := _at(labels, label, pattern))), None)

    outputs = tuple(find(labels) or R for labels in op.results)
    return Signature(
        "split",
        tuple(find(labels) or R for labels in op.operands),
        outputs,
        tuple(find(labels) or P for labels in op.operands),
        outputs,
        next((op.local[label] for label in together if label in op.local), ""),
    )


def _contracted(op: Labelled, label: str, results: Sequence[TensorSpec], pattern: Blocks) -> Iterator[Signature]:
    shards = [_at(labels, label, pattern) for labels in op.operands]
    inputs: list[Placement] = [one or R for one in shards]
    gradients: list[Placement] = [one or P for one in shards]
    needs, whole, partial = op.local.get(label, ""), (R,) * len(results), (Partial(op.reduction),) * len(results)
    if label in op.whole:
        yield Signature("local", tuple(inputs), whole, tuple(gradients), whole, needs)
        return
    if not all(one.is_floating for one in results):
        return
    if op.reduction != "sum":  # the gradient of a maximum goes to the rank that has it
        none = (None,) * len(shards), (None,) * len(results)
        yield Signature("contracted", tuple(inputs), partial, *none, "no_grad")
        return
    for term in op.terms:
        if all(shards[one] is None for one in term):
            if len(term) > 1:
                return  # a product without the label would be added by every rank
            inputs[term[0]], gradients[term[0]] = P, R
    yield Signature("contracted", tuple(inputs), partial, tuple(gradients), whole, needs)


def _partial(op: Labelled, specs: Sequence[TensorSpec], results: Sequence[TensorSpec]) -> Iterator[Signature]:
    if not op.terms or not all(one.is_floating for one in results):
        return
    alone = all(len(term) == 1 for term in op.terms)
    for chosen in product(*op.terms):
        if not all(specs[one].is_floating for one in chosen):
            continue
        inputs = tuple(P if i in chosen else R for i in range(len(specs)))
        outputs = (P,) * len(results)
        if alone and len(set(chosen)) == len(specs):
            yield Signature("partial", inputs, outputs, (None,) * len(specs), (None,) * len(results))
        else:
            gradients = tuple(R if i in chosen else P for i in range(len(specs)))
            yield Signature("partial", inputs, outputs, gradients, (R,) * len(results))


def _extreme(inputs: int, outputs: int, op: str) -> Signature:
    placements = (Partial(op),) * inputs, (Partial(op),) * outputs
    return Signature("partial", *placements, (None,) * inputs, (None,) * outputs, "no_grad")


# ---------------------------------------------------------------- from moves


def _moved(
    operation: Operation, specs: Sequence[TensorSpec], ranks: int, blocks: Sequence[Blocks]
) -> Iterator[Signature]:
    many = len(operation.results)
    for inputs, outputs in moves(operation, ranks, blocks):
        yield Signature("moved", inputs, outputs, inputs, outputs)
    if all(one.is_floating for one in (*specs, *operation.results)):
        count = len(specs) if takes_all(operation) else 1
        for op in ("sum", "max", "min"):
            inputs = (Partial(op),) * count + (R,) * (len(specs) - count)
            yield Signature("partial", inputs, (Partial(op),) * many, (None,) * len(specs), (None,) * many)
