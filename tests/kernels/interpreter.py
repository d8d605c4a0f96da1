"""Triton's interpreter, mended: it cuts fp32 off to bf16, where a GPU rounds to the nearest even number."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_usual = InterpreterBuilder.cast_impl


def _cast(self: Any, source: Any, kind: Any) -> Any:
    before, after = source.dtype.scalar, kind.scalar
    if (before, after) == (tl.float32, tl.bfloat16):
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        nearest = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return TensorHandle(np.where(np.isnan(source.data), np.uint16(0x7FC0), nearest), after)
    if (before, after) == (tl.bfloat16, tl.float32):
        return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), after)
    return _usual(self, source, kind)


def mend() -> None:
    """From here on, in this process."""
    InterpreterBuilder.cast_impl = _cast
