"""What the ranks of a mesh compute, and what one process computes: run on every rank, compared there."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo_py as slapo
from slapo_py.build.facts import facts_of
from slapo_py.build.slicing import part_of
from slapo_py.distributed.mesh import Mesh
from slapo_py.distributed.traffic import counted
from slapo_py.layouts.placement import join
from tests.fingerprint import changes, fingerprint
from tests.layouts.plans import PLANS


@dataclass
class Compared:
    """error: the largest of output and gradients, relative. calls, sent: collectives and bytes of this rank."""

    error: float
    where: str
    calls: Counter[str]
    sent: Counter[str]
    misses: dict[str, int]
    output: Tensor


def first_tensor(value: Any) -> Tensor:
    leaves = [value] if isinstance(value, Tensor) else torch.utils._pytree.tree_leaves(tuple(value.values()))
    return next(one for one in leaves if isinstance(one, Tensor))


def schedule(name: str, sequence: bool, ranks: int, dtype: torch.dtype) -> slapo.Schedule:
    """A family, split and synced; in eval mode, so that nothing is drawn."""
    plan = PLANS[name]
    model = plan.model().to(dtype).eval()
    inputs = {
        key: one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one
        for key, one in plan.inputs().items()
    }
    sch = slapo.create_schedule(model, inputs)
    if ranks == 1:
        return sch
    plan.split(sch)
    return sch.auto_sync("tp", pins=plan.pins if sequence else None, ranks=ranks)


def inputs_of(sch: slapo.Schedule) -> dict[str, Any]:
    return dict(sch.root.example_inputs)


def compare(name: str, sequence: bool, sizes: dict[str, int], dtype: torch.dtype = torch.float64) -> Compared:
    sch = schedule(name, sequence, sizes["tp"], dtype)
    before = fingerprint(sch.original)
    built = slapo.build(sch, mesh=sizes)
    assert changes(before, fingerprint(sch.original)) == []
    return compare_built(sch, built, Mesh.of(sizes))


def compare_built(
    sch: slapo.Schedule, built: nn.Module, mesh: Mesh, train: bool = False, given: tuple[Tensor, ...] = ()
) -> Compared:
    model, inputs = sch.original.train(train), {} if given else inputs_of(sch)
    built.train(train)
    torch.manual_seed(5)
    expected = first_tensor(model(*given, **inputs))
    seed = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(3))
    expected.backward(seed)
    torch.manual_seed(5)
    with counted() as traffic:
        found = first_tensor(built(*given, **inputs))
        found.backward(seed)
    errors = {"output": (found - expected).detach().abs().max() / expected.detach().abs().max()}
    named, theirs = dict(built.named_parameters()), dict(model.named_parameters())
    top = max(one.grad.abs().max() for one in theirs.values() if one.grad is not None)
    for parameter in named:
        fact = facts_of(built)[parameter]
        wanted, grad = theirs[parameter].grad, named[parameter].grad
        assert (wanted is None) == (grad is None), parameter
        if wanted is not None and grad is not None:
            errors[parameter] = (grad - part_of(wanted, fact.placements, mesh)).abs().max() / top
    buffers = dict(built.named_buffers())
    for name, wanted in model.named_buffers():
        fact = facts_of(built).get(name)
        part = part_of(wanted, fact.placements, mesh) if fact is not None else wanted
        if wanted.is_floating_point():
            errors[name] = (buffers[name] - part).abs().max()
    where = max(errors, key=lambda one: float(errors[one]))
    return Compared(
        float(errors[where]), where, traffic.calls, traffic.sent, slapo.tracing.misses(built), found.detach()
    )


def bit_equal_over(axis: str, mesh: Mesh, tensors: dict[str, Tensor]) -> list[str]:
    """The names of those that are not the same on all ranks of an axis."""
    found = []
    for name, tensor in tensors.items():
        every = [torch.empty_like(tensor) for _ in range(mesh.size(axis))]
        dist.all_gather(every, tensor.contiguous(), group=mesh.group(axis))
        if any(not torch.equal(every[0], one) for one in every):
            found.append(name)
    return found


def together(built: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """The whole parameters of a built module, put together of the parts of all ranks."""
    parts = {name: one.detach() for name, one in built.named_parameters()}
    for axis, size in mesh.sizes.items():
        heard: list[Any] = [None] * size
        dist.all_gather_object(heard, parts, group=mesh.group(axis))
        for name, fact in facts_of(built).items():
            if axis in fact.placements:
                placement = fact.placements[axis]
                parts[name] = join([one[name] for one in heard], placement, fact.shape[placement.dim])
    return parts
