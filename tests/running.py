"""Run a model once and keep everything that the laws compare."""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

Result = Sequence[Tensor] | Mapping[str, Tensor]


def record(model: nn.Module, kwargs: Mapping[str, Any], train: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """One forward and backward from `seed`: outputs, gradients, buffers and the final random state, by name.

    The loss weighs every output element differently, so no gradient vanishes by symmetry. The model is left as it
    was: modes, buffers, gradients and the random state.
    """
    inputs = {k: _leaf(v) for k, v in kwargs.items()}
    with _kept(model):
        model.train(train)
        random.seed(seed)
        torch.manual_seed(seed)
        outputs = model(**inputs)
        result = {f"output {i}": t for i, t in enumerate(tree_flatten(outputs)[0]) if isinstance(t, Tensor)}
        losses = [(t.float() * _weights(t)).sum() for t in result.values() if t.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
        result = {k: t.detach().clone() for k, t in result.items()}
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.requires_grad:
                result[f"gradient of input {name}"] = _or_empty(value.grad)
        for name, parameter in model.named_parameters():
            result[f"gradient of {name}"] = _or_empty(parameter.grad)
        for name, buffer in model.named_buffers():
            result[f"buffer {name}"] = buffer.detach().clone()
        result["random state"] = torch.get_rng_state()
    return result


def run(model: nn.Module, kwargs: Mapping[str, Any], train: bool = True, seed: int = 0) -> list[Tensor]:
    """`record` without the names."""
    return list(record(model, kwargs, train, seed).values())


def equal(a: Tensor, b: Tensor) -> bool:
    """Same type, shape and bits; NaN equals NaN, and -0.0 is not 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point() and a.layout == torch.strided:
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
        return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())
    return torch.equal(a, b)


def same(a: Result, b: Result) -> bool:
    """Whether two results are equal to the bit."""
    return not differences(a, b)


def differences(a: Result, b: Result) -> list[str]:
    """The names (or positions) at which two results differ."""
    a, b = _named(a), _named(b)
    if list(a) != list(b):
        return [f"only in one of the two: {sorted(set(a) ^ set(b))}"]
    return [name for name in a if not equal(a[name], b[name])]


def _named(result: Result) -> dict[str, Tensor]:
    if isinstance(result, Mapping):
        return dict(result)
    return {str(i): t for i, t in enumerate(result)}


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.is_floating_point())
    return value


def _weights(t: Tensor) -> Tensor:
    return torch.cos(torch.arange(t.numel(), dtype=torch.float32)).reshape(t.shape)


def _or_empty(grad: Tensor | None) -> Tensor:
    return torch.empty(0) if grad is None else grad.clone()


@contextlib.contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    modes = {m: m.training for m in model.modules()}
    buffers = [(b, b._version, b.detach().clone()) for b in model.buffers()]
    grads = [(p, p.grad) for p in model.parameters()]
    state, torch_state = random.getstate(), torch.get_rng_state()
    for p, _ in grads:
        p.grad = None
    try:
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version or not equal(buffer, value):
                    buffer.copy_(value)
        for p, grad in grads:
            p.grad = grad
        random.setstate(state)
        torch.set_rng_state(torch_state)
