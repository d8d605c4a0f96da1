"""The arguments of a step as JSON, as Python source, and as keys to compare by value.

What can be written: None, bool, int, float, str, lists, tuples, dicts, torch dtypes and devices, members of importable
enums, importable functions and classes as `package.module:name`, and the language's own value classes (`per_rank`, a
pattern, a parameter map). Everything else is a *live* object: it can be replayed in this process, but not saved.
"""

import enum
import importlib
import json
import math
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch

from slapo_py.errors import HistoryError, ScheduleError

Json = Any
TAG = "$"


class Value:
    """A frozen dataclass that can be an argument of a step: its fields are saved, and it can be written as source."""

    tag: ClassVar[str] = ""

    def written(self, write: Callable[[Any], str]) -> str:
        """Python source that makes an equal value, with the package as `slapo`; `write` writes a field."""
        raise TypeError(f"{type(self).__name__} does not say how it is written")


V = TypeVar("V", bound=type[Value])
_VALUES: dict[str, type[Value]] = {}


def value(tag: str) -> Callable[[V], V]:
    """Let a frozen dataclass be saved in histories, under this tag."""

    def decorate(cls: V) -> V:
        cls.tag = tag
        _VALUES[tag] = cls
        return cls

    return decorate


class Handle:
    """A live object that a user passes to a primitive, and that stands for a value: a match, say."""

    def recorded(self, place: Any) -> Any:
        """The value to record in its stead, at this place. Raises `ScheduleError` if it no longer stands for any."""
        raise TypeError(f"{type(self).__name__} does not say what it stands for")


def recorded(given: Any, place: Any) -> Any:
    """Arguments with each handle in them replaced by what it stands for."""
    if isinstance(given, Handle):
        return given.recorded(place)
    if type(given) in (list, tuple):
        return type(given)(recorded(one, place) for one in given)
    if type(given) is dict:
        return {name: recorded(one, place) for name, one in given.items()}
    return given


@value("per_rank")
@dataclass(frozen=True)
class PerRank(Value):
    """A value of `configure` that stays as it is in the schedule and is divided over a mesh axis by `build`."""

    axis: str

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str) or not self.axis.isidentifier():
            raise HistoryError(f'per_rank({self.axis!r}): needs the name of a mesh axis, as in per_rank("tp").')

    def written(self, write: Callable[[Any], str]) -> str:
        return f"slapo.per_rank({write(self.axis)})"

    def __repr__(self) -> str:
        return self.written(_quoted)


def per_rank(axis: str) -> PerRank:
    """`configure(split_size=per_rank("tp"))`: the attribute, divided by the size of this mesh axis on each rank."""
    return PerRank(axis)


class LiveObject(Exception):
    """Internal: a value that only exists in this process."""

    def __init__(self, value: Any) -> None:
        super().__init__(describe_live(value))


def describe_live(value: Any) -> str:
    code = getattr(value, "__code__", None)
    where = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
    return f"{getattr(value, '__qualname__', None) or repr(value)[:80]}{where}"


def importable_name(value: Any) -> str | None:
    """`package.module:name` under which exactly this object can be imported again, or None."""
    if isinstance(value, enum.Enum):
        owner = importable_name(type(value))
        return f"{owner}.{value.name}" if owner and value.name.isidentifier() else None
    if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return None
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not name or module == "__main__" or not _is_dotted(module) or not _is_dotted(name):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is value or _stands_for(found, value) else None


def _stands_for(found: Any, function: Any) -> bool:
    """Whether a decorator has put a value with this function as its only field in the function's place."""
    return isinstance(found, Value) and [getattr(found, one.name) for one in fields(found)] == [(function,)]  # type: ignore[arg-type]


def _is_dotted(name: Any) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


# JSON


