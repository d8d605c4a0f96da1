"""What python code does that torch's function mode doesn't show: attribute reads, calls of modules, autocast, caches.

Everything patched here is patched for the time of one capture and put back after it.
"""

import builtins
import copy
import logging
import sys
import threading
import types
import warnings
from typing import Any

import torch
import torch.nn.attention
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import autocast_mode

from slapo_py.errors import TraceError
from slapo_py.scheduled import bare, layers, own_forward, scheduled_class
from slapo_py.tracing.function_call import FunctionCall
from slapo_py.tracing.held import Held
from slapo_py.tracing.huggingface import COLLECTING_FLAG, collect, collected
from slapo_py.tracing.reads import ABSENT, At, dotted
from slapo_py.tracing.source import where
from slapo_py.tracing.tape import Tape
from slapo_py.tracing.trace import trace_of
from slapo_py.tracing.values import FUNCTIONS, SIMPLE, Tensor, is_plain

_GLOBAL_QUERIES = {
    "torch.is_grad_enabled": (torch, "is_grad_enabled"),
    "torch.is_autocast_enabled": (torch, "is_autocast_enabled"),
    "torch.get_default_dtype": (torch, "get_default_dtype"),
    "torch.is_inference_mode_enabled": (torch, "is_inference_mode_enabled"),
    "torch.get_autocast_dtype": (torch, "get_autocast_dtype"),
    "torch.get_autocast_gpu_dtype": (torch, "get_autocast_gpu_dtype"),
}
_REFUSED = (
    (torch, "set_rng_state", "sets the state of torch's generator"),
    (torch.random, "set_rng_state", "sets the state of torch's generator"),
    (torch, "set_default_dtype", "sets the default dtype"),
    (torch.nn.attention, "_sdpa_kernel", "chooses attention kernels"),
    (torch.autograd.graph.saved_tensors_hooks, "__enter__", "enters saved_tensors_hooks"),
    (nn.Module, "__delattr__", "deletes an attribute"),
)
_OWN_OF_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_ABSENT_OWNER = object()


def _refuse_collected_below(path: str, before: dict[str, int]) -> None:
    now = collected()
    kinds = [name for name in now if now[name] != before.get(name)]
    if kinds:
        raise TraceError(
            f"the forward collects {' and '.join(kinds)} from modules inside {path!r}, where this module's graph does "
            "not reach: trace the modules below it instead, or call the model without "
            f"{' and '.join(f'output_{kind}' for kind in kinds)}"
        )


