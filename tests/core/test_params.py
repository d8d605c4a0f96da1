"""Parameter maps: what they say, that they are bijections, and what they refuse."""

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slapo_py as slapo
from slapo_py import codec
from slapo_py.errors import ArgumentError, HistoryError
from slapo_py.history import History, Step
from slapo_py.params import Cat, Part, Transpose, cat, split, transpose
from slapo_py.replacing.parameter_map import ParameterMap

Shapes = dict[str, tuple[int, ...]]


def numbered(shapes: Shapes) -> dict[str, torch.Tensor]:
    """Tensors in which each element has a number of its own."""
    found, start = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        found[name] = torch.arange(start, start + size, dtype=torch.float64).reshape(shape)
        start += size
    return found


def test_words_mean_what_torch_means() -> None:
    old = numbered({"q": (2, 3), "k": (1, 3), "c": (4, 6), "bias": (5,)})
    parts = split("c", [1, 5], dim=1)
    sources = {"qk": cat("q", "k"), "first": parts[0], "second": transpose(parts[1], 0, 1), "b": "bias"}
    new = ParameterMap(sources, {name: tuple(one.shape) for name, one in old.items()}).forward(old)
    assert torch.equal(new["qk"], torch.cat([old["q"], old["k"]]))
    assert torch.equal(new["first"], old["c"][:, :1])
    assert torch.equal(new["second"], old["c"][:, 1:].t())
    assert new["b"] is old["bias"]
    assert new["second"].is_contiguous()


def test_interleaved_heads() -> None:
    """Rows of q, k and v head by head: split and cat nest."""
    q, k = split("q", 2), split("k", 2)
    old = numbered({"q": (4, 3), "k": (4, 3)})
    mapping = ParameterMap({"qk": cat(q[0], k[0], q[1], k[1])}, {"q": (4, 3), "k": (4, 3)})
    new = mapping.forward(old)["qk"]
    assert torch.equal(new, torch.cat([old["q"][:2], old["k"][:2], old["q"][2:], old["k"][2:]]))
    back = mapping.inverse({"qk": new})
    assert all(torch.equal(back[name], old[name]) for name in old)


@st.composite
def maps(draw: Any) -> tuple[dict[str, Any], Shapes]:
    """A random nested map: old tensors are split, transposed and put together again, all elements once."""
    shapes: Shapes = {}
    pieces: list[tuple[Any, tuple[int, ...]]] = []
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
        shapes[f"old.{index}"] = shape
        pieces.append((f"old.{index}", shape))
    for _ in range(draw(st.integers(0, 8))):
        which = draw(st.integers(0, len(pieces) - 1))
        source, shape = pieces[which]
        if not shape:
            continue
        dim = draw(st.integers(-len(shape), len(shape) - 1))
        action = draw(st.sampled_from(["split", "sizes", "transpose", "cat"]))
        pieces.pop(which)
        if action == "transpose":
            other = draw(st.integers(0, len(shape) - 1))
            swapped = list(shape)
            swapped[dim], swapped[other] = swapped[other], swapped[dim]
            pieces.append((transpose(source, dim, other), tuple(swapped)))
        elif action == "cat":
            mates = [one for one in pieces if _fit(one[1], shape, dim % len(shape))]
            pieces = [one for one in pieces if one not in mates]
            length = shape[dim] + sum(one[1][dim] for one in mates)
            whole = list(shape)
            whole[dim] = length
            pieces.append((cat(source, *(one[0] for one in mates), dim=dim), tuple(whole)))
        else:
            sizes = [1] * shape[dim] if action == "split" else _sizes(draw, shape[dim])
            for part, size in zip(split(source, len(sizes) if action == "split" else sizes, dim), sizes, strict=True):
                small = list(shape)
                small[dim] = size
                pieces.append((part, tuple(small)))
    order = draw(st.permutations(range(len(pieces))))
    return {f"new.{at}": pieces[index][0] for at, index in enumerate(order)}, shapes


