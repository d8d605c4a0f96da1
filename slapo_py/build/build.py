"""`build`: a schedule becomes a plain module with its own storage, or an engine of a target."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch.distributed as dist
from torch import Tensor, nn

from slapo_py.build.conserve import check_conserved
from slapo_py.build.facts import set_facts
from slapo_py.build.initial import initial_values
from slapo_py.build.materialize import materialize
from slapo_py.build.on_mesh import scheduled_on
from slapo_py.build.slicing import parts_of
from slapo_py.build.spread import check_spread
from slapo_py.build.summed import sum_gradients
from slapo_py.build.without_cache import scheduled_without_cache, turn_off_cache
from slapo_py.distributed.failures import fails_together
from slapo_py.distributed.mesh import DATA, Mesh
from slapo_py.errors import BuildError
from slapo_py.layouts.checking.axes import used_axes

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
def build(
    sch: Buildable,
    *,
    init: Callable[[str, Tensor], object] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    donate: bool = False,
    mesh: Any = None,
    logical_masks: bool = False,
) -> nn.Module: ...


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
    init: Callable[[str, Tensor], object] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    donate: bool = False,
    mesh: Any = None,
    data_parallel: str = "ddp",
    logical_masks: bool = False,
) -> "Engine": ...


@fails_together
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
    init: Callable[[str, Tensor], object] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    donate: bool = False,
    mesh: Any = None,
    data_parallel: str = "ddp",
    logical_masks: bool = False,
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
    - mesh: sizes by axis, `{"dp": 2, "tp": 2}`, outer axis first, or torch's DeviceMesh with names; every rank calls
      build, and gets its own part. Attributes such as `out_features` keep the sizes of the whole, but for those that
      were configured `slapo.per_rank(axis)`. Only "dp" splits the data: a rank is given its own part of the batch.
      Gradients are averaged over "dp" by an engine only: around a module that is built without a target, put DDP.
      Ranks of one place on "dp" draw alike, but inside of `fork_rng`, if they have the same random state: call the same
      `torch.manual_seed(...)` on them, after data loading is set up, and draw nothing on one of them alone; ranks of
      other places take another seed. An engine sees to the latter, and refuses a step for which the states of a place
      differ. A module without a target can't know: its replicas would drop differently, and go apart in silence.
      `{}` is for a process that is by itself, though there are others
    - data_parallel: what "dp" does with parameters: "ddp" keeps them whole on every rank, "fsdp" (FSDP2) spreads them
    - logical_masks: the ranks together drop what one process drops: each draws the mask of the whole tensor and takes
      its part. For comparing runs on different meshes, not for training: it costs the whole mask on every rank
    - init(name, tensor): for a model on "meta"; fills a whole parameter or persistent buffer in place, on each rank.
      Each is drawn with a seed of its own, of its first name in the original and of the first rank's
      `torch.manual_seed`, so that no schedule and no mesh changes the numbers. `slapo.own_init(model)` is the model's
      own initialisation
    - checkpoint: a safetensors file, or a folder that holds model.safetensors or several with an index, under the
      original's names; each rank reads its own part. It wins over the model's values, and `init` fills what it lacks
    - donate: move the original's parameters instead of copying them; the original must not be used afterwards

    Requires: the whole schedule (not one place of it); parameters with values, or where to take them from; on a mesh
    the same model on all ranks; attributes that can be deep-copied.
    Raises: BuildError, CheckpointError.
    """
    path = _check_whole(sch)
    if path:
        raise BuildError(
            f"build at {path!r}: build takes the whole schedule, not one place of it. "
            "Write slapo.build(sch), with the sch that create_schedule returned."
        )
    mesh = _mesh_of(mesh, target, sch)
    options = {
        "optimizer": optimizer,
        "loss": loss,
        "count": count,
        "scheduler": scheduler,
        "clip": clip,
        "inputs": inputs,
        "micro_batches": None if micro_batches == 1 else micro_batches,
        "precision": None if precision == "fp32" else precision,
        "data_parallel": None if data_parallel == "ddp" else data_parallel,
    }
    if target is None:
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise BuildError(
                f"build: {given[0]}= is for an engine, and no target is named. "
                f'Write slapo.build(sch, target="torch", {given[0]}=..., ...).'
            )
        built = _build_module(sch, donate, mesh, logical_masks, init, checkpoint)
        if mesh is not None:
            sum_gradients(built, mesh)
        return built

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
        data_parallel=data_parallel,
        logical_masks=logical_masks,
    )
    return engine(_build_module(sch, donate, mesh, logical_masks, init, checkpoint), training, mesh)


def _mesh_of(mesh: Any, target: str | None, sch: Any) -> Mesh | None:
    """The mesh; None for a process that is by itself."""
    if mesh is not None:
        return None if isinstance(mesh, Mapping) and not mesh else Mesh.of(mesh)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    used = used_axes(sch.root)
    if ranks > 1 and (used or target is not None):
        sizes = {used[0]: ranks} if used else {DATA: ranks}
        raise BuildError(
            f"build: the world has {ranks} ranks, and without mesh= each would have a whole model of its own. Write "
            f"mesh={sizes}, or mesh={{}} where that is meant."
        )
    return None


def _check_whole(sch: Any) -> str:
    if isinstance(sch, nn.Module) or not all(hasattr(type(sch), name) for name in ("path", "module", "original")):
        raise BuildError(
            f"build: needs a schedule and got a {type(sch).__name__}. Write slapo.build(slapo.create_schedule(model))."
        )
    return str(sch.path)


def _build_module(
    sch: Buildable, donate: bool, mesh: Mesh | None, logical_masks: bool, init: Any, checkpoint: Any
) -> nn.Module:
    if mesh is not None:
        source, facts = scheduled_on(sch, mesh, logical_masks)
        initial = initial_values(sch.original, source, facts, mesh, init, checkpoint)
        held: list[tuple[str, Tensor]] = [*source.named_parameters(), *source.named_buffers()]
        wholes = {name: one for name, one in held if name not in initial.names} | initial.hashes
        made = initial.made | parts_of(source, facts, mesh, initial.made)
        built = materialize(source, donate=donate, made=made)
        turn_off_cache(built, sch.original)
        set_facts(built, facts)
        check_conserved(sch.original, built, donated=donate, mesh=mesh, renewed=initial.names)
        check_spread(built, wholes, mesh)
        return built
    source = scheduled_without_cache(sch)
    initial = initial_values(sch.original, source, {}, None, init, checkpoint)
    built = materialize(source, donate=donate, made=initial.made)
    turn_off_cache(built, sch.original)
    check_conserved(sch.original, built, donated=donate, renewed=initial.names)
    return built
