"""What torch.compile keeps for the whole process, while verify runs compiled modules in many ways."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

NOTE = (
    "compiled modules drew their random numbers as uncompiled ones do, so that dropout masks agree; in use, inductor "
    "draws others."
)
_PLENTY = 10_000


@contextlib.contextmanager
def compiling_always() -> Iterator[None]:
    """Compiled code is made for every scenario: past its limit torch runs the module uncompiled, and says little.

    It draws as uncompiled code does: other numbers would be no rounding, and hide what is.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    with contextlib.ExitStack() as stack:
        if dynamo is not None:  # else nothing is compiled
            names = (
                "recompile_limit",
                "accumulated_recompile_limit",
                "cache_size_limit",
                "accumulated_cache_size_limit",
            )
            stack.enter_context(dynamo.config.patch({n: _PLENTY for n in names if hasattr(dynamo.config, n)}))
            inductor: Any = importlib.import_module("torch._inductor.config")
            stack.enter_context(inductor.patch(fallback_random=True))
        yield


@contextlib.contextmanager
def code_forgotten() -> Iterator[list[str]]:
    """What the body compiles is its own: compiled code is thrown away before and after (all of it, torch has no finer
    way), if there is some. Gives a list that says so in the end.

    Code from before draws otherwise, and code of the body would count towards the limit of the user's own modules,
    which share theirs with the private copies.
    """
    before, said = _compiled(), []  # type: ignore[var-annotated]
    if before:
        sys.modules["torch._dynamo"].reset()
    try:
        yield said
    finally:
        if _compiled() != before:
            sys.modules["torch._dynamo"].reset()
            said.append(NOTE)


def _compiled() -> int:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])
