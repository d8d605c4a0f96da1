"""Operations that only move elements: where a split dim of the input lies in the result.

For `view`, `reshape`, `flatten`, `unflatten`, `squeeze` and `unsqueeze` there is one rule. In row-major order a split
dim is a digit: before it stand `left` equal slices, each slice is a row of blocks, and each block is cut into as many
runs as there are ranks. The result has it too if one of its dims begins at the same place, cuts the same blocks, and
is balanced alike: (B, S, H) split along S becomes (B * S, H) split along dim 0 in B blocks.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from slapo_py.errors import PlacementError
from slapo_py.layouts.placement import Placement, R, Shard, balanced, local_shape, local_size
from slapo_py.layouts.rules.operation import Operation, TensorSpec
from slapo_py.layouts.rules.table import IDENTITY, MOVES, RESHAPE, canonical

Blocks = int | tuple[int, ...]

# What moves may be called with by keyword: `out` is not among them.
_KEYWORDS = frozenset(
    "dim axis dim0 dim1 axis0 axis1 dims shape size sizes repeats source destination start length index split_size "
    "split_size_or_sections chunks shifts other".split()
)


def divides(size: int, blocks: Blocks, ranks: int) -> bool:
    """Whether a dim has such blocks, and every rank a part of it."""
    fits = sum(blocks) == size if isinstance(blocks, tuple) else size > 0 and size % blocks == 0
    return fits and local_size(size, Shard(0, blocks), 0, ranks, ranks - 1) > 0  # the last rank has the smallest part


def is_move(operation: Operation) -> bool:
    """Whether the operation only moves elements, and in a way that is known before it runs."""
    name, first = canonical(operation.name), operation.argument(0)
    if not isinstance(first, (tuple, list) if name in ("cat", "stack") else TensorSpec):
        return False
    if name in IDENTITY or name in RESHAPE:
        # x.view(dtype) is another operation than x.view(sizes).
        return name != "view" or all(not _is_dtype(one) for one in operation.operands[1:]) and not operation.kwargs
    if name not in MOVES or not set(operation.kwargs) <= _KEYWORDS:
        return False
    if name == "getitem":
        return _basic_key(operation.operands[1]) is not None
    if name == "repeat_interleave":
        return _is_int(operation.argument(1, "repeats")) and _is_int(operation.argument(2, "dim"))
    return True


def takes_all(operation: Operation) -> bool:
    """Whether every tensor argument moves into the result (`cat`), not the first alone (`expand_as`)."""
    return canonical(operation.name) in ("cat", "stack")


def moves(
    operation: Operation, ranks: int, blocks: Iterable[Blocks]
) -> Iterator[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    """Every split of the inputs that the operation carries on: placements of the tensor arguments, of the results."""
    specs = [spec for _, spec in operation.slots()]
    if not specs or not operation.results:
        return
    patterns = list(blocks)
    for dim in range(len(specs[0].shape)):
        if takes_all(operation):
            yield from _joined(operation, specs, dim, ranks, patterns)
            continue
        for pattern in patterns:
            if divides(specs[0].shape[dim], pattern, ranks):
                outputs = carry(operation, Shard(dim, pattern), ranks)
                if outputs is not None:
                    # A tensor that only lends its shape (`expand_as`) has the result's part of it.
                    lent = (outputs[0] if one.shape == operation.results[0].shape else R for one in specs[1:])
                    yield (Shard(dim, pattern), *lent), outputs


def carry(operation: Operation, shard: Shard, ranks: int) -> tuple[Shard, ...] | None:
    """The placements of the results of an operation whose input is split; None: it can't be carried on."""
    name, shape = canonical(operation.name), next(operation.slots())[1].shape
    results = [one.shape for one in operation.results]
    if name in IDENTITY:
        return (shard,)
    one: Shard | None
    if name in RESHAPE:
        one = reshaped(shape, results[0], shard, ranks)
    elif name in ("split", "chunk"):
        return _sections(operation, shape, shard, name)
    elif name == "unbind":
        dim = _dim(operation.argument(1, "dim", 0), len(shape))
        return None if dim == shard.dim else (Shard(shard.dim - (dim < shard.dim), shard.blocks),) * len(results)
    elif name in ("repeat", "repeat_interleave"):
        one = _repeated(operation, shape, shard, ranks, name)
    else:
        place = dim_map(operation).get(shard.dim)
        one = None if place is None else Shard(place, shard.blocks)
    return None if one is None else (one,)


# ---------------------------------------------------------------- the digit


