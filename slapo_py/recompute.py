"""Running a module's forward a second time in the backward pass, so that nothing but the memory use can tell.

`torch.utils.checkpoint` keeps the inputs and torch's random state. What it leaves to the caller is done here: buffers
and attributes that the forward changes, Python's and numpy's random state, caches and other objects among the
arguments, inputs that are written into, random operations whose results a policy keeps.
"""

import copy
import functools
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slapo_py.clone import ATOMIC, copy_structure
from slapo_py.errors import RecomputeError
from slapo_py.scheduled import Forward, bare

Policy = Callable[..., Any]
CONTAINERS = (tuple, list, dict)
PLAIN = frozenset(ATOMIC)  # by exact type: a look-up instead of twenty isinstance checks

PLACES: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()
"""Where each checkpointed module was checkpointed, for messages. Not in the layer: equal layers share their class."""


def run(forward: Forward, module: nn.Module, args: Any, kwargs: Any, policy: Policy | None) -> Any:
    """`forward(module, *args, **kwargs)`, keeping its inputs only and running it again in the backward pass."""
    if torch.compiler.is_compiling():
        # The compiler follows torch's own form only, and turns effects on buffers into values itself.
        inner = functools.partial(forward, module)
        if policy is None:
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)
        select = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(inner, *args, use_reentrant=False, context_fn=select, **kwargs)
    call = _Call(forward, module, args, kwargs, policy)
    # Tensors go by position: torch looks for devices, and watches for writes, among those only.
    result = checkpoint(call.run, *call.tensors, use_reentrant=False, context_fn=call.contexts)
    call.check_inputs()
    return result


class _Call:
    """One call of a checkpointed module: what its forward is given again."""

    def __init__(self, forward: Forward, module: nn.Module, args: Any, kwargs: Any, policy: Policy | None) -> None:
        self.forward, self.module, self.policy = forward, module, policy
        # Plain containers only: a cache that is registered as a pytree is an object with a state, not its tensors.
        leaves, self.spec = _pytree.tree_flatten((args, kwargs), is_leaf=lambda one: not isinstance(one, CONTAINERS))
        self.given: Any = (args, kwargs)  # the first run gets the caller's own objects
        # Each tensor once: a forward may ask whether `query is key`, and within another checkpoint torch gives back a
        # new object for each tensor that it was given.
        self.tensors: list[torch.Tensor] = []
        self.at: list[int | None] = []
        self.leaves: list[Any] = []
        self.parameters: list[tuple[torch.Tensor, int | None]] = []
        self.watched: list[tuple[torch.Tensor, int | None]] = []
        # An inference tensor can't be saved for a backward pass, and nothing in the graph depends on it.
        known: dict[int, int] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not leaf.is_inference():
                if id(leaf) not in known:
                    known[id(leaf)] = len(self.tensors)
                    self.tensors.append(leaf)
                self.at.append(known[id(leaf)])
                self.leaves.append(None)
            else:
                kept, inside = _kept(leaf)
                self.at.append(None)
                self.leaves.append(kept)
                self.watched += [(one, _version(one)) for one in inside]
        self.watched += [(one, _version(one)) for one in self.tensors]
        # Modules among the arguments are called, too: a group of operations is given those that it calls.
        self.modules = [module, *(leaf for leaf in leaves if isinstance(leaf, nn.Module))]
        self.state = _State(self.modules, [leaf for leaf in leaves if isinstance(leaf, torch.Generator)])

    def run(self, *tensors: Any) -> Any:
        if self.given is not None:
            (args, kwargs), self.given = self.given, None
            result = self.forward(self.module, *args, **kwargs)
            self.state.leave()
            self.parameters = [(one, _version(one)) for module in self.modules for one in module.parameters()]
            return result
        if any(_version(one) != version for one, version in self.parameters):
            kind, place = bare(self.module).__name__, PLACES.get(self.module)
            raise RecomputeError(
                f'checkpoint at "{place or ""}": a parameter of {kind} was written into between the forward and the '
                f"backward pass, so running it again would use other weights. Call backward() before that."
            )
        # Each run gets its own copy of a cache: a second backward must find what the first found.
        leaves = [_kept(leaf)[0] if at is None else tensors[at] for at, leaf in zip(self.at, self.leaves)]
        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        return self.forward(self.module, *args, **kwargs)

    def check_inputs(self) -> None:
        for tensor, version in self.watched:
            if _version(tensor) != version:
                kind, place = bare(self.module).__name__, PLACES.get(self.module)
                where = f'"{place}"' if place is not None else "a copy of the scheduled model"
                raise RecomputeError(
                    f"checkpoint at {where}: {kind} writes into an argument of shape {list(tensor.shape)} in place, so "
                    f"running it again in the backward pass would start from other values. Checkpoint a module further "
                    f"out, whose own inputs stay as they are; or make the operation out of place (inplace=False); or, "
                    f"for a static cache, call the model with use_cache=False. Without gradients (torch.no_grad) "
                    f"nothing is run again and any call works."
                )
        self.watched = []

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if self.policy is None:
            return _Nested(), _Nested(self.state.again)
        draws: list[tuple[Any, torch.Tensor]] = []
        first, second = create_selective_checkpoint_contexts(self.policy)
        return _Nested(lambda: first, lambda: _Draws(draws)), _Nested(
            self.state.again, lambda: second, lambda: _Redraws(draws)
        )


