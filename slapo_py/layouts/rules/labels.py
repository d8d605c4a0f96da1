"""From an operation and its line in the table to labels: one for each dim of each operand and result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slapo_py.errors import PlacementError
from slapo_py.layouts.rules.operation import Key, Operation, TensorSpec
from slapo_py.layouts.rules.table import ALONG, CONSTANT, EXTREMES, LINEAR, NONLINEAR, OVER, RULES, Rule, canonical

Labels = tuple[str | None, ...]


@dataclass(frozen=True)
class Labelled:
    """An operation in labels; None is a dim that is never split, and so is a label that begins with a capital.

    operands: labels of each tensor argument, in the order of `Operation.slots`. results: of each result.
    terms: the tensor arguments of each linear term, by index; empty: linear in nothing.
    reduction: what a result is a partial of, where a split label is missing from it.
    local, whole, grouped: as in `Rule`. extreme: "max" or "min" where partial maxima (minima) of all operands pass.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    terms: tuple[tuple[int, ...], ...] = ()
    reduction: str = "sum"
    local: Mapping[str, str] = field(default_factory=dict)
    whole: str = ""
    grouped: bool = False
    extreme: str = ""

    @property
    def splittable(self) -> list[str]:
        """Every label that may be split, sorted."""
        return sorted({one for labels in self.operands for one in labels if one and not one[0].isupper()})


def labelled(operation: Operation, line: str | Rule | None = None) -> Labelled | None:
    """The operation in labels; None if the table has no line for it, or none for these arguments.

    line: the labels of an operation that the table doesn't know (a fused kernel's `placement`), or its rule; of labels
    alone, every argument is taken to be nonlinear. Raises `PlacementError` if a line doesn't fit the operation.
    """
    if line is not None:
        given = Rule(line) if isinstance(line, str) else line
        return _by_rule(operation, given) if given.line.strip() else None
    name = canonical(operation.name)
    if operation.kwargs.get("out") is not None:
        return None
    if (
        name in LINEAR
        or name in NONLINEAR | CONSTANT
        or name in EXTREMES
        or name in ("max", "min")
        and _of_two(operation)
    ):
        return _elementwise(operation, name)
    if name in ALONG:
        return _along(operation, name)
    if name in OVER:
        return _over(operation, name)
    if name == "pad":
        return _padded(operation)
    if name in ("getitem", "index_select"):
        return _rows(operation, name)
    rule = _einsum(operation) if name == "einsum" else _variant(operation, name)
    try:
        return None if rule is None else _by_rule(operation, rule)
    except PlacementError:  # called in a way that the line isn't about: then only whole values
        return None


# ---------------------------------------------------------------- lines


def parse(line: str) -> tuple[list[str], list[str]]:
    """The labels of the operands and of the results, as written. Raises `PlacementError` for what is no line."""
    left, arrow, right = line.partition("->")
    if not arrow or "->" in right:
        raise PlacementError(f"{line!r} is no line of labels: it needs one ->, as in '...k, nk, n -> ...n'.")
    sides = [[one.strip() for one in side.split(",")] for side in (left, right)]
    for one in (*sides[0], *sides[1]):
        letters = one.replace("...", "", 1).replace("***", "", 1)
        if one not in ("", "-") and letters and not (letters.isalpha() and letters.isascii()):
            raise PlacementError(
                f"{line!r}: {one!r} are no labels. Write one letter a dim, with ... for any number of dims that split, "
                "*** for dims that don't, and - for a plain value."
            )
    unknown = {c for one in sides[1] for c in one if c.islower()} - {c for one in sides[0] for c in one}
    if unknown:
        raise PlacementError(
            f"{line!r}: a result has the label {sorted(unknown)[0]!r}, which no operand has. Write a capital for a dim "
            "that the operation makes."
        )
    return sides[0], sides[1]


def spread(labels: str, dims: int, line: str) -> Labels:
    """One label a dim: '...k' of 3 dims is ('e1', 'e0', 'k'). Fewer dims are aligned from the right."""
    for sign, letter in (("...", "e"), ("***", "E")):
        if sign in labels:
            before, _, after = labels.partition(sign)
            many = dims - len(before) - len(after)
            if many < 0:
                raise PlacementError(
                    f"{line!r}: {labels!r} needs {len(before) + len(after)} dims or more, found {dims}."
                )
            return (*before, *(f"{letter}{many - 1 - i}" for i in range(many)), *after)
    if dims > len(labels):
        raise PlacementError(
            f"{line!r}: {labels!r} labels {len(labels)} dims, the tensor has {dims}. Write ... for more."
        )
    return tuple(labels[len(labels) - dims :])


