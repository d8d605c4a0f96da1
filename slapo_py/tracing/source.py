"""Where in the user's code something happens."""

import sys
import sysconfig
import traceback
from types import TracebackType

_OWN = __file__.rpartition("/")[0]
_STANDARD = sysconfig.get_path("stdlib")


def is_user_file(file: str) -> bool:
    """Whether a file is the user's (or a model library's), not torch's and not ours."""
    if file.startswith(_STANDARD) and "site-packages" not in file:
        return False
    return "/torch/" not in file and not file.startswith((_OWN, "<"))


def where() -> str:
    """`file:line` of the innermost frame of the captured forward that is not torch's (its outermost if all are)."""
    frame = sys._getframe(1)
    found = "an unknown line"
    inside = False  # past our own frames at the top of the stack
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if is_user_file(file):
            return f"{file}:{line}"
        if file.startswith(_OWN) and inside:
            break
        inside |= not file.startswith(_OWN)
        if inside and "/torch/" in file:
            found = f"{file}:{line}"
        frame = frame.f_back  # type: ignore[assignment]
    return found


def where_raised(trace: TracebackType | None) -> str:
    """`file:line` of the innermost frame of user code in a traceback."""
    found = "an unknown line"
    for frame, line in traceback.walk_tb(trace):
        if is_user_file(frame.f_code.co_filename):
            found = f"{frame.f_code.co_filename}:{line}"
    return found
