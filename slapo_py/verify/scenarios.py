"""What the original and the scheduled model are put through."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from slapo_py.tracing.recorder import Inputs, vary
from slapo_py.tracing.values import map_tensors, tensors
from slapo_py.verify.leaves import once

SMALL = 2.0**-8  # a power of two: scaled values are exact, and their squares are no larger than a usual eps
LARGE = 8.0  # attention scores grow with the fourth power: a softmax that can't take large ones overflows
OTHER = (1.125, 2.0**-5)  # the same function of each number, whatever tensor a step has moved it to


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the model, and a backward pass if `grad`. `training` None leaves the flags as they are."""

    inputs: Inputs
    training: bool | None
    grad: bool
    step: bool = False
    """An optimizer step follows, with the gradients summed up so far."""
    inference: bool = False
    """Under `torch.inference_mode()`."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Calls in a row on one copy of the model, without a reset between them."""

    name: str
    calls: tuple[Call, ...]
    dtype: torch.dtype | None = None
    """The model and its floating inputs are cast to this first."""
    autocast: torch.dtype | None = None
    scale: float = 1.0
    """Parameters and floating inputs are multiplied by this first."""
    shift: float = 0.0
    """This is added to the parameters first: biases that are zero and norms that are one show nothing."""
    inputs_require_grad: bool = False
    derived: bool = False
    """Made up, not given by the user: where the original can't run it, it is left out."""

    @property
    def unusual(self) -> bool:
        """Other numbers than the user's, or another dtype: where the original overflows, it is left out."""
        return self.dtype is not None or self.autocast is not None or self.scale != 1.0 or bool(self.shift)


def scenarios(given: Sequence[Inputs], steps: int, own: torch.dtype, mixed: bool) -> Iterator[Scenario]:
    """All scenarios for some example inputs, the plain ones first."""
    first = given[0]
    for number, one in enumerate(given):
        which = f", example inputs {number + 1}" if len(given) > 1 else ""
        yield Scenario(f"train{which}", (Call(one, True, True),))
        yield Scenario(f"eval{which}", (Call(one, False, True),))
        yield Scenario(f"train, no_grad{which}", (Call(one, True, False),))
        yield Scenario(f"eval, no_grad{which}", (Call(one, False, False),))
    if mixed:
        yield Scenario("training flags as they are", (Call(first, None, True),))
    if any(one.is_floating_point() and not one.requires_grad for one in tensors(first)):
        calls = (Call(first, True, True), Call(first, False, True))
        yield Scenario("gradients of inputs", calls, inputs_require_grad=True, derived=True)
    if any(_has_strides(one) for one in tensors(first)):
        laid = map_tensors(first, once(_with_other_strides))
        calls = (Call(laid, True, True), Call(laid, False, False))
        yield Scenario("inputs with other strides", calls, derived=True)
    yield Scenario("two calls in a row", (Call(first, True, True), Call(first, True, True)))
    modes = ((True, True), (False, False), (False, True), (True, True))
    yield Scenario("train, then eval, then train", tuple(Call(first, *mode) for mode in modes))
    calls = (Call(first, False, False, inference=True), Call(first, True, True))
    yield Scenario("inference_mode, then train", calls, derived=True)
    yield from _other_sizes(first)
    yield from _padded(first)
    yield from _micro_batches(first)
    last = (Call(first, True, True), Call(first, False, False))
    if steps:
        # the call before the first step fills what a model may keep of its weights
        many = (Call(first, False, False), *(Call(first, True, True, step=True) for _ in range(steps)))
        yield Scenario(f"{steps} optimizer step{'s' if steps > 1 else ''}", many + last)
    yield Scenario("other parameters", last, scale=OTHER[0], shift=OTHER[1], derived=True)
    yield Scenario("small values", last, scale=SMALL, derived=True)
    yield Scenario("large values", last, scale=LARGE, derived=True)
    for dtype in (torch.bfloat16, torch.float16):
        if dtype != own:
            yield Scenario(f"model in {str(dtype).removeprefix('torch.')}", last, dtype=dtype, derived=True)
    yield Scenario("autocast to bfloat16", last, autocast=torch.bfloat16, derived=True)


