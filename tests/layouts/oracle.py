"""Whether a signature is right: an operation on random parts against the whole, forward and every gradient."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_py.layouts.placement import Partial, Placement, Replicate, Shard, join, split
from slapo_py.layouts.rules.operation import Operation, TensorSpec
from slapo_py.layouts.rules.shapes import is_move, rank_arguments
from slapo_py.layouts.rules.signatures import Signature
from slapo_py.layouts.rules.table import Rule

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One call of a torch operation, with real tensors in its arguments.

    line: of a fused kernel, or its rule. called: its name, where the function's own is another. frozen: which tensors,
    by number, the operation gives no gradient. tolerance: absolute and relative; float32 inside needs more.
    """

    name: str
    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    line: str | Rule | None = None
    called: str = ""
    frozen: tuple[int, ...] = ()
    tolerance: float = 1e-9

    @property
    def operation(self) -> Operation:
        return Operation(
            self.called or self.function.__name__,
            specified(self.args),
            specified(self.kwargs),
            tuple(spec(one) for one in results(self.function(*copied(self.args), **copied(self.kwargs)))),
        )

    @property
    def tensors(self) -> list[Tensor]:
        return list(leaves((self.args, self.kwargs)))


def case(
    name: str,
    function: Function,
    *args: Any,
    line: str | None = None,
    called: str = "",
    frozen: tuple[int, ...] = (),
    **kwargs: Any,
) -> Case:
    return Case(name, function, args, kwargs, line, called, frozen)


def spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.is_floating_point(), tensor.dtype == torch.bool)


def specified(tree: Any) -> Any:
    return mapped(tree, lambda one: spec(one) if isinstance(one, Tensor) else one)


def copied(tree: Any) -> Any:
    return mapped(tree, lambda one: one.clone() if isinstance(one, Tensor) else one)


def mapped(tree: Any, change: Function) -> Any:
    if isinstance(tree, dict):
        return {name: mapped(one, change) for name, one in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(mapped(one, change) for one in tree)
    return change(tree)


def leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (tuple, list)):
        for one in tree:
            yield from leaves(one)
    elif isinstance(tree, Tensor):
        yield tree


