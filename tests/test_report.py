"""Tables, plots and measured figures."""

from pathlib import Path

import pytest
import torch
from torch import nn

from slapo_py.report.measure import PeakBytes, paired_ratio, saved_activations
from slapo_py.report.plots import bars, loss_curves
from slapo_py.report.tables import cell, comparison, megabytes, plain, table


def test_a_table_is_plain_text_of_fixed_width() -> None:
    text = plain(table("Title", ("name", "figure"), [("a", 1.23456), ("b", None), ("c", True)]))
    assert "\x1b" not in text
    assert [line.split() for line in text.splitlines() if "│" in line] == [
        ["│", "a", "│", "1.235", "│"],
        ["│", "b", "│", "│"],
        ["│", "c", "│", "yes", "│"],
    ]


def test_a_comparison_has_one_column_a_run() -> None:
    text = plain(comparison("T", {"old": {"loss": 1.0}, "new": {"loss": 2.0, "equal": False}}))
    assert text.index("old") < text.index("new")
    assert next(line for line in text.splitlines() if "equal" in line).split() == ["│", "equal", "│", "│", "no", "│"]


def test_cells() -> None:
    assert [cell(v) for v in (None, False, 0.123456, 7, "x")] == ["", "no", "0.1235", "7", "x"]
    assert megabytes(1_250_000) == "1.2 MB"


def test_a_loss_curve_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = loss_curves(tmp_path / "new" / "curve.png", {"a": [3.0, 2.0], "b": [3.0, 2.5]})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_saved_activations_count_each_storage_once_and_no_parameter() -> None:
    linear = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    with saved_activations(linear) as saved:
        linear(x) * linear(x)  # saves x twice, the weight twice, and both products
    assert saved.bytes == 3 * 4 * 8 * 4


def test_a_paired_ratio_is_the_median_of_ratios() -> None:
    assert paired_ratio([2.0, 30.0, 3.0], [1.0, 1.0, 1.0]) == 3.0
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


def test_peak_bytes_count_what_is_alive_at_one_time() -> None:
    size = 1000 * 4
    x = torch.zeros(1000)
    with PeakBytes([x]) as peak:
        a = x + 1
        view = a[:10]  # the same storage
        del a
        assert (peak.alive, peak.peak) == (size, size)
        del view
        assert (peak.alive, peak.peak) == (0, size)
        x.add_(1)  # was there before
        b, c = x + 1, x * 2
        assert peak.alive == 2 * size
        del b
        d = x - 1
        assert (peak.alive, peak.peak) == (2 * size, 2 * size)
        del c, d
    assert peak.alive == 0


def test_peak_bytes_go_on_in_the_backward_pass() -> None:
    linear = nn.Linear(8, 8)
    x = torch.randn(100, 8)
    linear(x).sum().backward()  # now the gradients are there
    with PeakBytes([x, *linear.parameters(), *(p.grad for p in linear.parameters())]) as peak:  # type: ignore[misc]
        loss = linear(x).square().sum()
        forward = peak.alive
        loss.backward()
    assert peak.peak > forward


def test_bars_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = bars(
        tmp_path / "new" / "bars.png", {"time": {"a": 1.0, "b": None}, "bytes": {"a": 3.0, "b": 2.0}}, {"time": 1.0}
    )
    assert path.read_bytes().startswith(b"\x89PNG")