class _Nested(AbstractContextManager[None]):
    """Contexts within each other; can be entered again, for a graph that goes backward twice."""

    def __init__(self, *makers: Callable[[], AbstractContextManager[Any]]) -> None:
        self.makers = makers
        self.open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self.makers:
                stack.enter_context(make())
            self.open.append(stack.pop_all())

    def __exit__(self, *exc: Any) -> None:
        self.open.pop().__exit__(*exc)


class _Draws(TorchDispatchMode):
    """Notes the random state before each random operation.

    A policy may keep the result of one; run again, it draws nothing, and all later ones would draw other numbers.
    """

    def __init__(self, draws: list[tuple[Any, torch.Tensor]]) -> None:
        super().__init__()
        self.draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            source = _source(args, kwargs or {})
            self.draws.append((source, _random_state(source)))
        return func(*args, **(kwargs or {}))


class _Redraws(_Draws):
    """Puts the random state back before each of those."""

    def __init__(self, draws: list[tuple[Any, torch.Tensor]]) -> None:
        super().__init__(draws)
        self.left = iter(draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            for source, state in self.left:
                _set_random_state(source, state)
                break
        return func(*args, **(kwargs or {}))


def _source(args: Any, kwargs: dict[str, Any]) -> Any:
    """Where an operation draws from: a generator, or the default one of a device."""
    leaves = _pytree.tree_leaves((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Generator):
            return leaf
    device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), kwargs.get("device"))
    return torch.device(device or "cpu")


def _random_state(source: Any) -> torch.Tensor:
    if isinstance(source, torch.Generator):
        return source.get_state()
    if source.type in ("cpu", "meta"):
        return torch.get_rng_state()
    state: torch.Tensor = getattr(torch, source.type).get_rng_state(source)
    return state


def _set_random_state(source: Any, state: torch.Tensor) -> None:
    if isinstance(source, torch.Generator):
        source.set_state(state)
    elif source.type in ("cpu", "meta"):
        torch.set_rng_state(state)
    else:
        getattr(torch, source.type).set_rng_state(state, source)


