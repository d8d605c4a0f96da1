"""The first module that diverges, from what hooks have seen at every module of both models."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slapo_py.verify.differences import BUG, Difference
from slapo_py.verify.probes import Probe

Visit = tuple[str, int]
_FLAG = "requires_grad of the"
_BEFORE = {"input", "random state before"}
_AFTER = {"output", "input afterwards", "random state after", "global state after", "buffer"}


def first_module(
    old: Mapping[Probe, Any], new: Mapping[Probe, Any], found: Sequence[Difference], parameters: Iterable[str]
) -> str | None:
    """The module whose own results differ though what it was given doesn't; None where the hooks saw nothing of it.

    Forward: the first to return. Backward: the first that the gradient comes to. Of nested ones the innermost.
    `parameters`: the names of those whose gradients differ.
    """
    bad: dict[Visit, set[str]] = defaultdict(set)
    changed: dict[Visit, set[str]] = defaultdict(set)
    for one in found:
        if one.grade == BUG:
            bad[one.key.path, one.key.number].add(one.key.kind)
        if one.key in old and one.key in new:
            changed[one.key.path, one.key.number].add(one.key.kind)
    both = _visits(old, "output") & _visits(new, "output")
    order = list(dict.fromkeys((one.path, one.number) for one in old if one.kind == "output"))
    for visit in order:
        if visit in both and bad[visit] & _AFTER and not bad[visit] & _BEFORE:
            return visit[0]
    for visit in order:  # of what runs without gradients in one of the two nothing was noted
        if f"{_FLAG} output" in changed[visit] and f"{_FLAG} input" not in changed[visit]:
            return visit[0]
    return _first_backward(old, new, bad, parameters)


def _first_backward(
    old: Mapping[Probe, Any], new: Mapping[Probe, Any], bad: Mapping[Visit, set[str]], parameters: Iterable[str]
) -> str | None:
    kind = "gradient of its output"
    seen = {path for path, _ in _visits(old, kind) & _visits(new, kind)}
    spoiled = {path for (path, _), kinds in bad.items() if kind in kinds}
    suspects = {path for (path, _), kinds in bad.items() if "gradient of its input" in kinds}
    for name in parameters:
        owner = name.rpartition(".")[0]
        while owner and owner not in seen:
            owner = owner.rpartition(".")[0]
        suspects.add(owner)
    suspects = {path for path in suspects if path in seen and path not in spoiled}
    inner = {path for path in suspects if not any(is_below(other, path) for other in suspects)}
    order = [one.path for one in old if one.kind == kind]
    return next((path for path in reversed(order) if path in inner), None)


def is_below(path: str, above: str) -> bool:
    return path != above and (not above or path.startswith(above + "."))


def _visits(seen: Mapping[Probe, Any], kind: str) -> set[Visit]:
    return {(one.path, one.number) for one in seen if one.kind == kind}
