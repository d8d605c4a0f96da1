"""A tensor from one placement to another, and its gradient from one to another, chosen apart.

    y = redistribute(x, P, R, group=tp)                               # all-reduce; the gradient is left
    y = redistribute(x, R, R, grad_source=P, group=tp)                # nothing; the gradient is all-reduced
    y = redistribute(x, S(1), R, grad_source=P, group=tp)             # all-gather; reduce-scatter
    y = redistribute(x, (S(0), R), (S(0), S(1)), group=(dp, tp))      # a mesh: a placement for each axis, outer first

A value that is S has its gradient S alike. One that is R or P has its gradient R or P. One that is P(max) or P(min) has
its gradient P: each rank the share of the elements that it has won.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slapo_py.distributed import agreement
from slapo_py.distributed.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Mask,
    Move,
    Pad,
    Ranks,
    ReduceScatter,
    Split,
    paired,
    winners,
)
from slapo_py.errors import PlacementError
from slapo_py.layouts.conversions import Layout, Step, cheapest
from slapo_py.layouts.placement import P, Partial, Placement, R, S, Shard, local_shape

Places = Placement | Sequence[Placement]
_Plain = str | tuple[int, int | tuple[int, ...]]
Groups = dist.ProcessGroup | Sequence[dist.ProcessGroup] | DeviceMesh


def redistribute(
    tensor: Tensor,
    source: Places,
    target: Places,
    grad_source: Places | None = None,
    grad_target: Places | None = None,
    *,
    group: Groups | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """This rank's part or term of a tensor in `source` -> the one in `target`, sending least.

    grad_source is how the gradient arrives at the result, grad_target how it is handed on to `tensor`; by default S
    for S, R for R and P, P for P(max) and P(min). group: of the axis, or of each axis of a mesh, the outer one first,
    or the mesh; None is the default group. shape: the whole tensor's; needed only where parts are uneven, since
    without it all are taken to be as large as this rank's.

    Every rank must call it with the same arguments; `agreement.checked()` makes sure that they do. Raises
    `PlacementError` before anything is sent.
    """
    groups = _groups(group)
    ranks = tuple(Ranks.of(one) for one in groups)
    if not torch.compiler.is_compiling() and agreement.asking():
        _agreed(tensor, (source, target, grad_source, grad_target), groups, ranks, shape)
    return over(tensor, source, target, grad_source, grad_target, ranks, shape)


def over(
    tensor: Tensor,
    source: Places,
    target: Places,
    grad_source: Places | None,
    grad_target: Places | None,
    ranks: tuple[Ranks, ...],
    shape: Sequence[int] | None = None,
) -> Tensor:
    """`redistribute` over axes that are given as plain data."""
    here, there, grad_from, grad_to = layouts(source, target, grad_source, grad_target, len(ranks))
    whole = whole_shape(tensor.shape, here, there, ranks, shape)
    sizes = tuple(one.size for one in ranks)
    parts = 1
    for size in sizes:
        parts = parts * size
    dims = tuple(dim for dim, size in enumerate(whole) if size % parts == 0)
    steps = _cheapest(here, there, sizes, dims)
    learns = tensor.requires_grad and torch.is_grad_enabled()
    y = tensor
    waiting: list[Step] = []
    until = grad_to
    for step in steps:
        if not learns or not is_won(step):
            waiting.append(step)
            continue
        y = _stretch(y, waiting, _default(step.layout), until, ranks, whole, dims)
        y = _won(y, step, ranks)
        waiting, until = [], _default(step.after)
    if not learns:
        return paired(y, moves(tuple(waiting), ranks, whole))
    return _stretch(y, waiting, grad_from, until, ranks, whole, dims)


def _stretch(
    x: Tensor,
    steps: Sequence[Step],
    grad_from: Layout,
    grad_to: Layout,
    ranks: tuple[Ranks, ...],
    whole: tuple[int, ...],
    dims: tuple[int, ...],
) -> Tensor:
    """Steps whose gradient needs to know nothing of the value."""
    back = _cheapest(grad_from, grad_to, tuple(one.size for one in ranks), dims)
    return paired(x, moves(tuple(steps), ranks, whole), moves(back, ranks, whole))


def _cheapest(source: Layout, target: Layout, sizes: tuple[int, ...], dims: tuple[int, ...]) -> tuple[Step, ...]:
    if not torch.compiler.is_compiling():
        return cheapest(source, target, sizes, dims)
    found = _plain_steps(tuple(map(_plain, source)), tuple(map(_plain, target)), sizes, dims)
    return tuple(Step(tuple(map(_from_plain, layout)), axis, _from_plain(end)) for layout, axis, end in found)


@torch.compiler.assume_constant_result
def _plain_steps(
    source: tuple[_Plain, ...], target: tuple[_Plain, ...], sizes: tuple[int, ...], dims: tuple[int, ...]
) -> tuple[tuple[tuple[_Plain, ...], int, _Plain], ...]:
    """While it compiles, torch runs this as it is and doesn't look inside; objects can't pass its border."""
    steps = cheapest(tuple(map(_from_plain, source)), tuple(map(_from_plain, target)), sizes, dims)
    return tuple((tuple(map(_plain, step.layout)), step.axis, _plain(step.target)) for step in steps)


def _plain(placement: Placement) -> _Plain:
    if isinstance(placement, Shard):
        return placement.dim, placement.blocks
    return placement.op if isinstance(placement, Partial) else ""


def _from_plain(one: _Plain) -> Placement:
    if isinstance(one, tuple):
        return Shard(*one)
    return Partial(one) if one else R


def is_won(step: Step) -> bool:
    """Whether a maximum or a minimum is taken, whose gradient goes to the rank that holds it."""
    return isinstance(step.source, Partial) and step.source.op != "sum"


def _won(x: Tensor, step: Step, ranks: tuple[Ranks, ...]) -> Tensor:
    """P(max) -> S, or -> R by way of the flat tensor in parts: the same bytes as an all-reduce."""
    axis = ranks[step.axis]
    assert isinstance(step.source, Partial)
    if axis.size == 1:
        return x
    if isinstance(step.target, Shard):
        return winners(x, step.target, step.source.op, axis)
    best = winners(x.reshape(-1), S(0), step.source.op, axis)
    return paired(best, (AllGather(axis, S(0), x.numel()),), (Split(axis, S(0)),)).reshape(x.shape)


def moves(steps: tuple[Step, ...], ranks: tuple[Ranks, ...], whole: Sequence[int]) -> tuple[Move, ...]:
    """What the ranks do for steps of a tensor of a whole shape. Axes of one rank do nothing."""
    found = []
    for step in steps:
        axis = ranks[step.axis]
        if axis.size > 1 and step.kind not in ("nothing", "keep"):
            found.append(_move(step, axis, part_shape(whole, step.layout, ranks, step.axis)))
    return tuple(found)


def _move(step: Step, axis: Ranks, whole: Sequence[int]) -> Move:
    """whole: the shape that the ranks of this axis have between them."""
    match step.source, step.target:
        case Partial(op), Shard() as shard:
            return ReduceScatter(axis, shard, op)
        case Partial(op), _:
            return AllReduce(axis, op)
        case Shard(dim) as shard, Shard() as other:
            return AllToAll(axis, shard, other, whole[dim])
        case Shard(dim) as shard, Partial(op):
            return Pad(axis, shard, whole[dim], op)
        case Shard(dim) as shard, _:
            return AllGather(axis, shard, whole[dim])
        case _, Shard() as shard:
            return Split(axis, shard)
    return Mask(axis)


def part_shape(whole: Sequence[int], layout: Layout, ranks: Sequence[Ranks], but: int | None = None) -> tuple[int, ...]:
    """The shape of this rank's part. but: an axis that is left out, for the shape that its ranks have between them."""
    shape = tuple(whole)
    for at, (placement, axis) in enumerate(zip(layout, ranks)):
        if at != but:
            shape = local_shape(shape, placement, axis.size, axis.rank)
    return shape


