"""What a node does besides computing its value: random draws, writes in place, switches of a mode."""

import functools
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.amp import autocast_mode

from slapo_py.scheduled import bare

_SWITCHES = (torch._C._set_grad_enabled, autocast_mode._enter_autocast, autocast_mode._exit_autocast)
_IN_PLACE_OPERATORS = {
    operator.setitem, operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imatmul,
    operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift, operator.isub, operator.itruediv,
    operator.ixor,
}  # fmt: skip
_NEVER_DRAWS = (
    nn.Linear, nn.Bilinear, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Embedding, nn.GELU, nn.ReLU,
    nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.LogSoftmax, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Flatten,
)  # fmt: skip


def is_barrier(node: fx.Node, module: nn.Module) -> bool:
    """Whether nothing may be moved past this node: it writes in place, or switches gradients or autocast."""
    if node.op == "call_module":
        return getattr(module.get_submodule(str(node.target)), "inplace", False) is True
    if node.op not in ("call_function", "call_method"):
        return False
    kwargs = node.kwargs
    written = bool(kwargs) and (kwargs.get("inplace") is True or kwargs.get("out") is not None)
    return written or _always_writes(node.target)


@functools.lru_cache(maxsize=512)
def _always_writes(target: Any) -> bool:
    """Whether a function or method writes in place or switches a mode whatever it is given."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return (
        target in _SWITCHES
        or target in _IN_PLACE_OPERATORS
        or (name.endswith("_") and not name.endswith("__"))
        or name == "__setitem__"
        or bool(getattr(getattr(target, "_schema", None), "is_mutable", False))
    )


def draws(node: fx.Node, module: nn.Module) -> bool:
    """Whether a node may draw random numbers; unknown functions and submodules may."""
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        return bare(child) not in _NEVER_DRAWS
    if node.op == "call_method":
        return _seeded(str(node.target))
    if node.op != "call_function":
        return False
    target: Any = node.target
    name = getattr(target, "__name__", "")
    if name == "scaled_dot_product_attention":
        p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return isinstance(p, fx.Node) or bool(p != 0.0)
    if target is getattr or getattr(target, "__module__", "") in ("_operator", "builtins"):
        return False
    if "dropout" in name:
        return True
    if getattr(target, "__module__", "") == "torch.nn.functional" or getattr(torch, name, None) is target:
        return _seeded(name)
    if getattr(torch._C._nn, name, None) is target:
        return _seeded(name)
    return True


def _seeded(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads())