def _fit(one: tuple[int, ...], other: tuple[int, ...], dim: int) -> bool:
    return len(one) == len(other) and all(a == b for at, (a, b) in enumerate(zip(one, other, strict=True)) if at != dim)


def _sizes(draw: Any, total: int) -> list[int]:
    sizes = []
    while sum(sizes) < total:
        sizes.append(draw(st.integers(1, total - sum(sizes))))
    return sizes


@given(maps())
@settings(max_examples=200, deadline=None)
def test_forth_and_back_is_identity(case: tuple[dict[str, Any], Shapes]) -> None:
    sources, shapes = case
    mapping = ParameterMap(sources, shapes)
    old = numbered(shapes)
    new = mapping.forward(old)
    assert {name: tuple(one.shape) for name, one in new.items()} == mapping.new_shapes
    elements = torch.cat([one.flatten() for one in new.values()])
    assert torch.equal(elements.sort().values, torch.arange(len(elements), dtype=torch.float64))
    back = mapping.inverse(new)
    assert list(back) == list(shapes)
    assert all(torch.equal(back[name], old[name]) for name in shapes)
    made = numbered(mapping.new_shapes)
    again = mapping.forward(mapping.inverse(made))
    assert all(torch.equal(again[name], made[name]) for name in made)


@given(maps())
@settings(max_examples=50, deadline=None)
def test_a_map_is_a_value(case: tuple[dict[str, Any], Shapes]) -> None:
    sources, shapes = case
    step = Step("replace", "", (), {"params": sources})
    assert codec.decode(codec.encode(sources)) == sources
    text = step.source(codec.Source()).removeprefix("sch.replace(params=").removesuffix(")")
    assert eval(text, {"slapo": slapo}) == sources
    copied = pickle.loads(pickle.dumps(ParameterMap(sources, shapes)))
    assert all(torch.equal(copied.forward(numbered(shapes))[name], one) for name, one in
               ParameterMap(sources, shapes).forward(numbered(shapes)).items())  # fmt: skip


def test_a_history_saves_maps(tmp_path: Path) -> None:
    params = {"a": cat("q", transpose("k", 0, 1), dim=1), "b": split("c", [1, 2])[1], "d": "e"}
    history = History([Step("replace", "h.0", (dict,), {"params": params})])
    history.save(tmp_path / "history.json")
    loaded = History.load(tmp_path / "history.json", allow=["builtins"])
    assert loaded == history
    assert loaded[0].kwargs["params"] == params
    assert (
        'params={"a": slapo.params.cat("q", slapo.params.transpose("k", 0, 1), dim=1), '
        '"b": slapo.params.split("c", [1, 2])[1], "d": "e"}' in str(history)
    )
    text = (tmp_path / "history.json").read_text()
    (tmp_path / "bad.json").write_text(text.replace('"index": 1', '"index": 7'))
    with pytest.raises(HistoryError, match="there is no part 7 of 2"):
        History.load(tmp_path / "bad.json", allow=["builtins"])


def test_windows_are_live_and_ties_stay() -> None:
    mapping = ParameterMap({"qk": cat("q", "k")}, {"q": (2, 2), "k": (2, 2)})
    new = {"qk": torch.zeros(4, 2)}
    known: dict[Any, Any] = {}
    old = mapping.inverse(new, known)
    old["k"].fill_(1.0)
    assert new["qk"].sum() == 4
    assert mapping.inverse(new, known)["q"] is old["q"]
    assert mapping.inverse(new)["q"] is not old["q"]


