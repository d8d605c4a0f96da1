"""`sch.attention("sdpa")`: all attention below goes through another implementation of transformers' registry."""

import difflib
from typing import Any

from slapo_py.attention.function import check_function, registered, registered_flex
from slapo_py.attention.places import BACKENDS, Backend, configs_below, problem
from slapo_py.errors import ArgumentError, StepError
from slapo_py.primitive import Primitive
from slapo_py.registry import register
from slapo_py.schedule import Schedule


@register("attention")
class Attention(Primitive):
    """Let every attention of this model go through another implementation: `backend` is `"sdpa"` (torch's
    scaled_dot_product_attention), `"eager"` (the model's own matmuls), `"flex"` (flex_attention) or a function.

    Before: the implementation that the model was made with; after: `backend`, for this model and those inside it, with
    the masks that it needs. It is the copy's config that changes, as transformers' `set_attn_implementation` would
    do it; the original keeps its own. Traces that depend on it are made anew. The numbers differ in rounding, and
    dropout draws other masks: sdpa draws its random numbers in another order than the matmuls do.

    A function is called as `f(module, query, key, value, attention_mask, scaling=..., dropout=..., **kwargs)` and
    returns `(output, weights or None)`. Shapes: query (batch, heads, length, size), key and value the same with the
    heads of the keys, output (batch, length, heads, size). `attention_mask` is to be added to the scores: 0 or the
    least number of its dtype, (batch, 1, queries, keys), causal and padding masks included, or None where nothing is
    masked; `is_causal` is to be ignored. A call with an argument that would change the result and that the function
    does not name (`dropout` in training, `softcap`, `position_bias`) is refused.

    `"flex"` has no dropout (transformers raises a ValueError in train mode if the config asks for it), and is refused
    on CPU when it is called: torch's gives wrong numbers there. Only `"eager"` gives `output_attentions`. Positions
    that attend to nothing (padding at the left) have other outputs with each backend; no other position sees them.

    Requires: a transformers model that makes its own masks, whose attention goes through transformers' registry and
    supports the backend; its config is not used outside it. Raises `ArgumentError`, `StepError`.
    """

    reaches_flattened = True  # a flattened trace above is made anew

    def check(self, place: Schedule, backend: Backend) -> None:
        where = f'attention at "{place.path}"' if place.path else "attention at the whole model"
        _check_backend(where, backend)
        found = problem(place, backend)
        if found is not None:
            raise ArgumentError(f"{where}: {found}")

    def apply(self, place: Schedule, backend: Backend) -> None:
        name = backend if isinstance(backend, str) else registered(backend)
        name = registered_flex() if name == "flex" else name
        configs = configs_below(place)

        def change() -> None:
            for config in configs:
                config._attn_implementation_internal = name  # the public one would set those of other models, too

        if not place.root.has_tracer:
            change()
            return
        rewritten = place.root.tracer.follow(change)
        if rewritten:
            steps = [str(step) for step in place.root.history if step.path in rewritten]
            raise StepError(
                f'attention at "{place.path}": the graphs of {", ".join(map(repr, rewritten))} must be traced anew, '
                f"which would lose what was done to them: {'; '.join(steps)}. Take those steps back with sch.undo() "
                f"and write attention(...) before them."
            )


def _check_backend(where: str, backend: Any) -> None:
    if callable(backend):
        check_function(where, backend)
    elif not isinstance(backend, str) or backend not in BACKENDS:
        close = difflib.get_close_matches(str(backend), BACKENDS, n=1)
        hint = f' Did you mean "{close[0]}"?' if close else ""
        raise ArgumentError(
            f"{where}: there is no backend {backend!r}.{hint} Backends: {', '.join(map(repr, BACKENDS))}, or a "
            f"function f(module, query, key, value, attention_mask, **kwargs)."
        )
