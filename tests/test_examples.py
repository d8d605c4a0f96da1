"""Every example runs, and says what it promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_own_kernel(tmp_path: Path) -> None:
    text = run(f"{load('own_kernel')}; own_kernel.main()", tmp_path)
    assert "does not match: the graph has no gelu" in text
    assert '<Match of 2 nodes at "model.layers.0.mlp": silu, mul>' in text
    assert 'sch["model.layers.1.mlp"].replace(examples.own_kernel.swiglu, what=examples.own_kernel.pattern)' in text
    assert "verified: rounding" in text


def test_own_primitive(tmp_path: Path) -> None:
    text = run(f"{load('own_primitive')}; own_primitive.main()", tmp_path)
    assert "<- keep_in_float32" in text
    assert "original: torch.bfloat16  scheduled: torch.float32" in text
    assert 'refused: keep_in_float32 at "2": it is kept already.' in text
    assert "after undo: 0 steps" in text


def test_wrong_replacement(tmp_path: Path) -> None:
    text = run(f"{load('wrong_replacement')}; wrong_replacement.main()", tmp_path)
    assert 'The first module that diverges is "2" (Block).' in text
    assert 'It comes with step 6: sch["2"].replace(examples.wrong_replacement.wrong' in text
    assert "verify: rounding" in text


def test_fused_qkv(tmp_path: Path) -> None:
    text = run(f"{load('fused_qkv')}; fused_qkv.main()", tmp_path)
    assert 'replace(examples.fused_qkv.FusedAttention, params={"qkv.weight": slapo.params.cat("q.weight"' in text
    fused, plain = (float(part.split()[-1]) for part in text.split("after 20 steps: ")[1].split("\n")[0].split(","))
    assert abs(fused - plain) < 1e-4 * abs(plain)
    assert "1.q.weight 1.q.bias 1.k.weight" in text and "1.qkv" not in text.split("keys of the checkpoint:")[1]


def test_layouts(tmp_path: Path) -> None:
    text = run(f"{load('layouts')}; layouts.main()", tmp_path)
    line = 'Write: sch["up"].sync("input", None, grad="all_reduce")'
    assert f'forgotten: the gradient of input 0 of "up" is P and is needed R: all_reduce is missing. {line}' in text
    assert "faults now: []" in text and "faults there: []" in text
    assert 'sch["up"].sync("input", grad="all_reduce")' in text
    assert 'elsewhere: Leave out step 4, sch["norm"].sync("input", grad="all_reduce"): input 0 of "norm"' in text
    assert "backward: all_reduce" in text


def test_tensor_parallel(tmp_path: Path) -> None:
    """The losses of one process, and a run that goes on at another world size."""
    alone = _on_mesh(tmp_path / "alone", 1, "--steps", "22")
    split = _on_mesh(tmp_path / "split", 2, "--steps", "11")
    assert "calls that missed a trace: {}" in split
    assert "training on {'dp': 1, 'tp': 2}" in split
    resumed = _on_mesh(tmp_path / "split", 1, "--steps", "22", "--resume")
    expected, found = _losses(alone), _losses(split) | _losses(resumed)
    assert list(found) == list(expected) == [0, 10, 20, 21]
    assert all(abs(found[step] - expected[step]) < 1e-5 for step in expected)
    assert expected[21] < expected[0] - 1


@pytest.mark.slow
def test_tensor_and_data_parallel(tmp_path: Path) -> None:
    expected = _losses(_on_mesh(tmp_path / "alone", 1, "--steps", "11"))
    found = _losses(_on_mesh(tmp_path / "split", 4, "--steps", "11", "--dp", "2"))
    assert all(abs(found[step] - expected[step]) < 1e-5 for step in expected)


def _on_mesh(out: Path, ranks: int, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / "tensor_parallel.py"), "--out", str(out), *arguments]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *torchrun, *command[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss ([\d.]+)", printed)}
