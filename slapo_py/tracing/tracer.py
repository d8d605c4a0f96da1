"""The tracer of one schedule: records on demand, captures each kind of module once, and puts traces on modules."""

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from slapo_py.errors import NoExampleInputs, StepError, TraceError
from slapo_py.scheduled import bare, dress, own_layers, undress
from slapo_py.tracing.align import same
from slapo_py.tracing.assemble import Assembly, SizeDependent
from slapo_py.tracing.held import Held
from slapo_py.tracing.reads import ABSENT, At
from slapo_py.tracing.recorder import Call, Recording, normalize_inputs, record, vary
from slapo_py.tracing.sandbox import Fakes
from slapo_py.tracing.trace import Trace, trace_of
from slapo_py.tracing.values import Tensor, signature, structure


class Tracer:
    """Traces modules of one model; modules that behave alike share one trace.

    Args:
        get_model: gives the scheduled copy's root.
        example_inputs: what the model is called with: a mapping of keyword arguments, a tuple of positional ones or a
            tensor, or a list of such at different sizes. With one size, a second one is derived from it.
    """

    def __init__(self, get_model: Callable[[], nn.Module], example_inputs: Any) -> None:
        self._model = get_model
        self._inputs = normalize_inputs(example_inputs)
        self._first: Recording | None = None
        self._others: list[Recording] | None = None
        self._dropped = False
        self._pool: dict[Any, list[Trace]] = {}
        self._options: dict[str, tuple[bool, tuple[str, ...]]] = {}
        self.captures = 0
        """How many traces were really made."""

    # ---- what primitives call ---------------------------------------------------------------------------------------
    def check(self, path: str, flatten: bool = False, leaves: Sequence[str] = ()) -> None:
        """Raise what `trace` would raise; nothing changes (what is captured is kept for it)."""
        self._find(path, flatten, tuple(leaves))

    def trace(self, path: str, flatten: bool = False, leaves: Sequence[str] = ()) -> Trace:
        """Give the module at `path` its static graph."""
        trace = self._find(path, flatten, tuple(leaves))
        dress(self._module(path), trace)
        self._options[path] = (flatten, tuple(leaves))
        return trace

    def inlined(self, path: str, flatten: bool = False, leaves: Sequence[str] = ()) -> frozenset[str]:
        """The submodules, seen from `path`, that a trace makes part of its graph."""
        return self._find(path, flatten, tuple(leaves)).inlined

    def refresh(self, path: str) -> None:
        """Something at `path` has changed: trace anew every traced module that had read it.

        Raises `StepError` where a step has rewritten the graph of such a module.
        """
        self.forget()
        self._renew(path)

    def replaced(self, path: str) -> None:
        """Another module is at `path`: trace anew every traced module that had read something there. As `refresh`."""
        self.forget_below(path)
        self._renew(path)

    def recorded(self, path: str) -> Call | None:
        """What the module at `path` was called with, if that is known already."""
        return self._first.calls.get(path) if self._first is not None else None

    def _renew(self, path: str) -> None:
        for name, module in self._model().named_modules():
            trace = trace_of(module)
            if trace is not None and not _reads_hold(module, trace):
                if trace.parent is not None:
                    raise StepError(
                        f'what is changed at "{path}" was read when "{name}" was traced, and the graph of "{name}" has '
                        f'been rewritten since, so it can\'t be traced anew. Do this before the steps at "{name}": '
                        f"print(sch.history) shows them, sch.undo() takes back the last"
                    )
                undress(module, Trace)
                self.trace(name, *self._options.get(name, (False, ())))

    def follow(self, change: Callable[[], None]) -> list[str]:
        """Carry out a change of configs, and trace anew what is called or computes differently after it.

        Returns the paths of those whose graph a step has rewritten, which a new trace would lose: they keep it, so the
        caller has to refuse the change.
        """
        traced = {name: one for name, one in self._model().named_modules() if trace_of(one) is not None}
        before = self._seen() if traced else {}
        change()
        self.forget()
        after = self._seen() if traced else {}
        rewritten = []
        for name, module in traced.items():
            trace, options = trace_of(module), self._options.get(name, (False, ()))
            if trace is None or (_reads_hold(module, trace) and not _differ(name, options[0], before, after)):
                continue
            if trace.parent is not None:
                rewritten.append(name)
            else:
                dress(module, self._find(name, *options))
        return rewritten

    def _seen(self) -> dict[str, tuple[Any, Any]]:
        """What each module is called with and what it gives back, in all recordings."""
        found: dict[str, tuple[Any, Any]] = {}
        for recording in (self.recording, *self._second_recordings()):
            for path, call in recording.calls.items():
                given, out = found.get(path, ((), ()))
                found[path] = ((*given, signature((call.args, call.kwargs))), (*out, call.out))
        return found

    def forget(self) -> None:
        """The copy is another one, or as it was before a step: what was recorded since then may not hold any more."""
        self._first = self._others = None
        self._dropped = False

    def forget_below(self, path: str) -> None:
        """Another module is at `path`: what it and those below are called with is found out when it is asked for."""
        for recording in (self._first, *(self._others or ())):
            for name in list(recording.calls) if recording is not None else ():
                if recording is not None and (name == path or name.startswith(path + ".") or not path):
                    del recording.calls[name]
        self._dropped = True

    # ---- recordings --------------------------------------------------------------------------------------------------
    @property
    def recording(self) -> Recording:
        """What each module is called with."""
        if self._first is None:
            if not self._inputs:
                raise NoExampleInputs(
                    "trace needs to know what the model is called with; write "
                    "create_schedule(model, example_inputs={...}) with a small batch of what you call the model with"
                )
            self._first = record(self._model(), self._inputs[0])
        return self._first

    def _second_recordings(self) -> list[Recording]:
        """Recordings at other sizes, best first."""
        if self._others is None:
            self._others = []
            given = self._inputs[1:]
            for inputs in given or vary(self._inputs[0]):
                try:
                    self._others.append(record(self._model(), inputs))
                except TraceError:
                    if given:
                        raise
        return self._others

    def call(self, path: str) -> Call:
        """What the module at a path is called with. Raises `TraceError` if it is not called."""
        if self._dropped and path not in self.recording.calls:
            self.forget()
        call = self.recording.calls.get(path)
        if call is None:
            raise TraceError(
                f"{path!r} ({bare(self._module(path)).__name__}) was not called when the model ran on the example "
                "inputs; trace a module around it, or give example inputs that reach it"
            )
        return call

    # ---- traces ------------------------------------------------------------------------------------------------------
    def _module(self, path: str) -> nn.Module:
        return self._model().get_submodule(path)

    def _find(self, path: str, flatten: bool, leaves: tuple[str, ...]) -> Trace:
        module, call = self._module(path), self.call(path)
        seconds = [(other.calls[path], other.fakes) for other in self._second_recordings() if path in other.calls]
        alike = [one for one in seconds if _comparable(call, one[0])]
        other_kinds, seconds = len(seconds) - len(alike), alike
        notes = []
        if other_kinds and len(self._inputs) > 1:
            notes.append("another example calls this module with other arguments (None for a tensor, say): not covered")
        key = self._key(path, module, [call, *(one for one, _ in seconds)], flatten, leaves)
        for known in self._pool.get(key, ()):
            if _reads_hold(module, known):
                return known
        try:
            made = self._make(module, (call, self.recording.fakes), seconds, flatten, leaves, notes)
        except TraceError as error:  # not kept: it may be due to an attribute that another such module has not
            raise TraceError(f'trace at "{path}" ({bare(module).__name__}): {error}') from error
        self._pool.setdefault(key, []).append(made)
        return made

    def _make(
        self,
        module: nn.Module,
        first: tuple[Call, Fakes],
        seconds: list[tuple[Call, Fakes]],
        flatten: bool,
        leaves: tuple[str, ...],
        notes: list[str],
    ) -> Trace:
        def is_leaf(path: str, _: nn.Module) -> bool:
            return not flatten or any(fnmatch.fnmatchcase(path, glob) for glob in leaves)

        self.captures += 1
        for index, second in enumerate(seconds):
            try:
                return Assembly(module, is_leaf, first, second, notes).trace()
            except SizeDependent:
                if index + 1 == len(seconds):
                    raise
        return Assembly(module, is_leaf, first, None, notes).trace()

    def _key(self, path: str, module: nn.Module, calls: list[Call], flatten: bool, leaves: tuple[str, ...]) -> Any:
        """All that a forward can see, attributes aside: code, arguments, what its children give back, tensors."""
        prefix = f"{path}." if path else ""
        recordings = [self.recording, *self._second_recordings()]
        children = tuple(
            (
                name,
                bare(child),
                own_layers(child),
                tuple(getattr(r.calls.get(prefix + name), "out", None) for r in recordings),
            )
            for name, child in module.named_modules()
            if name
        )
        own = tuple(
            (name, tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad)
            for name, tensor in [*module.named_parameters(), *module.named_buffers(), *_plain_tensors(module)]
        )
        given = tuple(signature((call.args, call.kwargs)) for call in calls)
        return (bare(module), own_layers(module), given, children, own, flatten, leaves)