def layouts(
    source: Places, target: Places, grad_source: Places | None, grad_target: Places | None, axes: int
) -> tuple[Layout, Layout, Layout, Layout]:
    """The four layouts. Raises `PlacementError` where there isn't one placement an axis, or a gradient can't lie so."""
    here, there = _layout("source", source, axes), _layout("target", target, axes)
    grad_from = _default(there) if grad_source is None else _layout("grad_source", grad_source, axes)
    grad_to = _default(here) if grad_target is None else _layout("grad_target", grad_target, axes)
    for name, values, grads in (("grad_source", there, grad_from), ("grad_target", here, grad_to)):
        for axis, (value, grad) in enumerate(zip(values, grads)):
            legal = gradients(value)
            if grad not in legal:
                where = f" on axis {axis}" if axes > 1 else ""
                raise PlacementError(
                    f"redistribute: {name}={grad}{where}, where the value is {value}. "
                    f"The gradient of {value} is {' or '.join(str(one) for one in legal)}."
                )
    return here, there, grad_from, grad_to


def gradients(value: Placement) -> tuple[Placement, ...]:
    """The placements that the gradient of a value can have, the usual one first."""
    if isinstance(value, Shard):
        return (value,)
    if isinstance(value, Partial) and value.op != "sum":
        return (P,)
    return (R, P)