class Watch:
    """Patches in place while a capture runs."""

    def __init__(self, capture: Tape) -> None:
        self.capture = capture
        self._saved: list[tuple[Any, str, Any]] = []
        self._objects: dict[int, tuple[Any, str]] = {}  # plain objects reached from attributes, and how

    def _patch(self, owner: Any, name: str, new: Any) -> None:
        self._saved.append((owner, name, owner.__dict__.get(name, _ABSENT_OWNER)))
        setattr(owner, name, new)

    def __enter__(self) -> "Watch":
        try:
            self._patch_modules()
            self._patch_functions()
            self._patch_modes()
            self._patch_queries()
            self._patch_caches()
            self._patch_output()
            for path, module in self.capture.root.named_modules():
                config = module.__dict__.get("config")
                if hasattr(config, "__dict__"):
                    self._watch_object(config, f"self{dotted(path)}.config")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for owner, name, old in reversed(self._saved):
            if old is _ABSENT_OWNER:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        self._saved.clear()

    # ---- modules ---------------------------------------------------------------------------------------------------
    def _patch_modules(self) -> None:
        capture, paths, note = self.capture, self.capture.paths, self._note
        thread, plain_call = threading.get_ident(), nn.Module.__call__
        plain_read, slow_read, plain_write = object.__getattribute__, nn.Module.__getattr__, nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            value = plain_read(module, name)
            if capture.active and id(module) in paths and not name.startswith("__"):
                note("self" + dotted(paths[id(module)]), name, value)
                return capture.attribute(paths[id(module)], name, value)
            return value

        def read_stored(module: nn.Module, name: str) -> Any:
            watched = capture.active and id(module) in paths and not name.startswith("__")
            try:
                value = slow_read(module, name)
            except AttributeError:
                if watched:
                    note("self" + dotted(paths[id(module)]), name, ABSENT)
                raise
            if watched and value is None:
                note("self" + dotted(paths[id(module)]), name, None)
            return value

        def write(module: nn.Module, name: str, value: Any) -> None:
            if capture.active and id(module) in paths and name != COLLECTING_FLAG:
                raise TraceError(
                    f"the forward assigns self.{name} at {where()}; write in place (self.{name}.copy_(...)), "
                    "or leave this module untraced"
                )
            plain_write(module, name, value)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or id(module) not in paths:
                return plain_call(module, *args, **kwargs)  # another model, or another thread: none of our business
            plain: Any = _rewritten(module) or own_forward(module)
            forward = module.__dict__.get("forward") or plain.__get__(module)
            if not capture.active or id(module) not in capture.leaves:
                if capture.active:
                    capture.inlined.add(paths[id(module)])
                    instead = capture.instead(paths[id(module)])
                    if instead is None:
                        _refuse_rewritten(module, paths[id(module)])
                    forward = instead or forward
                around, capture.within = capture.within, paths[id(module)]
                try:
                    args, kwargs = capture.entered(args, kwargs)
                    out = capture.left(forward(*args, **kwargs))
                finally:
                    capture.within = around
            else:
                path, before = paths[id(module)], collected()
                out = capture.call_opaque(lambda a, k: capture.graph.call_module(path, a, k), forward, args, kwargs)
                _refuse_collected_below(path, before)
            collect(module, args, out)  # hooks of the user never run here
            return out

        self._patch(nn.Module, "__getattribute__", read)
        self._patch(nn.Module, "__getattr__", read_stored)
        self._patch(nn.Module, "__setattr__", write)
        self._patch(nn.Module, "__call__", call)
        for module in capture.root.modules():  # a class with its own __call__ (transformers' checkpointing layers)
            for cls in bare(module).__mro__:
                patched = any(owner is cls and name == "__call__" for owner, name, _ in self._saved)
                if "__call__" in cls.__dict__ and issubclass(cls, nn.Module) and not patched:
                    self._patch(cls, "__call__", call)

    def _note(self, expr: str, name: str, value: Any) -> None:
        """Remember that the forward has read `expr.name`."""
        if name == "_modules":  # how many children a container has; which ones, the graph asks for by name
            self.capture.reads.setdefault((expr, name), len(value))
            return
        if name in _OWN_OF_MODULE or name == COLLECTING_FLAG or name.startswith("_slapo"):
            return
        if isinstance(value, (*SIMPLE, *FUNCTIONS)) or is_plain(value) or value is ABSENT:
            if isinstance(value, types.FunctionType) and name == "forward":
                return
            self.capture.reads.setdefault((expr, name), copy.deepcopy(value))
        elif isinstance(value, nn.Module):  # one that is no child by this name: which one is it?
            if id(value) in self.capture.paths:
                self.capture.reads.setdefault((expr, name), At("self" + dotted(self.capture.paths[id(value)])))
        elif isinstance(value, types.MethodType):
            if name in object.__getattribute__(value.__self__, "__dict__") or name in self._own_names(expr):
                self.capture.reads.setdefault((expr, name), value)  # set on the object: not its class's
        elif isinstance(value, Tensor):
            if not expr.endswith("]") and expr != "self":
                self.capture.inside_objects[id(value)] = f"{expr}.{name}"
        elif isinstance(value, (types.ModuleType, torch.Generator)):
            return
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self.capture.reads.setdefault((expr, name), Held(value))
        elif not self.capture.is_bound(value):
            self._watch_object(value, f"{expr}.{name}")

    def _own_names(self, expr: str) -> set[str]:
        owner = eval(expr, {"self": self.capture.root})
        return set(object.__getattribute__(owner, "__dict__"))

    # ---- plain objects (configs) -----------------------------------------------------------------------------------
    def _watch_object(self, value: Any, expr: str) -> None:
        """Note the attributes read of an object that the module holds."""
        if id(value) in self._objects:
            return
        self._objects[id(value)] = (value, expr)
        cls = type(value)
        if expr.rpartition(".")[2] != "config":  # a config is told by its entries
            self.capture.reads.setdefault((expr, "__class__"), cls)
        if any(owner is cls and name == "__getattribute__" for owner, name, _ in self._saved):
            return
        plain_read: Any = cls.__getattribute__
        capture, objects = self.capture, self._objects

        def read(owner: Any, name: str) -> Any:
            watched = capture.active and id(owner) in objects and not name.startswith("__")
            try:
                result = plain_read(owner, name)
            except AttributeError:
                if watched:
                    self._note(objects[id(owner)][1], name, ABSENT)
                raise
            if watched:
                capture.quiet(self._note, objects[id(owner)][1], name, result)
            elif capture.inside and id(owner) in objects and isinstance(result, SIMPLE) and not name.startswith("__"):
                capture.deep_reads.setdefault((objects[id(owner)][1], name), result)
            return result

        plain_write: Any = cls.__setattr__

        def write(owner: Any, name: str, value: Any) -> None:
            if capture.active and id(owner) in objects:
                raise TraceError(f"the forward sets .{name} of {objects[id(owner)][1]} at {where()}: a graph would not")
            plain_write(owner, name, value)

        try:
            self._patch(cls, "__getattribute__", read)
            self._patch(cls, "__setattr__", write)
        except TypeError:  # a class of the interpreter's: it can't be watched, so its identity is what counts
            self._saved.pop()
            if hasattr(value, "__dict__") and is_plain(vars(value)):
                self.capture.reads.setdefault((expr, "__dict__"), copy.deepcopy(vars(value)))
                return
            head, _, name = expr.rpartition(".")
            self.capture.reads.setdefault((head, name), value)

    # ---- functions and modes ---------------------------------------------------------------------------------------
    def _patch_functions(self) -> None:
        capture, plain = self.capture, torch.autograd.Function.__dict__["apply"]

        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            function = plain.__get__(None, cls)
            if not capture.active:
                return function(*args, **kwargs)
            target = FunctionCall(cls)
            return capture.call_opaque(lambda a, k: capture.graph.call_function(target, a, k), function, args, kwargs)

        self._patch(torch.autograd.Function, "apply", classmethod(apply))

        device = FakeTensor.device.fget  # type: ignore[attr-defined]

        def read_device(tensor: Any) -> torch.device:
            found: torch.device = capture.quiet(device, tensor)
            return capture.device_of(tensor, found) if capture.active else found

        self._patch(FakeTensor, "device", property(read_device))  # python's own property: no function mode sees it

        checkpoint = torch.utils.checkpoint._checkpoint_without_reentrant_generator

        def refuse_checkpoint(*args: Any, **kwargs: Any) -> Any:
            if capture.active:
                raise TraceError(
                    f"the forward calls torch.utils.checkpoint itself at {where()}; take that call out and write "
                    "sch[...].checkpoint() instead, or leave this module untraced"
                )
            return checkpoint(*args, **kwargs)

        self._patch(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", refuse_checkpoint)

    def _patch_modes(self) -> None:
        capture = self.capture
        enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
        inference = torch.inference_mode.__enter__

        def enter_autocast(context: Any) -> Any:
            if capture.active:
                state = (context.device, context.fast_dtype, context._enabled, context._cache_enabled)
                capture.bind(context, capture.graph.call_function(autocast_mode._enter_autocast, state))
            return enter(context)

        def leave_autocast(context: Any, *error: Any) -> Any:
            if capture.active:
                capture.graph.call_function(autocast_mode._exit_autocast, (capture.node_of(context),))
            return leave(context, *error)

        def enter_inference(context: Any) -> Any:
            if capture.active:
                raise TraceError(f"the forward enters torch.inference_mode at {where()}; use torch.no_grad")
            return inference(context)

        def refused(plain: Any, what: str) -> Any:
            def refuse(*args: Any, **kwargs: Any) -> Any:
                if capture.active and threading.get_ident() == thread:
                    raise TraceError(f"the forward {what} at {where()}: a graph would not; leave this module untraced")
                return plain(*args, **kwargs)

            return refuse

        thread = threading.get_ident()
        for owner, name, what in _REFUSED:
            if hasattr(owner, name):  # private names come and go with torch's versions
                self._patch(owner, name, refused(getattr(owner, name), what))
        self._patch(torch.autocast, "__enter__", enter_autocast)
        self._patch(torch.autocast, "__exit__", leave_autocast)
        self._patch(torch.inference_mode, "__enter__", enter_inference)

    def _patch_queries(self) -> None:
        capture = self.capture

        def watched(key: str, plain: Any) -> Any:
            def query(*args: Any, **kwargs: Any) -> Any:
                result = plain(*args, **kwargs)
                if capture.active:
                    capture.globals.setdefault((key, (*args, *kwargs.values())), result)
                return result

            return query

        homes = {bare(module).__module__ for module in capture.root.modules()}
        for key, (owner, name) in _GLOBAL_QUERIES.items():
            plain = getattr(owner, name)
            self._patch(owner, name, watched(key, plain))
            for home in homes:  # where it was imported by name
                if vars(sys.modules.get(home, types)).get(name) is plain:
                    self._patch(sys.modules[home], name, watched(key, plain))
        # under a capture every tensor has a torch function; the forward must take the road of a real run
        has_function = torch.overrides.has_torch_function
        self._patch(
            torch.overrides,
            "has_torch_function",
            lambda relevant: False if capture.active else has_function(relevant),
        )

    def _patch_output(self) -> None:
        """Note where the forward prints, logs or warns: the graph will not."""
        capture = self.capture

        def noting(plain: Any, what: str) -> Any:
            def said(*args: Any, **kwargs: Any) -> Any:
                if capture.active:
                    capture.said.append(f"the forward {what} at {where()}: the graph does not")
                return plain(*args, **kwargs)

            return said

        self._patch(builtins, "print", noting(builtins.print, "prints"))
        self._patch(logging.Logger, "handle", noting(logging.Logger.handle, "logs"))
        self._patch(warnings, "warn", noting(warnings.warn, "warns"))

    def _patch_caches(self) -> None:
        capture = self.capture
        for cls, name in capture.opaque:
            plain = getattr(cls, name)

            def method(owner: Any, *args: Any, _plain: Any = plain, _name: str = name, **kwargs: Any) -> Any:
                node = capture.node_of(owner) if capture.active else None
                if node is None:
                    return _plain(owner, *args, **kwargs)
                return capture.call_opaque(
                    lambda a, k: capture.graph.call_method(_name, (node, *a), k),
                    lambda *a, **k: _plain(owner, *a, **k),
                    args,
                    kwargs,
                )

            self._patch(cls, name, method)
        for given in capture.foreign.values():
            self._refuse_reads(given, {name for cls, name in capture.opaque if isinstance(given, cls)})

    def _refuse_reads(self, value: Any, allowed: set[str]) -> None:
        """An argument that is an unknown object stays opaque: the forward may hand it on, but not look into it."""
        cls, capture = type(value), self.capture
        if any(owner is cls and name == "__getattribute__" for owner, name, _ in self._saved):
            return
        plain_read: Any = cls.__getattribute__

        def read(owner: Any, name: str) -> Any:
            if capture.active and id(owner) in capture.foreign and name not in allowed and not name.startswith("__"):
                raise TraceError(
                    f"the forward looks into an argument of type {cls.__name__} (.{name}) at {where()}: "
                    "trace the modules inside it instead"
                    + (", or call the model with use_cache=False" if cls.__name__.endswith("Cache") else "")
                )
            return plain_read(owner, name)

        try:
            self._patch(cls, "__getattribute__", read)
        except TypeError:
            self._saved.pop()


def _rewritten(module: nn.Module) -> Any:
    """The forward of a module whose graph a step has rewritten so that the original can't stand in: it may not run."""
    trace = trace_of(module)
    if trace is None or trace.structural:
        return None
    inner = tuple(layer for layer in layers(module) if layer.rank <= trace.rank)
    forward: Any = scheduled_class(bare(module), inner).forward
    return forward


def _refuse_rewritten(module: nn.Module, path: str) -> None:
    if _rewritten(module) is not None:
        raise TraceError(
            f"a step has rewritten the graph of {path!r}, and flattening would bypass that; keep it a call: "
            f"trace(flatten=True, leaves=[{path!r}])"
        )
