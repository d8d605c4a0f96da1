"""Selecting places by a glob, and doing a step at all of them."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from slapo_py.errors import NoMatchError
from slapo_py.root import Root, close_paths

if TYPE_CHECKING:
    from collections.abc import Callable

    from slapo_py.schedule import Schedule


class Selection(Sequence["Schedule"]):
    """Places in model order. A primitive called on it is done at each of them, or, if one refuses, at none."""

    __slots__ = ("_glob", "_places", "_start")

    def __init__(self, start: "Schedule", glob: str, places: "list[Schedule]") -> None:
        self._start = start
        self._glob = glob
        self._places = tuple(places)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> "Callable[..., Selection]": ...
    else:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"a selection has no {name!r}: it does primitives at each of its places. For anything else take them "
                f"one by one: for place in selection: place.{name}"
            )

    @property
    def paths(self) -> list[str]:
        return [place.path for place in self._places]

    @overload
    def __getitem__(self, index: int) -> "Schedule": ...
    @overload
    def __getitem__(self, index: slice) -> "Selection": ...
    def __getitem__(self, index: int | slice) -> "Schedule | Selection":
        if isinstance(index, slice):
            return Selection(self._start, self._glob, list(self._places[index]))
        return self._places[index]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> "Iterator[Schedule]":
        return iter(self._places)

    def each(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Selection":
        """Call a primitive at each place, all or nothing."""
        root = self._start.root
        with root.transaction(_common(self.paths)):
            for place in self._places:
                getattr(place, name)(*args, **kwargs)
        return self

    def __str__(self) -> str:
        kinds = [type(place.module).__name__ for place in self._places]
        lines = [f'  "{place.path}"  {kind}' for place, kind in zip(self._places, kinds)]
        return "\n".join([f'select("{self._glob}"): {len(self)} places', *lines])

    def __repr__(self) -> str:
        return f'<Selection "{self._glob}" of {len(self)} places>'


def matching(root: Root, start: str, glob: str) -> list[str]:
    """Canonical paths below `start` that a glob matches, in model order. Raises `NoMatchError`."""
    if not isinstance(glob, str) or not glob or not all(glob.split(".")):
        raise NoMatchError(
            f'select({glob!r}): needs a glob of whole path components, such as select("h.*.mlp") or select("**.mlp").'
        )
    base = root.module(start)
    pattern = re.compile(translate(glob))
    names = [name for name, _ in base.named_modules(remove_duplicate=False) if name]
    prefix = start + "." if start else ""
    hits = [root.canonical(prefix + name) for name in names if pattern.fullmatch(name + ".")]
    if not hits:
        raise NoMatchError(_no_hit(start, glob, names))
    return list(dict.fromkeys(hits))


def translate(glob: str) -> str:
    """`h.*.mlp` -> a regular expression for a path with a dot after each component ("h.0.mlp.")."""
    return "".join(r"(?:[^.]+\.)*" if part == "**" else _component(part) + r"\." for part in glob.split("."))


def _component(part: str) -> str:
    """Within a component `*`, `?`, `[..]` and `[!..]` mean what they mean in file names."""
    expression, rest = "", part
    while rest:
        klass = re.match(r"\[(!?)(\]?[^\]]*)\]", rest)
        if klass and klass[2]:
            negated = "^." if klass[1] else ""
            inner = re.sub(r"([\\\[\]^&~|])", r"\\\1", klass[2])
            expression += f"[{negated}{inner}]"
            rest = rest[klass.end() :]
            continue
        expression += {"*": "[^.]*", "?": "[^.]"}.get(rest[0]) or re.escape(rest[0])
        rest = rest[1:]
    return expression


def _no_hit(start: str, glob: str, names: list[str]) -> str:
    # The longest beginning of the glob that does match shows where it went wrong.
    parts = glob.split(".")
    reached = ""
    for end in range(len(parts) - 1, 0, -1):
        if any(re.fullmatch(translate(".".join(parts[:end])), name + ".") for name in names):
            reached = ".".join(parts[:end])
            break
    plain = [re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names]
    close = close_paths(glob, list(dict.fromkeys(plain)))
    where = f"below {start!r}" if start else "in this model"
    upto = f" {reached!r} has matches, {parts[len(reached.split('.'))]!r} below it has none." if reached else ""
    hint = (
        "Did you mean " + " or ".join(f'select("{name}")' for name in close) + "?"
        if close
        else "print(sch) shows all paths."
    )
    return f"select({glob!r}): no module {where} matches.{upto} {hint}"


def _common(paths: list[str]) -> str:
    """The path of the lowest module above all of these."""
    parts = [path.split(".") for path in paths]
    common: list[str] = []
    for column in zip(*parts):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return ".".join(common)
