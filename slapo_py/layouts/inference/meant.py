"""Operations that are wrong on parts, where what was meant is plain: it is said, and the analysis goes on as meant."""

from collections.abc import Sequence

from torch import fx

from slapo_py.layouts.inference.state import Fault, said
from slapo_py.layouts.placement import P, Placement, R, Shard
from slapo_py.layouts.recording.nodes import name_of, operation_of, slots_of
from slapo_py.layouts.rules.signatures import Signature
from slapo_py.layouts.rules.table import canonical


def batch_is_split(node: fx.Node, have: Sequence[Placement]) -> tuple[Signature, Fault] | None:
    """A batch norm in training whose batch is split: every rank would take the mean of its part."""
    first = have[0] if have else R
    if canonical(name_of(node)) != "batch_norm" or not operation_of(node).argument(5, "training", False):
        return None
    if not isinstance(first, Shard) or first.dim != 0 or any(one != R for one in have[1:]):
        return None
    rest = len(have) - 1
    meant = Signature("split", (first, *(R,) * rest), (first,), (first, *(P,) * rest), (first,))
    text = (
        f"{said(node)} is in training and takes the mean over the batch, and its input is {first}: each rank would "
        f"take that of its part, and it needs R. Split something else than the batch, or use torch.nn.SyncBatchNorm."
    )
    return meant, Fault("batch norm", node, text)


def adds_to_each(node: fx.Node, have: Sequence[Placement], ranks: int) -> tuple[Signature, Fault] | None:
    """A sum of a partial product and a parameter that is whole: every rank would add it."""
    slots = slots_of(node)
    if canonical(name_of(node)) != "add" or len(slots) != 2 or set(have) != {P, R}:
        return None
    term = slots[have.index(R)]
    if term.op != "get_attr":
        return None
    meant = Signature("partial", tuple(have), (P,), (None, None), (None,))
    text = (
        f"{said(node)} adds {said(term)}, which is R, to a value that is P: it would be added {ranks} times, once by "
        f"each rank. Give it to the product, as in F.linear(x, weight, bias): there it is added once."
    )
    return meant, Fault("added by each rank", node, text)