class _State:
    """What a forward may change besides its outputs, as it was on entry: to begin from there again.

    Looked at are the modules and all below them: plain attributes and their lists, dicts and sets, buffers and other
    tensors without a gradient, random generators, and the random states of Python and numpy.
    """

    def __init__(self, roots: list[nn.Module], generators: list[torch.Generator]) -> None:
        self.modules = list(dict.fromkeys(one for root in roots for one in root.modules()))
        self.plain = [{k: v for k, v in vars(one).items() if type(v) in PLAIN} for one in self.modules]
        self.tensors: list[tuple[dict[str, Any], str, torch.Tensor, int | None, torch.Tensor]] = []
        self.names = [set(vars(one)) for one in self.modules]
        self.made: list[list[str]] = [[] for _ in self.modules]
        self.contents = _contents(self.modules)
        generators = list(generators)
        for one in self.modules:
            for holder in (vars(one), one._buffers):
                for name, held in holder.items():
                    if type(held) in PLAIN:
                        continue
                    if isinstance(held, torch.Tensor):
                        if not held.requires_grad:
                            self.tensors.append((holder, name, held, _version(held), held.clone()))
                    elif isinstance(held, torch.Generator):
                        generators.append(held)
        self.generators = [(one, one.get_state()) for one in generators]
        self.random: Any = random.getstate()
        self.numpy = _numpy_state()

    def leave(self) -> None:
        """After the first run: let go of what it did not change."""
        self.made = [[k for k in vars(one) if k not in before] for one, before in zip(self.modules, self.names)]
        if random.getstate() == self.random:
            self.random = None
        if self.numpy is not None and _is_numpy_state(self.numpy):
            self.numpy = None
        # A floating tensor is kept in any case: batch norm's running statistics change without a new version.
        self.tensors = [
            (holder, name, held, version, copied)
            for holder, name, held, version, copied in self.tensors
            if held.is_floating_point() or _version(held) != version or holder.get(name) is not held
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within: all as it was on entry of the first run. Afterwards: all as it was before."""
        attributes = [dict(vars(one)) for one in self.modules]
        buffers = [dict(one._buffers) for one in self.modules]
        contents = _contents(self.modules)
        now = (
            [(one, one.get_state()) for one, _ in self.generators],
            random.getstate() if self.random is not None else None,
            _numpy_state() if self.numpy is not None else None,
        )
        try:
            for one, plain, made in zip(self.modules, self.plain, self.made):
                vars(one).update(plain)
                for name in made:
                    vars(one).pop(name, None)
            for container, content in self.contents:
                _refill(container, content)
            for holder, name, _, _, copied in self.tensors:
                holder[name] = copied.clone()
            self._set_random(self.generators, self.random, self.numpy)
            yield
        finally:
            self._set_random(*now)
            for one, names, held in zip(self.modules, attributes, buffers):
                _put_back(vars(one), names)
                _put_back(one._buffers, held)
            for container, content in contents:
                _refill(container, content)

    def _set_random(self, generators: Any, python: Any, numpy: Any) -> None:
        for one, state in generators:
            one.set_state(state)
        if python is not None:
            random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)


def _numpy_state() -> Any:
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def _is_numpy_state(state: Any) -> bool:
    now = _numpy_state()
    return bool((now[1] == state[1]).all()) and now[0] == state[0] and now[2:] == state[2:]


def _contents(modules: list[nn.Module]) -> list[tuple[Any, Any]]:
    """The lists, dicts and sets among the attributes, and what is in them."""
    return [
        (held, copy.copy(held))
        for one in modules
        for name, held in vars(one).items()
        if not name.startswith("_") and type(held) in (list, dict, set)
    ]


def _refill(container: Any, content: Any) -> None:
    if not _same(container, content):
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)


def _same(now: Any, before: Any) -> bool:
    values = (lambda one: [*one, *one.values()]) if isinstance(now, dict) else list
    return len(now) == len(before) and all(a is b for a, b in zip(values(now), values(before)))


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name in now if name not in before]:
        del now[name]
    for name, held in before.items():
        if now.get(name, now) is not held:
            now[name] = held


def _kept(leaf: Any) -> tuple[Any, list[torch.Tensor]]:
    """An argument that is no tensor, as it is now, and the tensors inside it: a cache would grow twice."""
    if isinstance(leaf, (*ATOMIC, nn.Module, torch.Generator, torch.Tensor)):
        return leaf, []
    return copy_structure(leaf)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
