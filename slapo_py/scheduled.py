"""A scheduled module: the same object with a swapped class, whose forward is the user's with layers around it.

The object, its attributes, its children and its hooks stay; only `type(module)` becomes a subclass made on the fly.
So isinstance, names, deepcopy, pickle and all that walks the module tree go on working, and undoing is one assignment.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

Forward = Callable[..., Any]


class Layer:
    """What one step puts around a module's forward.

    A layer that is equal by value to another one shares its class with it: identical modules then run the same
    code object, which is what lets torch.compile compile them once.
    """

    rank: ClassVar[int]
    """Nesting, low is inner: decompose -10, trace 0, compile 10, output sync 20, fork_rng 30, input sync 40,
    checkpoint 50. A layer of negative rank is the module's forward itself, said differently: a trace reads it."""

    def wrap(self, forward: Forward, base: type[nn.Module]) -> Forward:
        """`forward(self, *args, **kwargs)` -> a function of the same form. `base` is the user's class."""
        raise TypeError(f"{type(self).__name__} does not say how it wraps a forward")

    def describe(self) -> str:
        """A few words for the printed schedule."""
        return type(self).__name__.lower()


class Scheduled:
    """Mixin of every scheduled module's class."""

    _slapo_base: ClassVar[type[nn.Module]]
    _slapo_layers: ClassVar[tuple[Layer, ...]]
    _slapo_own: ClassVar[Forward]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class exists in this process only: pickle (and deepcopy, and torch.save) rebuild it from its parts.
        # Python's default is (copyreg.__newobj__, (cls, ...), state, ...) for every protocol >= 2.
        _, args, *rest = list(super().__reduce_ex__(max(2, int(protocol))))
        return (_rebuild, (self._slapo_base, self._slapo_layers, *args[1:]), *rest)


def _rebuild(base: type[nn.Module], layers: tuple[Layer, ...], *args: Any) -> nn.Module:
    cls: Any = scheduled_class(base, layers)
    return cls.__new__(cls, *args)  # type: ignore[no-any-return]


_CLASSES: weakref.WeakValueDictionary[Any, type[nn.Module]] = weakref.WeakValueDictionary()


def scheduled_class(base: type[nn.Module], layers: tuple[Layer, ...]) -> type[nn.Module]:
    """The subclass of `base` whose forward has these layers around it (inner to outer); equal layers, one class."""
    known = _CLASSES.get((base, layers))
    if known is None:
        known = _CLASSES[base, layers] = _make_class(base, layers)
    return known


def _make_class(base: type[nn.Module], layers: tuple[Layer, ...]) -> type[nn.Module]:
    forward: Any = base.forward
    own = forward
    for layer in layers:
        forward = layer.wrap(forward, base)
        own = forward if layer.rank < 0 else own
    if not inspect.isfunction(forward):  # e.g. a torch.compile wrapper object: make it a method
        inner = forward
        forward = functools.wraps(base.forward)(lambda self, *args, **kwargs: inner(self, *args, **kwargs))
    # transformers reads the signature of forward to prepare inputs; __wrapped__ would lead dynamo and inspect past us
    forward.__dict__.pop("__wrapped__", None)
    forward.__signature__ = inspect.signature(base.forward)
    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "forward": forward,
        "_slapo_base": base,
        "_slapo_layers": layers,
        "_slapo_own": own,
    }
    kind: Any = type(base)
    return kind(base.__name__, (Scheduled, base), body)  # type: ignore[no-any-return]


def is_scheduled(module: nn.Module) -> bool:
    return isinstance(module, Scheduled)


def bare(module: nn.Module) -> type[nn.Module]:
    """The user's class of a module."""
    return module._slapo_base if isinstance(module, Scheduled) else type(module)


def layers(module: nn.Module) -> tuple[Layer, ...]:
    """The layers on a module, inner to outer."""
    return module._slapo_layers if isinstance(module, Scheduled) else ()


def own_layers(module: nn.Module) -> tuple[Layer, ...]:
    """The layers that are part of the module's forward itself: those of negative rank."""
    return tuple(layer for layer in layers(module) if layer.rank < 0)


def own_forward(module: nn.Module) -> Forward:
    """What a trace reads: the user's forward with the layers of negative rank around it."""
    # past the instance: what is looked up there would be bound to the module
    return type(module)._slapo_own if isinstance(module, Scheduled) else type(module).forward


def layer_of(module: nn.Module, kind: type[Layer]) -> Any:
    """The layer of this class on a module, or None."""
    return next((layer for layer in layers(module) if type(layer) is kind), None)


def dress(module: nn.Module, layer: Layer) -> None:
    """Put a layer on a module, in the place of one of the same class."""
    kept = [other for other in layers(module) if type(other) is not type(layer)]
    _set(module, tuple(sorted([*kept, layer], key=lambda one: one.rank)))


def undress(module: nn.Module, kind: type[Layer]) -> None:
    """Take the layer of this class off a module."""
    _set(module, tuple(layer for layer in layers(module) if type(layer) is not kind))


def _set(module: nn.Module, new: tuple[Layer, ...]) -> None:
    base = bare(module)
    module.__class__ = scheduled_class(base, new) if new else base
