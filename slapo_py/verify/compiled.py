"""What torch.compile keeps for the whole process, while verify runs compiled modules in many ways."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_PLENTY = 10_000


@contextlib.contextmanager
def compiling_always() -> Iterator[None]:
    """Compiled code is made for every scenario: past its limit torch runs the module uncompiled, and says little."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    names = ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit")
    known = {name: _PLENTY for name in names if dynamo is not None and hasattr(dynamo.config, name)}
    with dynamo.config.patch(**known) if known else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def code_forgotten() -> Iterator[None]:
    """What the body compiled is thrown away (with all compiled code, as torch has no finer way), if it did.

    Else it would count towards the limit of the user's own modules, which share their code with the private copies.
    """
    before = _compiled()
    try:
        yield
    finally:
        if _compiled() != before:
            sys.modules["torch._dynamo"].reset()


def _compiled() -> int:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])
