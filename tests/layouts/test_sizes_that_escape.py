"""Sizes of split values that leave the graph as numbers of python: refused where a rank's number is another."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.errors import PlacementError, VerificationError
from slapo_py.layouts.checking.check import checked
from slapo_py.layouts.checking.on_a_rank import unlike
from slapo_py.layouts.inference.code_line import with_size_left_open
from slapo_py.layouts.recording.record import record


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.summed = nn.Linear(16, 32), nn.Linear(32, 16), nn.Identity()
        self.width, self.heads = 32, 4


Forward = Callable[[Base, Tensor], Any]


def split(forward: Forward) -> slapo.Schedule:
    """Column-parallel first, row-parallel second, with the syncs that this needs."""
    torch.manual_seed(0)
    model = type("Model", (Base,), {"forward": forward})()
    sch = slapo.create_schedule(model, (torch.randn(4, 6, 16),))
    sch["up"].shard("weight", "bias", dim="out")
    sch["down"].shard("weight", dim="in")
    sch["up"].sync("input", grad="all_reduce")
    sch["down"].sync("output", "all_reduce")
    if "summed" in forward.__code__.co_names:
        sch["summed"].sync("output", "all_reduce")
    return sch


# What is wrong


def a_root(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y / math.sqrt(y.size(-1)))


def a_choice(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    if y.shape[-1] > 16:
        y = y * 2
    return self.down(y)


def a_length(self: Base, x: Tensor) -> Tensor:
    y = self.up(x).transpose(0, 2)
    return self.down((y * len(y)).transpose(0, 2))


def a_loop(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    for _ in range(y.shape[2]):
        y = y * 1.01
    return self.down(y)


def a_loop_over_a_length(self: Base, x: Tensor) -> Tensor:
    y = self.up(x).flatten(0, 1)
    for _ in range(len(y[0])):
        y = y * 1.01
    return self.down(y).unflatten(0, (4, 6))


def a_factor_by_keyword(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(torch.add(y, y, alpha=1 / y.shape[-1]))


def a_reciprocal(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y * (1.0 / y.shape[-1]))


def a_float(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y * float(y.size(2)))


def a_power(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y * y.shape[-1] ** -0.5)


def a_number_of_elements(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y * math.log(y.numel()))


def a_mean_by_hand(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y) * (self.summed(y.sum(-1, keepdim=True)) / y.shape[-1])


def a_mean_by_hand_with_a_float(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y) * (self.summed(y.sum(-1, keepdim=True)) / float(y.shape[-1]))


def a_size_by_keyword(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(torch.mul(y, other=y.shape[-1]))


def a_size_that_raises(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    if y.shape[-1] != 32:
        raise ValueError("not 32 wide")
    return self.down(y)


WRONG: list[Forward] = [
    a_root, a_choice, a_length, a_loop, a_loop_over_a_length, a_factor_by_keyword, a_reciprocal, a_float, a_power,
    a_number_of_elements, a_size_by_keyword, a_size_that_raises,
]  # fmt: skip


@pytest.mark.parametrize("forward", WRONG, ids=lambda one: one.__name__)
def test_refused_and_mended(forward: Forward) -> None:
    sch = split(forward)
    (fault,) = sch.check()
    assert fault.kind == "size" and f"let each rank have this value whole. Write: {fault.line}" in fault.message
    exec(fault.line, {"sch": sch})
    assert sch.check() == []


@pytest.mark.parametrize("forward", [a_mean_by_hand, a_mean_by_hand_with_a_float])
def test_a_mean_by_hand_is_refused(forward: Forward) -> None:
    """No step alone mends it: with the value whole, its sum would be, too."""
    (fault,) = split(forward).check()
    assert fault.kind == "size" and fault.line == ""
    assert "Take the number from an attribute that is not divided" in fault.message


@pytest.mark.parametrize("forward", [a_root, a_choice, a_reciprocal, a_loop, a_mean_by_hand_with_a_float])
def test_refused_by_verify_and_auto_sync(forward: Forward) -> None:
    with pytest.raises(VerificationError, match="build refuses|has other values"):
        split(forward).verify(mesh={"tp": 2}, simulate=True)
    with pytest.raises(PlacementError, match="auto_sync.* It depends on a size of output 0 of .up., .* 16 on a rank"):
        split(forward).auto_sync("tp")


def test_what_is_said() -> None:
    (fault,) = split(a_root).check()
    assert re.fullmatch(
        r"the forward gives 5.65\d+ to truediv \(.*test_sizes_that_escape.py:\d+\) in one process, and 4.0 on a rank. "
        r'It depends on a size of output 0 of "up", which is read at .*escape.py:\d+: 32 in one process, '
        r'16 on a rank \(output 0 of "up" is S\(2\) by step 1, sch\["up"\].shard\("weight", "bias", dim="out"\)\)'
        r". Take the number from an attribute that is not divided, or from the size of a value that is whole, or let "
        r'each rank have this value whole. Write: sch\["up"\].sync\("output", "all_gather", dim=2\); '
        r'sch\["down"\].sync\("input", "split", dim=2\)',
        fault.message,
    )


def test_a_part_of_a_model() -> None:
    """The module that does it is named."""
    model = nn.Sequential(type("Model", (Base,), {"forward": a_root})(), nn.Linear(16, 16))
    sch = slapo.create_schedule(model, (torch.randn(4, 6, 16),))
    sch["0.up"].shard("weight", "bias", dim="out").sync("input", grad="all_reduce")
    sch["0.down"].shard("weight", dim="in").sync("output", "all_reduce")
    (fault,) = sch.check()
    assert 'to truediv in "0"' in fault.message and 'output 0 of "0.up" is S(2) by step 1' in fault.message


# Attributes that are divided


def a_choice_by_heads(self: Base, x: Tensor) -> Tensor:
    y = self.up(x).view(4, 6, self.heads, -1)
    if self.heads > 2:
        y = y * 2
    return self.down(y.flatten(2))


def a_loop_over_heads(self: Base, x: Tensor) -> Tensor:
    y = self.up(x).view(4, 6, self.heads, -1)
    for _ in range(self.heads):
        y = y * 1.01
    return self.down(y.flatten(2))


def a_reciprocal_of_heads(self: Base, x: Tensor) -> Tensor:
    y = self.up(x).view(4, 6, self.heads, -1)
    return self.down(y.flatten(2) * (1.0 / self.heads))


def heads_as_they_are(self: Base, x: Tensor) -> Tensor:
    y = self.up(x).view(4, 6, self.heads, -1)
    return self.down(y.flatten(2) * abs(self.heads))


@pytest.mark.parametrize("forward", [a_choice_by_heads, a_loop_over_heads, a_reciprocal_of_heads, heads_as_they_are])
def test_divided_attributes(forward: Forward) -> None:
    sch = split(forward).configure(heads=slapo.per_rank("tp"))
    (fault,) = sch.check()
    assert "depends on the attribute 'heads' of \"\", of which a rank has its part. Take the number" in fault.message


# Sizes that do not divide evenly: the last ranks have smaller parts


def a_choice_of_the_last_rank(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y * 2 if y.shape[-1] > 10 else y)


def a_factor_of_the_last_rank(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y * (11 / min(11, y.shape[-1])))


def a_result_of_the_last_rank(self: Base, x: Tensor) -> Any:
    y = self.up(x)
    return self.down(y), min(11, y.shape[-1])


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (a_choice_of_the_last_rank, "goes on with mul .* in one process, and with .* on rank 2.* 32 .*, 10 on rank 2"),
        (a_factor_of_the_last_rank, r"gives 1\.0 to mul .* in one process, and 1\.1 on rank 2"),
        (a_result_of_the_last_rank, "gives 11 to the result .* in one process, and 10 on rank 2"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_each_rank_that_has_other_sizes_is_looked_at(forward: Forward, text: str) -> None:
    sch = split(forward)
    assert sch.check(ranks=2) == []  # 16 and 16
    (fault,) = sch.check(ranks=3)  # 11, 11 and 10
    assert re.search(text, fault.message), fault.message


TABLE = {size: torch.tensor(1.0 / size) for size in (16, 32)}


def a_tensor_chosen_by_a_size(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y * TABLE[int(y.shape[-1])])


def test_a_tensor_that_python_chooses_by_a_size() -> None:
    (fault,) = split(a_tensor_chosen_by_a_size).check()
    text = (
        "takes a tensor from outside in one process, and another one on a rank. It depends on a size of .*32 .*, 16 on"
    )
    assert re.search(text, fault.message), fault.message


def test_an_attribute_of_which_the_last_rank_has_less() -> None:
    sch = split(a_choice_by_one_head).configure(heads=slapo.per_rank("tp"))
    assert sch.check(ranks=2) == []  # 2 and 2
    (fault,) = sch.check(ranks=3)  # 2, 1 and 1
    assert "on rank 1" in fault.message and "the attribute 'heads'" in fault.message


def a_choice_by_one_head(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y * 2 if self.heads > 1 else y)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_one_rank_of_each_kind_is_looked_at(ranks: int) -> None:
    sch = split(sizes_of_the_value_itself)
    typing, _ = checked(sch, recording := record(sch), "tp", ranks)
    assert unlike(recording, typing) == {2: [0], 3: [0, 2], 5: [0, 2]}[ranks]  # 32 = 3 * 10 + 2 = 5 * 6 + 2
    assert sch.check(ranks=ranks) == []


# What is right


def a_size_that_is_whole(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    for _ in range(y.shape[1]):
        y = y / math.sqrt(y.size(0))
    return self.down(y * len(y) * (1.0 / x.shape[-1]))


def sizes_of_the_value_itself(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    rows, length, width = y.shape
    return self.down(y.view(rows * length, width).view(rows, length, width))


def a_choice_that_is_the_same(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y * 2 if y.shape[-1] > 2 and len(y[0, 0]) else y)


def a_number_of_an_attribute(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    return self.down(y / math.sqrt(self.width) * (1.0 / self.down.in_features))


def a_size_of_the_result(self: Base, x: Tensor) -> Tensor:
    y = self.down(self.up(x))
    return y / math.sqrt(y.size(-1))


RIGHT = [
    a_size_that_is_whole, sizes_of_the_value_itself, a_choice_that_is_the_same, a_number_of_an_attribute,
    a_size_of_the_result,
]  # fmt: skip


@pytest.mark.parametrize("forward", RIGHT, ids=lambda one: one.__name__)
def test_right(forward: Forward) -> None:
    sch = split(forward)
    assert sch.check() == []
    assert sch.verify(mesh={"tp": 2}, simulate=True).grade in ("equal", "rounding")


def a_number_by_keyword(self: Base, x: Tensor) -> Tensor:
    return self.down(self.up(x).unflatten(dim=-1, sizes=(self.heads, -1)).softmax(-1).flatten(2))


def test_sizes_by_keyword_are_divided() -> None:
    sch = split(a_number_by_keyword)
    (fault,) = sch.check()
    assert fault.kind == "size not divided" and fault.line == 'sch.configure(heads=slapo.per_rank("tp"))'
    sch.auto_sync("tp")
    assert sch.check() == []
    assert sch.verify(mesh={"tp": 2}, simulate=True).grade in ("equal", "rounding")


# Sizes of a whole value, given to a split one


def the_width_of_the_input(self: Base, x: Tensor) -> Tensor:
    rows, length, width = x.shape
    y = self.up(x).view(rows, length, -1, 8).softmax(-1)
    return self.down(y.view(rows, length, 2 * width))


def the_size_of_a_head(self: Base, x: Tensor) -> Tensor:
    y = self.up(x)
    rows, length, width = x.shape
    return self.down(y.view(rows, length, self.heads, 2 * width // self.heads).softmax(-1).flatten(2))


@pytest.mark.parametrize(
    ("forward", "line"),
    [
        (the_width_of_the_input, "return self.down(y.view(rows, length, -1))"),
        (the_size_of_a_head, "return self.down(y.view(rows, length, self.heads, -1).softmax(-1).flatten(2))"),
    ],
)
def test_sizes_of_a_whole_value(forward: Forward, line: str) -> None:
    sch = split(forward)
    faults = {one.kind: one for one in sch.check()}
    assert "wrong split" not in faults
    message = faults["size of a whole value"].message
    assert "that is whole on a rank" in message
    assert message.endswith(f"or leave it to torch with -1. Write in the code: {line}")
    with pytest.raises(PlacementError, match="Write in the code: "):
        sch.auto_sync("tp")


def test_a_line_is_proposed_only_where_it_is_plain() -> None:
    file = __file__
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    number = next(i for i, one in enumerate(lines, 1) if "y.view(rows, length, 2 * width)" in one)
    assert with_size_left_open(f"{file}:{number}", "view", 0) == "return self.down(y.view(-1, length, 2 * width))"
    for where, name, index in [
        (f"{file}:{number}", "reshape", 0), (f"{file}:{number}", "view", 3), ("an unknown line", "view", 0),
        ("/nowhere.py:3", "view", 0),
    ]:  # fmt: skip
        assert with_size_left_open(where, name, index) == ""
