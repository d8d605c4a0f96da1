"""Plain globals that a forward reads: a constant of a module may be changed after the trace was made."""

import contextlib
import copy
import dis
import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from torch import nn

from slapo_py.tracing.held import Held
from slapo_py.tracing.source import is_user_file
from slapo_py.tracing.values import SIMPLE, Tensor, is_plain


class GlobalReads:
    """While it is entered, collects the functions of user code that run; `found` are the globals they name.

    Functions and classes are left out: they are read in every line and hardly ever rebound.
    """

    def __init__(self, active: Callable[[], bool]) -> None:
        self._active = active
        self._ran: dict[CodeType, dict[str, Any]] = {}
        self._containers: dict[int, tuple[str, Any, Held]] = {}
        self._before: Any = None

    def __enter__(self) -> "GlobalReads":
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(self._before)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code not in self._ran and self._active():
            self._ran[frame.f_code] = frame.f_globals
            if is_user_file(frame.f_code.co_filename):
                self._hold(frame)

    def _hold(self, frame: FrameType) -> None:
        """Note what the lists, dicts and sets hold that a function may reach, before it runs."""
        code = frame.f_code
        reached = {name: frame.f_globals.get(name) for name in _global_names(code)}
        reached.update({name: frame.f_locals.get(name) for name in code.co_freevars})
        for name, value in reached.items():
            if type(value) in (list, dict, set) and id(value) not in self._containers:
                self._containers[id(value)] = (name, value, Held(value))

    def changed(self) -> list[str]:
        """The names of those that hold something else now; they are put back."""
        names = []
        for name, container, held in self._containers.values():
            if not held.matches(container):
                names.append(name)
                held.put_back(container)
        return names

    def found(self) -> dict[tuple[str, str], Any]:
        """{(module name, global name): value}."""
        values: dict[tuple[str, str], Any] = {}
        for code, scope in self._ran.items():
            module = scope.get("__name__", "")
            if not is_user_file(code.co_filename):
                continue
            if getattr(sys.modules.get(module), "__dict__", None) is not scope:
                continue  # code of exec: its globals can't be found again
            for name in _global_names(code):
                value = scope.get(name)
                if name in scope and not name.startswith("__"):
                    if isinstance(value, (*SIMPLE, Tensor)) or (
                        isinstance(value, (list, tuple, dict, set)) and value and is_plain(value) and len(value) <= 16
                    ):
                        values[module, name] = value if isinstance(value, Tensor) else copy.deepcopy(value)
        return values


_Cached = type(functools.cache(len))


@contextlib.contextmanager
def caches_kept(root: nn.Module) -> Iterator[None]:
    """Empty every `functools.cache` of the modules' files that was filled within: it would hold fake tensors."""
    homes = {sys.modules.get(type(module).__module__) for module in root.modules()} - {None}
    cached = [one for home in homes for one in list(vars(home).values()) if isinstance(one, _Cached)]
    before = [one.cache_info().currsize for one in cached]
    try:
        yield
    finally:
        for one, size in zip(cached, before, strict=True):
            if one.cache_info().currsize != size:
                one.cache_clear()


@functools.cache
def _global_names(code: CodeType) -> frozenset[str]:
    """The globals that a function reads (its `co_names` also hold the attributes)."""
    return frozenset(
        str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