def test_scalars_pass_and_must_agree() -> None:
    mapping = ParameterMap({"qk": cat("q", "k"), "o": "p"}, {"q": (2, 2), "k": (2, 2), "p": (1,)})
    assert mapping.forward({"q": 3, "k": 3, "p": 2}) == {"qk": 3, "o": 2}
    step = torch.tensor(5.0)
    new = mapping.forward({"q": step, "k": step.clone()})
    assert new["qk"] is step
    assert mapping.inverse({"qk": step}) == {"q": step, "k": step}
    with pytest.raises(ArgumentError, match="'qk' is made of 'q', 'k', and they disagree: 'q' has 3 and 'k' has 4"):
        mapping.forward({"q": 3, "k": 4})
    with pytest.raises(ArgumentError, match="'qk' needs 'q', 'k', and 'k' is missing"):
        mapping.forward({"q": 3})
    with pytest.raises(ArgumentError, match=r"'q' has shape \(3, 2\), and the map needs a tensor of shape \(2, 2\)"):
        mapping.forward({"q": torch.zeros(3, 2), "k": torch.zeros(2, 2)})


def test_parts_of_two_dtypes() -> None:
    mapping = ParameterMap({"q": split("qk", 2)[0], "k": split("qk", 2)[1]}, {"qk": (4,)})
    old = mapping.inverse({"q": torch.ones(2, dtype=torch.bfloat16), "k": torch.full((2,), 1 / 3)})["qk"]
    assert old.dtype is torch.float32
    assert torch.equal(old, torch.tensor([1.0, 1.0, 1 / 3, 1 / 3]))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"a": "q"}, "no new parameter takes 'k', so it would be lost"),
        ({"a": "q", "b": "k", "c": "q"}, "elements of 'q' are used by 'a' and by 'c'; each may be used once"),
        ({"a": cat("q", "q"), "b": "k"}, "elements of 'q' are used by 'a' twice"),
        ({"a": cat("k", split("q", 2)[1])}, r"6 of the 12 elements of 'q' \(4, 3\) are in no new parameter"),
        ({"a": cat("q", "x"), "b": "k"}, "there is no parameter 'x'. Those here: 'q', 'k'"),
        ({"a": cat("q", "k", dim=1)}, r"'k' has shape \(2, 3\) and 'q' has \(4, 3\); they must agree in all dims but"),
        ({"a": transpose("q", 0, 2), "b": "k"}, r"there is no dim 2 in a tensor of shape \(4, 3\)"),
        ({"a": split("q", 3)[0], "b": "k"}, "4 does not divide into 3 equal parts"),
        ({"a": split("q", [1, 2])[0], "b": "k"}, "the sizes add up to 3, and dim 0 has 4"),
    ],
    ids=["lost", "twice", "twice_in_one", "part", "unknown", "shapes", "dim", "uneven", "sizes"],
)
def test_no_bijection(sources: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ParameterMap(sources, {"q": (4, 3), "k": (2, 3)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cat(), "needs the names of parameters, as in cat"),
        (lambda: cat("q", 3), "cat: needs names of parameters, or cat, split or transpose of such, found 3"),  # type: ignore[arg-type]
        (lambda: cat("q", dim="out"), "cat: a dim is a whole number, found 'out'"),  # type: ignore[arg-type]
        (lambda: split("q", 0), "needs a number of parts or a list of sizes, found 0"),
        (lambda: split("q", [1, -1]), r"needs a number of parts or a list of sizes, found \(1, -1\)"),
        (lambda: split(["q"], 2), "split: needs names of parameters"),  # type: ignore[arg-type]
        (lambda: Part("q", 2, 2), "there is no part 2 of 2, counted from 0"),
        (lambda: transpose("q", 0, 1.5), "transpose: a dim is a whole number, found 1.5"),  # type: ignore[arg-type]
    ],
    ids=["nothing", "number", "dim", "none", "negative", "list", "index", "half"],
)
def test_no_expression(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_printed() -> None:
    written = 'slapo.params.cat("q", slapo.params.transpose("k", 0, 1), dim=1)'
    assert repr(Cat(("q", Transpose("k", 0, 1)), 1)) == written
    assert slapo.params.cat("q") == cat("q")
