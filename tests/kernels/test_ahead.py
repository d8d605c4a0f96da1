"""Ahead of time: every kernel compiles for four architectures, and what spills is seen."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import slapo_py.kernels  # noqa: F401  (registers them)
from slapo_py.errors import NoMatchError
from slapo_py.kernels import Kernel, ahead, find_kernel, list_kernels
from slapo_py.kernels.launch import Launch
from slapo_py.report.tables import plain

NAMES = list_kernels()
NORMS = "layer_norm rms_norm add_layer_norm add_rms_norm dropout_add_layer_norm".split()
IN_FORWARD = ["linear_cross_entropy"]  # gradients are made there, so that backward launches nothing
ROOT = Path(__file__).parents[2]
CASES = [
    (dtype, width, t) for dtype in ("float32", "bfloat16", "float16") for width in (65, 1024) for t in ahead.TARGETS
]
QUICK = [
    ("bfloat16", 1024, "sm_90"),
    ("float32", 1024, "sm_80"),
    ("float16", 65, "sm_100"),
    ("float32", 65, "gfx942"),
]  # each target, dtype and width at least once


def slow_unless(quick: bool, *values: object) -> object:
    return pytest.param(*values, id="-".join(map(str, values)), marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(
    "name, dtype, width, target", [slow_unless(case in QUICK, name, *case) for name in NAMES for case in CASES]
)
def test_every_kernel_compiles(name: str, dtype: str, width: int, target: str) -> None:
    found = ahead.needs([name], [width], [dtype], [target], rows=300)
    directions = ["forward"] if name in IN_FORWARD else ["backward", "forward"]
    assert sorted({one.direction for one in found}) == directions
    for one in found:
        assert (one.kernel, one.dtype, one.width, one.target) == (name, dtype, width, target)
        assert 0 < one.use.registers <= (512 if target == "gfx942" else 255)
        assert one.use.shared <= 64 * 1024, "more than an AMD program may have"


@pytest.mark.parametrize(
    "name, width, target",
    [
        slow_unless((width, target) == (4096, "sm_90"), name, width, target)
        for name in NORMS
        if name in NAMES
        for width in (1024, 2048, 4096)
        for target in ("sm_80", "sm_90", "sm_100")
    ],
)
def test_norms_keep_their_rows_in_registers(name: str, width: int, target: str) -> None:
    found = ahead.needs([name], [width], ["bfloat16"], [target])
    assert len(found) >= 2
    assert [one for one in found if one.use.spilled] == []


# A kernel written to spill: 1024 threads hold 128 values each, so that each may have 64 registers, on AMD 128.


@triton.jit
def _hoards(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns)
    centred = x - tl.sum(x, 0) / BLOCK
    tl.store(y_ptr + columns, x * tl.sum(centred * centred, 0) + centred)


def hoarding(target: str, values: int = 128) -> Launch:
    x = torch.empty(1024 * values)
    threads = ahead.TARGETS[target][2]
    return Launch(_hoards, (1,), (x, torch.empty_like(x)), {"BLOCK": len(x)}, 1024 // threads)


@pytest.mark.parametrize("target", ahead.TARGETS)
def test_what_spills_is_seen(target: str) -> None:
    assert ahead.use_of(hoarding(target), target).spilled > 100
    assert ahead.use_of(hoarding(target, 8), target).spilled == 0


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_figures_are_those_of_the_assembler(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    knobs = triton.knobs
    with knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile = True, True
        use = ahead.use_of(hoarding(target), target)
    log = capfd.readouterr().out
    stores, loads = (int(re.findall(rf"(\d+) bytes spill {kind}", log)[-1]) for kind in ("stores", "loads"))
    registers = int(re.findall(r"Used (\d+) registers", log)[-1])
    assert stores > 0
    assert (use.registers, use.spilled) == (registers, stores + loads)


def test_bytes_by_the_width_of_an_instruction() -> None:
    widths = {"": 4, ".LU": 4, ".64": 8, ".LU.64": 8, ".128": 16, ".U8": 1, ".S16": 2}
    assert {one: ahead._bytes_moved(one) for one in widths} == widths


# A launch is compiled as it would be made


@triton.jit
def _takes(x_ptr, none, one, even, odd, long, flag, real, N: tl.constexpr):  # type: ignore[no-untyped-def]
    if none is None:
        tl.store(x_ptr + tl.arange(0, N), one + even + odd + tl.cast(long, tl.float32) + real + tl.where(flag, 1, 0))


def test_arguments_are_specialized_as_in_a_launch() -> None:
    x = torch.empty(33)
    args = (x, None, 1, 32, 33, 2**40, True, 0.5)
    source = ahead._source(Launch(_takes, (1,), args, {"N": 16}, 1), _gpu("sm_90"))
    assert source.signature == {
        "x_ptr": "*fp32", "none": "constexpr", "one": "constexpr", "even": "i32", "odd": "i32", "long": "i64",
        "flag": "u1", "real": "fp32", "N": "constexpr",
    }  # fmt: skip
    assert source.constants == {(1,): None, (2,): 1, (8,): 16}
    assert set(source.attrs) == {(0,), (3,), (5,)}
    shifted = ahead._source(Launch(_takes, (1,), (x[1:], *args[1:]), {"N": 16}, 1), _gpu("sm_90"))
    assert set(shifted.attrs) == {(3,), (5,)}
    assert ahead.use_of(Launch(_takes, (1,), args, {"N": 16}, 1), "sm_90").registers > 0


def test_an_argument_that_no_kernel_takes() -> None:
    with pytest.raises(TypeError, match="_hoards: y_ptr is 'text', which no kernel takes"):
        ahead._source(Launch(_hoards, (1,), (torch.empty(4), "text"), {"BLOCK": 4}, 1), _gpu("sm_90"))


def _gpu(target: str) -> object:
    from triton.backends.compiler import GPUTarget

    return GPUTarget(*ahead.TARGETS[target])


def test_launches_are_noted_forward_and_backward() -> None:
    noted = ahead.launches(find_kernel("bias_gelu"), 300, 65, torch.bfloat16)
    assert [direction for direction, _ in noted] == ["forward", "backward"]
    assert noted[0][1].grid == (300, 1) and noted[1][1].grid == (150, 1)


def test_what_needs_no_gradient_has_no_backward() -> None:
    kernel = find_kernel("bias_gelu")
    example = kernel.example
    assert example is not None
    plainly = Kernel(
        name="plainly", op=kernel.op, reference=kernel.reference, patterns=kernel.patterns,
        example=lambda *args: tuple(one.detach() for one in example(*args)),
    )  # fmt: skip
    assert [direction for direction, _ in ahead.launches(plainly, 4, 8, torch.float32)] == ["forward"]


# What a person sees


def test_the_table() -> None:
    use = ahead.Use(registers=40, spilled=16, shared=4096)
    need = ahead.Need("bias_gelu", "backward", "_backward_kernel", "bfloat16", 1024, "sm_90", 256, 4, use)
    text = plain(ahead.table([need]), width=140)
    row = next(line for line in text.splitlines() if "bias_gelu" in line)
    assert row.replace("│", " ").split() == (
        "bias_gelu backward _backward_kernel bfloat16 1024 sm_90 256 4 40 16 4096".split()
    )
    assert "bytes spilled by a thread" in text


def test_on_the_command_line_without_a_warning() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_DEFAULT_FP_FUSION"}
    command = (
        "-W error -m slapo_py.kernels.ahead bias_gelu --widths 64 --dtypes float16 --targets sm_90 gfx942 --rows 8"
    )
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line for line in done.stdout.splitlines() if "bias_gelu" in line]
    assert len(rows) == 4 and all("float16" in line and " 64 " in line for line in rows)


def test_the_environment_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    before = dict(os.environ)
    ahead.use_of(hoarding("sm_90", 1), "sm_90")
    assert dict(os.environ) == before
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert ahead.compiled(hoarding("sm_90", 1), "sm_90").metadata.enable_fp_fusion is False


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoMatchError, match="there is no kernel 'bias_gelo'"):
        ahead.needs(["bias_gelo"])
    with pytest.raises(ValueError, match="there is no target 'sm_20'. Targets: sm_80, sm_90, sm_100, gfx942"):
        ahead.use_of(hoarding("sm_90"), "sm_20")
    kernel = find_kernel("bias_gelu")
    bare = Kernel(name="bare", op=kernel.op, reference=kernel.reference, patterns=kernel.patterns)
    with pytest.raises(ValueError, match="bare: has no example"):
        ahead.launches(bare, 4, 8, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(ahead, "INTERPRETED", True)
        with pytest.raises(RuntimeError, match="interpreter compiles nothing: .* without TRITON_INTERPRET=1"):
            ahead.use_of(hoarding("sm_90"), "sm_90")
    with monkeypatch.context() as patch:
        patch.setattr(ahead, "triton", None)
        with pytest.raises(RuntimeError, match="needs Triton: pip install triton"):
            ahead.use_of(hoarding("sm_90"), "sm_90")


def test_no_cuobjdump(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lacking:
        @property
        def cuobjdump(self) -> None:
            raise RuntimeError("Cannot find cuobjdump")

    ahead._cuobjdump_path.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(ahead, "triton", types.SimpleNamespace(knobs=types.SimpleNamespace(nvidia=Lacking())))
        with pytest.raises(RuntimeError, match="comes with Triton but is not there. Set TRITON_CUOBJDUMP_PATH"):
            ahead._cuobjdump("-res-usage", "kernel.cubin")
    with pytest.raises(RuntimeError, match="cuobjdump -res-usage /nowhere.cubin failed"):
        ahead._cuobjdump("-res-usage", "/nowhere.cubin")
