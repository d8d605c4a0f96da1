"""`slapo_py.kernels.list()`: the registered kernels as a table."""

import inspect

from rich.console import Console
from rich.table import Table

from slapo_py.kernels.spec import find_kernel, list_kernels

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def table() -> Table:
    """Arguments, dtypes in and out, placement and features of each registered kernel."""
    made = Table(title="kernels", show_lines=True)
    made.add_column("kernel", no_wrap=True)
    for head in ("arguments", "dtypes", "placement", "features"):
        made.add_column(head)
    for name in list_kernels():
        kernel = find_kernel(name)
        takes = " ".join(_SHORT.get(one, one) for one in kernel.takes)
        sums = _SHORT.get(kernel.accumulates, kernel.accumulates)
        made.add_row(
            name, ", ".join(inspect.signature(kernel.op).parameters), f"{takes}; sums in {sums}; out {kernel.returns}",
            kernel.placement, ", ".join(kernel.features),
        )  # fmt: skip
    return made


def list() -> None:
    """Print the table of registered kernels. `list_kernels()` gives their names."""
    Console().print(table())