def encode(value: Any) -> Json:
    """A value -> JSON. Raises `LiveObject` for what exists in this process only."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if type(value) is list:
        return [encode(one) for one in value]
    if type(value) in (tuple, torch.Size):
        return {TAG: "tuple", "items": [encode(one) for one in value]}
    if type(value) is dict:
        return {TAG: "dict", "items": [[encode(key), encode(one)] for key, one in value.items()]}
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {TAG: "device", "name": str(value)}
    if isinstance(value, Value):
        return {TAG: value.tag, **{one.name: encode(getattr(value, one.name)) for one in fields(value)}}  # type: ignore[arg-type]
    name = importable_name(value)
    if name is not None:
        return {TAG: "object", "name": name}
    raise LiveObject(value)


_FIELDS = {
    "float": ("value", str), "tuple": ("items", list), "dict": ("items", list), "dtype": ("name", str),
    "device": ("name", str), "object": ("name", str),
}  # fmt: skip


def verify(given: Json, allow: Sequence[str]) -> None:
    """Raise `HistoryError` unless `decode` may be given this. Imports nothing."""
    if given is None or type(given) in (bool, int, float, str):
        return
    if type(given) is list:
        for one in given:
            verify(one, allow)
        return
    kind = given.get(TAG)  # JSON has only dicts left
    if isinstance(kind, str) and kind in _VALUES:
        _verify_value(kind, given, allow)
        return
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise HistoryError(f"found a value of unknown kind {kind!r}; known kinds: {', '.join([*_FIELDS, *_VALUES])}")
    field, wanted = _FIELDS[kind]
    if set(given) != {TAG, field} or type(given[field]) is not wanted:
        raise HistoryError(f"a {kind} needs exactly the field {field!r} with a {wanted.__name__}, found {given!r}")
    content = given[field]
    if kind == "tuple":
        verify(content, allow)
    elif kind == "dict":
        for pair in content:
            if type(pair) is not list or len(pair) != 2:
                raise HistoryError(f"a dict needs pairs of key and value, found {pair!r}")
            if type(pair[0]) is list or (type(pair[0]) is dict and pair[0].get(TAG) == "dict"):
                raise HistoryError(f"{pair[0]!r} can't be the key of a dict")
            verify(pair, allow)
    elif kind == "float" and content not in ("nan", "inf", "-inf"):
        raise HistoryError(f"{content!r} is no float; finite ones are written as plain numbers")
    elif kind == "dtype" and not isinstance(
        getattr(torch, content, None) if content.isidentifier() else None, torch.dtype
    ):
        raise HistoryError(f"torch has no dtype {content!r}")
    elif kind == "device":
        try:
            torch.device(content)
        except RuntimeError:
            raise HistoryError(f"torch has no device {content!r}") from None
    elif kind == "object":
        module, colon, name = content.partition(":")
        if not colon or not _is_dotted(module) or not _is_dotted(name):
            raise HistoryError(f"{content!r} is no importable name of the form package.module:name")
        if not any(module == root or module.startswith(root + ".") for root in allow):
            more = ", ".join(_quoted(root) for root in (*allow, module.partition(".")[0]))
            raise HistoryError(
                f"names {content!r}, which lies outside the allowed modules ({', '.join(allow) or 'none'}). "
                f"If you trust it: slapo_py.History.load(path, allow=({more},))"
            )


def _verify_value(kind: str, given: dict[str, Json], allow: Sequence[str]) -> None:
    wanted = {one.name for one in fields(_VALUES[kind])}  # type: ignore[arg-type]
    if set(given) != {TAG, *wanted}:
        raise HistoryError(f"a {kind} needs exactly the fields {sorted(wanted)}, found {given!r}")
    for name in wanted:
        verify(given[name], allow)


def decode(given: Json) -> Any:
    """What `encode` wrote -> the value. Only after `verify`: this imports the modules that objects lie in."""
    if type(given) is list:
        return [decode(one) for one in given]
    if type(given) is not dict:
        return given
    if given[TAG] in _VALUES:
        cls = _VALUES[given[TAG]]
        try:
            return cls(**{one.name: decode(given[one.name]) for one in fields(cls)})  # type: ignore[arg-type]
        except HistoryError:
            raise
        except ScheduleError as error:  # a class that checks what it is given
            raise HistoryError(str(error)) from error
    kind, content = given[TAG], given[_FIELDS[given[TAG]][0]]
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(decode(one) for one in content)
    if kind == "dict":
        return {decode(key): decode(one) for key, one in content}
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    return _imported(content)


def _imported(name: str) -> Any:
    module, _, qualname = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise HistoryError(f"{name!r} can't be imported: {error}") from error
    for part in qualname.split("."):
        # Through classes only: "allowed.module:os.system" must not reach another module by an attribute.
        found = vars(found).get(part) if isinstance(found, types.ModuleType) else getattr(found, part, None)
        if found is None or isinstance(found, types.ModuleType):
            raise HistoryError(f"{name!r}: module {module!r} defines no {qualname!r}")
    if isinstance(found, Value) and len(fields(found)) == 1:  # type: ignore[arg-type]
        behind = getattr(found, fields(found)[0].name)  # type: ignore[arg-type]
        if type(behind) is tuple and len(behind) == 1 and importable_name(behind[0]) == name:
            return behind[0]
    if importable_name(found) != name:
        real = importable_name(found) or f"a {type(found).__name__}"
        raise HistoryError(f"{name!r} is no function, class or enum member of that module, but {real}")
    return found


# Comparing


def key(value: Any) -> Any:
    """A hashable key: equal for values that are the same when written down; live objects by identity."""
    if type(value) in (list, tuple):
        return (type(value).__name__, tuple(key(one) for one in value))
    if type(value) is dict:
        return ("dict", tuple((key(name), key(one)) for name, one in value.items()))
    if value is None or type(value) in (bool, int, str, float):
        return (type(value).__name__, repr(value))
    if isinstance(value, Value):
        return (value.tag, tuple(key(getattr(value, one.name)) for one in fields(value)))  # type: ignore[arg-type]
    try:
        return ("value", repr(encode(value)))
    except LiveObject:
        return ("live", id(value))


def frozen(value: Any) -> Any:
    """A copy of the containers, so that a list which the user changes later does not change the history."""
    if type(value) in (list, tuple, torch.Size):
        return [frozen(one) for one in value] if type(value) is list else tuple(frozen(one) for one in value)
    if type(value) is dict:
        return {name: frozen(one) for name, one in value.items()}
    return value


# Source


class Source:
    """Writes values as Python source, and collects what that source has to import."""

    def __init__(self) -> None:
        self.imports: dict[str, None] = {}
        self.live: dict[int, str] = {}
        self._live_names: dict[int, str] = {}

    def write(self, value: Any) -> str:
        if type(value) is str:
            return _quoted(value)
        if value is None or type(value) in (bool, int):
            return repr(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else f'float("{value!r}")'
        if type(value) is list:
            return f"[{', '.join(map(self.write, value))}]"
        if type(value) is tuple:
            return f"({', '.join(map(self.write, value))}{',' if len(value) == 1 else ''})"
        if type(value) is dict:
            return f"{{{', '.join(f'{self.write(name)}: {self.write(one)}' for name, one in value.items())}}}"
        if isinstance(value, torch.dtype | torch.device):
            self.imports["import torch"] = None
            return f"torch.device({_quoted(str(value))})" if isinstance(value, torch.device) else str(value)
        if isinstance(value, Value):
            self.imports["import slapo_py as slapo"] = None
            return value.written(self.write)
        name = importable_name(value)
        if name is not None:
            module, _, qualname = name.partition(":")
            if module == "builtins":
                return qualname
            return f"{self._import(module)}.{qualname}"
        self.live.setdefault(id(value), describe_live(value))
        return f"live_{list(self.live).index(id(value))}"

    def _import(self, module: str) -> str:
        if module.partition(".")[0] not in ("sch", "schedule", "slapo", "torch") or module == "torch":
            self.imports[f"import {module}"] = None
            return module
        alias = module.replace(".", "_") + "_"  # the plain name would be hidden, or hide another
        self.imports[f"import {module} as {alias}"] = None
        return alias


def _quoted(text: str) -> str:
    plain = json.dumps(text, ensure_ascii=False)  # double quotes; a JSON string is a Python string
    return plain if plain.isprintable() else json.dumps(text)