def results(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [one for one in value if isinstance(one, Tensor)]


# ---------------------------------------------------------------- parts


def integers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randint(-4, 5, tuple(shape), generator=generator).double()


def parts_of(whole: Tensor, placement: Placement, ranks: int, generator: torch.Generator) -> list[Tensor]:
    """Random parts that make up the whole."""
    if isinstance(placement, Shard):
        return [one.clone() for one in split(whole, placement, ranks)]
    if isinstance(placement, Replicate):
        return [whole.clone() for _ in range(ranks)]
    if placement == Partial():
        exact = bool((whole == whole.round()).all())
        draw = integers if exact else lambda shape, generator: torch.randn(shape, generator=generator).double()
        rest = [draw(whole.shape, generator).to(whole.dtype) for _ in range(ranks - 1)]
        return [*rest, whole - sum(rest)]
    assert isinstance(placement, Partial)
    sign = -1 if placement.op == "max" else 1
    holder = torch.randint(0, ranks, tuple(whole.shape), generator=generator)
    away = torch.randint(1, 5, (ranks, *whole.shape), generator=generator).to(whole.dtype)
    return [whole + sign * away[rank] * (holder != rank) for rank in range(ranks)]


def whole_of(parts: Sequence[Tensor], placement: Placement, size: int | None = None) -> Tensor | None:
    """What the parts make up; None if they contradict each other."""
    if isinstance(placement, Shard):
        return join(parts, placement, size)
    if isinstance(placement, Partial):
        stacked = torch.stack(list(parts))
        return {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[placement.op](0)
    return parts[0] if all(same(one, parts[0], 1e-6) for one in parts) else None


def same(found: Tensor | None, wanted: Tensor, tolerance: float = 1e-9) -> bool:
    """Equal up to rounding. Sums and products of the whole numbers that the cases use are exact."""
    if found is None or found.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    return torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- local implementations


def masked_lookup(rank: int, parts: Sequence[Sequence[Tensor]], args: Any, kwargs: Any) -> Tensor:
    """Each rank looks up its range of rows; the others give zeros."""
    ids, mine = parts[0][rank], parts[1][rank]
    start = sum(one.shape[0] for one in parts[1][:rank])
    inside = (ids >= start) & (ids < start + mine.shape[0])
    return F.embedding((ids - start).clamp(0, mine.shape[0] - 1), mine) * inside[..., None]


def cross_entropy_of_parts(rank: int, parts: Sequence[Sequence[Tensor]], args: Any, kwargs: Any) -> Tensor:
    """Each rank gets the whole loss and the gradient of its own classes."""
    mine = [one if i == rank else one.detach() for i, one in enumerate(parts[0])]
    return F.cross_entropy(torch.cat(mine, 1 if mine[0].dim() > 1 else 0), parts[1][rank], *args[2:], **kwargs)


LOCAL = {"embedding": masked_lookup, "cross_entropy": cross_entropy_of_parts}


# ---------------------------------------------------------------- the check


def fault(one: Case, signature: Signature, ranks: int, seed: int = 0, backward: bool = True) -> str:
    """What is wrong with a signature; empty if it is sound."""
    generator = torch.Generator().manual_seed(seed)
    operation, wholes = one.operation, [tensor.clone() for tensor in one.tensors]
    parts = [
        [part.detach() for part in parts_of(whole, placement, ranks, generator)]
        for whole, placement in zip(wholes, signature.inputs, strict=True)
    ]
    grads = backward and signature.needs != "no_grad"
    for number, (whole, row) in enumerate(zip(wholes, parts)):
        for tensor in (whole, *row):
            tensor.requires_grad_(grads and number not in one.frozen and tensor.is_floating_point())
    wanted = results(_call(one, one.args, one.kwargs, wholes))
    try:
        found = [_on_rank(one, operation, signature, parts, ranks, rank) for rank in range(ranks)]
    except Exception as error:  # a wrong signature may well not run
        return f"raised {type(error).__name__}: {error}"
    for i, (want, placement) in enumerate(zip(wanted, signature.outputs, strict=True)):
        size = want.shape[placement.dim] if isinstance(placement, Shard) else None
        try:
            got = whole_of([outs[i].detach() for outs in found], placement, size)
        except Exception as error:
            return f"result {i} are no parts: {error}"
        if not same(got, want.detach(), one.tolerance):
            return f"result {i} is not {placement}"
    return _gradients(one, signature, ranks, wholes, parts, wanted, found, generator) if grads else ""


def _gradients(
    one: Case,
    signature: Signature,
    ranks: int,
    wholes: list[Tensor],
    parts: list[list[Tensor]],
    wanted: list[Tensor],
    found: list[list[Tensor]],
    generator: torch.Generator,
) -> str:
    flows = [i for i, want in enumerate(wanted) if want.requires_grad]
    if not flows:
        return ""
    free = any(signature.output_gradients[i] is None for i in flows)
    for default in (Replicate(), Partial()) if free else (Replicate(),):
        tops = [integers(wanted[i].shape, generator) for i in flows]
        arriving = [
            parts_of(top, signature.output_gradients[i] or default, ranks, generator) for i, top in zip(flows, tops)
        ]
        needing = [tensor for tensor in wholes if tensor.requires_grad]
        whole_grads = iter(
            torch.autograd.grad([wanted[i] for i in flows], needing, tops, retain_graph=True, allow_unused=True)
        )
        mine = []
        for rank in range(ranks):
            leaf = [row[rank] for row in parts if row[rank].requires_grad]
            outs = [(found[rank][i], top[rank]) for i, top in zip(flows, arriving) if found[rank][i].requires_grad]
            if not outs:
                return "no gradient on a rank"
            mine.append(
                iter(
                    torch.autograd.grad(
                        [a for a, _ in outs], leaf, [b for _, b in outs], retain_graph=True, allow_unused=True
                    )
                )
            )
        for number, whole in enumerate(wholes):
            if not whole.requires_grad:
                continue
            want, got = next(whole_grads), [next(row) for row in mine]
            placement = signature.gradients[number] or default
            if want is None:
                want = torch.zeros_like(whole)
            got = [torch.zeros_like(parts[number][rank]) if g is None else g for rank, g in enumerate(got)]
            size = want.shape[placement.dim] if isinstance(placement, Shard) else None
            try:
                total = whole_of(got, placement, size)
            except Exception as error:
                return f"gradient {number} are no parts: {error}"
            if not same(total, want, one.tolerance):
                return f"gradient {number} is not {placement}, for result gradients {default}"
    return ""


def _on_rank(
    one: Case, operation: Operation, signature: Signature, parts: list[list[Tensor]], ranks: int, rank: int
) -> list[Tensor]:
    mine = [row[rank] for row in parts]
    if signature.needs in LOCAL:
        return results(LOCAL[signature.needs](rank, parts, one.args, one.kwargs))
    args, kwargs = one.args, one.kwargs
    if one.line is None:
        given = rank_arguments(operation, signature.outputs, ranks, rank)
        args, kwargs = _with_literals(one.args, given[0]), _with_literals(one.kwargs, given[1])
    return results(_call(one, args, kwargs, mine))


def _with_literals(real: Any, literals: Any) -> Any:
    """The real tensors, and the plain values as they were given."""
    if isinstance(real, dict):
        return {name: _with_literals(real[name], literals[name]) for name in real}
    if isinstance(literals, (tuple, list)) and type(real) in (tuple, list) and len(real) == len(literals):
        return type(real)(_with_literals(a, b) for a, b in zip(real, literals))
    return real if isinstance(real, Tensor) else literals


def _call(one: Case, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    given = iter(tensors)
    # A view, so that an operation may write in place into what needs a gradient.
    fill = lambda value: (lambda new: new.clone())(next(given)) if isinstance(value, Tensor) else value
    args, kwargs = mapped(args, fill), mapped(kwargs, fill)
    return one.function(*args, **kwargs)


# ---------------------------------------------------------------- all that is legal, found by trying


def legal(one: Case, ranks: int) -> set[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    """Every combination of plain placements of inputs and results that holds forward, on two random draws."""
    found = set()
    for inputs in product(*(_options(tensor, ranks) for tensor in one.tensors)):
        for outputs in _held(one, inputs, ranks):
            signature = Signature("tried", inputs, outputs, (None,) * len(inputs), (None,) * len(outputs))
            if not any(fault(one, signature, ranks, seed, backward=False) for seed in (0, 1)):
                found.add((inputs, outputs))
    return found


def _held(one: Case, inputs: tuple[Placement, ...], ranks: int) -> Iterator[tuple[Placement, ...]]:
    """Placements of the results that may hold for these inputs."""
    operation, wanted = one.operation, results(_call(one, one.args, one.kwargs, one.tensors))
    choices = [_options(want, ranks) for want in wanted]
    if is_move(operation):  # the sizes that a rank writes depend on the choice
        yield from product(*choices)
        return
    generator = torch.Generator().manual_seed(2)
    parts = [parts_of(whole, put, ranks, generator) for whole, put in zip(one.tensors, inputs, strict=True)]
    try:
        found = [results(_call(one, one.args, one.kwargs, [row[rank] for row in parts])) for rank in range(ranks)]
    except Exception:  # the parts don't go together
        return
    yield from product(
        *(
            [put for put in choice if _is(put, [outs[i] for outs in found], want)]
            for i, (choice, want) in enumerate(zip(choices, wanted, strict=True))
        )
    )


def _is(placement: Placement, parts: list[Tensor], want: Tensor) -> bool:
    try:
        size = want.shape[placement.dim] if isinstance(placement, Shard) else None
        return same(whole_of(parts, placement, size), want)
    except Exception:  # of shapes that make up no tensor
        return False


def _options(tensor: Tensor, ranks: int) -> list[Placement]:
    partial = [Partial()] if tensor.is_floating_point() else []
    return [Replicate(), *partial, *(Shard(dim) for dim in range(tensor.dim()) if tensor.shape[dim] >= ranks)]
