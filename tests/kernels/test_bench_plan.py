"""The benchmark of the kernels, as far as it runs without a GPU: its plan, and its arithmetic on a device made up."""

import gc
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from slapo_py.kernels import Kernel, list_kernels, register_kernel, unregister_kernel
from slapo_py.kernels import find_kernel as find
from slapo_py.kernels.bias_gelu import bias_gelu

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_kernels", ROOT / "benchmarks/bench_kernels.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["bench_kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def test_the_dry_run_names_every_kernel() -> None:
    done = script("--plan")
    assert (done.returncode, done.stderr) == (0, "")
    for name in list_kernels():
        assert f"│ {name} " in done.stdout, name
    assert "pytest" in done.stdout and "at most 240 s" in done.stdout
    assert "This is a plan: no kernel ran, and nothing was measured." in done.stdout
    assert done.stdout.endswith("This was a dry run: nothing was tested or measured on a GPU.\n")


def test_without_a_gpu_the_script_says_so() -> None:
    done = script()
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no GPU here, so nothing was tested or measured. --plan shows" in done.stderr


def test_an_unknown_option() -> None:
    done = script("--quick")
    assert (done.returncode, done.stderr) == (2, "gpu.sh: there is no option --quick; there is --plan.\n")


def test_the_plan_of_one(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--plan", "bias_gelu", "--dtypes", "float32", "--no-compile"]) == 0
    text = capsys.readouterr().out
    first = next(line for line in text.splitlines() if "bias_gelu" in line)
    x = 16384 * 4096 * 4
    assert [one.strip() for one in first.split("│")[1:7]] == [
        "bias_gelu", "16384 x 4096", "float32", f"{(2 * x + 4096 * 4) / 1e6:.1f} MB",
        f"{(3 * x + 4096 * 4 + 256 * 4096 * 4) / 1e6:.1f} MB", "forward _forward_kernel[16384, 4] 4w",
    ]  # fmt: skip
    assert "backward _backward_kernel[256, 4] 4w" in text
    assert "Beside each: eager, liger" in text


def test_the_measurement_says_that_there_is_no_gpu(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    assert "There is no GPU here: nothing was measured." in capsys.readouterr().out


def test_kernels_come_at_their_important_shape_first(bench: ModuleType) -> None:
    names = ["swiglu", "cross_entropy"]
    cases = bench.cases_of(names, ["bfloat16"])
    assert [one.kernel.name for one in cases] == names * 2
    assert [one.shape for one in cases] == ["16384 x 4096", "4096 x 128256", "65536 x 1024", "8192 x 32000"]


# The arithmetic, on a device made up: the CPU, with a clock that counts what it is asked


class _Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: "_Event") -> float:
        return 1e3 * (other.at - self.at)


@pytest.fixture
def device(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "COPIED", 2**16)
    monkeypatch.setattr(bench, "SHAPES", {"": ((8, 64), (16, 32))})
    monkeypatch.setattr(bench, "liger_forms", lambda: {"swiglu": lambda gate, up: gate.relu() * up})
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device made up")
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    return bench


def test_a_table_of_every_kernel(device: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "kernels.md"
    assert device.main(["--no-compile", "--rounds", "2", "--seconds", "1e6", "--out", str(out)]) == 0
    assert gc.isenabled()  # as before
    text = out.read_text()
    assert text.startswith("# Kernels on a device made up, 20") and f"torch {torch.__version__}" in text
    rows = [[one.strip() for one in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    head, body = rows[0], [one for one in rows if len(one) == 10 and one[1] != "rows x width" and one[0] != "---"]
    assert head[4:7] == ["us", "GB/s", "of copy"]
    for name in list_kernels():
        mine = [one for one in body if one[0] == name]
        assert [one[3] for one in mine] == ["forward", "backward"] * 2, name
        for one in mine:
            assert float(one[4]) > 0 and one[6].endswith("%") and one[7].endswith("x") and one[8] == "", one
            assert one[9].endswith("x") == (name == "swiglu"), one
    memory = [one for one in rows if one[0].endswith("cross_entropy") and len(one) == 7]
    assert len(memory) == 4 and all(one[3] == one[4] == "0.0 MB" for one in memory)


def test_a_wrong_kernel_has_no_time(device: ModuleType, tmp_path: Path) -> None:
    right = find("bias_gelu")
    unregister_kernel("bias_gelu")
    register_kernel(Kernel(name="bias_gelu", op=bias_gelu, reference=lambda x, bias, approximate: (x + bias).relu(),
                           patterns=right.patterns, example=right.example))  # fmt: skip
    try:
        out = tmp_path / "kernels.md"
        assert device.main(["bias_gelu", "--no-compile", "--rounds", "1", "--seconds", "1e6", "--out", str(out)]) == 1
    finally:
        unregister_kernel("bias_gelu")
        register_kernel(right)
    text = out.read_text()
    assert "| bias_gelu | 8 x 64 | bfloat16 |  | WRONG |  |  |  |  |  |" in text
    assert "WRONG, so without a time: bias_gelu 8 x 64 bfloat16: output 0: error" in text


def test_what_fails_and_what_there_is_no_time_for(
    device: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(device, "liger_forms", lambda: {"swiglu": broken})
    out = tmp_path / "kernels.md"
    assert device.main(["swiglu", "--no-compile", "--rounds", "1", "--seconds", "1e6", "--out", str(out)]) == 0
    text = out.read_text()
    assert "| failed |" in text and "liger failed: swiglu 8 x 64 bfloat16: RuntimeError: out of registers" in text
    assert device.main(["swiglu", "--no-compile", "--seconds", "0", "--out", str(out)]) == 0
    assert "left out for time: swiglu 8 x 64 bfloat16" in out.read_text()
