"""DTensor as a second oracle: where it takes these placements without communication, it gives ours."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as DPartial
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from slapo_py.layouts.placement import Partial, Placement, Replicate, Shard
from slapo_py.layouts.rules.signatures import Signature, signatures
from tests.layouts.cases import LABELLED, MOVES
from tests.layouts.oracle import Case, mapped, parts_of, results

RANKS = 2
BY_NAME = {one.name: one for one in (*LABELLED, *MOVES)}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def theirs(placement: Placement) -> object:
    if isinstance(placement, Shard):
        return DShard(placement.dim)
    return DReplicate() if isinstance(placement, Replicate) else DPartial(placement.op)  # type: ignore[attr-defined]


def as_ours(placement: object) -> Placement:
    if isinstance(placement, _StridedShard):  # its parts are every split_factor-th: our blocks
        return Shard(placement.dim, placement.split_factor)
    if isinstance(placement, DShard):
        return Shard(placement.dim)
    if isinstance(placement, DPartial):  # also the masked kind that embedding makes
        return Partial(placement.reduce_op)
    assert isinstance(placement, DReplicate)
    return Replicate()


def part(whole: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    mine = parts_of(whole.detach(), placement, RANKS, torch.Generator().manual_seed(0))[0]
    made = DTensor.from_local(mine, mesh, [theirs(placement)], run_check=False)
    return made.detach().requires_grad_(whole.is_floating_point())


def plain(one: Case, signature: Signature) -> bool:
    """DTensor's parts are torch.chunk's, and a user can't make blocks."""
    tensors = zip(
        (*one.tensors, *results(one.function(*one.args, **one.kwargs))), (*signature.inputs, *signature.outputs)
    )
    return all(not isinstance(put, Shard) or put.blocks == 1 and t.shape[put.dim] % RANKS == 0 for t, put in tensors)


def compare(one: Case, signature: Signature, mesh: DeviceMesh) -> str:
    """ "agrees", "not there", or what DTensor has instead."""
    parts = [part(whole, put, mesh) for whole, put in zip(one.tensors, signature.inputs, strict=True)]
    given = iter(parts)
    args, kwargs = mapped((one.args, one.kwargs), lambda value: next(given) if isinstance(value, Tensor) else value)
    with CommDebugMode() as sent:
        try:
            outs = results(one.function(*args, **kwargs))
        except RuntimeError:  # how DTensor says that it has no rule for this, or not so placed: NAMES says where
            return "not there"
    if sent.get_total_counts():
        return "not there"
    found = [as_ours(out.placements[0]) for out in outs]
    if found != list(signature.outputs):
        return f"results {', '.join(map(str, found))}"
    flows = [(out, put) for out, put in zip(outs, signature.output_gradients) if out.requires_grad]
    needing = [(one, put) for one, put in zip(parts, signature.gradients) if one.requires_grad]
    if not flows or not needing or signature.needs == "no_grad":
        return "agrees"
    tops = [part(torch.ones(out.shape, dtype=out.dtype), put or Replicate(), mesh).detach() for out, put in flows]
    with CommDebugMode() as sent:
        grads = torch.autograd.grad([out for out, _ in flows], [one for one, _ in needing], tops)
    if sent.get_total_counts():
        return "not there"
    got = [as_ours(grad.placements[0]) for grad in grads]
    # A gradient that DTensor keeps whole where ours is a part is one local slice away.
    if any(
        have not in (put or Replicate(), Replicate()) or have != put == Partial()
        for have, (_, put) in zip(got, needing)
    ):
        return f"gradients {', '.join(map(str, got))}"
    return "agrees"


# Case -> the inputs of signatures for which DTensor communicates: the others must agree.
NAMES: dict[str, set[str]] = {
    **dict.fromkeys(
        "linear addmm bmm mm matmul layer_norm softmax log_softmax flatten unsqueeze transpose permute add sub mul div "
        "neg gelu relu pow sum cat split chunk amax".split(),
        set(),
    ),
    **dict.fromkeys(("linear without bias", "view heads", "view merges", "mul a number", "add a number"), set()),
    "embedding": {"R P"},
    "mean": {"P"},
    "where": {"R P P"},
    "cumsum": {"P"},
}


@pytest.mark.parametrize("name", NAMES)
def test_dtensor_gives_the_same(name: str, mesh: DeviceMesh) -> None:
    one = BY_NAME[name]
    found = {
        " ".join(map(str, signature.inputs)): compare(one, signature, mesh)
        for signature in signatures(one.operation, RANKS)
        if plain(one, signature)
    }
    assert {inputs for inputs, what in found.items() if what == "not there"} == NAMES[name]
    assert {inputs: what for inputs, what in found.items() if what not in ("agrees", "not there")} == {}
    assert len(found) > 1
