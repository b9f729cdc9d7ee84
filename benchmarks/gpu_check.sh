#!/usr/bin/env bash
# Optional: what one GPU says about parity, speed and memory at the shape of the 4B. Ten minutes at most, after the packages are installed.
#
#     bash benchmarks/gpu_check.sh            needs an NVIDIA GPU of 80 GB or more for the update; on a smaller one it says that it does not fit
#     bash benchmarks/gpu_check.sh --row=4096
#
# NOT RUN BY US: no GPU was at hand. tests/grpo/test_gpu_check.py runs its Python part on the CPU with a tiny shape.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
command -v nvidia-smi >/dev/null || { echo "nvidia-smi not found: this check needs an NVIDIA GPU and its driver; benchmarks/gpu_check.py --shape=tiny runs anywhere" >&2; exit 2; }
VENV=.venv-gpu
if [ ! -e "$VENV/.installed" ] || [ setup.py -nt "$VENV/.installed" ]; then
  "${PYTHON:-python3.11}" -m venv "$VENV"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[cuda,parity]'
  touch "$VENV/.installed"
fi
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.95}"
status=0
timeout 600 "$VENV/bin/python" benchmarks/gpu_check.py "$@" || status=$?
[ "$status" -ne 124 ] || echo "stopped after ten minutes; the lines above are what was measured" >&2
exit "$status"