def reshaped(before: Sequence[int], after: Sequence[int], shard: Shard, ranks: int) -> Shard | None:
    """Where a split dim lies after a reshape that keeps the row-major order; None if no dim of the result holds it."""
    if 0 in (*before, *after):
        return None
    tail = math.prod(before[shard.dim + 1 :])
    left = math.prod(before[: shard.dim])
    runs = [block * tail for block in shard.block_sizes(before[shard.dim])]
    cuts = [[one * tail for one in balanced(run // tail, ranks)] for run in runs]
    if isinstance(shard.blocks, int):  # equal blocks are slices before the digit
        left, runs, cuts = left * shard.blocks, runs[:1], cuts[:1]
    for dim, size in enumerate(after):
        outer, inner = math.prod(after[:dim]), math.prod(after[dim + 1 :])
        if size == 1 and before[shard.dim] != 1 or left % outer or any(run % inner for run in runs):
            continue
        sizes = [run // inner for run in runs] * (left // outer)
        if sum(sizes) == size and all(
            [n * inner for n in balanced(run // inner, ranks)] == cut for run, cut in zip(runs, cuts)
        ):
            return Shard(dim, len(sizes) if len(set(sizes)) == 1 else tuple(sizes))
    return None


# ---------------------------------------------------------------- dims of the result in terms of the input's


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_dtype(value: object) -> bool:
    return not isinstance(value, (int, tuple, list, TensorSpec))


def _dim(value: Any, dims: int) -> int:
    return int(value) % dims


def _sizes(operation: Operation, start: int, *names: str) -> list[int]:
    """Sizes or dims that are given one by one, as one tuple, or by keyword."""
    given: Any = operation.operands[start:]
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = given[0]
    if not given:
        given = next((operation.kwargs[name] for name in names if name in operation.kwargs), ())
    return list(given)


def dim_map(operation: Operation) -> dict[int, int]:
    """Where each dim of the input lies in the result; dims that are cut, repeated or gone have no place."""
    name, shape = canonical(operation.name), next(operation.slots())[1].shape
    dims, get = len(shape), operation.argument
    places = list(range(dims))
    if name == "transpose":
        one, two = _dim(get(1, "dim0"), dims), _dim(get(2, "dim1"), dims)
        places[one], places[two] = two, one
    elif name == "t":
        places.reverse()
    elif name == "permute":
        order = [_dim(one, dims) for one in _sizes(operation, 1, "dims")]
        places = [order.index(one) for one in range(dims)]
    elif name == "movedim":
        source, target = (
            [_dim(one, dims) for one in (value if isinstance(value, (tuple, list)) else (value,))]
            for value in (get(1, "source"), get(2, "destination"))
        )
        rest = [one for one in range(dims) if one not in source]
        order = [source[target.index(i)] if i in target else rest.pop(0) for i in range(dims)]
        places = [order.index(one) for one in range(dims)]
    elif name in ("expand", "expand_as", "broadcast_to"):
        more = len(operation.results[0].shape) - dims
        return {one: one + more for one in range(dims) if shape[one] == operation.results[0].shape[one + more]}
    elif name == "getitem":
        return _indexed(operation.operands[1], shape)
    elif name == "select":
        gone = _dim(get(1, "dim"), dims)
        return {one: one - (one > gone) for one in range(dims) if one != gone}
    elif name in ("narrow", "flip", "roll"):
        touched = _touched(operation, name, dims)
        return {one: one for one in range(dims) if one not in touched}
    return dict(enumerate(places))


def _touched(operation: Operation, name: str, dims: int) -> set[int]:
    """Dims along which elements change their place."""
    if name == "flip":
        return {_dim(one, dims) for one in _sizes(operation, 1, "dims")}
    value: Any = operation.argument(1, "dim") if name == "narrow" else operation.argument(2, "dims", tuple(range(dims)))
    return {_dim(one, dims) for one in (value if isinstance(value, (tuple, list)) else (value,))}


def _basic_key(key: object) -> list[Any] | None:
    """An index of numbers, slices, None and ...; None for tensors, lists and masks."""
    keys = list(key) if isinstance(key, tuple) else [key]
    plain = all(one is None or one is Ellipsis or isinstance(one, slice) or _is_int(one) for one in keys)
    bounds = [end for one in keys if isinstance(one, slice) for end in (one.start, one.stop, one.step)]
    return keys if plain and all(one is None or _is_int(one) for one in bounds) else None


def _indexed(key: object, shape: Sequence[int]) -> dict[int, int]:
    keys = _basic_key(key) or []
    used = sum(one is not None and one is not Ellipsis for one in keys)
    if Ellipsis not in keys:
        keys.append(Ellipsis)
    at = keys.index(Ellipsis)
    keys[at : at + 1] = [slice(None)] * (len(shape) - used)
    places, source, target = {}, 0, 0
    for one in keys:
        if one is None:
            target += 1
        elif isinstance(one, slice):
            # A written end as large as the whole dim does no harm to a part of it.
            if one.start in (None, 0) and one.step in (None, 1) and (one.stop is None or one.stop >= shape[source]):
                places[source] = target
            source, target = source + 1, target + 1
        else:
            source += 1
    return places


# ---------------------------------------------------------------- along the split dim itself


def _sections(operation: Operation, shape: Sequence[int], shard: Shard, name: str) -> tuple[Shard, ...] | None:
    """`split` and `chunk`: along the split dim, each section must be some of its blocks."""
    dim = _dim(operation.argument(2, "dim", 0), len(shape))
    many = len(operation.results)
    if dim != shard.dim:
        return (shard,) * many
    sizes = [one.shape[dim] for one in operation.results]
    if name == "chunk" and len(set(sizes)) > 1:
        return None  # of a part, the sections would begin elsewhere
    rest, found = shard.block_sizes(shape[dim]), list[Shard]()
    for size in sizes:
        mine: list[int] = []
        while rest and sum(mine) < size:
            mine.append(rest.pop(0))
        if sum(mine) != size:
            return None
        found.append(Shard(dim, len(mine) if len(set(mine)) == 1 else tuple(mine)))
    return tuple(found) if name == "split" or len(set(found)) == 1 else None


def _repeated(operation: Operation, shape: Sequence[int], shard: Shard, ranks: int, name: str) -> Shard | None:
    """`repeat` makes more blocks, `repeat_interleave` larger ones."""
    if name == "repeat":
        times = _sizes(operation, 1, "repeats", "size")
        more = len(times) - len(shape)
        many = times[shard.dim + more]
        return Shard(shard.dim + more, shard.blocks * many)  # a number of blocks, or a tuple of their sizes
    if _dim(operation.argument(2, "dim"), len(shape)) != shard.dim:
        return shard
    many = int(operation.argument(1, "repeats"))  # type: ignore[call-overload]
    sizes = shard.block_sizes(shape[shard.dim])
    if any([one * many for one in balanced(size, ranks)] != balanced(size * many, ranks) for size in sizes):
        return None
    return shard if isinstance(shard.blocks, int) else Shard(shard.dim, tuple(size * many for size in sizes))


def _joined(
    operation: Operation, specs: Sequence[TensorSpec], dim: int, ranks: int, patterns: Sequence[Blocks]
) -> Iterator[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    """`cat` and `stack`: along the dim of `cat`, the operands' blocks follow one another."""
    dims, stacks = len(specs[0].shape), canonical(operation.name) == "stack"
    at = _dim(operation.argument(1, "dim", 0), dims + stacks)
    if any(len(spec.shape) != dims for spec in specs):
        return
    for pattern in patterns if stacks or dim != at else ():
        if divides(specs[0].shape[dim], pattern, ranks):
            yield (Shard(dim, pattern),) * len(specs), (Shard(dim + (stacks and at <= dim), pattern),)
    if stacks or dim != at:
        return
    fitting = [[one for one in patterns if divides(spec.shape[dim], one, ranks)] for spec in specs]
    if len(specs) > 4:  # the same pattern for all, or there would be too many
        choices: Iterable[tuple[Blocks, ...]] = [
            (one,) * len(specs) for one in patterns if all(one in f for f in fitting)
        ]
    else:
        choices = product(*fitting)
    for choice in choices:
        shards = tuple(Shard(dim, one) for one in choice)
        sizes = [size for one, spec in zip(shards, specs) for size in one.block_sizes(spec.shape[dim])]
        yield shards, (Shard(dim, len(sizes) if len(set(sizes)) == 1 else tuple(sizes)),)


# ---------------------------------------------------------------- the sizes that a rank writes


def rank_arguments(
    operation: Operation, outputs: Sequence[Placement], ranks: int, rank: int
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Operands and keywords with the sizes that a rank must pass so that its results are its parts of the whole ones.

    Only sizes of `view`, `reshape`, `unflatten`, `expand`, `broadcast_to` and `split` differ; tensors stay as they are.
    Raises `PlacementError` if the placements aren't as many as the results.
    """
    if len(outputs) != len(operation.results):
        raise PlacementError(
            f"rank_arguments: {operation.name} has {len(operation.results)} results, found {len(outputs)} placements. "
            "Give one a result."
        )
    name, operands, kwargs = canonical(operation.name), operation.operands, dict(operation.kwargs)
    if name in ("view", "reshape", "expand", "broadcast_to", "unflatten"):
        mine = list(local_shape(operation.results[0].shape, outputs[0], ranks, rank))
        start, keyword = (2, "sizes") if name == "unflatten" else (1, "shape" if "shape" in kwargs else "size")
        written = _sizes(operation, start, keyword)
        if name == "unflatten":
            at = _dim(operation.argument(1, "dim"), len(next(operation.slots())[1].shape))
            mine = mine[at : at + len(written)]
        sizes = [one if one == -1 else size for one, size in zip(written, mine, strict=True)]
        if keyword in kwargs:
            kwargs[keyword] = tuple(sizes)
        elif isinstance(operands[start], (tuple, list)):
            operands = (*operands[:start], tuple(sizes))
        else:
            operands = (*operands[:start], *sizes)
    elif name == "split":
        dim = _dim(operation.argument(2, "dim", 0), len(operation.results[0].shape))
        mine = [local_shape(one.shape, put, ranks, rank)[dim] for one, put in zip(operation.results, outputs)]
        keyword = "split_size_or_sections" if "split_size_or_sections" in kwargs else "split_size"
        given = operation.argument(1, keyword)
        sections: object = tuple(mine) if isinstance(given, (tuple, list)) or len(set(mine[:-1])) > 1 else mine[0]
        if len(operands) > 1:
            operands = (operands[0], sections, *operands[2:])
        else:
            kwargs[keyword] = sections
    return operands, kwargs