def _by_rule(operation: Operation, rule: Rule) -> Labelled | None:
    left, right = parse(rule.line)
    slots = list(operation.slots())
    index: dict[int, int] = {}  # position in the line -> number of the tensor argument
    operands: list[Labels] = []
    for number, (key, spec) in enumerate(slots):
        position = rule.names.index(key) if key in rule.names else key
        if not isinstance(position, int) or position >= len(left):
            raise PlacementError(
                f"{rule.line!r} labels {len(left)} operands, but {operation.name} has a tensor at {position!r}. "
                "Pass it by position, and add its labels to the line."
            )
        if left[position] == "-":
            raise PlacementError(
                f"{rule.line!r} says that operand {position} is a plain value, but {operation.name} has a tensor of "
                f"shape {spec.shape} there. Write its labels instead of -."
            )
        index[position] = number
        operands.append(_drop_ones(spread(left[position], len(spec.shape), rule.line), spec))
    if len(right) != len(operation.results):
        raise PlacementError(
            f"{rule.line!r} labels {len(right)} results, but {operation.name} has {len(operation.results)}."
        )
    results = tuple(
        spread(labels, len(one.shape), rule.line) for labels, one in zip(right, operation.results, strict=True)
    )
    terms = _terms(operation, rule.linear, rule.names, index)
    return Labelled(tuple(operands), results, terms, local=rule.local, whole=rule.whole, grouped=rule.grouped)


def _drop_ones(labels: Sequence[str | None], spec: TensorSpec) -> Labels:
    """A dim of size 1 broadcasts: it is never split."""
    return tuple(None if size == 1 else label for label, size in zip(labels, spec.shape, strict=True))


