"""One module alone: the original's at a place, and what it is called with when the original runs."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slapo_py.errors import ArgumentError, PathError
from slapo_py.tracing.recorder import Inputs
from slapo_py.tracing.values import map_tensors
from slapo_py.verify.leaves import once
from slapo_py.verify.trial import private
from slapo_py.verify.world import alone

if TYPE_CHECKING:
    from slapo_py.schedule import Schedule


def original_at(sch: "Schedule", where: str) -> nn.Module:
    """The original's module at a place. Raises: PathError, with the nearest place above that it has."""
    root = sch.root
    found = root.find(sch.path, within=root.original)
    if found is not None:
        return found
    above = sch.path
    while above and root.find(above, within=root.original) is None:
        above = above.rpartition(".")[0]
    line = f'sch["{above}"].verify()' if above else "sch.verify()"
    raise PathError(
        f"{where}: the original has no module of this name, a step made it, so there is nothing to compare it with. "
        f"The nearest place above that the original has: {line}."
    )


def calls_of(sch: "Schedule", given: list[Inputs], where: str) -> list[Inputs]:
    """What the original calls the module of a place with: its first call on each of the example inputs."""
    found = []
    for args, kwargs in given:
        try:
            call = _first_call(sch.root.original, sch.path, args, kwargs)
        except Exception as error:
            raise ArgumentError(
                f"{where}: the original does not run on the example inputs: {type(error).__name__}: {error}. Give "
                f"create_schedule(example_inputs=...) what the model is called with."
            ) from error
        if call is not None:
            found.append(call)
    if not found:
        raise ArgumentError(
            f"{where}: the original never calls this module on the example inputs, so there is nothing to run it on. "
            f"Verify a place that is called, such as the one around it, or the whole: sch.verify()."
        )
    return found


def _first_call(original: nn.Module, path: str, args: Any, kwargs: Any) -> Inputs | None:
    caught: list[Inputs] = []
    with alone():
        model = private(original)
        names = dict(model.named_modules(remove_duplicate=False))

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not caught:
                caught.append(map_tensors((args, kwargs), once(_copy)))

        names[path].register_forward_pre_hook(note, with_kwargs=True, prepend=True)
        for training in (False, True):  # a module may be called in one of the modes only
            model.train(training)
            with torch.enable_grad():
                model(*map_tensors(args, once(_copy)), **map_tensors(kwargs, once(_copy)))
            if caught:
                break
    return caught[0] if caught else None


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
