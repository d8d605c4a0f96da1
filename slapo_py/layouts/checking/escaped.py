"""Numbers that python makes of sizes on its own, and what a rank, whose sizes are others, does otherwise for them."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from slapo_py.layouts.checking.faults import Look
from slapo_py.layouts.checking.numbers_of_parts import gathering, remedy
from slapo_py.layouts.checking.on_a_rank import OnARank, unlike
from slapo_py.layouts.inference.recorded import Asked
from slapo_py.layouts.inference.state import Fault, Typing, said
from slapo_py.layouts.placement import local_shape
from slapo_py.layouts.recording.nodes import is_size, is_tensor, shape_of, tensors_of
from slapo_py.layouts.recording.record import Recording, Taken

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule

Place = tuple[int | str, ...]
_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def escaped(place: "Schedule", recording: Recording, look: Look, asked: Asked, typing: Typing) -> list[Fault]:
    """What a forward does otherwise on a rank than placements say: at most one fault.

    typing: of a schedule that is right otherwise.
    """
    for number in unlike(recording, typing):
        rank = OnARank(recording, typing, typing.divided, number)
        found = _escaped(place, recording, rank, look, asked)
        if found:
            return found
    return []


def _escaped(place: "Schedule", recording: Recording, rank: OnARank, look: Look, asked: Asked) -> list[Fault]:
    typing, on = rank.typing, rank.rank_name
    for index, (whole, part) in enumerate(zip(recording.taken, rank.taken)):
        if (whole.node.op, whole.node.target) != (part.node.op, part.node.target):
            what = f"goes on with {_shown(whole)} in one process, and with {_shown(part)} on {on}"
            return [_fault(place, recording, rank, look, asked, index, what)]
        if is_size(whole.node):
            continue  # computed of a rank's numbers: what matters is where it is given
        if whole.node.op == "output" and (size := _other_size(whole.node, part.node)) is not None:
            what = f"gives its caller {size[0]} in one process, and {size[1]} on {on}"
            return [_fault(place, recording, rank, look, asked, index, what)]
        if whole.node.op == "get_attr" and not _same_constant(recording, rank, str(whole.node.target)):
            what = f"takes a tensor from outside in one process, and another one on {on}"
            return [_fault(place, recording, rank, look, asked, index, what)]
        sizes = typing.resized.get(whole.node, {})
        other = _other((whole.args, whole.kwargs), (part.args, part.kwargs), sizes, rank.rank == 0)
        if other is not None:
            ours, theirs = _number(other[0], recording.taken), _number(other[1], rank.taken)
            what = f"gives {ours} to {_shown(whole)} in one process, and {theirs} on {on}"
            return [_fault(place, recording, rank, look, asked, index, what)]
    if rank.failed:
        index = min(len(rank.taken), len(recording.taken) - 1)
        what = f"goes on with {_shown(recording.taken[index])} in one process, and not on {on}: {rank.failed}"
        return [_fault(place, recording, rank, look, asked, index, what)]
    return _of_other_shapes(place, recording, rank, look, asked)


def _other(one: Any, other: Any, resized: Any, first: bool, place: Place = ()) -> tuple[Any, Any] | None:
    """The first argument that differs, but for sizes that are a rank's.

    first: the rank is the first, of which it is known what each size has to be; of the others, that it is another one.
    """
    if isinstance(one, tuple | list | dict | slice):
        ours, theirs = _items(one), _items(other)
        if [key for key, _ in ours] != [key for key, _ in theirs]:
            return one, other
        pairs = zip(ours, theirs)
        return next((it for (key, a), (_, b) in pairs if (it := _other(a, b, resized, first, (*place, key)))), None)
    plain = isinstance(one, _PLAIN) or isinstance(other, _PLAIN)
    if not plain or (one is other) or (one is not None and one == other) or (_is_nan(one) and _is_nan(other)):
        return None
    size = resized.get(place[1:])
    return None if size is not None and (size.needs == other or not first) else (one, other)


def _other_size(whole: fx.Node, part: fx.Node) -> tuple[int, int] | None:
    """The first size that a forward returns and that is another one on a rank."""
    sizes = (
        (one.meta.get("int"), other.meta.get("int")) for one, other in zip(whole.all_input_nodes, part.all_input_nodes)
    )
    return next(((one, other) for one, other in sizes if one is not None and other is not None and one != other), None)


def _same_constant(whole: Recording, rank: Recording, name: str) -> bool:
    one, other = whole.constants.get(name), rank.constants.get(name)
    return one is other or (
        one is not None and other is not None and one.shape == other.shape and torch.equal(one, other)
    )


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, slice):
        return list(enumerate((value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, tuple | list) else [("", value)]


def _number(value: Any, taken: list[Taken]) -> Any:
    """What an argument is: of a size that is computed, the number."""
    sizes = (one.node.meta.get("int", value) for one in taken if value == f"%{one.node.name}")
    return next(sizes, value)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _of_other_shapes(place: "Schedule", recording: Recording, rank: OnARank, look: Look, asked: Asked) -> list[Fault]:
    """A value whose shape on a rank is not that of its part."""
    typing = rank.typing
    for index, (whole, part) in enumerate(zip(recording.taken, rank.taken)):
        if whole.node in typing.signature and is_tensor(whole.node) and tensors_of(part.node):
            needs = local_shape(shape_of(whole.node), typing.produced[whole.node][0], typing.ranks, rank.rank)
            if shape_of(part.node) != needs:
                made = f"{rank.rank_name} makes {shape_of(part.node)}, and needs {needs}"
                what = f"gives {_shown(whole)} sizes of which {made}"
                return [_fault(place, recording, rank, look, asked, index, what)]
    return []


def _shown(one: Taken) -> str:
    where = one.node.meta.get("where")
    return said(one.node) + (f" ({where})" if where else "")


def _fault(
    place: "Schedule", recording: Recording, rank: OnARank, look: Look, asked: Asked, index: int, what: str
) -> Fault:
    text, line = f"the forward {what}.", ""
    size = _size_before(recording, rank, index)
    if size is not None:
        node, whole, part = size
        base = node.args[0]
        base = base.args[0] if isinstance(base, fx.Node) and not tensors_of(base) else base
        assert isinstance(base, fx.Node)
        value = _used_in_whole(rank, base)
        where = f" at {node.meta['where']}" if "where" in node.meta else ""
        text += f" It depends on a size of {said(base)}, which is read{where}: "
        text += f"{whole} in one process, {part} on {rank.rank_name}"
        if value is not None:
            step = _step(place, asked, value)
            text += f" ({said(value)} is {rank.typing.after[value][0]}{step})"
            line = gathering(look, asked, rank.typing, value)
        text += f". {remedy(line)}"
    elif rank.read:
        path, name = rank.read[-1]
        text += (
            f' It depends on the attribute {name!r} of "{path}", of which a rank has its part. Take the number from '
            f"another attribute, which is not divided."
        )
    return Fault("size", recording.taken[index].node, text, line)


def _size_before(recording: Recording, rank: OnARank, index: int) -> tuple[fx.Node, int, int] | None:
    """The size that is another on a rank, read last before a node: one that only python uses, if there is any."""
    found = list[tuple[fx.Node, int, int]]()
    for whole, part in zip(recording.taken[: index + 1], rank.taken[: index + 1]):
        ours, theirs = whole.node.meta.get("int", 0), part.node.meta.get("int", 0)
        if ours != theirs and part.node.args and isinstance(part.node.args[0], fx.Node):
            if "int" not in part.node.args[0].meta:
                found.append((part.node, ours, theirs))
    alone = [one for one in found if not one[0].users]
    return next(reversed(alone or found), None)


def _used_in_whole(rank: OnARank, node: fx.Node) -> fx.Node | None:
    """A value of the whole that a rank's value is made of."""
    while True:
        value = rank.of_whole(node)
        if value is not None and value in rank.typing.after:
            return value
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]


def _step(place: "Schedule", asked: Asked, node: fx.Node) -> str:
    """The step that has split the parameter nearest before a node."""
    seen, nodes = {node}, [node]
    for one in nodes:
        if one in asked.params:
            path, _, name = str(one.target).rpartition(".")
            full = ".".join(filter(None, (place.path, path)))
            steps = [
                (number, step)
                for number, step in enumerate(place.root.history, 1)
                if (step.primitive, step.path) == ("shard", full) and name in step.args
            ]
            return f" by step {steps[-1][0]}, {steps[-1][1]}" if steps else ""
        nodes += [before for before in one.all_input_nodes if before not in seen]
        seen.update(one.all_input_nodes)
    return ""