def _terms(
    operation: Operation, linear: str, names: tuple[str, ...], index: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """The linear terms by numbers of tensor arguments; none if a number is added to them."""
    found = []
    for term in linear.split("+") if linear else ():
        positions = [int(one) for one in term.split("*")]
        tensors = tuple(index[one] for one in positions if one in index)
        if tensors:
            found.append(tensors)
            continue
        values = [operation.argument(one, names[one]) for one in positions]
        if not any(one is None or one == 0 for one in values):  # None or 0: there is no such term
            return ()
    return tuple(found)


# ---------------------------------------------------------------- which line


def _variant(operation: Operation, name: str) -> Rule | None:
    """The rule under this name, or the one for these arguments; None if there is none for them."""
    get = operation.argument
    first = get(0, "input")
    if name == "matmul":
        return _matmul(operation)
    if name in ("conv1d", "conv2d", "conv3d"):
        assert isinstance(first, TensorSpec)
        if len(first.shape) != int(name[4]) + 2:  # without a batch
            return None
        return RULES["conv" if get(6, "groups", 1) == 1 else "conv, in groups"]
    if name == "linear":
        weight = get(1, "weight")
        return RULES[name] if isinstance(weight, TensorSpec) and len(weight.shape) == 2 else None
    if name in ("layer_norm", "rms_norm"):
        shape = get(1, "normalized_shape")
        over = "NMLKJ"[: len(shape)] if isinstance(shape, (tuple, list)) else ""
        return replace(RULES[name], line=RULES[name].line.replace("N", over)) if over else None
    if name == "batch_norm":
        return RULES["batch_norm, in training" if get(5, "training", False) else "batch_norm"]
    if name == "embedding":
        # Renormalising writes into whole rows, and frequencies are of all the indices.
        renormalises, by_frequency = get(3, "max_norm"), get(5, "scale_grad_by_freq", False)
        return None if renormalises is not None or by_frequency else RULES[name]
    if name == "scaled_dot_product_attention":
        causal, grouped = get(5, "is_causal", False), get(7, "enable_gqa", False)
        rule = RULES[name + (", causal" if causal else "")]
        linear = rule.linear if get(4, "dropout_p", 0.0) == 0 else ""
        return replace(rule, linear=linear, grouped=bool(grouped))
    if name == "cross_entropy":
        return _cross_entropy(operation)
    return RULES.get(name)


def _matmul(operation: Operation) -> Rule | None:
    one, two = operation.argument(0, "input"), operation.argument(1, "other")
    if not isinstance(one, TensorSpec) or not isinstance(two, TensorSpec):
        return None
    if len(one.shape) == 1:
        return RULES["matmul of two vectors" if len(two.shape) == 1 else "matmul of a vector"]
    return RULES["matmul by a vector" if len(two.shape) == 1 else "matmul"]


def _cross_entropy(operation: Operation) -> Rule | None:
    """Logits (T, V) or (B, V, ...), targets (T,) or (B, ...); without class weights, smoothing and soft targets.

    The local implementation is for classes in the last dim: of (B, V, ...) they do not split.
    """
    logits, target = operation.argument(0, "input"), operation.argument(1, "target")
    plain = operation.argument(2, "weight") is None and not operation.argument(7, "label_smoothing", 0.0)
    if not isinstance(logits, TensorSpec) or not isinstance(target, TensorSpec) or target.is_floating or not plain:
        return None
    how = {"none": ", of each", "sum": ", summed"}.get(str(operation.argument(6, "reduction", "mean")), ", averaged")
    rule, more = RULES["cross_entropy" + how], len(logits.shape) - 2
    if more == 0:
        return rule
    letters = "wxyz"[:more] if how != ", averaged" else "WXYZ"[:more]
    (first, second), (result,) = parse(rule.line)
    if more < 0:  # one row
        return replace(rule, line=f"{first[1:]}, -> ")
    return replace(rule, line=f"{first[0]}V{letters}, {second}{letters} -> {result and result + letters}")


def _einsum(operation: Operation) -> Rule | None:
    """Its equation is a line already: small letters, a letter twice in an operand (a diagonal) never splits."""
    equation, count = operation.argument(0), len(list(operation.slots()))
    if not isinstance(equation, str) or len(operation.operands) != count + 1:
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow or any(c.isupper() for c in equation) or len(inputs) != count:
        return None
    twice = {c for one in inputs for c in one if c.isalpha() and one.count(c) > 1}
    line = "".join(c.upper() if c in twice else c for c in f"-, {', '.join(inputs)} -> {right}")
    return Rule(line, " * ".join(str(1 + i) for i in range(count)), ("",) * (count + 1))


# ---------------------------------------------------------------- element by element, along a dim, over dims


def _of_two(operation: Operation) -> bool:
    return isinstance(operation.argument(1, "other"), TensorSpec)


def _result_labels(spec: TensorSpec) -> tuple[str, ...]:
    return tuple(f"d{len(spec.shape) - 1 - i}" for i in range(len(spec.shape)))


def _elementwise(operation: Operation, name: str) -> Labelled | None:
    if len(operation.results) != 1 or not operation.results[0].shape:
        result: tuple[str, ...] = ()
    else:
        result = _result_labels(operation.results[0])
    slots = list(operation.slots())
    if len(operation.results) != 1 or any(len(spec.shape) > len(result) for _, spec in slots):
        return None
    if name == "where" and operation.argument(1, "input") is None:  # where a mask is true: a size that depends on data
        return None
    operands = tuple(_drop_ones(result[len(result) - len(spec.shape) :], spec) for _, spec in slots)
    linear, names = LINEAR.get(name, ("", ()))
    if operation.kwargs.get("rounding_mode") is not None:
        linear = ""
    extreme = {"max": "max", "min": "min", **EXTREMES}.get(name, "")
    return Labelled(operands, (result,), _terms(operation, linear, names, _positions(slots, names)), extreme=extreme)


def _positions(slots: Sequence[tuple[Key, TensorSpec]], names: tuple[str, ...]) -> dict[int, int]:
    """Position in the signature of the function -> number of the tensor argument."""
    found = {}
    for number, (key, _) in enumerate(slots):
        position = names.index(key) if isinstance(key, str) and key in names else key
        if isinstance(position, int):
            found[position] = number
    return found


def _along(operation: Operation, name: str) -> Labelled | None:
    """Every dim is free but one."""
    position, default, linear = ALONG[name]
    dim = operation.argument(1 if name == "gather" else position, "dim", default)
    slots = list(operation.slots())
    shape = slots[0][1].shape
    if isinstance(dim, bool) or not isinstance(dim, int) or not shape or not operation.results:
        return None
    if any(len(spec.shape) != len(shape) for spec in (*(one for _, one in slots), *operation.results)):
        return None
    dim %= len(shape)
    labels = tuple(f"N{i}" if i == dim else f"d{i}" for i in range(len(shape)))
    # An index is free along the dim that it picks from.
    picked = (*labels[:dim], "i", *labels[dim + 1 :]) if name == "gather" else labels
    terms = tuple((i,) for i, (_, one) in enumerate(slots) if one.is_floating) if linear else ()
    operands = tuple(_drop_ones(picked if i else labels, spec) for i, (_, spec) in enumerate(slots))
    return Labelled(operands, tuple(picked for _ in operation.results), terms)


def _over(operation: Operation, name: str) -> Labelled | None:
    """Dims that vanish, or stay with size 1."""
    reduction, linear = OVER[name]
    slots = list(operation.slots())
    if len(slots) != 1:
        return None
    shape = slots[0][1].shape
    dim: Any = operation.argument(2 if name == "norm" else 1, "dim")
    if dim is None or dim == () or dim == []:
        dims = set(range(len(shape)))
    elif isinstance(dim, bool) or not isinstance(dim, (int, tuple, list)):
        return None
    else:
        dims = {one % len(shape) for one in (dim if isinstance(dim, (tuple, list)) else (dim,))}
    letter = "r" if reduction else "N"
    labels = tuple(f"{letter}{i}" if i in dims else f"d{i}" for i in range(len(shape)))
    results: list[Labels] = []
    for spec in operation.results:
        if spec.shape == tuple(1 if i in dims else size for i, size in enumerate(shape)):
            results.append(tuple(None if i in dims else one for i, one in enumerate(labels)))
        elif spec.shape == tuple(size for i, size in enumerate(shape) if i not in dims):
            results.append(tuple(one for i, one in enumerate(labels) if i not in dims))
        else:
            return None
    terms: tuple[tuple[int, ...], ...] = ((0,),) if linear else ()
    return Labelled((_drop_ones(labels, slots[0][1]),), tuple(results), terms, reduction=reduction or "sum")


def _padded(operation: Operation) -> Labelled | None:
    """Dims that get nothing are free. Zeros are added to every part of a sum alike, another number is not."""
    slots, widths = list(operation.slots()), operation.argument(1, "pad")
    if len(slots) != 1 or not isinstance(widths, (tuple, list)):
        return None
    shape, spec = slots[0][1].shape, slots[0][1]
    padded = {len(shape) - 1 - i // 2 for i, width in enumerate(widths) if width != 0}
    labels = tuple(f"N{i}" if i in padded else f"d{i}" for i in range(len(shape)))
    constant = operation.argument(2, "mode", "constant") == "constant"
    linear = not constant or operation.argument(3, "value") in (None, 0)
    return Labelled((_drop_ones(labels, spec),), (labels,), ((0,),) if linear else ())


def _rows(operation: Operation, name: str) -> Labelled | None:
    """`x[:, ids]` and `index_select`: whole slices are picked by an index, the dims beside it are free."""
    slots = list(operation.slots())
    if len(slots) != 2 or slots[0][0] != 0 or slots[1][1].is_bool or len(operation.results) != 1:
        return None
    (_, spec), (_, index) = slots
    if name == "index_select":
        at: Any = operation.argument(1, "dim")
    else:
        given = operation.operands[1]
        key = given if isinstance(given, tuple) else (given,)
        at = next((i for i, one in enumerate(key) if isinstance(one, TensorSpec)), 0)
        if any(one != slice(None) for i, one in enumerate(key) if i != at):
            return None
    labels = [f"d{i}" for i in range(len(spec.shape))]
    at, mine = at % len(labels), tuple(f"i{i}" for i in range(len(index.shape)))
    result = (*labels[:at], *mine, *labels[at + 1 :])
    labels[at] = "N"
    if len(result) != len(operation.results[0].shape):
        return None
    return Labelled((_drop_ones(labels, spec), _drop_ones(mine, index)), (result,), ((0,),))
