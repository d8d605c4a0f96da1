"""From a reference and two launchers to an operation of torch: `slapo::name`, differentiable on every device."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slapo_py.kernels.launch import DTYPES, WIDEST, runs_triton

Function = Callable[..., Any]


def fused_op(
    name: str,
    reference: Function,
    forward: Function,
    backward: Function,
    *,
    fits: Function = lambda *args: True,
    keep: bool = False,
    everywhere: bool = False,
    widest: int = WIDEST,
    twin: str = "",
    unread: str = "",
) -> Function:
    """The operation `torch.ops.slapo.<name>`; it is called with all its arguments by position.

    reference: plain torch, fully annotated; Tensors, `Tensor | None` and plain values go in, one Tensor or a tuple of
        them comes out. It defines values, shapes and dtypes, and runs wherever Triton does not; its gradients are
        torch's own there, computed again from the inputs, which are all that is kept.
    forward: the same arguments and results by Triton; tensors that it returns are contiguous and new.
    backward: `backward(grads, outputs, needs, *args)`: the gradients of the outputs, the outputs themselves (none
        unless keep=True), and for each argument whether its gradient is needed. It returns as many values as there
        are arguments; one that is needed has the argument's shape and dtype, the others are ignored.
    fits: whether Triton's form covers these arguments (shapes that broadcast oddly, say); else the reference runs.
    everywhere: `forward` and `backward` run on every device; they know themselves what to do without Triton.
    widest: the longest last dim of the first argument that Triton's form takes.
    twin: "a, b" if the arguments a and b always have the same gradient: where shape and dtype agree, it is computed
        for a and used for both.

    unread: "a, b" if backward reads no values of the arguments a and b (what is linear in them): only their shapes are
        kept for it, and it is given zeros.

    Results are contiguous and never share storage with an argument. Inside, autocast is off: the public function casts
    as autocast would. The second derivative is the reference's.
    """
    schema = torch.library.infer_schema(reference, mutates_args=())
    taken = schema.rpartition(" -> ")[0].strip()[1:-1]
    names = [one.split("=")[0].split()[-1] for one in taken.split(", ")]
    pair = tuple(names.index(one) for one in twin.split(", ")) if twin else ()

    left = {names.index(one) for one in unread.split(", ")} if unread else set()

    def by_triton(args: Sequence[Any]) -> bool:
        if everywhere:
            return True
        floats = (one for one in args if isinstance(one, Tensor) and one.is_floating_point())
        return runs_triton(args[0], widest) and all(one.dtype in DTYPES for one in floats) and fits(*args)

    def run(*args: Any) -> Any:
        with _no_autocast(args):
            return _owned(forward(*args) if by_triton(args) else reference(*args), args)

    def fake(*args: Any) -> Any:
        with _no_autocast(args):
            return _owned(reference(*args), args)

    def run_backward(grads: list[Tensor], outputs: list[Tensor], needs: list[bool], *args: Any) -> list[Tensor]:
        with _no_autocast(args):
            found = backward(tuple(grads), tuple(outputs), needs, *args)
        needed = [one for one, need in zip(found, needs) if need]
        return list(_owned(tuple(needed), (*args, *grads, *outputs)))

    def fake_backward(grads: list[Tensor], outputs: list[Tensor], needs: list[bool], *args: Any) -> list[Tensor]:
        return [torch.empty_like(one, memory_format=_CONTIGUOUS) for one, need in zip(args, needs) if need]

    op = torch.library.custom_op(f"slapo::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(fake)
    backward_schema = f"(Tensor[] grads, Tensor[] outputs, bool[] needs, {taken}) -> Tensor[]"
    backward_op = torch.library.custom_op(
        f"slapo::{name}_backward", run_backward, mutates_args=(), schema=backward_schema
    )
    backward_op.register_fake(fake_backward)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.saved = [isinstance(one, Tensor) and place not in left for place, one in enumerate(inputs)]
        ctx.plain = [
            _facts(one) if isinstance(one, Tensor) and place in left else None if saved else one
            for place, (one, saved) in enumerate(zip(inputs, ctx.saved))
        ]
        outputs = (output if isinstance(output, tuple) else (output,)) if keep else ()
        ctx.save_for_backward(*outputs, *(one for one, saved in zip(inputs, ctx.saved) if saved))
        ctx.kept = len(outputs)
        ctx.set_materialize_grads(False)  # of a statistic that nobody used: no zeros of its size
        ctx.facts = [_facts(one) for one in (output if isinstance(output, tuple) else (output,))]

    def differentiate(ctx: Any, *found: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = [facts.zeros() if one is None else one for one, facts in zip(found, ctx.facts)]
        saved = ctx.saved_tensors  # read once: a checkpoint makes them anew for one reading
        outputs, tensors = saved[: ctx.kept], iter(saved[ctx.kept :])
        args = [next(tensors) if one else plain for one, plain in zip(ctx.saved, ctx.plain)]
        args = [one.zeros() if isinstance(one, _Facts) else one for one in args]
        needs = [bool(one) for one in ctx.needs_input_grad[: len(args)]]
        if torch.is_grad_enabled() or not by_triton(args):
            return _gradients(reference, grads, needs, args)
        same = _is_twin(pair, needs, args)
        asked = [need and not (same and place == pair[1]) for place, need in enumerate(needs)]
        results = iter(backward_op(list(grads), list(outputs), asked, *args))
        made = [next(results) if need else None for need in asked]
        if same:
            made[pair[1]] = made[pair[0]]
        return tuple(made)

    op.register_autograd(differentiate, setup_context=setup)
    return op


class _Facts(NamedTuple):
    """What is left of a tensor whose values are not needed."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        """Zeros of its shape that take no memory."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


