"""The scheduled copy as training calls it: transformers' models without their key-value cache."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_py.clone import clone
from slapo_py.tracing import trace_of

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


def scheduled_without_cache(sch: Any) -> nn.Module:
    """The module to build from: `sch.module`, or a copy of it whose traces were made with `use_cache=False`.

    A layer that was recorded while the model made a cache is traced with one among its arguments. Built for training
    it gets none, its guards would fail at each call, and the schedule would be bypassed. So where a config says
    `use_cache` and a module is traced, the history is replayed on a clone whose configs don't.
    """
    source: nn.Module = sch.module
    modules = list(source.modules())
    if not any(_caches(config) for config in _configs(source)) or not any(trace_of(one) for one in modules):
        return source
    return fresh_without_cache(sch).module


def fresh_without_cache(sch: Any) -> "Schedule":
    """The same steps on a new schedule of a clone whose configs say `use_cache=False`."""
    plain = clone(sch.original)
    turn_off_cache(plain, sch.original)
    fresh: Schedule = sch.root.fresh(plain)
    sch.history.replay(fresh)
    training = {name: one.training for name, one in sch.module.named_modules(remove_duplicate=False)}
    for name, one in fresh.module.named_modules(remove_duplicate=False):
        one.training = training.get(name, one.training)
    return fresh


def turn_off_cache(built: nn.Module, source: nn.Module) -> None:
    """Set `use_cache=False` on every config (and config inside a config) of the built module.

    A cache costs memory in training and stops transformers' own checkpointing. `generation_config` stays as it is:
    `generate()` asks it, and forward does not. Configs that the copy shares with `source` are not touched.
    """
    theirs = {id(config) for config in _configs(source)}
    for config in _configs(built):
        if id(config) not in theirs and _caches(config):
            config.use_cache = False


def _caches(config: Any) -> bool:
    return getattr(config, "use_cache", None) is True


def _configs(module: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = [vars(child)["config"] for child in module.modules() if "config" in vars(child)]
    while waiting:
        config = waiting.pop()
        if id(config) in seen or not hasattr(config, "__dict__") or isinstance(config, type | nn.Module):
            continue
        seen.add(id(config))
        yield config
        waiting += [value for value in vars(config).values() if isinstance(getattr(value, "use_cache", None), bool)]
