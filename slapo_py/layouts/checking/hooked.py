"""Hooks of users: what one does with a rank's part is not looked into, so it has to be given whole values."""

from collections.abc import Iterator
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
        if is_border(node):
            path = str(node.args[2])
            if any(not is_collecting_hook(one) for one in hooks_of(place.module.get_submodule(path))):
                other = next(_not_whole(node, typing), None)
                if other is not None:
                    found.setdefault(f'the module "{path}"', _fault(node, f'the module "{path}"', other))
        elif node.op == "get_attr" and any(tensor_hooks(_tensor(place.module, str(node.target)))):
            other = next(_not_whole(node, typing), None)
            if other is not None:
                found.setdefault(said(node), _fault(node, said(node), other))
    return list(found.values())


def _fault(node: fx.Node, whose: str, placement: str) -> Fault:
    what = "its gradient" if node.op == "get_attr" else said(node)
    return Fault(
        HOOKED, node,
        f"{whose} has a hook, which would see what a rank has of {what} ({placement}). Take the hook off, or write "
        f"what it does into a forward, which is looked into.",
    )  # fmt: skip


def _not_whole(node: fx.Node, typing: Typing) -> Iterator[str]:
    """The placements of a value, before and after its own sync, and of its gradient, that are not whole."""
    found: list[Placement] = (
        [] if node.op == "get_attr" else [*typing.produced.get(node, ()), *typing.after.get(node, ())]
    )
    if node.op == "get_attr":
        found += [one for one in (typing.params.get(node),) if one is not None]
    if node in typing.gradient:
        found.append(typing.gradient[node])
    yield from (str(one) for one in found if one != R)


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    path, _, attribute = name.rpartition(".")
    try:
        found = getattr(module.get_submodule(path), attribute)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None
