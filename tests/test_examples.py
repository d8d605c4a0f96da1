"""Every example runs, and says what it promises."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(name: str) -> str:
    return f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); from examples import {name}"


def test_quickstart(tmp_path: Path) -> None:
    short = f"quickstart.STEPS = 6; quickstart.OUT = {str(tmp_path)!r}; sys.exit(quickstart.main())"
    text = run(f"{load('quickstart')}; {short}", tmp_path)
    assert "losses equal to the bit" in text
    assert 'sch["transformer.h.0"].checkpoint()' in text
    assert (tmp_path / "quickstart_loss.png").stat().st_size > 0


def test_debugging(tmp_path: Path) -> None:
    text = run(load("debugging"), tmp_path)
    assert "loss of the scheduled model: nan" in text
    assert "the first NaN in the original comes out of: 1.attention" in text
    assert 'sch["1"].trace()' in text
    assert float(text.rsplit(":", 1)[1]) < 3.0
