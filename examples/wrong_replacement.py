"""A wrong replacement, and verify's answer: what differs, where first, and which line of the schedule did it.

The replacement forgets that the model's GELU is the exact one. Everything runs, the loss falls, and nobody notices.

Run: python examples/wrong_replacement.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import VerificationError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def up_and_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def wrong(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def right(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x @ weight.t() + bias)  # the same, but for the rounding


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(16) for _ in range(4)])
    sch = slapo.create_schedule(model, example_inputs=(torch.randn(3, 5, 16),))
    sch.select("*").trace()
    sch["0"].replace(right, up_and_gelu)
    sch["2"].replace(wrong, up_and_gelu)
    sch["3"].checkpoint()
    try:
        sch.verify()
    except VerificationError as error:
        print(error)
    sch.undo(2)  # the checkpoint, and what verify blames
    sch["2"].replace(right, up_and_gelu)
    sch["3"].checkpoint()
    print(sch.verify())


if __name__ == "__main__":
    main()
