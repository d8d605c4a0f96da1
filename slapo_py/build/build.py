"""`build`: a schedule becomes a plain module with its own storage, or an engine of a target."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, overload

from torch import nn

from slapo_py.build.conserve import check_conserved
from slapo_py.build.materialize import materialize
from slapo_py.build.without_cache import scheduled_without_cache, turn_off_cache
from slapo_py.errors import BuildError

if TYPE_CHECKING:
    from slapo_py.backends.base import Engine


class Buildable(Protocol):
    """What `build` reads of a schedule."""

    @property
    def path(self) -> str: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def original(self) -> nn.Module: ...
    @property
    def history(self) -> Any: ...
    @property
    def root(self) -> Any: ...


@overload
def build(sch: Buildable, *, donate: bool = False) -> nn.Module: ...


@overload
def build(
    sch: Buildable,
    *,
    target: str,
    optimizer: Callable[..., Any],
    loss: Callable[[Any, Any], Any],
    count: Callable[[Any], int],
    scheduler: Callable[..., Any] | None = None,
    micro_batches: int = 1,
    precision: str = "fp32",
    clip: float | None = None,
    inputs: Callable[[Any], Any] | None = None,
    donate: bool = False,
    mesh: Any = None,
) -> "Engine": ...


def build(
    sch: Buildable,
    *,
    target: str | None = None,
    optimizer: Callable[..., Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    count: Callable[[Any], int] | None = None,
    scheduler: Callable[..., Any] | None = None,
    micro_batches: int = 1,
    precision: str = "fp32",
    clip: float | None = None,
    inputs: Callable[[Any], Any] | None = None,
    donate: bool = False,
    mesh: Any = None,
) -> Any:
    """Carry a schedule out: give the scheduled copy storage of its own, and an engine where a target is named.

    `build(sch)` -> an `nn.Module` with the original's names, values and ties, and the schedule's traces and layers.
    `build(sch, target="torch", optimizer=..., loss=..., count=...)` -> an `Engine` with train_step, eval_step, save
    and load. The original is not changed, and the schedule can be built again.

    - optimizer: a factory, called on the trainable (name, parameter) pairs: `partial(torch.optim.AdamW, lr=1e-3)`
    - scheduler: a factory, called on the optimizer
    - loss(output, batch): the *sum* of the loss over the batch, a scalar tensor
    - count(batch): what the sum is divided by (tokens, rows), an int; called on each micro-batch and summed
    - micro_batches: a batch is split into so many parts along dim 0; gradients are those of the whole batch
    - precision: "fp32" trains the parameters as they are; "bf16" trains a bfloat16 module with float32 masters
    - clip: the largest global L2 norm of the gradient; None does not clip
    - inputs(batch): the model's arguments, a dict or (args, kwargs); without it a dict is passed as keywords and a
      tuple by position
    - donate: move the original's parameters instead of copying them; the original must not be used afterwards

    Requires: the whole schedule (not one place of it); parameters with values; attributes that can be deep-copied.
    Raises: BuildError.
    """
    path = _check_whole(sch)
    if path:
        raise BuildError(
            f"build at {path!r}: build takes the whole schedule, not one place of it. "
            "Write slapo.build(sch), with the sch that create_schedule returned."
        )
    if mesh is not None:
        raise BuildError(
            "build: mesh= is not supported yet; this version builds for one process and one device. Leave mesh= out."
        )
    options = {
        "optimizer": optimizer,
        "loss": loss,
        "count": count,
        "scheduler": scheduler,
        "clip": clip,
        "inputs": inputs,
        "micro_batches": None if micro_batches == 1 else micro_batches,
        "precision": None if precision == "fp32" else precision,
    }
    if target is None:
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise BuildError(
                f"build: {given[0]}= is for an engine, and no target is named. "
                f'Write slapo.build(sch, target="torch", {given[0]}=..., ...).'
            )
        return _build_module(sch, donate)

    # here, not at the top: backends import the core, never the reverse
    from slapo_py.backends import find_engine
    from slapo_py.backends.base import Training

    engine = find_engine(target)
    training = Training.checked(
        optimizer=optimizer,
        loss=loss,
        count=count,
        scheduler=scheduler,
        micro_batches=micro_batches,
        precision=precision,
        clip=clip,
        inputs=inputs,
    )
    return engine(_build_module(sch, donate), training)


def _check_whole(sch: Any) -> str:
    if isinstance(sch, nn.Module) or not all(hasattr(type(sch), name) for name in ("path", "module", "original")):
        raise BuildError(
            f"build: needs a schedule and got a {type(sch).__name__}. Write slapo.build(slapo.create_schedule(model))."
        )
    return str(sch.path)


def _build_module(sch: Buildable, donate: bool) -> nn.Module:
    source = scheduled_without_cache(sch)
    built = materialize(source, donate=donate)
    turn_off_cache(built, sch.original)
    check_conserved(sch.original, built, donated=donate)
    return built
