"""Submodules whose call is an operation with a name: `nn.GELU` is `F.gelu`."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from slapo_py.patterns.words import Attribute
from slapo_py.scheduled import bare, layers


@dataclass(frozen=True)
class Known:
    """The operation of a class, its tensors, and its plain attributes: each a parameter of the operation."""

    op: str
    tensors: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    mode: bool = False


KNOWN: dict[type[nn.Module], Known] = {
    nn.Linear: Known("linear", ("weight", "bias")),
    nn.LayerNorm: Known("layer_norm", ("weight", "bias"), ("normalized_shape", "eps")),
    nn.RMSNorm: Known("rms_norm", ("weight",), ("normalized_shape", "eps")),
    nn.GroupNorm: Known("group_norm", ("weight", "bias"), ("num_groups", "eps")),
    nn.Embedding: Known(
        "embedding", ("weight",), ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    ),
    nn.Conv1d: Known("conv1d", ("weight", "bias"), ("stride", "padding", "dilation", "groups")),
    nn.Conv2d: Known("conv2d", ("weight", "bias"), ("stride", "padding", "dilation", "groups")),
    nn.Conv3d: Known("conv3d", ("weight", "bias"), ("stride", "padding", "dilation", "groups")),
    nn.GELU: Known("gelu", (), ("approximate",)),
    nn.ReLU: Known("relu", (), ("inplace",)),
    nn.SiLU: Known("silu", (), ("inplace",)),
    nn.Mish: Known("mish", (), ("inplace",)),
    nn.ELU: Known("elu", (), ("alpha", "inplace")),
    nn.SELU: Known("selu", (), ("inplace",)),
    nn.CELU: Known("celu", (), ("alpha", "inplace")),
    nn.LeakyReLU: Known("leaky_relu", (), ("negative_slope", "inplace")),
    nn.Hardtanh: Known("hardtanh", (), ("min_val", "max_val", "inplace")),
    nn.Hardswish: Known("hardswish", (), ("inplace",)),
    nn.Hardsigmoid: Known("hardsigmoid", (), ("inplace",)),
    nn.PReLU: Known("prelu", ("weight",)),
    nn.Softplus: Known("softplus", (), ("beta", "threshold")),
    nn.Softsign: Known("softsign"),
    nn.LogSigmoid: Known("log_sigmoid"),
    nn.Tanhshrink: Known("tanhshrink"),
    nn.Tanh: Known("tanh"),
    nn.Sigmoid: Known("sigmoid"),
    nn.GLU: Known("glu", (), ("dim",)),
    nn.Softmax: Known("softmax", (), ("dim",)),
    nn.LogSoftmax: Known("log_softmax", (), ("dim",)),
    nn.Flatten: Known("flatten", (), ("start_dim", "end_dim")),
    nn.Dropout: Known("dropout", (), ("p", "inplace"), mode=True),
    nn.Dropout1d: Known("dropout1d", (), ("p", "inplace"), mode=True),
    nn.Dropout2d: Known("dropout2d", (), ("p", "inplace"), mode=True),
    nn.Dropout3d: Known("dropout3d", (), ("p", "inplace"), mode=True),
    nn.AlphaDropout: Known("alpha_dropout", (), ("p", "inplace"), mode=True),
    nn.FeatureAlphaDropout: Known("feature_alpha_dropout", (), ("p", "inplace"), mode=True),
}  # fmt: skip


@dataclass(frozen=True)
class ChildForm:
    """What a call of a submodule computes, and the facts about it on which that rests."""

    op: str
    operands: dict[str, Any]
    reads: dict[tuple[str, str], Any]


def _known(module: nn.Module) -> Known | None:
    """The entry of a module's class, or of the torch class whose forward it inherits."""
    kind: Any = bare(module)
    for base in kind.__mro__:
        if base in KNOWN:
            names = [name for name in ("forward", "_conv_forward") if hasattr(base, name)]
            inherits = all(getattr(kind, name) is getattr(base, name) for name in names)
            return KNOWN[base] if inherits else None
    return None


def is_known(module: nn.Module) -> bool:
    """Whether a call of this module is seen as an operation, as long as nothing was done to the module."""
    return _known(module) is not None


def op_of(module: nn.Module) -> str | None:
    """The name of the operation that a module's class stands for, or None."""
    known = _known(module)
    return known.op if known is not None else None


def resembles(module: nn.Module) -> str | None:
    """The operation of the torch class that a module's class is made of, whatever forward it has."""
    return next((KNOWN[base].op for base in bare(module).__mro__ if base in KNOWN), None)


def hindrance(module: nn.Module) -> str | None:
    """Why a call of a module of a known class is more than the operation, or None if it is just that."""
    if layers(module):
        return f"a step was done at it ({', '.join(layer.describe() for layer in layers(module))})"
    if "forward" in vars(module):
        return "its forward was set on the object"
    if is_parametrized(module):
        return "it is parametrized"
    for name, held in vars(module).items():
        if isinstance(held, dict) and held and name.endswith("_hooks") and "state_dict" not in name:
            return "it has a hook"
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f"its padding_mode is {module.padding_mode!r}"
    if getattr(module, "max_norm", None) is not None:
        return "its max_norm makes it write into its weight"
    return None


def child_form(module: nn.Module, path: str) -> ChildForm | None:
    """The operation that a submodule's call is, without its argument; None if it is no known one."""
    known = _known(module)
    if known is None or hindrance(module) is not None:
        return None
    operands: dict[str, Any] = {}
    reads: dict[tuple[str, str], Any] = {}
    for name in known.tensors:
        if getattr(module, name) is None:
            operands[name] = reads[path, name] = None
        else:
            operands[name] = Attribute(f"{path}.{name}")
    for name in known.plain:
        operands[name] = reads[path, name] = getattr(module, name)
    if hasattr(module, "padding_mode"):
        reads[path, "padding_mode"] = module.padding_mode
    if known.mode:
        operands["training"] = Attribute(f"{path}.training")
    return ChildForm(known.op, operands, reads)
