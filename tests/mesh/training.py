"""Three optimizer steps on a mesh and in one process, compared on every rank."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.backends.global_numbers import local
from slapo_py.build.facts import facts_of
from slapo_py.build.slicing import part_of
from slapo_py.distributed.mesh import Mesh
from tests.mesh.whole import bit_equal_over, inputs_of, schedule

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-2)
STEPS = 3


def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = output["logits"]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def count(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"] != -100).sum())


def inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: one for key, one in batch.items() if key != "labels"}


def batches(sch: slapo.Schedule, rows: int = 4) -> list[dict[str, Any]]:
    """A batch for each step; rows differ in how many tokens count."""
    made = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batch: dict[str, Any] = {}
        for key, one in inputs_of(sch).items():
            if isinstance(one, Tensor) and one.dtype == torch.long and "mask" not in key:
                batch[key] = torch.randint(3, 90, (rows, *one.shape[1:]), generator=generator)
            elif isinstance(one, Tensor):
                batch[key] = one[torch.arange(rows) % len(one)]  # padded in every other row
            else:
                batch[key] = one
        length = batch.get("decoder_input_ids", batch.get("input_ids")).shape[1]
        batch["labels"] = torch.randint(3, 90, (rows, length), generator=generator)
        batch["labels"][0, : length // 2] = -100
        made.append(batch)
    return made


def of_rank(batch: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The rows of this data-parallel rank."""
    parts, at = mesh.size("dp"), mesh.coordinate("dp")
    return {key: one.tensor_split(parts)[at] if isinstance(one, Tensor) else one for key, one in batch.items()}


def _keep_in_eval_mode(module: nn.Module) -> None:
    """Dropout has tests of its own."""
    module.eval()
    module.train = lambda mode=True: module  # type: ignore[method-assign]


def train(
    name: str, sizes: dict[str, int], sequence: bool = False, clip: float | None = None, micro_batches: int = 1,
    **options: Any,
) -> tuple[float, str, list[str]]:  # fmt: skip
    """The largest relative error after three steps, where it is, and what ranks that hold the same don't agree on."""
    given: dict[str, Any] = {"optimizer": OPTIMIZER, "loss": loss, "count": count, "inputs": inputs, "clip": clip}
    tp = sizes.get("tp", 1)
    sch = schedule(name, sequence, tp, torch.float64)
    alone = slapo.build(sch, target="torch", mesh={}, **given)
    engine = slapo.build(sch, target="torch", mesh=sizes, micro_batches=micro_batches, **given, **options)
    mesh = Mesh.of(sizes)
    for one in (alone, engine):
        _keep_in_eval_mode(one.module)
    errors: dict[str, float] = {}
    for step, batch in enumerate(batches(sch)):
        expected, found = alone.train_step(batch), engine.train_step(of_rank(batch, mesh))
        errors[f"loss of step {step}"] = float((expected - found).abs() / expected)
        errors[f"norm of step {step}"] = float((alone.grad_norm - engine.grad_norm).abs() / alone.grad_norm)
    last = batches(sch)[-1]
    expected, found = alone.eval_step(last), engine.eval_step(of_rank(last, mesh))
    errors["loss of eval_step"] = float((expected - found).abs() / expected)
    theirs = dict(alone.module.named_parameters())
    same: dict[str, Tensor] = {}
    for key, one in engine.module.named_parameters():
        fact = facts_of(engine.module)[key]
        part = one.detach()
        part = part.full_tensor() if hasattr(part, "full_tensor") else part
        errors[key] = float((part - part_of(theirs[key].detach(), fact.placements, mesh)).abs().max())
        if not fact.placements:
            same[key] = local(one.detach())
    differ = bit_equal_over("tp", mesh, same) if tp > 1 else []
    where = max(errors, key=lambda one: errors[one])
    return errors[where], where, differ
