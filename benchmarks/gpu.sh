#!/usr/bin/env bash
# The kernels on a GPU: their tests, then the benchmark, in less than 8 minutes.
#
#     [PYTHON=python3] benchmarks/gpu.sh [--plan]
#
# --plan shows what would run; it needs no GPU. PYTHON is .venv/bin/python if that is there, else python3; where it has no
# slapo_py of this checkout, a copy laid out as the wheel is used. Exit status: 0, 1 if a part failed, 2 without a GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} && -x $root/.venv/bin/python ]]; then PYTHON=$root/.venv/bin/python; fi
PYTHON=$(command -v "${PYTHON:-python3}") || { echo "gpu.sh: PYTHON is no program." >&2; exit 2; }
[[ $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
cd "$root"
test_seconds=240
bench_seconds=180
bench_limit=210 # what the compilers of the last case may still need

case ${1:-} in
    "" | --plan) ;;
    *) echo "gpu.sh: there is no option $1; there is --plan." >&2; exit 2 ;;
esac

if [[ ${1:-} != --plan ]] && ! device=$("$PYTHON" -c '
import re, sys, torch
if not torch.cuda.is_available(): sys.exit(1)
print(re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name().lower().removeprefix("nvidia ")).strip("-"))'); then
    echo "gpu.sh: there is no GPU here, so nothing was tested or measured. --plan shows what would run." >&2
    exit 2
fi
# Python of this checkout: as installed, or from a copy.
at=$root
found=$(cd / && "$PYTHON" -c 'import slapo_py.kernels; print(slapo_py.__file__)' 2>/dev/null || true)
if [[ $found != "$root/slapo_py/__init__.py" ]]; then
    at=$root/build/gpu
    rm -rf "$at"
    mkdir -p "$at"
    cp -r slapo_py tests benchmarks pyproject.toml "$at"
    cp -r kernels primitives "$at/slapo_py"
    export PYTHONPATH=$at${PYTHONPATH:+:$PYTHONPATH}
fi
cd "$at"

has() { "$PYTHON" -c "import $1" 2>/dev/null; }
tests=("$PYTHON" -m pytest -q -p no:cacheprovider tests/kernels
    --ignore=tests/kernels/test_ahead.py --ignore=tests/kernels/test_bench_plan.py)
if has xdist; then tests+=(-n "$(($(nproc) < 8 ? $(nproc) : 8))" --dist worksteal); fi # most of the time is Triton's compiler
bench=("$PYTHON" benchmarks/bench_kernels.py --seconds "$bench_seconds")

if [[ ${1:-} == --plan ]]; then
    echo "1. at most $test_seconds s: ${tests[*]}"
    echo "2. at most $bench_limit s: ${bench[*]} --out $root/benchmarks/results/<date>-kernels-<device>.md"
    "${bench[@]}" --plan
    echo "This was a dry run: nothing was tested or measured on a GPU."
    exit 0
fi

out=$root/benchmarks/results/$(date +%F)-kernels-$device.md

status=0
export OMP_NUM_THREADS=2
echo "== tests on $device, at most $test_seconds s"
timeout -k 10 "$test_seconds" "${tests[@]}" || { echo "== the tests failed: $?, 124 is the time limit"; status=1; }
echo "== benchmark on $device, at most $bench_limit s"
timeout -k 10 "$bench_limit" "${bench[@]}" --out "$out" || { echo "== the benchmark failed: $?"; status=1; }
exit $status
