"""Two tables of what was seen, held against each other: equal, different by rounding, or a bug."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

EQUAL, ROUNDING, BUG, UNCOVERED = "equal", "rounding", "bug", "not covered"
_ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """One entry that differs: why, and by how much of what is allowed (both 0.0 where it is not a matter of size)."""

    key: Any
    why: str
    grade: str = BUG
    error: float = 0.0
    allowed: float = 0.0
    name: str = ""
    """Where the entry is a list of names: the first that differs."""

    @property
    def may_be_rounding(self) -> bool:
        return self.why == VALUES or self.why.startswith(COUNTED)

    @property
    def ratio(self) -> float:
        if not self.error:
            return 0.0
        return self.error / self.allowed if self.allowed else float("inf")


def suspects(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> list[Difference]:
    """What is not bit-equal, graded as a bug for now. Where values alone differ, it may turn out to be rounding."""
    found = []
    for key in [*old, *(key for key in new if key not in old)]:
        one, other = old.get(key, _ABSENT), new.get(key, _ABSENT)
        why, name = _unequal(one, other), ""
        if why and _are_names(one) and _are_names(other):
            why, name = _names_differ(one, other)
        if why:
            found.append(Difference(key, why, name=name))
    return found


def _unequal(old: Any, new: Any) -> str:
    if old is _ABSENT:
        return f"is there in the scheduled model only: {_said(new)}"
    if new is _ABSENT:
        return f"is missing in the scheduled model; the original has {_said(old)}"
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return _unequal_tensors(old, new)
    if isinstance(old, Tensor) or isinstance(new, Tensor) or type(old) is not type(new):
        return f"is {_said(new)}; the original's is {_said(old)}"
    if isinstance(old, float) and old != old and new != new:
        return ""
    return "" if old == new else f"is {_said(new)}; the original's is {_said(old)}"


def _are_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, str) for one in value)


def _names_differ(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, str]:
    """Why two lists of names differ, and the name that is to blame."""
    lost, added = [one for one in old if one not in new], [one for one in new if one not in old]
    if lost or added:
        said = [f"lack {lost[0]!r}"] if lost else []
        said += [f"have {added[0]!r}, which the original's haven't"] if added else []
        return " and ".join(said), (lost or added)[0]
    one, other = next((one, other) for one, other in zip(old, new) if one != other)
    parts = zip(one.split("."), other.split("."))
    above = [part for part, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], parts)]
    return f"come in another order: {other!r} is where the original has {one!r}", ".".join([*above, ""])


def _unequal_tensors(old: Tensor, new: Tensor) -> str:
    for what in ("shape", "dtype", "device", "layout"):
        one, other = getattr(old, what), getattr(new, what)
        if one != other:
            return f"has {what} {_plain(other)}; the original's has {_plain(one)}"
    if not old.is_floating_point() and not old.is_complex():
        count = int((old != new).sum())
        return f"{COUNTED}{count} of {old.numel()} elements" if count else ""
    if torch.equal(old, new):
        return ""
    if not torch.equal(old.isnan(), new.isnan()):
        return f"has {int(new.isnan().sum())} NaN; the original's has {int(old.isnan().sum())}, at other places"
    if not torch.equal(old.isinf(), new.isinf()):
        return f"has {int(new.isinf().sum())} infinities; the original's has {int(old.isinf().sum())}, at other places"
    if torch.equal(old.nan_to_num(), new.nan_to_num()):
        return ""
    return VALUES


VALUES = "has other values"
COUNTED = "differs in "


class Scale:
    """What is allowed of one difference of values: it grows with each run of the original that is weighed in.

    `exact` is the entry of the reference. Without one the original's own numbers stand in for it, and the other runs
    alone say what is allowed.
    """

    def __init__(self, found: Difference, old: Tensor, new: Tensor, exact: Any, dtype: torch.dtype) -> None:
        self._found, self._shape = found, old.shape
        exact = exact if isinstance(exact, Tensor) and exact.shape == old.shape else old
        self._whole = not (old.is_floating_point() or old.is_complex())
        if self._whole:
            self._exact = exact.to(old.dtype)
            self._least: tuple[float, ...] = (0.0, 0.0)
        else:
            usable = exact.isfinite() & old.isfinite() & new.isfinite()
            self._usable = None if bool(usable.all()) else usable
            self._exact = right = self._compared(exact)
            info = torch.finfo(dtype)
            size = (float(right.abs().max()), _rms(right)) if right.numel() else (0.0, 0.0)
            self._least = tuple(info.eps * one + info.smallest_normal * info.eps for one in size)
        self._error = self._errors(new)
        self._floor = self._errors(old)

    def weigh_in(self, run: Any) -> None:
        """Another run that is as right as the original's own."""
        if isinstance(run, Tensor) and run.shape == self._shape:
            self._floor = tuple(map(max, self._floor, self._errors(run)))

    def graded(self) -> Difference:
        allowed = [2 * floor + least for floor, least in zip(self._floor, self._least)]
        grade = ROUNDING if all(error <= most for error, most in zip(self._error, allowed)) else BUG
        shares = [error / most if most else float(error > 0) for error, most in zip(self._error, allowed)]
        which = shares.index(max(shares))
        return replace(self._found, grade=grade, error=self._error[which], allowed=allowed[which])

    def _errors(self, one: Tensor) -> tuple[float, ...]:
        """The largest and the mean; of whole numbers, such as the index of the larger of two, how many are others."""
        if self._whole:
            count = float((one != self._exact).sum())
            return count, count
        off = (self._compared(one) - self._exact).abs()
        return (float(off.max()), _rms(off)) if off.numel() else (0.0, 0.0)

    def _compared(self, one: Tensor) -> Tensor:
        """The elements that are finite in all; to pick them costs more than all else here, so not where all are."""
        return _wide(one) if self._usable is None else _wide(one)[self._usable]


def _rms(tensor: Tensor) -> float:
    return float(tensor.abs().square().mean().sqrt())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {_plain(value.shape)}"
    if isinstance(value, type):
        return f"a {value.__qualname__}"
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _plain(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
