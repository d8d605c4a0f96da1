"""The optimizer and the scheduler of an engine, and the gradient's norm."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from slapo_py.errors import BuildError


def make_optimizer(factory: Callable[..., Any], named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Call the factory on the trainable (name, parameter) pairs.

    Requires: an Optimizer that holds each of them exactly once and nothing else, and steps without a closure.
    Raises: BuildError.
    """
    if not named:
        raise BuildError(
            "build: the model has no trainable parameter. Set requires_grad_(True) on what is to be trained before "
            "create_schedule, or write slapo.build(sch) for the module alone."
        )
    optimizer = factory(list(named))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BuildError(
            f"build: optimizer= returned a {type(optimizer).__name__}, not a torch.optim.Optimizer. "
            "For example: optimizer=partial(torch.optim.AdamW, lr=1e-3)."
        )
    _check_partition(optimizer, named)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise BuildError(
            f"build: {type(optimizer).__name__}.step needs a closure that runs the model again; an engine steps "
            "once a batch. Use an optimizer that steps without one, or slapo.build(sch) and your own loop."
        )
    return optimizer


def _check_partition(optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]]) -> None:
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    ours = {id(parameter): name for name, parameter in named}
    lost = [name for key, name in ours.items() if key not in held]
    twice = [name for key, name in ours.items() if held.count(key) > 1]
    if lost:
        raise BuildError(
            f"build: optimizer= left out {len(lost)} of {len(ours)} trainable parameters: {_list(lost)}. "
            "They would never be trained. Give it all of them, or freeze these with requires_grad_(False) before "
            "create_schedule."
        )
    if twice:
        raise BuildError(f"build: optimizer= holds {_list(twice)} more than once. Put each name in one group.")
    foreign = sum(key not in ours for key in held)
    if foreign:
        raise BuildError(
            f"build: optimizer= holds {foreign} parameters that are not the built module's trainable ones. "
            "Use the pairs it is called with, not the original's parameters."
        )


def make_scheduler(factory: Callable[..., Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    """Call the factory on the optimizer. Raises: BuildError."""
    if factory is None:
        return None
    scheduler = factory(optimizer)
    missing = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, name)]
    if missing:
        raise BuildError(
            f"build: scheduler= returned a {type(scheduler).__name__} without {missing[0]}(). "
            "For example: scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=100)."
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise BuildError(
            "build: scheduler=: ReduceLROnPlateau steps on a metric, and an engine has none to give it. Leave it out "
            "and write ReduceLROnPlateau(engine.optimizer).step(metric) in your loop."
        )
    return scheduler


def norm_and_clip(parameters: Iterable[nn.Parameter], clip: float | None) -> torch.Tensor:
    """The global L2 norm of the gradients; with `clip`, scale them in place so that it is at most that.

    The arithmetic is that of torch.nn.utils.clip_grad_norm_, to the bit.
    """
    carriers = [_dense(parameter) for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([carrier.grad for carrier in carriers if carrier.grad is not None])
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(carriers, clip, norm)
    return norm.detach()


def _dense(parameter: nn.Parameter) -> torch.Tensor:
    """Something whose `.grad` is dense: the parameter, or a stand-in for the values of a sparse gradient."""
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return parameter
    parameter.grad = gradient.coalesce()
    values = parameter.grad.values()
    stand_in = torch.empty_like(values)
    stand_in.grad = values
    return stand_in


def _list(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
