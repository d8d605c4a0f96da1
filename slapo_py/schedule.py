"""The schedule: a cursor onto the scheduled copy of a model."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_py.errors import ArgumentError, PathError, TraceError
from slapo_py.history import History, Step
from slapo_py.root import Annotations, Root
from slapo_py.selection import Selection, matching
from slapo_py.snapshot import random_states_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.fx import Graph

    from slapo_py.layouts.inference.state import Fault
    from slapo_py.layouts.placement import Placement
    from slapo_py.matches import Match
    from slapo_py.verify import Report


def create_schedule(model: nn.Module, example_inputs: Any = None) -> "Schedule":
    """A model -> a schedule of it. The model itself is never changed.

    `example_inputs`: what the model is called with: keyword arguments as a dict, positional ones as a tuple, a single
    tensor, or a list of such (several sizes). Steps that need to run the model, like `trace`, need them.

    Requires: an `nn.Module` that can be cloned structurally. Raises `ArgumentError`, `CloneError`.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"create_schedule: needs a torch.nn.Module, found {type(model).__name__}. "
            f"Write create_schedule(model, example_inputs=...)."
        )
    return Schedule(Root(model, example_inputs, Schedule), "")


class Schedule:
    """A place in the scheduled copy: `sch["h.0"]` moves to a module below, `sch["h.0"].checkpoint()` is a step there.

    Primitives are methods (`slapo_py.list_primitives()` names them); each returns the cursor, so calls chain. A
    refused one raises and leaves everything as it was. Cursors are equal when they name the same place of the same
    schedule. They are paths: one is looked up each time it is used.
    """

    __slots__ = ("_path", "_root")

    def __init__(self, root: Root, path: str) -> None:
        self._root = root
        self._path = path

    if TYPE_CHECKING:
        # Primitives are added when they are registered.
        def __getattr__(self, name: str) -> "Callable[..., Schedule]": ...

    # The place

    @property
    def root(self) -> Root:
        """What all cursors of this schedule share."""
        return self._root

    @property
    def path(self) -> str:
        """The first name of this place in model order; "" is the whole model."""
        return self._path

    @property
    def module(self) -> nn.Module:
        """The scheduled copy's module at this place. Raises `StaleCursorError` if a step removed it."""
        return self._root.module(self._path)

    @property
    def original(self) -> nn.Module:
        """The original's module at this place. Raises `PathError` if a step put this place there."""
        module = self._root.find(self._path, within=self._root.original)
        if module is None:
            raise PathError(
                f"sch[{self._path!r}].original: the original model has no module of this name; a step of the schedule "
                f"made it. sch.blame({self._path!r}) shows which."
            )
        return module

    @property
    def annotations(self) -> Annotations:
        """Tags of the parameters at and below this place, by their name seen from here."""
        first: dict[int, str] = {}
        for name, parameter in self._root.copy.named_parameters():
            first.setdefault(id(parameter), name)
        found = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            tags = self._root.annotations.get(first.get(id(parameter), ""))
            if tags:
                found[name] = dict(tags)
        return found

    @property
    def children(self) -> "tuple[Schedule, ...]":
        """The places directly below."""
        return tuple(self)

    # Moving

    def __getitem__(self, path: str | int) -> "Schedule":
        """The place at a path seen from here. Raises `PathError`, with names like it."""
        if isinstance(path, bool) or not isinstance(path, str | int):
            raise PathError(f'sch[{path!r}]: needs a path such as sch["h.0.mlp"], found {type(path).__name__}.')
        self._root.module(self._path)
        below = str(path)
        return self._root.cursor(".".join(part for part in (self._path, below) if part))

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._root.find(path, within=self.module) is not None

    def __iter__(self) -> "Iterator[Schedule]":
        names = [name for name, child in self.module._modules.items() if child is not None]
        return iter([self[name] for name in names])

    def __len__(self) -> int:
        return sum(child is not None for child in self.module._modules.values())

    def __bool__(self) -> bool:
        return True  # a place without children is a place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self._root is other._root and self._path == other._path

    def __hash__(self) -> int:
        return hash((id(self._root), self._path))

    def select(self, glob: str) -> Selection:
        """All places below that match: `*` is one component of a path, `**` any number, in model order.

        A snapshot: places that later steps make are not in it. Raises `NoMatchError`, with names like it.
        """
        return Selection(self, glob, [self._root.cursor(path) for path in matching(self._root, self._path, glob)])

    # What was done

    @property
    def history(self) -> History:
        """All steps of the schedule so far, as a value."""
        return self._root.history

    def undo(self, k: int = 1) -> "Schedule":
        """Take the last k steps back, by replaying the others on a fresh clone of the original.

        Cursors stay valid; `sch.module` is a new object, with the training flags of the old.
        """
        root = self._root
        if not root.history:
            raise ArgumentError(f"undo({k!r}): the history is empty; there is no step to take back.")
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= len(root.history):
            raise ArgumentError(
                f"undo({k!r}): needs a whole number of steps between 1 and {len(root.history)}, the length of the "
                f"history. print(sch.history) shows the steps."
            )
        kept = root.history[:-k]
        with root.rebuilt():
            kept._apply(root)
        return self

    def blame(self, path: str = "") -> History:
        """The steps that touched a place (seen from here): at it, below it, and above it where they flatten."""
        place = self[path].path

        def touched(step: Step) -> bool:
            if step.path == place or step.path.startswith(place + ".") or not place:
                return True
            above = not step.path or place.startswith(step.path + ".")
            return above and bool(step.kwargs.get("flatten"))

        return History(step for step in self._root.history if touched(step))

    # Traces

    def _trace(self) -> Any:
        from slapo_py.tracing import trace_of

        trace = trace_of(self.module)
        if trace is None:
            where = f'sch["{self._path}"]' if self._path else "sch"
            raise TraceError(f"{where}: this place is not traced, so it has no graph. Trace it first: {where}.trace().")
        return trace

    @property
    def graph(self) -> "Graph":
        """The static graph of a traced place. Raises `TraceError` if it is not traced."""
        graph: Graph = self._trace().graph
        return graph

    @property
    def guards(self) -> list[str]:
        """What is checked at each call of a traced place before its graph is used."""
        return list(self._trace().guards)

    @property
    def misses(self) -> int:
        """How often a traced place was called in a way that its trace does not cover."""
        return int(self._trace().misses(self.module))

    @property
    def missed_guards(self) -> "Counter[str]":
        """Why they missed: the guards that failed first, and how often."""
        missed: Counter[str] = self._trace().missed_guards(self.module)
        return missed

    @property
    def notes(self) -> list[str]:
        """What a reader of a traced place should know, such as a mode that runs the original."""
        return list(self._trace().notes)

    # Patterns

    def find(self, pattern: Any) -> "list[Match]":
        """All occurrences of a pattern in the graph of a traced place, in its order; they never overlap.

        A pattern is a function over torch operations, such as `lambda x, b: F.gelu(x + b)`; see `slapo_py.pattern`.
        Raises `TraceError` if the place is not traced, `PatternError` if the pattern can't be one.
        """
        from slapo_py.matches import search

        return search(self, pattern)

    def why_not(self, pattern: Any) -> str:
        """How far the best near-miss of a pattern came at a traced place, and what stopped it."""
        from slapo_py.matches import reason

        return reason(self, pattern)

    # Layouts

    def check(self, axis: str | None = None, ranks: "int | Mapping[str, int]" = 2) -> "list[Fault]":
        """What is wrong with the split parameters and syncs at and below this place; [] if they fit.

        Each fault says where, which placements were found and needed, and the line to write. axis: the mesh axis that
        is looked at; None: each that the schedule uses. ranks: the size of every axis for which sizes are looked at, or
        of each by name. Raises `ArgumentError`, `TraceError`, `NoExampleInputs`.
        """
        with random_states_kept():
            from slapo_py.layouts.checking.check import check

            return check(self, axis, ranks)

    def auto_sync(self, axis: str = "tp", pins: "Mapping[str, Placement] | None" = None, ranks: int = 2) -> "Schedule":
        """Insert every missing sync, summed gradient and divided attribute at and below this place, as ordinary steps.

        And `fork_rng` at modules that draw random numbers for split values alone; where one draws for whole ones, too,
        its ranks go on drawing alike.

        pins: placements of what enters modules, by path from here: sequence parallelism is one pin,
        `{"model.layers.0": slapo.Shard(1)}`. All or nothing. Raises `PlacementError` where a conversion or a literal
        size has no place, `ShardError` for heads that do not divide, `ArgumentError`, `TraceError`, `NoExampleInputs`.
        """
        with random_states_kept():
            from slapo_py.layouts.checking.auto import auto_sync
            from slapo_py.layouts.checking.axes import refuse

            # A pin is a word on an axis that no step uses yet.
            refuse(self._root, f'auto_sync at "{self._path}"', None if pins else axis, ranks)
            with self._root.transaction(self._path):
                auto_sync(self, axis, pins, ranks)
        return self

    # Verifying

    def verify(
        self, *, steps: int = 1, seed: int = 0, mesh: "Mapping[str, int] | None" = None, simulate: bool = False
    ) -> "Report":
        """Run the original and the scheduled model side by side on private copies, and grade every difference.

        Outputs, gradients, buffers, random states, names, ties and flags are compared in train and eval mode, at
        several batch sizes, in several dtypes, over calls in a row and `steps` optimizer steps. At a place below, that
        module alone. `mesh={"tp": 2}` runs the schedule on two processes of this machine, `mesh={"tp": 2},
        simulate=True` as two ranks in lock step in this one, with its own collectives and no others. Returns a report
        with a `grade`, "equal" or "rounding", that prints as a table. Raises `VerificationError` for a bug, which names
        the module and the step; `RankError`, `NoExampleInputs`, `ArgumentError`.
        """
        with random_states_kept():  # what is imported here may draw
            from slapo_py.verify import verify

        return verify(self, steps=steps, seed=seed, mesh=mesh, simulate=simulate)

    # Printing

    def __str__(self) -> str:
        with random_states_kept():  # importing rich draws from Python's random state
            from slapo_py.report.tree import text

            return text(self)

    def __rich__(self) -> Any:
        with random_states_kept():
            from slapo_py.report.tree import rich_view

            return rich_view(self)

    def __repr__(self) -> str:
        module = self._root.find(self._path)
        kind = type(module).__name__ if module is not None else "a removed place"
        return f'<Schedule of {kind} at "{self._path}", {len(self._root.history)} steps>'
