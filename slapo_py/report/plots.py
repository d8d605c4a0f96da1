"""Plots as PNG files. matplotlib is imported when a plot is drawn: slapo_py does not depend on it."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def loss_curves(path: str | Path, runs: Mapping[str, Sequence[float]], title: str = "Training loss") -> Path:
    """Draw each run's losses over its steps into `path`, and return the path.

    Curves that coincide stay visible: each later run is drawn thinner, on top of the earlier ones.

    Requires: matplotlib (``pip install "slapo-py[examples]"``), else ImportError.
    """
    # The object interface draws without pyplot, so no display is opened and no global state is touched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for i, (name, losses) in enumerate(runs.items()):
        width = 1.5 + 4.0 * (len(runs) - 1 - i)
        axes.plot(range(1, len(losses) + 1), losses, label=name, linewidth=width, alpha=1.0 if i else 0.6)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def bars(path: str | Path, panels: Mapping[str, Mapping[str, float | None]], lines: Mapping[str, float]) -> Path:
    """Draw one panel of horizontal bars for each figure into `path`, and return the path.

    `panels`: {figure: {name: value}}; a value that is None has no bar. `lines`: {figure: value of a thin vertical
    line}, to compare with.

    Requires: matplotlib (``pip install "slapo-py[examples]"``), else ImportError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = max(len(values) for values in panels.values())
    figure = Figure(figsize=(4.5 * len(panels), 1.2 + 0.4 * count), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        drawn = [0.0 if value is None else value for value in values.values()]
        marks = axes.barh(range(len(values)), drawn)
        axes.bar_label(marks, ["" if value is None else f"{value:.3g}" for value in values.values()], padding=3)
        axes.set_yticks(range(len(values)), list(values))
        axes.invert_yaxis()  # the first on top, as in a table
        axes.set_title(title)
        axes.margins(x=0.2)
        if title in lines:
            axes.axvline(lines[title], color="black", linewidth=0.8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
