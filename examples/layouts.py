"""An MLP is split over two ranks by hand, an all-reduce is forgotten, and the checker says which line is missing.

The first product is split by its columns, the second by its rows. So the output is a partial sum on each rank, which
everybody remembers; and so is the gradient of the input, which nobody sees in the output. Nothing runs in parallel
here: placements are worked out from the model alone.

Run: python examples/layouts.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def split(sch: slapo.Schedule) -> None:
    """Each rank has half of the hidden features: rows of one weight, columns of the other."""
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")


def main() -> None:
    x = torch.randn(4, 6, 16)
    by_hand = slapo.create_schedule(Mlp(16), example_inputs=(x,))
    split(by_hand)
    by_hand["down"].sync("output", "all_reduce")
    (fault,) = by_hand.check()
    print("forgotten:", fault.message)

    by_hand["up"].sync("input", None, grad="all_reduce")  # the line that it says
    print("faults now:", by_hand.check())

    found = slapo.create_schedule(Mlp(16), example_inputs=(x,))
    split(found)
    found.auto_sync("tp")  # the other way: both are found
    print(found.history)
    print("faults there:", found.check())

    wrong = slapo.create_schedule(Mlp(16), example_inputs=(x,))
    split(wrong)
    wrong["down"].sync("output", "all_reduce")
    wrong["norm"].sync("input", None, grad="all_reduce")  # one module too early: the norm's own gradients stay partial
    for fault in wrong.check():
        print("elsewhere:", fault.message)

    print(slapo.plan(found, mesh={"dp": 4, "tp": 2}))


if __name__ == "__main__":
    main()
