"""Tables of results, for a terminal and for plain text."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

Row = Sequence[object]


def table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> Table:
    """A table whose first column is text and whose others are aligned right."""
    result = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        result.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        result.add_row(*(cell(value) for value in row))
    return result


def comparison(title: str, runs: Mapping[str, Mapping[str, object]]) -> Table:
    """One column a run, one row a figure; a figure that a run lacks stays blank."""
    names = list(dict.fromkeys(name for figures in runs.values() for name in figures))
    rows = [(name, *(figures.get(name) for figures in runs.values())) for name in names]
    return table(title, ("", *runs), rows)


def cell(value: object) -> str:
    """How a figure is written: None blank, truth as yes or no, floats with four significant digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def megabytes(size: int) -> str:
    """Bytes as MB (10^6)."""
    return f"{size / 1e6:.1f} MB"


def plain(renderable: Table, width: int = 100) -> str:
    """The table as text without colors, the same on every terminal."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()