def _has_strides(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim > 1 and min(tensor.shape[-2:]) > 1


def _with_other_strides(tensor: Tensor) -> Tensor:
    """The same numbers, with the last two dims laid out the other way round."""
    if not _has_strides(tensor):
        return tensor
    new = tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    return new.requires_grad_(tensor.requires_grad)


def batch_size(inputs: Inputs) -> int | None:
    """The most frequent first dim of the tensors."""
    firsts = [tensor.shape[0] for tensor in tensors(inputs) if tensor.ndim]
    return max(set(firsts), key=firsts.count) if firsts else None


def rows(inputs: Inputs, indices: Sequence[int]) -> Inputs:
    """The same inputs with these rows of the batch."""
    batch = batch_size(inputs)

    @once
    def chosen(tensor: Tensor) -> Tensor:
        if not tensor.ndim or tensor.shape[0] != batch:
            return tensor
        return tensor.detach()[list(indices)].requires_grad_(tensor.requires_grad)

    result: Inputs = map_tensors(inputs, chosen)
    return result


def _other_sizes(inputs: Inputs) -> Iterator[Scenario]:
    batch = batch_size(inputs)
    if not batch:
        return
    for size in [size for size in (1, 2, 3) if size != batch][:2]:
        some = rows(inputs, [index % batch for index in range(size)])
        yield Scenario(f"batch of {size}", (Call(some, True, True), Call(some, False, False)), derived=True)
    for other in vary(inputs)[:1]:
        calls = (Call(other, True, True), Call(other, False, False))
        yield Scenario(f"batch of {batch_size(other)} at another length", calls, derived=True)
    longer = _longer(inputs, batch)
    if longer is not None:
        yield Scenario("twice the length", (Call(longer, True, True), Call(longer, False, False)), derived=True)


def _longer(inputs: Inputs, batch: int) -> Inputs | None:
    """The same inputs with each sequence twice in a row: what a window or a table of positions hides when short."""
    found = tensors(inputs)
    if any(one.is_cuda for one in found):
        return None  # an index beyond a table of positions can't be caught there
    lengths = {one.shape[1] for one in found if one.ndim == 2 and not one.is_floating_point() and one.shape[0] == batch}

    @once
    def doubled(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.ndim):
            if tensor.shape[dim] in lengths:
                tensor = torch.cat([tensor, tensor], dim)
        return tensor

    result: Inputs = map_tensors(inputs, doubled)
    return result if lengths else None


def _padded(inputs: Inputs) -> Iterator[Scenario]:
    """A mask that is all ones hides nothing: the last third of its first row becomes zeros."""

    def is_mask(tensor: Tensor) -> bool:
        return tensor.ndim == 2 and tensor.shape[1] > 2 and not tensor.is_floating_point() and bool((tensor == 1).all())

    if not any(is_mask(one) for one in tensors(inputs)):
        return

    @once
    def padded(tensor: Tensor) -> Tensor:
        if not is_mask(tensor):
            return tensor
        new = tensor.clone()
        new[0, new.shape[1] - max(1, new.shape[1] // 3) :] = 0
        return new

    some: Inputs = map_tensors(inputs, padded)
    yield Scenario("a padded row", (Call(some, True, True), Call(some, False, False)), derived=True)


def _micro_batches(inputs: Inputs) -> Iterator[Scenario]:
    """A batch in three parts, whose gradients are summed up."""
    batch = batch_size(inputs)
    if not batch:
        return
    whole = inputs if batch >= 3 else rows(inputs, [index % batch for index in range(3)])
    size = max(batch, 3)
    bounds = [size * part // 3 for part in range(4)]
    parts = [rows(whole, range(low, high)) for low, high in zip(bounds, bounds[1:])]
    yield Scenario("three micro-batches", tuple(Call(part, True, True) for part in parts), derived=True)


def mixed_flags(module: nn.Module) -> bool:
    """Whether some modules are in train mode and others in eval mode."""
    return len({one.training for one in module.modules()}) > 1