def _facts(tensor: Tensor) -> _Facts:
    return _Facts(tensor.shape, tensor.dtype, tensor.device)


_CONTIGUOUS = torch.contiguous_format


def _no_autocast(args: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    kind = args[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def _owned(results: Any, args: Sequence[Any]) -> Any:
    """Contiguous tensors of their own, as torch demands of an operation that claims no aliases."""
    seen = {_storage(one) for one in args if isinstance(one, Tensor)}
    owned = []
    for one in results if isinstance(results, tuple) else (results,):
        one = one.contiguous()
        one = one.view(-1).view(one.shape) if one.numel() else one  # a dim of size 1 may have any stride
        if _storage(one) in seen:
            one = one.clone(memory_format=_CONTIGUOUS)
        seen.add(_storage(one))
        owned.append(one)
    return tuple(owned) if isinstance(results, tuple) else owned[0]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_twin(pair: tuple[int, ...], needs: Sequence[bool], args: Sequence[Any]) -> bool:
    if not pair:
        return False
    a, b = (args[place] for place in pair)
    return all(needs[place] for place in pair) and a.shape == b.shape and a.dtype == b.dtype


def _gradients(
    reference: Function, grads: Sequence[Tensor], needs: Sequence[bool], args: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """The reference's gradients, from its inputs; a graph of their own is kept if one is being made."""
    keep = torch.is_grad_enabled()  # under create_graph=True
    with torch.enable_grad(), _no_autocast(args):
        given = [
            one.detach().requires_grad_(need) if isinstance(one, Tensor) and not (keep and one.requires_grad) else one
            for one, need in zip(args, needs)
        ]
        results = reference(*given)
        pairs = zip(results if isinstance(results, tuple) else (results,), grads)
        chosen = [(one, grad) for one, grad in pairs if one.requires_grad]
        needed = [one for one, need in zip(given, needs) if need]
        found = torch.autograd.grad(
            [one for one, _ in chosen], needed, [grad for _, grad in chosen], create_graph=keep, allow_unused=True
        )
    by_place = iter(found)
    return tuple(next(by_place) if need else None for need in needs)
