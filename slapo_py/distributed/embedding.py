"""`F.embedding` where each rank has a part of the table's rows: each looks up its own, the results are summed.

    terms = embedding(ids, rows, total=50257, ranks=ranks)   # zeros where an id belongs to another rank
    found = all_reduce(terms, group, gradient="identity")    # or a reduce-scatter

Rows lie as a balanced split has them: sizes differ by at most one, larger parts first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.distributed.collectives import Ranks
from slapo_py.errors import PlacementError
from slapo_py.layouts.placement import balanced


def embedding(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    total: int,
    ranks: Ranks,
) -> Tensor:
    """This rank's term of `F.embedding(ids, table, padding_idx)`, of a table with `total` rows in all.

    ids: of any shape, the same on every rank, numbers of rows of the whole table, as is padding_idx; weight: (rows of
    this rank, width). The result, (*ids.shape, width), is a term of a sum. The gradient of the weight is that of its
    rows of the table, exactly, given the whole gradient of the sum. An id that the table has not raises what
    `F.embedding` raises.

    Raises `PlacementError` for a weight that is not this rank's part, and for max_norm, scale_grad_by_freq and sparse.
    """
    for name, given in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if given:
            raise PlacementError(
                f"embedding: {name}={given} is not supported where the rows are split over ranks. Keep the table whole "
                f"(take its shard step back), or leave {name} out."
            )
    sizes = balanced(total, ranks.size)
    size, first = sizes[ranks.rank], sum(sizes[: ranks.rank])
    if weight.shape[0] != size:
        raise PlacementError(
            f"embedding: rank {ranks.rank} of {ranks.size} holds {weight.shape[0]} rows; of {total} in all it should "
            f"hold {size}. Give the rows of the whole table as total=, and the part that a balanced split gives."
        )
    padding = None
    if padding_idx is not None:
        padding = padding_idx % total - first
        padding = padding if 0 <= padding < size else None
    here = (ids >= first) & (ids < first + size)
    rows = weight if size else F.pad(weight, (0, 0, 0, 1))  # one row to look up where this rank has none
    # An id that the table has not is out of range on every rank, so that each lookup refuses it, and none goes on.
    other = torch.where((ids >= 0) & (ids < total), 0, rows.shape[0])
    found = F.embedding(torch.where(here, ids - first, other), rows, padding)
    return found.masked_fill(~here.unsqueeze(-1), 0)
