"""A copy of a scheduled module with storage of its own."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from slapo_py.build.tensors import byte_range, has_plain_storage, held_by
from slapo_py.clone import Memo, _copied, _copied_hooks, _is_hooks, _survey
from slapo_py.errors import BuildError

_ALIGN = 64  # bytes; what torch aligns fresh memory to, so that vectorized kernels split their work as before


def materialize(
    module: nn.Module, *, donate: bool = False, made: Mapping[int, torch.Tensor] | None = None
) -> nn.Module:
    """A new module tree: module objects, attributes and configs are copied, and so is every tensor's storage.

    `module` -> the same tree, where tensors that were one object still are, and tensors that were windows onto one
    storage are windows onto one new storage. `requires_grad`, Parameter subclasses, dtypes, strides, hooks, training
    flags, random generators and attributes set on parameters come along; `.grad` does not. Classes with layers are
    kept. What can't be copied (a lock, a process group) is shared, as in the scheduled copy itself.

    made: id(tensor) -> what stands for it, with storage of its own: a rank's part of it, say.

    With `donate=True` the tensors themselves move into the new tree: no memory is spent, and the old tree must not be
    used any more.

    Requires: tensors with values, those in `made` apart (none on "meta").
    Raises: BuildError.
    """
    made = made or {}
    held = list(held_by(module))
    tensors = [value for _, value in held if isinstance(value, torch.Tensor)]
    for path, value in held:
        if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in made:
            raise BuildError(
                f"build at {path!r}: a tensor on device 'meta' has no values. Write slapo.build(sch, "
                f'init=slapo.own_init(model)) to draw them, or slapo.build(sch, checkpoint="model.safetensors") to '
                f"read them. A tensor that is neither parameter nor buffer needs its values before create_schedule."
            )
    shells, memo = _survey(module)
    memo.update({id(one): one.clone_state() for _, one in held if isinstance(one, torch.Generator)})
    if not donate:
        memo.update(_fresh([one for one in tensors if id(one) not in made]))
    memo.update({id(one): _in_class_of(one, made[id(one)]) for one in tensors if id(one) in made})
    for old, shell in shells:
        for name, value in vars(old).items():
            shell.__dict__[name] = _copied_hooks(value, memo) if _is_hooks(name, value) else _copied(value, memo)
    for tensor in tensors:
        if donate and id(tensor) not in made:
            if tensor.is_leaf:
                tensor.grad = None
        else:
            _carry(tensor, memo[id(tensor)], memo)
    built: nn.Module = memo[id(module)]
    return built


def _fresh(tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """id(old) -> new tensor, storage by storage."""
    new: dict[int, torch.Tensor] = {}
    shared: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if has_plain_storage(tensor):
            shared[tensor.untyped_storage()._cdata].append(tensor)
        else:
            new[id(tensor)] = _in_class_of(tensor, tensor.detach().clone())
    with torch.no_grad():
        for group in shared.values():
            ranges = [byte_range(tensor) for tensor in group]
            low = min(low for low, _ in ranges) // _ALIGN * _ALIGN
            high = max(high for _, high in ranges)
            window = torch.empty(0, dtype=torch.uint8, device=group[0].device)
            window.set_(group[0].untyped_storage(), low, (max(high - low, 0),), (1,))
            storage = window.clone().untyped_storage()
            for tensor in group:
                offset = tensor.storage_offset() - low // tensor.element_size()
                data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                data.set_(storage, offset if tensor.numel() else 0, tensor.size(), tensor.stride())
                new[id(tensor)] = _in_class_of(tensor, data)
    return new


def _in_class_of(old: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """`data` as a Parameter, a subclass of it, or a tensor subclass, as `old` is."""
    wanted = old.requires_grad and old.is_leaf  # a tensor with a history (weight_norm's `weight`) is recomputed anyway
    kind = type(old)
    if isinstance(old, nn.Parameter) and issubclass(kind, nn.Parameter):
        parameter: torch.Tensor = torch.Tensor._make_subclass(kind, data, wanted)
        return parameter
    if type(data) is not kind:
        data = data.as_subclass(kind)
    return data.requires_grad_(wanted)


def _carry(old: torch.Tensor, new: torch.Tensor, memo: Memo) -> None:
    """Attributes and hooks that were set on the tensor itself."""
    for name, value in vars(old).items():
        new.__dict__[name] = _copied(value, memo)
    if not old.is_leaf:
        return
    wanted = new.requires_grad
    for hooks, register in (
        (old._backward_hooks, "register_hook"),
        (old._post_accumulate_grad_hooks, "register_post_accumulate_grad_hook"),
    ):
        if hooks:
            new.requires_grad_(True)  # the tensor may have been frozen after its hooks were set
            for hook in _copied_hooks(dict(hooks), memo).values():
                getattr(new, register)(hook)
            new.requires_grad_(wanted)
