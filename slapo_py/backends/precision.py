"""Which parameters the optimizer updates: the module's own, or float32 masters of a bfloat16 module."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from slapo_py.build.tensors import byte_range, has_plain_storage
from slapo_py.errors import BuildError


class Weights:
    """The optimizer updates the module's own parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        """Trainable (name, parameter) pairs that the optimizer is given, ties once under their first name."""

    def renew(self) -> None:
        """The module has new parameter objects: FSDP2 has spread them."""
        names = {name for name, _ in self.named}
        self.named = [(name, one) for name, one in self.module.named_parameters() if name in names]

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The tensor that holds a module parameter's exact value."""
        return parameter

    def inputs(self, values: Any) -> Any:
        """Arguments as the module takes them."""
        return values

    def outputs(self, values: Any) -> Any:
        """The module's output as `loss` takes it."""
        return values

    def collect(self) -> None:
        """After each backward: move gradients to where the optimizer finds them."""

    def publish(self) -> None:
        """After the optimizer's step: move values to where the module finds them."""

    def drop_gradients(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None


class MasterWeights(Weights):
    """Parameters in bfloat16, a float32 master of each for the optimizer, gradients summed in float32.

    As Megatron and DeepSpeed do it: floating inputs are cast to bfloat16 and floating outputs to float32. Buffers keep
    their dtype (a rotary table in bfloat16 is wrong from position 256 on), and so do the parameters beside a batch
    norm's running statistics, which must have the same dtype. Frozen parameters that bfloat16 would round are kept
    in float32 beside, for `state_dict` and `save`.
    """

    def __init__(self, module: nn.Module) -> None:
        _check_windows(module)
        kept = {
            id(parameter)
            for child in module.modules()
            if isinstance(child, _NormBase) and child.running_mean is not None
            for parameter in child.parameters(recurse=False)
        }
        self._exact: dict[int, torch.Tensor] = {}  # id(module parameter) -> the tensor that holds its exact value
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (module parameter, master)
        named = []
        for name, parameter in module.named_parameters():
            master = parameter
            if parameter.is_floating_point() and id(parameter) not in kept:
                exact = parameter.detach().to(torch.float32, copy=True)
                parameter.data = parameter.detach().to(torch.bfloat16)
                if parameter.requires_grad:
                    master = nn.Parameter(exact)
                    master.__dict__.update(vars(parameter))
                    self._pairs.append((parameter, master))
                    self._exact[id(parameter)] = master
                elif not torch.equal(exact, parameter.float()):
                    self._exact[id(parameter)] = exact
            if parameter.requires_grad:
                named.append((name, master))
        self.module, self.named = module, named

    def renew(self) -> None:
        """DDP leaves the parameters as they are."""

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._exact.get(id(parameter), parameter)

    def inputs(self, values: Any) -> Any:
        return _cast(values, (torch.float32, torch.float64), torch.bfloat16)

    def outputs(self, values: Any) -> Any:
        return _cast(values, (torch.bfloat16,), torch.float32)

    def collect(self) -> None:
        for parameter, master in self._pairs:
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        for parameter, master in self._pairs:
            parameter.copy_(master)
        for parameter in self.module.parameters():
            exact = self._exact.get(id(parameter))
            if exact is not None and not parameter.requires_grad:
                parameter.copy_(exact)

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for _, master in self._pairs:
            master.grad = None


def _cast(values: Any, found: Iterable[torch.dtype], wanted: torch.dtype) -> Any:
    found = tuple(found)
    return tree_map_only(torch.Tensor, lambda one: one.to(wanted) if one.dtype in found else one, values)


def _check_windows(module: nn.Module) -> None:
    """Two parameters that see the same bytes would drift apart, once each has a bfloat16 storage of its own."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point() and has_plain_storage(tensor) and tensor.numel():
            spans.setdefault(tensor.untyped_storage()._cdata, []).append((*byte_range(tensor), name))
    for group in spans.values():
        group.sort()
        for (_, end, one), (start, _, other) in zip(group, group[1:], strict=False):
            if start < end:
                raise BuildError(
                    f'build: precision="bf16" at {other!r}: it shares memory with {one!r} without being the same '
                    'tensor, and a cast would part them. Write precision="fp32", or make them one parameter.'
                )
