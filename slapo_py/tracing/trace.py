"""A trace: the static graph of a module, the guards under which it holds, and the forward generated from both."""

import contextlib
import copy
import functools
import inspect
import linecache
import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.amp import autocast_mode

from slapo_py.errors import GuardError
from slapo_py.scheduled import Forward, Layer, bare, layer_of
from slapo_py.tracing.guards import Guards
from slapo_py.tracing.reads import Reads, dotted
from slapo_py.tracing.values import Tensor

_MISS = object()
_MODE_SWITCHES = (torch._C._set_grad_enabled, autocast_mode._enter_autocast)


class Trace(Layer):
    """The graph and guards of one captured forward. One trace may serve many modules; it is never changed.

    Attributes:
        graph: the torch.fx graph; submodules are `call_module` nodes.
        inputs: [(placeholder name, how the forward reaches the argument)].
        reads: the attributes and config entries that the forward read, with their values.
        checks: {node name: (condition, message)}: what is checked while the graph runs.
        names: {local name: expression} evaluated before the graph runs (sizes that checks need).
        notes: what a reader should know, e.g. that one mode runs the original.
        inlined: paths, seen from the module, of the submodules that are part of the graph.
        structural: whether every step on the graph is bit-exact, so that the original may stand in for it.
        parent: the trace that a step has rewritten into this one, if one has.
        consumed: for each match that this step has rewritten, the names of the parent's nodes that it covered.
        steps: what has rewritten it, in order: the primitive, and what was put in.
        replaceable: whether the original forward can run at all: its submodules are still there.
    """

    rank = 0
    replaceable = True

    def __init__(
        self,
        graph: fx.Graph,
        guards: Guards,
        inputs: list[tuple[str, str]],
        constants: dict[str, Tensor],
        reads: Reads,
        checks: dict[str, tuple[str, str]] | None = None,
        names: dict[str, str] | None = None,
        notes: list[str] | None = None,
        structural: bool = True,
        inlined: frozenset[str] = frozenset(),
        parent: "Trace | None" = None,
        consumed: frozenset[frozenset[str]] = frozenset(),
        steps: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.steps = steps
        self.inlined, self.parent, self.consumed = inlined, parent, consumed
        self.graph, self._guards, self.inputs, self.constants, self.reads = graph, guards, inputs, constants, reads
        self.checks, self.names, self.notes, self.structural = checks or {}, names or {}, notes or [], structural
        self._missed: weakref.WeakKeyDictionary[nn.Module, Counter[str]] = weakref.WeakKeyDictionary()

    # a trace is immutable: copies of a module share it
    def __deepcopy__(self, memo: Any) -> "Trace":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_missed": None, "parent": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._missed = weakref.WeakKeyDictionary()

    @property
    def guards(self) -> list[str]:
        """The conditions of a call that the trace covers, as python."""
        return self._guards.described()

    def describe(self) -> str:
        calls = sum(node.op.startswith("call_") for node in self.graph.nodes)
        guards = len(self._guards.merged())
        return f"trace ({calls} call{'s' * (calls != 1)}, {guards} guard{'s' * (guards != 1)})"

    def rewritten(
        self,
        graph: fx.Graph,
        structural: bool,
        step: tuple[str, str] = ("", ""),
        consumed: frozenset[frozenset[str]] = frozenset(),
        checks: dict[str, tuple[str, str]] | None = None,
        guards: Guards | None = None,
        reads: Reads | None = None,
    ) -> "Trace":
        """The trace that a step makes of this one: another graph with the same inputs.

        `step`: the primitive, and what it put in; `consumed`: the names of the nodes of each match; `checks`: what is
        checked of new nodes; `guards`, `reads`: all of them, if the step relies on more than this trace does.
        """
        names = {node.name for node in graph.nodes}
        kept = {name: check for name, check in self.checks.items() if name in names}
        return Trace(
            graph, guards or self._guards, self.inputs, self.constants, reads if reads is not None else self.reads,
            {**kept, **(checks or {})}, self.names, self.notes, self.structural and structural, self.inlined, self,
            consumed, (*self.steps, step),
        )  # fmt: skip

    def relying_on(self, module: nn.Module, reads: Reads, kinds: dict[str, type]) -> tuple[Guards, Reads]:
        """The guards and reads of this trace and more: attributes of `module` and below, and classes of submodules."""
        guards = self._guards.copy()
        for path, kind in sorted(kinds.items()):
            guards.add(f"type(self{dotted(path)}) is {guards.name(kind)}")
        guards.attributes(module, {key: value for key, value in reads.items() if key not in self.reads})
        return guards, {**self.reads, **reads}

    def takes_in(self, path: str) -> bool:
        """Whether a step on this graph has put something in the place of the call of a submodule."""
        return any(line.startswith(f"type(self{dotted(path)}) is ") for line in self._guards.lines)

    def reading(self, module: nn.Module, changed: Reads) -> "Trace":
        """This trace where attributes that it has read have other values now, which its graph knows already."""
        guards = self._guards.copy()
        for owner, name in changed:
            guards.lines = [line for line in guards.lines if not line.startswith(f"({owner}.{name} is ")]
        guards.attributes(module, changed)
        reads = {**self.reads, **changed}
        return self.rewritten(self.graph, self.structural, ("build", "reads"), guards=guards, reads=reads)

    def without(self, paths: Collection[str]) -> "Trace":
        """This trace where submodules are gone that its graph does not use: what was asked of them is asked no more."""
        if not paths:
            return self
        gone = [f"self{dotted(path)}" for path in paths]
        owners = {(f"self{dotted(path.rpartition('.')[0])}", path.rpartition(".")[2]) for path in paths}
        trace = copy.copy(self)
        trace.parent, trace._guards = self.parent, self._guards.copy()  # a copy leaves the parent out, as pickle does
        trace.replaceable = False
        trace._guards.lines = [line for line in trace._guards.lines if not any(one in line for one in gone)]
        trace.reads = {
            key: value
            for key, value in self.reads.items()
            if key not in owners and not any(key[0].startswith(one) for one in gone)
        }
        return trace

    # ---- misses ----------------------------------------------------------------------------------------------------
    def misses(self, module: nn.Module) -> int:
        """How often a call of this module was not covered."""
        return sum(self._missed.get(module, Counter()).values())

    def missed_guards(self, module: nn.Module) -> Counter[str]:
        """The guards that failed, each with how often it was the first to fail."""
        return Counter(self._missed.get(module, Counter()))

    def reset_misses(self) -> None:
        self._missed.clear()

    def why(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """The guards that this call fails."""
        bound = inspect.signature(bare(module).forward).bind(module, *args, **kwargs)
        bound.apply_defaults()
        scope = {**self._guards.environment(), **bound.arguments, "self": module}
        failed = []
        for line, text in zip(self._guards.merged(), self._guards.described(), strict=True):
            try:
                holds = eval(line, scope)
            except Exception:
                holds = False
            if not holds:
                failed.append(text)
        return failed

    def _miss(self, original: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _trial and self.replaceable:
            return original(module, *args, **kwargs)
        compiling = torch.compiler.is_compiling()  # a compiler can't follow the bookkeeping
        failed = ["a guard"] if compiling else self.why(module, args, kwargs)
        if not compiling:
            self._missed.setdefault(module, Counter())[failed[0] if failed else "?"] += 1
        if not self.structural:
            raise GuardError(
                f"{type(module).__name__} was called in a way that its trace does not cover: {'; '.join(failed)} does "
                "not hold, and a step on its graph is not bit-exact, so that the original can't stand in. Give "
                "create_schedule example_inputs of this kind and trace again"
            )
        return original(module, *args, **kwargs)

    # ---- the generated forward -------------------------------------------------------------------------------------
    def source(self, base: type[nn.Module]) -> tuple[str, dict[str, Any]]:
        """The generated forward as text, and the names that it uses."""
        header, defaults = _header(base.forward)
        code = self.graph.python_code("self")
        body = code.src[code.src.index("def forward(") :].split("\n", 1)[1].rstrip().split("\n")
        body = [re.sub(r"self\.(_slapo_constant_\d+)", r"_constants['\1']", line) for line in body]
        body = body[next((i for i, line in enumerate(body) if line.startswith("    ")), 0) :]
        lines = [f"def {header}:"]
        guards = self._guards.merged()
        if guards:
            lines += ["    try:", "        _covered = ("]
            lines += [f"            {line}" + (" and" if i < len(guards) - 1 else "") for i, line in enumerate(guards)]
            lines += ["        )", "    except Exception:"]
            lines += ["        _covered = False", "    if not _covered:", "        return _MISS"]
        lines += [f"    {name} = {expr}" for name, expr in self.names.items()]
        lines += [f"    {name} = {expr}" for name, expr in self.inputs if name != expr]
        for line in body:
            name = re.match(r"    (\w+) = ", line)
            if name is None or name[1] not in self.checks:
                lines.append(line)
                continue
            condition, message = self.checks[name[1]]
            lines += [_kept(line, name[1]), f"    if not ({condition}):", f"        _broken({message!r})"]
        lines += _outer(any(node.target in _MODE_SWITCHES for node in self.graph.nodes))
        environment = {**code.globals, **self._guards.environment(), "_constants": self.constants, **defaults}
        return "\n".join(lines) + "\n", environment

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        text, environment = self.source(base)
        file = f"<trace of {base.__qualname__} {id(self):x}>"
        environment.update(_MISS=_MISS, _missed=functools.partial(self._miss, forward), _broken=_broken, _modes=_Modes)
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        exec(compile(text, file, "exec"), environment)
        return functools.wraps(base.forward)(environment["forward"])


_trial: list[None] = []


@contextlib.contextmanager
def on_trial() -> Iterator[None]:
    """Within: a call that a trace does not cover runs the original and is not counted: nobody uses its numbers."""
    _trial.append(None)
    try:
        yield
    finally:
        _trial.pop()


def trace_of(module: nn.Module) -> Trace | None:
    """The trace of a module, if it has one."""
    return layer_of(module, Trace)  # type: ignore[no-any-return]


def misses(model: nn.Module) -> dict[str, int]:
    """Calls that no trace covered, by the path of the traced module; empty if none missed."""
    found = {path: trace.misses(module) for path, module in model.named_modules() if (trace := trace_of(module))}
    return {path: count for path, count in found.items() if count}


def missed_guards(model: nn.Module) -> dict[str, Counter[str]]:
    """Why: by the path of the traced module, the guards that failed, and how often each was the first to fail."""
    found = {path: trace.missed_guards(module) for path, module in model.named_modules() if (trace := trace_of(module))}
    return {path: guards for path, guards in found.items() if guards}


def _header(forward: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """`_traced(self, x, *, flag=_default_flag, **kwargs)`, and the defaults by name."""
    parts: list[str] = []
    defaults: dict[str, Any] = {}
    starred = False
    parameters = list(inspect.signature(forward).parameters.values())
    for index, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        starred |= parameter.kind is parameter.VAR_POSITIONAL
        mark = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        mark = "*" if parameter.kind is parameter.VAR_POSITIONAL else mark
        default = ""
        if parameter.default is not parameter.empty:
            default = f"=_default_{parameter.name}"
            defaults[default[1:]] = parameter.default
        parts.append(mark + ("self" if index == 0 else parameter.name) + default)
        positional_only = parameter.kind is parameter.POSITIONAL_ONLY
        last = index + 1 == len(parameters) or parameters[index + 1].kind is not parameter.POSITIONAL_ONLY
        if positional_only and last:
            parts.append("/")
    return f"_traced({', '.join(parts)})", defaults


def _kept(line: str, name: str) -> str:
    """A generated line without the deletion of `name` at its end: a check after it still reads the value."""
    head, mark, names = line.rpartition(";  ")
    if not mark or not names.endswith(" = None"):
        return line
    left = [one for one in names.split(" = ") if one != name]
    return head + (mark + " = ".join(left) if len(left) > 1 else "")


def _outer(switches_modes: bool) -> list[str]:
    """The forward itself. A graph that switches modes must not leave them switched when it raises."""
    call = ["    out = _traced(self, *args, **kwargs)"]
    if switches_modes:
        call = [
            "    modes = None if _compiling() else _modes()",
            "    try:",
            "        out = _traced(self, *args, **kwargs)",
            "    except BaseException:",
            "        if modes is not None:",
            "            modes.put_back()",
            "        raise",
        ]
    return [
        "", "", "def forward(self, *args, **kwargs):", *call,
        "    if out is _MISS:", "        return _missed(self, args, kwargs)", "    return out",
    ]  # fmt: skip


def _broken(message: str) -> None:
    raise GuardError(message)


class _Modes:
    """Grad mode and autocast as they are now."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
        self.autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in self.devices]
        self.cache = torch.is_autocast_cache_enabled()
        self.depth = self._depth()

    @staticmethod
    def _depth() -> int:
        torch.autocast_increment_nesting()
        return torch.autocast_decrement_nesting()

    def put_back(self) -> None:
        torch._C._set_grad_enabled(self.grad)
        while self._depth() > self.depth:
            torch.autocast_decrement_nesting()
        for device, (enabled, dtype) in zip(self.devices, self.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.cache)
