"""Starts SGLang on this machine's CPUs. As a script, with the environment that install.sh made:

python tests/sglang_cpu/serve.py CHECKPOINT [PORT]
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOADER = "intraskill.rollout.sglang_loader.load"


def command(environment: Path, checkpoint: Path, port: int, *more: str) -> list[str]:
    """The command line; `environment` is the virtual environment."""
    return [
        *(str(environment / "bin/python"), "-m", "sglang.launch_server", "--model-path", str(checkpoint)),
        *("--device", "cpu", "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
        *("--custom-weight-loader", LOADER, "--enable-fp32-lm-head"),
        # What the kernels' stand-ins allow, and sizes for two cores.
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph", "--disable-overlap-schedule"),
        *("--mem-fraction-static", "0.2", "--max-total-tokens", "16384", "--max-running-requests", "32", "--page-size", "1"),
        *("--mamba-radix-cache-strategy", "no_buffer", "--sleep-on-idle"),
        *more,
    ]


def variables() -> dict[str, str]:
    """Environment variables of the server: the loader comes from this repository."""
    settings = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **settings, "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    environment = Path(os.environ.get("INTRASKILL_SGLANG", ROOT / ".venv-sglang"))
    line = command(environment, Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 30000)
    os.execvpe(line[0], line, variables())
