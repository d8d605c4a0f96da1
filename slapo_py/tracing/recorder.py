"""What each module of a model is called with: one run of the model, on real tensors or, for `meta` models, on fakes."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_py.errors import NoExampleInputs, TraceError
from slapo_py.scheduled import bare
from slapo_py.snapshot import Snapshot
from slapo_py.tracing.huggingface import collected, is_collecting_hook
from slapo_py.tracing.sandbox import Fakes, random_state_kept, sandbox
from slapo_py.tracing.trace import on_trial
from slapo_py.tracing.values import SIMPLE, Tensor, map_tensors, signature, tensors

_HOOKS = [name for name in nn.Module().__dict__ if "hook" in name]


@dataclasses.dataclass
class Call:
    """How a module was called (tensors are fakes), and the signature of what it gave back."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any = None


@dataclasses.dataclass
class Recording:
    """The first call of every module in one run of the model."""

    calls: dict[str, Call]
    fakes: Fakes


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def normalize_inputs(example_inputs: Any) -> list[Inputs]:
    """A mapping of keyword arguments, a tuple of positional ones or a tensor, or a list of such -> [(args, kwargs)]."""
    if example_inputs is None:
        return []
    if isinstance(example_inputs, list):
        return [one for item in example_inputs for one in normalize_inputs(item)]
    if isinstance(example_inputs, Mapping):
        return [((), dict(example_inputs))]
    if isinstance(example_inputs, tuple):
        return [(example_inputs, {})]
    if isinstance(example_inputs, Tensor):
        return [((example_inputs,), {})]
    raise NoExampleInputs(
        f"example_inputs is a {type(example_inputs).__name__}; give a dict of keyword arguments, a tuple of positional "
        "ones, a tensor, or a list of such (several sizes)"
    )


