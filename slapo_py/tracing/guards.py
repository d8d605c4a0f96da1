"""Guards: what must hold for a call to be covered by a trace, as lines of python that the generated forward checks."""

import copy
import importlib
import re
from typing import Any

import torch
from torch import nn

from slapo_py.tracing.align import same
from slapo_py.tracing.held import Held
from slapo_py.tracing.reads import ABSENT, At, Reads
from slapo_py.tracing.values import FUNCTIONS, SIMPLE, Tensor, is_plain


class Guards:
    """Boolean expressions over the arguments and `self`, in the order of checking; `env` holds what they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.env: dict[str, Any] = {}
        self.modules: dict[str, str] = {}  # name of a scope -> the module whose globals it is

    def copy(self) -> "Guards":
        other = Guards()
        other.lines, other.env, other.modules = list(self.lines), dict(self.env), dict(self.modules)
        return other

    def add(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)

    def name(self, value: Any) -> str:
        """A name for an object that has no literal."""
        for key, known in self.env.items():
            if known is value:
                return key
        key = f"_c{len(self.env)}"
        self.env[key] = value
        return key

    def equal(self, expr: str, value: Any) -> None:
        """`expr` has this very value (type included, so that 1 is not True and not 1.0)."""
        if value is None or isinstance(value, (bool, torch.dtype, torch.layout, torch.memory_format)):
            self.add(f"{expr} is {value!r}")
        elif type(value) is str:
            self.add(f"{expr} == {value!r}")
        elif isinstance(value, Held):
            self.add(f"{self.name(value)}.matches({expr})")
        elif isinstance(value, FUNCTIONS):
            self.add(f"{expr} is {self.name(value)}")
        elif isinstance(value, SIMPLE) or is_plain(value):
            if isinstance(value, (list, dict, set, tuple)):  # what it holds may change: compare with a copy
                self.add(f"_same({expr}, {self.name(copy.deepcopy(value))})")
                return
            # the identity of the very object that was read is the quick road
            known = self.name(value)
            self.add(f"({expr} is {known} or _same({expr}, {known}))")
        else:
            self.add(f"{expr} is {self.name(value)}")

    def argument(self, expr: str, value: Any, ranks: bool) -> None:
        """An argument has the structure that it had."""
        if isinstance(value, Tensor):
            self.add(f"isinstance({expr}, Tensor)" + (f" and {expr}.ndim == {value.ndim}" if ranks else ""))
        elif isinstance(value, (list, tuple)) and not is_plain(value):
            self.add(f"type({expr}) is {self.name(type(value))} and len({expr}) == {len(value)}")
            for index, item in enumerate(value):
                self.argument(f"{expr}[{index}]", item, ranks)
        elif isinstance(value, dict) and not is_plain(value):
            self.add(f"type({expr}) is {self.name(type(value))} and list({expr}) == {list(value)!r}")
            for key, item in value.items():
                self.argument(f"{expr}[{key!r}]", item, ranks)
        elif isinstance(value, (*SIMPLE, *FUNCTIONS)) or is_plain(value):
            self.equal(expr, value)
        else:
            self.add(f"type({expr}) is {self.name(type(value))}")

    def attributes(self, module: nn.Module, reads: Reads) -> None:
        """Every attribute and config entry that the forward has read is what it was."""
        for (owner_expr, name), value in sorted(reads.items(), key=lambda item: item[0]):
            if name == "training":
                continue
            owner = eval(owner_expr, {"self": module})
            if isinstance(owner, nn.Module):
                self._module_attribute(owner, owner_expr, name, value)
            else:
                self._object_attribute(owner, owner_expr, name, value)

    def _module_attribute(self, owner: nn.Module, expr: str, name: str, value: Any) -> None:
        if isinstance(value, At):
            self.add(f"{expr}.{name} is {value.expr}")
        elif name == "_modules":
            self.add(f"len({expr}._modules) == {value}")
        elif value is ABSENT:
            stores = ("__dict__", "_parameters", "_buffers", "_modules")
            absent = " and ".join(f"{name!r} not in {expr}.{store}" for store in stores)
            self.add(f"(not hasattr({expr}, {name!r}) if _compiling() else {absent})")
        elif value is None and name not in owner.__dict__:  # a parameter or a child that is None
            store = next((s for s in ("_parameters", "_buffers", "_modules") if name in getattr(owner, s)), None)
            self.add(f"{expr}.{store}[{name!r}] is None" if store else f"{expr}.{name} is None")
        else:
            self.equal(f"{expr}.{name}", value)

    def _object_attribute(self, owner: Any, expr: str, name: str, value: Any) -> None:
        own = getattr(owner, "__dict__", {})  # a class with slots has none
        if name == "__class__":
            self.add(f"{expr}.__class__ is {self.name(value)}")
        elif name == "__dict__":
            self.equal(f"{expr}.__dict__", value)
        elif value is ABSENT:
            self.add(f"not hasattr({expr}, {name!r})")
        elif name in own:  # past the slow __getattribute__ of transformers' configs
            self.equal(f"_read({expr}, {name!r})", value)
        elif not isinstance(getattr(type(owner), name, None), property):  # a property's own reads are guarded already
            self.equal(f"{expr}.{name}", value)

    def described(self) -> list[str]:
        """The lines as a person reads them: with the values in the place of their names."""
        found = []
        for line in self.merged():
            line = re.sub(r"^\((.+) is (_c\d+) or _same\(\1, \2\)\)$", r"\1 == \2", line)
            line = re.sub(r"(_m\d+)\['(\w+)'\]", lambda m: f"{self.modules[m[1]]}.{m[2]}", line)
            line = re.sub(r"^_same\((.+), (_c\d+)\)$", r"\1 == \2", line)
            line = re.sub(r"_read\((.+?), '(\w+)'\)", r"\1.\2", line)
            line = re.sub(r"\._modules\['([A-Za-z_]\w*)'\]", r".\1", line)
            line = re.sub(r"\._modules\['(\d+)'\]", r"[\1]", line)
            found.append(re.sub(r"_c\d+", lambda name: _shown(self.env[name[0]]), line))
        return found

    def module_globals(self, found: dict[tuple[str, str], Any]) -> None:
        """Plain globals of the forward's module are what they were; a tensor is the same object."""
        for (module, name), value in sorted(found.items(), key=lambda item: item[0]):
            scope = next((key for key, known in self.modules.items() if known == module), f"_m{len(self.modules)}")
            self.modules[scope] = module
            if isinstance(value, Tensor):
                self.add(f"{scope}[{name!r}] is {self.name(value)}")
            else:
                self.equal(f"{scope}[{name!r}]", value)

    def environment(self) -> dict[str, Any]:
        """What the guards need besides the arguments."""
        return {
            **self.env,
            **{scope: vars(importlib.import_module(module)) for scope, module in self.modules.items()},
            "Tensor": Tensor,
            "torch": torch,
            "_same": same,
            "_compiling": torch.compiler.is_compiling,
            "_read": object.__getattribute__,
        }

    def merged(self) -> list[str]:
        """The lines with all that is asked of one tensor's sizes as one read of its shape."""
        lines: list[str] = []
        at: dict[str, int] = {}  # of a tensor: the line that reads its shape
        for line in self.lines:
            rank = re.fullmatch(r"isinstance\((\S+), Tensor\) and \1\.ndim == (\d+)", line)
            size = re.fullmatch(r"(\S+)\.shape\[(\d+)\] (==|!=|<|<=|>|>=) (-?\d+)", line)
            if size and size[1] in at:
                lines[at[size[1]]] += f" and _s[{size[2]}] {size[3]} {size[4]}"
                continue
            if rank:
                at[rank[1]] = len(lines)
                line = f"isinstance({rank[1]}, Tensor) and len(_s := {rank[1]}.shape) == {rank[2]}"
            lines.append(line)
        return lines


def _shown(value: Any) -> str:
    if isinstance(value, Held):
        return f"the {value.kind.__name__} of {len(value.items)} items that it was"
    if isinstance(value, Tensor):
        return f"the tensor {list(value.shape)} that it was"
    return str(getattr(value, "__qualname__", None) or repr(value))
