"""The printed schedule: the module tree, what is there, and what was done at each place."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text
from rich.tree import Tree
from torch import nn

from slapo_py.codec import Source
from slapo_py.history import Step
from slapo_py.scheduled import bare, layers

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


@dataclass
class _Row:
    """One module of the tree; rows with equal `form` look the same apart from their names."""

    name: str
    kind: str
    size: str
    done: list[str]
    below: list["_Row"] = field(default_factory=list)

    @property
    def form(self) -> tuple[Any, ...]:
        return (self.kind, self.size, tuple(self.done), tuple((row.name, row.form) for row in self.below))


def text(schedule: "Schedule") -> str:
    """The tree as plain text, the same on every terminal and without one; no line is broken or cut."""
    row = _whole(schedule)
    trees = [_label(row).plain, *_lines(row, "")]
    return "\n".join(line.rstrip() for line in [*trees, *_details(schedule)])


def rich_view(schedule: "Schedule") -> Any:
    """The tree for rich; under the tree of one traced place, its graph as code and its guards."""
    row = _whole(schedule)
    tree = Tree(_label(row))
    _grow(tree, row)
    return Group(tree, *(Text(line) for line in _details(schedule)))


def _details(schedule: "Schedule") -> list[str]:
    trace = _trace_of(schedule.module)
    if trace is None or not schedule.path:
        return []
    code = trace.graph.python_code("self").src.strip("\n")
    guards = [f"  {one}" for one in trace.guards] or ["  none"]
    notes = ["notes:", *(f"  {one}" for one in trace.notes)] if trace.notes else []
    return ["graph:", *code.split("\n"), "guards:", *guards, *notes]


def _whole(schedule: "Schedule") -> _Row:
    return _rows(schedule.module, schedule.path, schedule.path or "model", _steps_by_path(schedule))


def _rows(module: nn.Module, path: str, name: str, steps: dict[str, list[Step]]) -> _Row:
    """Children that have another, earlier name are shown under both; what was done is shown at the first."""
    row = _Row(name, bare(module).__name__, _size(module), _done(module, steps.get(path, [])))
    for key, child in module._modules.items():
        if child is not None:
            row.below.append(_rows(child, f"{path}.{key}" if path else key, key, steps))
    return row


def _size(module: nn.Module) -> str:
    own = {name: tuple(one.shape) for name, one in module._parameters.items() if one is not None}
    if own and not any(child is not None for child in module._modules.values()):
        return "  ".join(f"{name} {list(shape)}" for name, shape in own.items())
    count = sum(one.numel() for one in module.parameters())
    return f"{count:,} parameters" if count else ""


def _done(module: nn.Module, steps: list[Step]) -> list[str]:
    done = [layer.describe() for layer in layers(module)]
    shown = {text.split("(")[0].split()[0] for text in done if text.strip()}
    trace = _trace_of(module)
    if trace is not None and trace.misses(module):
        done.append(f"{trace.misses(module)} misses")
    # Steps that leave no layer, such as annotate and configure, are shown as they were written.
    return done + [_call(step) for step in steps if step.primitive not in shown]


def _call(step: Step) -> str:
    whole = step.source(Source())
    return whole[whole.index(f".{step.primitive}(", len(step.path)) + 1 :]


def _steps_by_path(schedule: "Schedule") -> dict[str, list[Step]]:
    found: dict[str, list[Step]] = {}
    for step in schedule.history:
        found.setdefault(step.path, []).append(step)
    return found


def _trace_of(module: nn.Module) -> Any:
    if not layers(module):
        return None
    from slapo_py.tracing import trace_of

    return trace_of(module)


def _grow(tree: Tree, row: _Row) -> None:
    for shown, first in _shown(row):
        _grow(tree.add(_label(shown)), first)


def _lines(row: _Row, indent: str) -> Iterator[str]:
    shown = _shown(row)
    for index, (one, first) in enumerate(shown):
        last = index == len(shown) - 1
        yield f"{indent}{'└── ' if last else '├── '}{_label(one).plain}"
        yield from _lines(first, indent + ("    " if last else "│   "))


def _shown(row: _Row) -> list[tuple[_Row, _Row]]:
    """What to print for each run of children, and the child that it stands for."""
    shown = []
    for run in _runs(row.below):
        first, last = run[0], run[-1]
        if len(run) == 1:
            shown.append((first, first))
            continue
        size = f"each {first.size}" if first.size else ""
        shown.append((_Row(f"{first.name}..{last.name}", f"({len(run)} x {first.kind})", size, first.done), first))
    return shown


def _runs(rows: list[_Row]) -> list[list[_Row]]:
    """Consecutive numbered siblings that look the same are shown once."""
    runs: list[list[_Row]] = []
    for row in rows:
        if runs and row.name.isdigit() and runs[-1][0].name.isdigit() and runs[-1][0].form == row.form:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _label(row: _Row) -> Text:
    label = Text(no_wrap=True, overflow="ignore")
    label.append(f"{row.name}", style="bold").append("  ").append(row.kind, style="cyan")
    if row.size:
        label.append(f"  {row.size}", style="dim")
    if row.done:
        label.append(f"  <- {', '.join(row.done)}", style="green")
    return label
