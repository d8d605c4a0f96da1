"""Whether a caller wrote an argument or left it out.

torch's Python functions hand their defaults on as if they had been written, so a pattern's graph does not tell
`F.dropout(x, p)` from `F.dropout(x, p, training=True)`. The call instruction of the caller does.
"""

import dis
import inspect
from types import CodeType, FrameType

_PLAIN = ("CALL", "PRECALL", "CALL_FUNCTION", "CALL_METHOD")
_WITH_NAMES = ("CALL_KW", "CALL_FUNCTION_KW")


def is_written(code: CodeType, parameter: str, frame: FrameType | None) -> bool:
    """Whether the call of the innermost running function with this code, seen from `frame`, gives `parameter`.

    Where that can't be told, as in f(*args), it counts as written.
    """
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    caller = frame.f_back if frame is not None else None
    if caller is None:
        return True
    position = list(inspect.getargs(code).args).index(parameter)
    instructions = list(dis.get_instructions(caller.f_code))
    # an instruction is followed by its caches, and the one that runs may point to the last of them
    at = max(i for i, one in enumerate(instructions) if one.offset <= caller.f_lasti)
    names = _names(instructions, at, caller.f_code)
    if names is None:
        return True
    return parameter in names or int(instructions[at].arg or 0) - len(names) > position


def _names(instructions: list[dis.Instruction], at: int, code: CodeType) -> tuple[str, ...] | None:
    """The names of the keyword arguments of a call."""
    if instructions[at].opname in _PLAIN:
        for one in instructions[max(0, at - 2) : at]:
            if one.opname == "KW_NAMES":
                names: tuple[str, ...] = code.co_consts[int(one.arg or 0)]
                return names
        return ()
    if instructions[at].opname in _WITH_NAMES:
        given = instructions[at - 1].argval
        return given if isinstance(given, tuple) else None
    return None
