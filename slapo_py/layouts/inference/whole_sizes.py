"""Sizes that code reads of one value and gives to another, which a rank has in part: what is true, and what to write.

`y.view(B, T, C)` with C of the module's input is such one: no step of a schedule mends it, the code has to change.
"""

from collections.abc import Iterable

from torch import fx

from slapo_py.layouts.inference.code_line import with_size_left_open
from slapo_py.layouts.inference.sizes import Place, sizes_of
from slapo_py.layouts.inference.state import Fault, Typing, said
from slapo_py.layouts.recording.nodes import numbers_of, tensors_of

WHOLE = "size of a whole value"


def is_of_whole(typing: Typing, size: object) -> bool:
    """Whether a size is worked out from sizes alone that are the same on a rank."""
    if not isinstance(size, fx.Node) or typing.local.get(size) == size.meta.get("int"):
        return True
    reads = [one for one in size.all_input_nodes if "int" in one.meta]
    return bool(reads) and all(is_of_whole(typing, one) for one in reads)


def of_whole(node: fx.Node, place: Place, passes: int, needs: int) -> Fault:
    """The fault of a node that is given such a size."""
    text = (
        f"{said(node)}{_where(node)} is given the size {passes}, which the code works out from a value that is whole "
        f"on a rank, and the value that it is given to is split: a rank needs {needs}. {_remedy(node, place)}"
    )
    return Fault(WHOLE, node, text)


def gathered_for(node: fx.Node, readers: Iterable["fx.Node | str"], typing: Typing) -> Fault | None:
    """The fault of a split value that would have to be gathered inside a forward because of such sizes."""
    for reader in readers:
        if not isinstance(reader, fx.Node) or not tensors_of(reader):
            continue
        sizes = [(place, one) for place, one in sizes_of(reader) if isinstance(one, fx.Node)]
        large = [one for one in sizes if is_of_whole(typing, one[1])]
        if large:
            text = (
                f"{said(reader)}{_where(reader)} is given sizes that the code reads of a value that is whole on a "
                f"rank, and {said(node)}, which it is given to, is {typing.after[node][0]}. "
                f"{_remedy(reader, large[-1][0])}"
            )
            return Fault(WHOLE, reader, text)
    return None


def _remedy(node: fx.Node, place: Place) -> str:
    text = "The code must read the size of the split value itself, or leave it to torch with -1."
    numbers = [one for _, one in numbers_of(node)]
    if node.op == "call_method" and len(place) == 1 and isinstance(place[0], int) and -1 not in numbers:
        line = with_size_left_open(str(node.meta.get("where", "")), str(node.target), place[0] - 1)
        text += f" Write in the code: {line}" if line else ""
    return text


def _where(node: fx.Node) -> str:
    return f" ({node.meta['where']})" if "where" in node.meta else ""
