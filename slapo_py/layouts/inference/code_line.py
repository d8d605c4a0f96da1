"""The line of a user's code that a message proposes: a call as it stands in the file, with one size left to torch."""

import ast
import linecache


def with_size_left_open(where: str, name: str, index: int) -> str:
    """The statement at `file:line` whose call of the method `name` has -1 as argument number `index`; "" if none has.

    The file must be there, with one such call in the statement, whose arguments are written one by one.
    """
    file, _, line = where.rpartition(":")
    if not line.isdigit():
        return ""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ""
    for statement in (one for one in ast.walk(tree) if isinstance(one, ast.Assign | ast.Return | ast.Expr)):
        if statement.lineno <= int(line) <= (statement.end_lineno or 0):
            found = [one for one in ast.walk(statement) if isinstance(one, ast.Call) and _calls(one, name, index)]
            if len(found) == 1:
                found[0].args[index] = ast.Constant(-1)
                return ast.unparse(statement)
    return ""


def _calls(call: ast.Call, name: str, index: int) -> bool:
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr == name
    return is_method and index < len(call.args) and not any(isinstance(one, ast.Starred) for one in call.args)
