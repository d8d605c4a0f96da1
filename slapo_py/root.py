"""What all cursors of one schedule share: the original, the scheduled copy, the history."""

import difflib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_py.clone import clone
from slapo_py.errors import PathError, StaleCursorError
from slapo_py.history import History, Step
from slapo_py.primitive import TABLE
from slapo_py.snapshot import Snapshot, nothing_collected, random_states_kept

if TYPE_CHECKING:
    from slapo_py.layouts.syncs import Sync
    from slapo_py.schedule import Schedule
    from slapo_py.tracing import Tracer

Annotations = dict[str, dict[str, Any]]


class Root:
    """One schedule. `original` is never changed, `copy` is what the steps rewrite."""

    def __init__(self, original: nn.Module, example_inputs: Any, at: "Callable[[Root, str], Schedule]") -> None:
        self._at = at
        self.original = original
        self.copy = clone(original)
        self.example_inputs = example_inputs
        self.history = History()
        self.annotations: Annotations = {}
        """Tags of parameters, by the parameter's first name: `{"wte.weight": {"lr": 0.1}}`."""
        self.syncs: dict[str, dict[str, Sync]] = {}
        """Collectives at the borders of modules, by path and by where they stand."""
        self.divided: dict[str, dict[str, str]] = {}
        """The attributes that `build` divides over a mesh axis: path -> name -> axis."""
        self._removed: dict[str, Step] = {}
        self._names: dict[int, str] | None = None
        self._parameters: dict[int, tuple[nn.Parameter, str]] | None = None
        self._tracer: Tracer | None = None
        self._depth = 0

    @property
    def tracer(self) -> "Tracer":
        """Made when first asked for; it keeps its captures, so that replaying a history is cheap."""
        if self._tracer is None:
            from slapo_py.tracing import Tracer  # a schedule without a trace needs none of it

            self._tracer = Tracer(lambda: self.copy, self.example_inputs)
        return self._tracer

    @property
    def has_tracer(self) -> bool:
        return self._tracer is not None

    def cursor(self, path: str) -> "Schedule":
        """The cursor at a path. Raises `PathError`."""
        return self._at(self, self.canonical(path))

    def fresh(self, original: nn.Module | None = None) -> "Schedule":
        """A schedule without steps of the same original, or of another one like it."""
        return Root(original or self.original, self.example_inputs, self._at).cursor("")

    # Paths

    def canonical(self, path: str) -> str:
        """The first name, in model order, of the module that a path names. Raises `PathError`."""
        module = self.find(path)
        if module is None:
            raise self._unknown(path)
        if self._names is None or self._names.get(id(module)) is None:
            self._names = {id(one): name for name, one in self.copy.named_modules()}
        return self._names[id(module)]

    def first_name(self, parameter: nn.Parameter) -> str:
        """The first name, in model order, of a parameter of the copy."""
        held = (self._parameters or {}).get(id(parameter))
        if held is None or self._depth > 1:  # a larger step may be about to change the modules
            self._parameters = {id(one): (one, name) for name, one in self.copy.named_parameters()}
            held = self._parameters[id(parameter)]
        owner, _, last = held[1].rpartition(".")
        module = self.find(owner)
        if module is not None and module._parameters.get(last) is parameter:
            return held[1]
        self._parameters = None
        return self.first_name(parameter)

    def module(self, path: str) -> nn.Module:
        """The copy's module at the path of a cursor, which existed when the cursor was made."""
        module = self.find(path)
        if module is None:
            raise self._stale(path)
        return module

    def find(self, path: str, within: nn.Module | None = None) -> nn.Module | None:
        module: nn.Module | None = within if within is not None else self.copy
        for part in path.split(".") if path else ():
            module = module._modules.get(part) if module is not None else None
        return module

    def paths(self) -> list[str]:
        return [name for name, _ in self.copy.named_modules()]

    def _unknown(self, path: str) -> PathError:
        every = [name for name, _ in self.copy.named_modules(remove_duplicate=False) if name]
        if path in self._removed:
            return self._stale(path)
        close = close_paths(path, every)
        parent = path
        while parent and self.find(parent) is None:
            parent = parent.rpartition(".")[0]
        found = ", ".join(list((self.find(parent) or self.copy)._modules)[:12]) or "none"
        where = f"{parent!r}" if parent else "the model"
        hint = " ".join(f'sch["{name}"]' for name in close)
        remedy = f"Did you mean {hint}?" if close else "print(sch) shows all paths."
        return PathError(f"sch[{path!r}]: the model has no module of this name. Children of {where}: {found}. {remedy}")

    def _stale(self, path: str) -> StaleCursorError:
        step = self._removed.get(path)
        why = f"the step {step} removed it" if step else "it is no longer part of the model"
        return StaleCursorError(
            f"sch[{path!r}]: this place is gone: {why}. print(sch) shows what is there now; "
            f"sch.undo() takes the last step back."
        )

    # Steps

    @contextmanager
    def step(self, path: str) -> Iterator[None]:
        """Steps within the body belong to a larger one: they are carried out, but not recorded on their own."""
        self._depth += 1
        try:
            with random_states_kept(), _compiling_nothing(), nothing_collected(), self.transaction(path):
                yield
        finally:
            self._depth -= 1

    @contextmanager
    def transaction(self, path: str) -> Iterator[None]:
        """All or nothing for changes at and below a path: whatever is raised, everything is as before."""
        place = self.module(path)
        above = [self.module(path[:end]) for end in _dots(path)] if path else []
        shared = (self.annotations, self.syncs, self.divided, self._removed)
        snapshot = Snapshot(place.modules(), above, *shared)
        history, copy = self.history, self.copy
        try:
            yield
        except BaseException:
            self.copy = copy
            if snapshot.restore():
                self._forget()
            self.history = history
            self._names = self._parameters = None
            raise

    def record(self, step: Step, before: dict[str, int]) -> None:
        """Append a step, unless it is part of a larger one, and note the places that it removed."""
        self.note_removed(step, before)
        if not TABLE[step.primitive].structural:
            self._parameters = None
        if self._depth == 0:
            self.history = History((*self.history, step))

    def names_below(self, path: str) -> dict[str, int]:
        """All names at and below a path, with the id of their module."""
        prefix = path + "." if path else ""
        named = self.module(path).named_modules(remove_duplicate=False)
        return {prefix + name if name else path: id(one) for name, one in named}

    def note_removed(self, step: Step, before: dict[str, int]) -> None:
        if self.find(step.path) is not None and self.names_below(step.path) == before:
            return
        self._names = None
        for name in before:
            if self.find(name) is None:
                self._removed[name] = step

    @contextmanager
    def rebuilt(self) -> Iterator[None]:
        """A fresh clone of the original with an empty history; the old copy comes back if the body raises."""
        held = (self.copy, self.history, self.annotations, self.syncs, self.divided, self._removed, self._names)
        training = {name: one.training for name, one in self.copy.named_modules(remove_duplicate=False)}
        self.copy, self.history = clone(self.original), History()
        self.annotations, self.syncs, self.divided, self._removed, self._names = {}, {}, {}, {}, None
        self._parameters = None
        if not all(step.primitive in TABLE and TABLE[step.primitive].structural for step in held[1]):
            self._forget()
        try:
            yield
            for name, one in self.copy.named_modules(remove_duplicate=False):
                one.training = training.get(name, one.training)
        except BaseException:
            self.copy, self.history, self.annotations, self.syncs, self.divided, self._removed, self._names = held
            self._parameters = None
            self._forget()
            raise

    def _forget(self) -> None:
        """What modules are called with may be different from now on."""
        if self._tracer is not None:
            self._tracer.forget()


def _compiling_nothing() -> AbstractContextManager[Any]:
    """A step may run the model, to record it: compiled modules run as plain ones then.

    Compiling them for that would take seconds, and leaves marks on the parameters, which the original shares.
    """
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled yet, and the import is slow
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def close_paths(path: str, every: list[str], n: int = 3) -> list[str]:
    """Names like this one: by spelling, then those that end like it."""
    last = path.rpartition(".")[2]
    close = difflib.get_close_matches(path, every, n=n, cutoff=0.6)
    if not any(letter.isalpha() for letter in last):  # "*" and "3" are the last component of everything
        return close
    ends = [name for name in every if name.rpartition(".")[2] == last]
    ends += [name for name in every if difflib.get_close_matches(last, [name.rpartition(".")[2]], cutoff=0.75)]
    return list(dict.fromkeys([*close, *ends]))[:n]


def _dots(path: str) -> Iterator[int]:
    """Where the paths of the modules above end: "a.b.c" -> 0, 1, 3."""
    yield 0
    yield from (index for index, letter in enumerate(path) if letter == ".")
