"""How batches are split and handed to the model."""

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch

from slapo_py.backends.batches import arguments, split
from slapo_py.errors import EngineError

Pair = namedtuple("Pair", "x y")
rows = torch.arange(7.0).view(7, 1)
one = torch.ones(1, 3)
scalar = torch.tensor(2.0)


def shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {key: shapes(item) for key, item in value.items()}
    return [shapes(item) for item in value] if isinstance(value, tuple | list) else value


@pytest.mark.parametrize(
    ("batch", "first"),
    [
        ({"x": rows, "y": torch.ones(7)}, {"x": (3, 1), "y": (3,)}),
        ((rows, torch.ones(7)), [(3, 1), (3,)]),
        ([rows, torch.ones(7)], [(3, 1), (3,)]),
        (rows, (3, 1)),
        (UserDict({"x": rows}), {"x": (3, 1)}),
        (Pair(rows, torch.ones(7)), [(3, 1), (3,)]),
        (
            {"x": rows, "scale": scalar, "mask": one, "flag": True},
            {"x": (3, 1), "scale": (), "mask": (1, 3), "flag": True},
        ),
        ({"x": rows, "y": torch.ones(7), "weights": torch.ones(5)}, {"x": (3, 1), "y": (3,), "weights": (5,)}),
        ({"nested": {"x": rows}, "pair": (rows, scalar)}, {"nested": {"x": (3, 1)}, "pair": [(3, 1), ()]}),
        ({"x": rows, "names": ["a", "b"]}, {"x": (3, 1), "names": ["a", "b"]}),
    ],
)
def test_split(batch: Any, first: Any) -> None:
    parts = split(batch, 3)
    assert len(parts) == 3
    assert shapes(parts[0]) == first
    if isinstance(batch, tuple):
        assert type(parts[0]) is type(batch)


def test_sizes_differ_by_one_and_rows_keep_their_order() -> None:
    parts = split({"x": rows}, 3)
    assert [len(part["x"]) for part in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([part["x"] for part in parts]), rows)


def test_one_part_is_the_batch_itself() -> None:
    batch = {"anything": object()}
    assert split(batch, 1)[0] is batch


def test_fewer_parts_where_that_is_allowed() -> None:
    assert len(split({"x": rows[:2]}, 3, at_most=True)) == 2


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": rows[:2]}, r"2 rows and micro_batches=3.*micro_batches=2"),
        ({"x": rows[:1]}, r"1 row and micro_batches=3"),
        ({"x": scalar}, r"holds no tensor with rows.*micro_batches=1"),
        ({"x": rows, "w": torch.ones(5)}, r"isn't clear which dim 0.*\(batch\['x'\]: 7, batch\['w'\]: 5\).*inputs="),
        # most tensors agree on 5, but the first, which is what the model reads, has 7
        ({"x": rows, "w": torch.ones(5), "v": torch.ones(5)}, r"isn't clear which dim 0"),
        ({"images": [torch.ones(3, 8), torch.ones(3, 9)]}, r"batch\['images'\] is a list of tensors"),
    ],
)
def test_refuses_what_is_not_clear(batch: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        split(batch, 3)


@pytest.mark.parametrize(
    ("batch", "inputs", "expected"),
    [
        ({"x": 1}, None, ((), {"x": 1})),
        (UserDict({"x": 1}), None, ((), {"x": 1})),
        ((1, {"x": 2}), None, ((1, {"x": 2}), {})),
        ([1, 2], None, ((1, 2), {})),
        ({"x": 1, "y": 2}, lambda batch: {"x": batch["x"]}, ((), {"x": 1})),
        ({"x": 1, "y": 2}, lambda batch: ((batch["x"],), {"y": 2}), ((1,), {"y": 2})),
        ({"x": 1, "y": 2}, lambda batch: (batch["x"], batch["y"]), ((1, 2), {})),
        ("raw", lambda batch: [batch], (("raw",), {})),
    ],
)
def test_arguments(batch: Any, inputs: Any, expected: Any) -> None:
    assert arguments(batch, inputs) == expected


def test_a_tensor_is_one_argument() -> None:
    args, kwargs = arguments(rows)
    assert args[0] is rows and not kwargs


def test_refuses_other_batches() -> None:
    with pytest.raises(EngineError, match=r"the batch is a str; the model takes a dict.*inputs=lambda batch"):
        arguments("text")
    with pytest.raises(EngineError, match=r"inputs\(batch\) is a NoneType"):
        arguments({}, lambda batch: None)