def vary(inputs: Inputs) -> list[Inputs]:
    """Example inputs -> the same at other sizes, best first: (a larger batch and shorter sequence), (a larger batch).

    The batch is the most frequent first dim; a sequence is the second dim of a 2-d integer or boolean tensor.
    """
    found = [leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    if not found:
        return []
    firsts = [tensor.shape[0] for tensor in found]
    batch = max(set(firsts), key=firsts.count)
    token_like = [t for t in found if t.ndim == 2 and not t.is_floating_point() and t.shape[0] == batch]
    lengths = {t.shape[1] for t in token_like if t.shape[1] >= 4}

    def resize(given: Tensor, shorten: bool, made: dict[int, Tensor]) -> Tensor:
        if id(given) in made:  # the same tensor at two places stays one
            return made[id(given)]
        tensor = given
        if tensor.ndim and tensor.shape[0] == batch:
            tensor = torch.cat([tensor, tensor, tensor, tensor[:1]])  # halves, logarithms and products differ, too
        for dim in range(1, tensor.ndim) if shorten else ():
            if tensor.shape[dim] in lengths:
                tensor = tensor.narrow(dim, 0, tensor.shape[dim] - max(1, tensor.shape[dim] // 3))
        return made.setdefault(id(given), tensor.contiguous())

    choices = (True, False) if lengths else (False,)
    return [map_tensors(inputs, functools.partial(resize, shorten=shorten, made={})) for shorten in choices]


def record(model: nn.Module, inputs: Inputs) -> Recording:
    """Run the model once in eval mode; everything the run touches is put back. Hooks of the user do not run."""
    if any(tensor.device.type == "meta" for tensor in [*model.parameters(), *model.buffers()]):
        return _record_fake(model, inputs)
    return _record_real(model, inputs)


def _record_real(model: nn.Module, inputs: Inputs) -> Recording:
    fakes, calls = Fakes(), {}  # type: ignore[var-annotated]
    paths = {id(module): name for name, module in model.named_modules()}

    def around(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        path = paths.get(id(module))
        if path is None or path in calls:
            return forward(*args, **kwargs)
        call = calls[path] = Call(*_faked((args, kwargs), fakes))
        out = forward(*args, **kwargs)
        call.out = signature(out)
        return out

    with random_state_kept(), _python_kept(model), _state_kept(model), _hooks_muted(model), _calls_seen(around):
        own: dict[int, Tensor] = {}  # the run gets copies; the same tensor at two places has one copy

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in own:
                own[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            return own[id(tensor)]

        args, kwargs = map_tensors(inputs, copied)
        with torch.enable_grad(), _Undo(model) as writes:
            _run(model, args, kwargs)
        writes.undo()
    return Recording(calls, fakes)


def _faked(value: Any, fakes: Fakes) -> Any:
    """Nested values with fakes; the same tensor at two places has one fake, as `query is key` may be asked."""
    return map_tensors(value, fakes.of)


def _record_fake(model: nn.Module, inputs: Inputs) -> Recording:
    """A run without data. Modules like one already run (same class, state and arguments) are not run again."""
    fakes, calls = Fakes(), {}  # type: ignore[var-annotated]
    paths = {id(module): name for name, module in model.named_modules()}
    likeness = _Likeness()
    seen: dict[Any, tuple[str, Any]] = {}

    def around(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        path = paths.get(id(module))
        if path is None or path in calls:
            return forward(*args, **kwargs)
        key = (likeness.of(module), signature((args, kwargs)))
        if key in seen and not _holds_objects((args, kwargs)) and not collected():
            twin, out = seen[key]
            _copy_calls(calls, twin, path, (args, kwargs))
            return map_tensors(out, torch.empty_like)
        # a cache is filled later in the run: keep how it was
        args_now, kwargs_now = map_tensors((args, kwargs), lambda tensor: tensor)
        call = calls[path] = Call(args_now, kwargs_now)
        out = forward(*args, **kwargs)
        call.out = signature(out)
        seen[key] = (path, out)
        return out

    faked = _faked(inputs, fakes)
    with random_state_kept(), _python_kept(model), sandbox(model, fakes, False), _hooks_muted(model), _real_masks():
        with fakes.mode, torch.no_grad(), _calls_seen(around):
            _run(model, *faked)
    return Recording(calls, fakes)


def _run(model: nn.Module, args: Any, kwargs: Any) -> None:
    try:
        with on_trial():
            model(*args, **kwargs)
    except Exception as error:
        raise TraceError(
            f"the model does not run on the example inputs: {type(error).__name__}: {error}; "
            "give create_schedule(example_inputs=...) what you call the model with"
        ) from error


def _copy_calls(calls: dict[str, Call], twin: str, path: str, given: Any) -> None:
    """What the modules below `twin` were called with holds for the modules below `path`."""
    for name, call in list(calls.items()):
        if name.startswith(twin + "."):
            calls.setdefault(path + name[len(twin) :], call)
    args, kwargs = given
    calls[path] = Call(args, kwargs, calls[twin].out)


def _holds_objects(value: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value)
    return any(not isinstance(leaf, (*SIMPLE, Tensor)) and not callable(leaf) for leaf in leaves)


class _Likeness:
    """A key that modules which behave alike share: class, plain attributes, shapes, and the same below.

    An index of the layer is left out: it tells layers apart without changing what they call. A wrong guess here costs
    a missed guard later, never a wrong number: a trace checks its arguments at every call.
    """

    def __init__(self) -> None:
        self._made: dict[int, int] = {}
        self._numbers: dict[Any, int] = {}  # keys as small numbers: nested keys would be compared over and over

    def of(self, module: nn.Module) -> int:
        if id(module) not in self._made:
            attributes = tuple(
                (name, signature(value))
                for name, value in module.__dict__.items()
                if isinstance(value, SIMPLE) and not name.endswith(("idx", "index", "layer_id"))
            )
            shapes = tuple(
                (name, None if t is None else (tuple(t.shape), t.dtype))
                for store in (module._parameters, module._buffers)
                for name, t in store.items()
            )
            below = tuple((name, None if m is None else self.of(m)) for name, m in module._modules.items())
            key = (bare(module), attributes, shapes, below)
            self._made[id(module)] = self._numbers.setdefault(key, len(self._numbers))
        return self._made[id(module)]


@contextlib.contextmanager
def _calls_seen(around: Any) -> Iterator[None]:
    """Every call of a module goes through `around(module, forward, args, kwargs)`."""
    plain = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(module, lambda *a, **k: plain(module, *a, **k), args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]


@contextlib.contextmanager
def _hooks_muted(model: nn.Module) -> Iterator[None]:
    """No hook that the user has put on a module runs; those that the run itself puts on are taken off again."""
    saved = []
    for module in model.modules():
        for name in _HOOKS:
            hooks = module.__dict__.get(name)
            if isinstance(hooks, dict):  # an empty one too: the run may put hooks on
                saved.append((hooks, dict(hooks)))
                kept = {key: hook for key, hook in hooks.items() if is_collecting_hook(hook)}
                hooks.clear()
                hooks.update(kept)
    try:
        yield
    finally:
        for hooks, content in saved:
            hooks.clear()
            hooks.update(content)


class _Undo(TorchDispatchMode):
    """Keeps what a tensor of the model held before a run first writes into it: such as an Embedding with max_norm."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        held = [*model.parameters(), *(v for m in model.modules() for v in tensors(list(vars(m).values())))]
        self._protected = {tensor.untyped_storage()._cdata: tensor for tensor in held}
        self._kept: dict[int, tuple[Tensor, Tensor, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for spec, value in zip(func._schema.arguments, args, strict=False):
                written = spec.alias_info is not None and spec.alias_info.is_write
                for tensor in tensors(value) if written else ():
                    whole = self._protected.get(tensor.untyped_storage()._cdata)
                    if whole is not None and id(whole) not in self._kept:
                        self._kept[id(whole)] = (whole, whole.detach().clone(), whole._version)
        return func(*args, **kwargs)

    def undo(self) -> None:
        for tensor, content, version in self._kept.values():
            with torch.no_grad():
                tensor.detach().copy_(content)
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


@contextlib.contextmanager
def _python_kept(model: nn.Module) -> Iterator[None]:
    """Lists, dicts and objects that hang on the modules hold afterwards what they held; generators go on from there."""
    generators = [v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    snapshot = Snapshot(model.modules(), ())
    try:
        yield
    finally:
        snapshot.restore()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextlib.contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; flags, attributes and buffers come back."""
    stand_in: dict[int, Tensor] = {}  # the run writes to copies: the real buffers don't even change their version
    modules = list(model.modules())
    before = [dict(module.__dict__) for module in modules]
    try:
        for module in modules:
            module.__dict__["training"] = False
            module.__dict__["_buffers"] = {
                name: None if buffer is None else stand_in.setdefault(id(buffer), buffer.detach().clone())
                for name, buffer in module._buffers.items()
            }
        yield
    finally:
        for module, state in zip(modules, before, strict=True):
            module.__dict__.clear()
            module.__dict__.update(state)


class _AllOnes(TorchFunctionMode):
    """Answers `bool(fake tensor)` with True: transformers asks if a mask is all ones, and in the usual run it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__bool__":
            return True
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _real_masks() -> Iterator[None]:
    """transformers builds other masks when it believes to be traced, as it does on fakes: tell it that it isn't."""
    masking = sys.modules.get("transformers.masking_utils")
    plain = getattr(masking, "is_tracing", None)
    with _AllOnes():
        if plain is None:
            yield
            return
        masking.is_tracing = lambda *args, **kwargs: False  # type: ignore[union-attr]
        try:
            yield
        finally:
            masking.is_tracing = plain  # type: ignore[union-attr]
