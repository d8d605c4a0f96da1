"""A primitive of your own: `keep_in_float32`, for modules that must not run in bfloat16 under autocast.

Once registered it is a word like any other: checked, printed, saved, replayed, undone, and graded by verify.

Run: python examples/own_primitive.py
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

import slapo_py as slapo
from slapo_py.errors import StepError
from slapo_py.scheduled import Forward, Layer, dress, layer_of


@dataclass(frozen=True)
class Float32(Layer):
    """Runs the forward outside of autocast, on float32 inputs."""

    rank: ClassVar[int] = 15

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        @functools.wraps(forward)
        def wide(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return forward(self, *(a.float() if torch.is_floating_point(a) else a for a in args), **kwargs)

        return wide

    def describe(self) -> str:
        return "keep_in_float32"


@slapo.register("keep_in_float32")
class KeepInFloat32(slapo.Primitive):
    """Run this module in float32, whatever autocast says: before bfloat16 within autocast, after float32."""

    def check(self, place: slapo.Schedule) -> None:
        if layer_of(place.module, Float32) is not None:
            raise StepError(f'keep_in_float32 at "{place.path}": it is kept already. Leave out the second one.')

    def apply(self, place: slapo.Schedule) -> None:
        dress(place.module, Float32())


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(3, 8)
    sch = slapo.create_schedule(model, example_inputs=(x,))
    sch["2"].keep_in_float32()
    print(sch)
    print(sch.history)
    with torch.autocast("cpu", torch.bfloat16):
        print("original:", model(x).dtype, " scheduled:", sch.module(x).dtype)
    try:
        sch["2"].keep_in_float32()
    except StepError as error:
        print("refused:", error)
    sch.undo()
    print("after undo:", len(sch.history), "steps")


if __name__ == "__main__":
    main()
