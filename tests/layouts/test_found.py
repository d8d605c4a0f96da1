"""Models that once passed the checker and were wrong on ranks: each is refused with the reason, or right."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import PlacementError


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.RReLU()
        self.heads, self.width, self.split_heads = 4, 32, Heads()
        self.register_buffer("mean", torch.zeros(6, 32))


Forward = Callable[[Base, Tensor], Tensor]


def split(forward: Forward) -> slapo.Schedule:
    torch.manual_seed(0)
    model = type("Model", (Base,), {"forward": forward})()
    sch = slapo.create_schedule(model, (torch.randn(4, 6, 16),))
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")
    return sch


def a_number_of_a_divided_attribute(self: Base, x: Tensor) -> Tensor:
    heads = self.up(x).view(4, 6, self.heads, -1)
    return self.down((heads.softmax(-1) * (32 // self.heads) ** -0.5).flatten(2))


def the_same_by_another_name(self: Base, x: Tensor) -> Tensor:
    count = self.heads
    heads = self.up(x).view(4, 6, count, -1)
    return self.down((heads.softmax(-1) * (self.width / count) ** -0.5).flatten(2))


def a_size_worked_out_from_it(self: Base, x: Tensor) -> Tensor:
    rows, length, width = x.shape
    return self.down(self.up(x).view(rows, length, self.heads, 2 * width // self.heads).softmax(-1).flatten(2))


def a_tensor_divided_by_it(self: Base, x: Tensor) -> Tensor:
    return self.down((self.up(x).view(4, 6, self.heads, -1) / self.heads).flatten(2))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).softmax(-1).flatten(-2)


def a_module_called_on_split_and_whole(self: Base, x: Tensor) -> Tensor:
    return self.down(self.split_heads(self.up(x))) + self.split_heads(x)


def an_element_written(self: Base, x: Tensor) -> Tensor:
    hidden = self.up(x)
    hidden[..., 0] = 0
    return self.down(hidden)


def an_element_of_a_mask_written(self: Base, x: Tensor) -> Tensor:
    hidden = self.up(x)
    mask = torch.zeros_like(hidden)
    mask[..., 0] = 1
    return self.down(hidden * mask)


def a_whole_buffer_updated_in_place(self: Base, x: Tensor) -> Tensor:
    hidden = self.up(x)
    with torch.no_grad():
        self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
    return self.down(hidden - self.mean)


def a_module_called_on_two_kinds(self: Base, x: Tensor) -> Tensor:
    return self.drop(self.down(self.drop(self.up(x))))


BOTH = "a rank has its part of the attribute 'heads' .* the forward also uses it otherwise"
WRITTEN = "elements of it are written in place: each rank would write at the same indexes of its own part"
REFUSED: dict[Forward, str] = {
    a_number_of_a_divided_attribute: BOTH,
    the_same_by_another_name: BOTH,
    a_size_worked_out_from_it: "works out from a value that is whole on a rank, .*view.rows, length, self.heads, -1.",
    a_tensor_divided_by_it: BOTH,
    a_module_called_on_split_and_whole: BOTH,
    an_element_written: f'output 0 of "up" is S.2., and {WRITTEN}',
    an_element_of_a_mask_written: f"zeros_like is S.2., and {WRITTEN}",
    a_whole_buffer_updated_in_place: "mean is S.1., and add_ needs it R",
    a_module_called_on_two_kinds: 'called several times, and input 0 of "drop" needs a collective in one call',
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda one: one.__name__)
def test_refused(forward: Forward) -> None:
    sch = split(forward)
    with pytest.raises(PlacementError, match=REFUSED[forward]):
        sch.auto_sync("tp")
    assert sch.check()


def rows_written(self: Base, x: Tensor) -> Tensor:
    hidden = self.up(x) * 1
    hidden[:, 0] = 0
    return self.down(hidden)


def written_under_a_mask(self: Base, x: Tensor) -> Tensor:
    hidden = self.up(x) * 1
    hidden[hidden < 0] = 0
    return self.down(hidden)


def all_results_taken_as_one(self: Base, x: Tensor) -> Tensor:
    return self.down(torch.stack(self.up(x).unbind(-1), -1))


def layers_called_twice(self: Base, x: Tensor) -> Tensor:
    return self.down(F.relu(self.up(F.relu(self.down(F.relu(self.up(x)))))))


def complex_values(self: Base, x: Tensor) -> Tensor:
    return self.down(torch.fft.fft(self.up(x), dim=1).real)


def the_same_dim_in_other_blocks(self: Base, x: Tensor) -> Tensor:
    heads = self.up(x).unflatten(-1, (-1, 8)).transpose(2, 3)
    return self.down(heads.flatten(2))


def a_whole_bias_with_split_and_whole_values(self: Base, x: Tensor) -> Tensor:
    return self.down(self.up(x) * self.down.bias.sum()) + x * self.down.bias.exp()


RIGHT = [
    rows_written, written_under_a_mask, all_results_taken_as_one, layers_called_twice, complex_values,
    the_same_dim_in_other_blocks, a_whole_bias_with_split_and_whole_values,
]  # fmt: skip


@pytest.mark.parametrize("forward", RIGHT, ids=lambda one: one.__name__)
def test_right(forward: Forward) -> None:
    sch = split(forward).auto_sync("tp")
    assert sch.check() == []
    assert sch.verify(mesh={"tp": 2}, simulate=True).grade in ("equal", "rounding")


def test_an_attribute_that_is_no_size_is_not_divided() -> None:
    def forward(self: Base, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) / self.heads**0.5)

    sch = split(forward).auto_sync("tp")
    assert sch.check() == []
    sch.configure(heads=slapo.per_rank("tp"))
    (fault,) = sch.check()
    assert "where a rank would need the whole" in fault.message
