"""The history of a schedule is a value: print it as Python, save, load, replay, compare, cut."""

import difflib
import json
import keyword
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from slapo_py import codec
from slapo_py.errors import HistoryError, ScheduleError
from slapo_py.primitive import TABLE

FORMAT = "slapo_py history"
VERSION = 1


class Step:
    """One step: the primitive, the path, the arguments. Equal by value; live objects compare by identity."""

    __slots__ = ("args", "kwargs", "path", "primitive")

    def __init__(
        self, primitive: str, path: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> None:
        self.primitive = primitive
        self.path = path
        self.args: tuple[Any, ...] = tuple(codec.frozen(one) for one in args)
        self.kwargs: dict[str, Any] = codec.frozen(kwargs or {})

    def _key(self) -> Any:
        # by name: the order in which keywords were written means nothing
        named = tuple(sorted((name, codec.key(value)) for name, value in self.kwargs.items()))
        return (self.primitive, self.path, codec.key(self.args), named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Step) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def source(self, writer: codec.Source) -> str:
        place = f"sch[{writer.write(self.path)}]" if self.path else "sch"
        args = [writer.write(value) for value in self.args]
        args += [f"{name}={writer.write(value)}" for name, value in self.kwargs.items()]
        return f"{place}.{self.primitive}({', '.join(args)})"

    def __str__(self) -> str:
        return self.source(codec.Source())

    def __repr__(self) -> str:
        return f"<Step {self}>"


class History(Sequence[Step]):
    """An immutable sequence of steps. `h[:-1]` is a history too; `print(h)` is Python source that runs."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self._steps = tuple(steps)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> "History": ...
    def __getitem__(self, index: int | slice) -> "Step | History":
        return History(self._steps[index]) if isinstance(index, slice) else self._steps[index]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self._steps == other._steps

    def __hash__(self) -> int:
        return hash(self._steps)

    def __repr__(self) -> str:
        return f"<History of {len(self)} steps>"

    def __str__(self) -> str:
        """Python source: a function `schedule(sch)`, with the imports that it needs."""
        writer = codec.Source()
        body = [f"    {step.source(writer)}" for step in self] or ["    pass"]
        head = sorted(writer.imports)
        for number, what in enumerate(writer.live.values()):
            head.append(f"# live_{number} is {what}: it exists in one process only; put it in a module to import it")
        return "\n".join([*head, *([""] * 2 if head else []), "def schedule(sch):", *body])

    # Saving and loading

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Write the history as JSON. Raises `HistoryError` for a step with an argument of this process only."""
        steps = []
        for number, step in enumerate(self, 1):
            try:
                args, kwargs = [codec.encode(one) for one in step.args], step.kwargs
                named = {name: codec.encode(value) for name, value in kwargs.items()}
            except codec.LiveObject as live:
                raise HistoryError(
                    f"history.save: step {number}, {step}: {live} exists in this process only (a lambda, a local "
                    f"function, an object of __main__). Define it at the top level of a module that can be imported."
                ) from None
            steps.append({"primitive": step.primitive, "path": step.path, "args": args, "kwargs": named})
        text = json.dumps({"format": FORMAT, "version": VERSION, "steps": steps}, indent=1, allow_nan=False)
        target = Path(path)
        partial = target.with_name(target.name + ".part")  # a reader never sees half a file
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(target)

    @classmethod
    def load(cls, path: "str | os.PathLike[str]", allow: Sequence[str] = ()) -> "History":
        """Read a history that `save` wrote. `load(save(h)) == h`.

        Functions and classes are imported only from modules under `allow` (`"my_pkg"` also allows `my_pkg.policies`).
        The whole file is verified before the first import, and nothing else of it is ever executed.
        """
        allow = (allow,) if isinstance(allow, str) else tuple(allow)
        where = f"History.load({str(path)!r})"
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise HistoryError(f"{where}: can't be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise HistoryError(
                f"{where}: is not JSON: {error}. Histories are written by history.save(path)."
            ) from error
        steps = _verified(content, allow, where)
        loaded = []
        for number, step in enumerate(steps, 1):
            try:
                args = [codec.decode(one) for one in step["args"]]
                kwargs = {name: codec.decode(value) for name, value in step["kwargs"].items()}
                hash(Step(step["primitive"], step["path"], args, kwargs))
            except (HistoryError, TypeError) as error:
                raise HistoryError(f"{where}: step {number}: {error}") from error
            loaded.append(Step(step["primitive"], step["path"], args, kwargs))
        return cls(loaded)

    # Using

    def replay(self, schedule: Any) -> Any:
        """Apply all steps to another schedule, all or nothing. Returns that schedule."""
        root = schedule.root
        with root.transaction(""):
            self._apply(root)
        return schedule

    def _apply(self, root: Any) -> None:
        for number, step in enumerate(self, 1):
            try:
                if step.primitive not in TABLE:
                    raise HistoryError(
                        f"no primitive {step.primitive!r} is registered here; import the module that does it first."
                    )
                getattr(root.cursor(step.path), step.primitive)(*step.args, **step.kwargs)
            except ScheduleError as error:
                raise HistoryError(f"replay: step {number}, {step}: {type(error).__name__}: {error}") from error
            except Exception as error:
                error.add_note(f"replay: step {number}, {step}")
                raise

    def diff(self, other: "History") -> "HistoryDiff":
        """What another history has in addition, or lacks. Falsy when they are equal; printable."""
        return HistoryDiff(self, other)


class HistoryDiff:
    """The difference of two histories, as steps that are only in one of them."""

    def __init__(self, old: History, new: History) -> None:
        self.removed: list[Step] = []
        self.added: list[Step] = []
        self._lines: list[str] = []
        for tag, i, j, k, m in difflib.SequenceMatcher(None, list(old), list(new), autojunk=False).get_opcodes():
            if tag == "equal":
                self._lines += [f"  {step}" for step in old[i:j]]
                continue
            self.removed += old[i:j]
            self.added += new[k:m]
            self._lines += [f"- {step}" for step in old[i:j]]
            self._lines += [f"+ {step}" for step in new[k:m]]

    def __bool__(self) -> bool:
        return bool(self.removed or self.added)

    def __str__(self) -> str:
        return "\n".join(self._lines) if self else "no difference"

    def __repr__(self) -> str:
        return f"<HistoryDiff: {len(self.removed)} removed, {len(self.added)} added>"


def _verified(content: Any, allow: Sequence[str], where: str) -> list[dict[str, Any]]:
    if type(content) is not dict or content.get("format") != FORMAT:
        raise HistoryError(f"{where}: is not a history of slapo_py: the field 'format' must be {FORMAT!r}.")
    if content.get("version") != VERSION:
        raise HistoryError(f"{where}: has version {content.get('version')!r}; this slapo_py reads version {VERSION}.")
    if set(content) != {"format", "version", "steps"} or type(content["steps"]) is not list:
        raise HistoryError(
            f"{where}: needs exactly the fields format, version and steps (a list), found {sorted(content)}."
        )
    for number, step in enumerate(content["steps"], 1):
        try:
            _verify_step(step, allow)
        except HistoryError as error:
            raise HistoryError(f"{where}: step {number}: {error}") from error
    steps: list[dict[str, Any]] = content["steps"]
    return steps


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _verify_step(step: Any, allow: Sequence[str]) -> None:
    if type(step) is not dict or set(step) != {"primitive", "path", "args", "kwargs"}:
        raise HistoryError(f"needs exactly the fields primitive, path, args and kwargs, found {step!r:.200}")
    name, path, args, kwargs = step["primitive"], step["path"], step["args"], step["kwargs"]
    if type(name) is not str or not _is_name(name):
        raise HistoryError(f"{name!r} is no name of a primitive")
    if name not in TABLE:
        close = difflib.get_close_matches(name, TABLE)
        hint = f" Did you mean {close[0]!r}?" if close else " Import the module that registers it first."
        raise HistoryError(f"no primitive {name!r} is registered here.{hint}")
    if type(path) is not str or not all(path.split(".") if path else ()):
        raise HistoryError(f"{path!r} is no path of a module")
    if type(args) is not list or type(kwargs) is not dict or not all(map(_is_name, kwargs)):
        raise HistoryError("needs a list of arguments and a dict of arguments by identifiers")
    for value in (*args, *kwargs.values()):
        codec.verify(value, allow)