def _differ(name: str, flatten: bool, before: dict[str, tuple[Any, Any]], after: dict[str, tuple[Any, Any]]) -> bool:
    """Whether a module is called otherwise, or gets other things back from what it calls (a flattened one: below)."""
    prefix = f"{name}." if name else ""
    if name not in before or name not in after or before[name][0] != after[name][0]:
        return True
    for path in before.keys() & after.keys():
        below = path != name and path.startswith(prefix)
        if below and (flatten or "." not in path[len(prefix) :]) and before[path][1] != after[path][1]:
            return True
    return False


def _plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, one in module.named_modules():
        for name, value in vars(one).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}", value


def _comparable(a: Call, b: Call) -> bool:
    return bool(structure((a.args, a.kwargs)) == structure((b.args, b.kwargs)))


def _reads_hold(module: nn.Module, trace: Trace) -> bool:
    """Whether every attribute that a trace relies on has the value that it had."""
    scope = {"self": module}
    for (owner, name), value in trace.reads.items():
        if name == "training":
            continue
        try:
            now: Any = getattr(eval(owner, scope), name, ABSENT)
            if isinstance(value, Held):
                now = value if value.matches(now) else now
            elif isinstance(value, At):
                now = value if now is eval(value.expr, scope) else now
            elif name == "_modules":
                now = len(now)
        except (AttributeError, KeyError):
            return False
        if now is not value and not same(now, value):
            return False
    return True