def _default(layout: Layout) -> Layout:
    return tuple(gradients(one)[0] for one in layout)


def _layout(name: str, places: Places, axes: int) -> Layout:
    found = (places,) if isinstance(places, Placement) else tuple(places)
    if len(found) != axes or not all(isinstance(one, Placement) for one in found):
        shown = ", ".join(str(one) for one in found)
        raise PlacementError(
            f"redistribute: {name} must be one placement for each of {axes} mesh {'axis' if axes == 1 else 'axes'}, "
            f"found ({shown})."
        )
    return found


def whole_shape(
    local: Sequence[int], source: Layout, target: Layout, ranks: Sequence[Ranks], shape: Sequence[int] | None
) -> tuple[int, ...]:
    """The whole tensor's shape; taken from this rank's part where it isn't given.

    Raises `PlacementError` if the part isn't this rank's, or the tensor can't lie as the target says.
    """
    if shape is None:
        whole = list(local)
        for placement, axis in zip(source, ranks):
            if isinstance(placement, Shard) and placement.dim < len(whole):
                whole[placement.dim] = whole[placement.dim] * axis.size
    else:
        whole = list(shape)
    expected = part_shape(whole, source, ranks)
    if tuple(local) != expected:
        shown = ", ".join(str(one) for one in source)
        where = ", ".join(str(axis.rank) for axis in ranks)
        raise PlacementError(
            f"redistribute: this rank ({where}) holds {tuple(local)}; of {tuple(whole)} in {shown} it should hold "
            f"{expected}. Give shape=, the whole shape, if parts are uneven."
        )
    part_shape(whole, target, ranks)
    return tuple(whole)


def _groups(group: Groups | None) -> tuple[dist.ProcessGroup | None, ...]:
    if isinstance(group, DeviceMesh):
        return tuple(group.get_group(axis) for axis in range(group.ndim))
    return (group,) if group is None or isinstance(group, dist.ProcessGroup) else tuple(group)


def _agreed(
    tensor: Tensor,
    places: tuple[Places, Places, Places | None, Places | None],
    groups: Sequence[dist.ProcessGroup | None],
    ranks: tuple[Ranks, ...],
    shape: Sequence[int] | None,
) -> None:
    """All ranks of each axis say what they do, or what is wrong with it; they raise together."""
    try:
        (here, there, *grads) = layouts(*places, len(ranks))
        whole = whole_shape(tensor.shape, here, there, ranks, shape)
        shown = " -> ".join(" ".join(str(one) for one in layout) for layout in (here, there, *grads))
        said = f"redistribute {shown} of {whole}, {tensor.dtype}, gradient {tensor.requires_grad}"
    except PlacementError as error:
        said = str(error)
    agreement.agree(said, groups)
