"""What a kernel is, and the table of those that are registered: `sch[path].fuse("name")` looks here."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slapo_py.errors import NoMatchError, RegistryError
from slapo_py.layouts.rules.lines import Classes as Classes
from slapo_py.layouts.rules.lines import give_line, take_line

Function = Callable[..., Any]
FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Form:
    """One way in which models write what a kernel computes.

    pattern: a function over torch operations.
    op: what runs in its place, called with the pattern's inputs by position and its named wild literals by keyword;
        None stands for the kernel's own op.
    keywords: plain values that it is given as well.
    placement: the line of labels of `op`, as in `Kernel`; None stands for the kernel's own.
    """

    pattern: Function
    op: Function | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    placement: str | None = None


@dataclass(frozen=True)
class Kernel:
    """A fused operation.

    name: what `fuse` is given.
    op: what runs; it is called with the inputs of a pattern by position, and its named wild literals by keyword.
    reference: the same in plain torch; it defines what is computed.
    patterns: functions of the same inputs over torch operations; each is looked for, in this order. A `Form` where the
        op needs to know which one it was, or where another op stands for it.
    takes: the dtypes of its tensors. accumulates: in which one sums are formed. returns: the dtype of the result.
    placement: one line of labels, `inputs -> outputs` as in einsum: which dims may be split over devices. A dim under a
        small letter splits, under a capital never; `...` are leading dims, that split like small letters. An output
        that lacks a split label is a partial sum; a plain value has no labels. Empty: only whole values. Of
        layer_norm: `...H, H, H -> ...H`.
    splits: `splits(*arguments) -> bool`: whether that line is right for these arguments; None: for all. Where it isn't,
        only whole values are taken.
    classes: of a loss over classes, how these may be split, though it needs all of them: one exchange inside.
    features: what it can do beyond the plain formula, in words: "dropout", "tanh form", "boolean mask".
    example: `example(rows, width, dtype, device) -> arguments`: the op's arguments by position, of about rows x width
        elements (rows may be 0), tensors that are learned requiring gradients; for benchmarks, ahead-of-time
        compilation and tests.
    """

    name: str
    op: Function
    reference: Function
    patterns: "tuple[Function | Form, ...]"
    takes: tuple[str, ...] = FLOATS
    accumulates: str = "float32"
    returns: str = "as the reference"
    placement: str = ""
    splits: Function | None = None
    classes: Classes | None = None
    features: tuple[str, ...] = ()
    example: Callable[[int, int, torch.dtype, str], tuple[Any, ...]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise RegistryError(f"Kernel(name={self.name!r}): the name must be a Python identifier.")
        if not self.patterns:
            raise RegistryError(f"Kernel({self.name!r}): needs at least one pattern, or fuse could never find it.")

    @property
    def forms(self) -> tuple[Form, ...]:
        """The patterns, each with what runs in its place."""
        given = (one if isinstance(one, Form) else Form(one) for one in self.patterns)
        return tuple(
            Form(
                one.pattern, one.op or self.op, one.keywords,
                self.placement if one.placement is None else one.placement,
            )
            for one in given
        )  # fmt: skip


_TABLE: dict[str, Kernel] = {}


def register_kernel(kernel: Kernel) -> Kernel:
    """Make a kernel known to `fuse`. Raises `RegistryError` if its name is taken."""
    if kernel.name in _TABLE:
        raise RegistryError(
            f"register_kernel: there is a kernel {kernel.name!r} already. Choose another name, or take it away first: "
            f'slapo_py.kernels.unregister_kernel("{kernel.name}").'
        )
    _TABLE[kernel.name] = kernel
    _give_lines(kernel)
    return kernel


def _give_lines(kernel: Kernel) -> None:
    for form in (Form(kernel.op, kernel.op, placement=kernel.placement), *kernel.forms):
        give_line(form.op or kernel.op, form.placement or "", kernel.splits, kernel.classes)


def unregister_kernel(name: str) -> None:
    """Take a kernel away again; an op that another kernel has, too, keeps the line of that one.

    Raises `NoMatchError` if there is none of this name.
    """
    kernel = find_kernel(name)
    for op in (kernel.op, *(form.op for form in kernel.forms)):
        take_line(op or kernel.op)
    del _TABLE[name]
    for other in _TABLE.values():
        _give_lines(other)


def find_kernel(name: str) -> Kernel:
    """The kernel of a name. Raises `NoMatchError`, with names like it."""
    if name not in _TABLE:
        close = difflib.get_close_matches(str(name), _TABLE)
        hint = f"Did you mean {close[0]!r}?" if close else f"Registered: {', '.join(sorted(_TABLE)) or 'none yet'}."
        raise NoMatchError(f"there is no kernel {name!r}. {hint}")
    return _TABLE[name]


def list_kernels() -> list[str]:
    """The names of all registered kernels, in order."""
    return sorted(_TABLE)
