"""Hooks of users: what one does with a rank's part is not looked into, so it has to be given whole values."""

from typing import TYPE_CHECKING

from torch import Tensor, fx, nn

from slapo_py.layouts.inference.state import Fault, Typing, said
from slapo_py.layouts.placement import Placement, R
from slapo_py.layouts.recording.nodes import is_border
from slapo_py.places import hooks_of, tensor_hooks
from slapo_py.tracing.huggingface import is_collecting_hook

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule

HOOKED = "hooked"


def hooked(place: "Schedule", typing: Typing) -> list[Fault]:
    """Modules and parameters with hooks that would see a part: one fault each.

    typing: of a schedule that is right otherwise.
    """
    found: dict[str, Fault] = {}
    for node in typing.graph.nodes:
        whose = f'the module "{node.args[2]}"' if is_border(node) else said(node)
        if whose not in found and _has_hook(place.module, node):
            for placement in _not_whole(node, typing):
                found[whose] = _fault(node, whose, placement)
    return list(found.values())


def _has_hook(module: nn.Module, node: fx.Node) -> bool:
    """Whether the module at whose border a node is, or the tensor that it reads, has a hook of a user."""
    if is_border(node):
        return any(not is_collecting_hook(one) for one in hooks_of(module.get_submodule(str(node.args[2]))))
    return node.op == "get_attr" and any(tensor_hooks(_tensor(module, str(node.target))))


def _fault(node: fx.Node, whose: str, placement: Placement) -> Fault:
    what = "its gradient" if node.op == "get_attr" else said(node)
    return Fault(
        HOOKED, node,
        f"{whose} has a hook, which would see what a rank has of {what} ({placement}). Take the hook off, or write "
        f"what it does into a forward, which is looked into.",
    )  # fmt: skip


def _not_whole(node: fx.Node, typing: Typing) -> list[Placement]:
    """The first placement that is not whole: of a value, before and after its own sync, or of its gradient."""
    found = [*typing.produced.get(node, ()), *typing.after.get(node, ())]
    found += [typing.gradient[node]] if node in typing.gradient else []
    return [one for one in found if one != R][:1]


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    path, _, attribute = name.rpartition(".")
    try:
        found = getattr(module.get_submodule(path), attribute)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None
