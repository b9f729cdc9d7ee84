"""Run by test_hf_faults.py in a process of its own, whose peak memory is what is measured.

    PYTHONPATH=.:tests python tests/models/hf_memory.py DIRECTORY

Prints one JSON object: numbers of entries of all parameters and of the largest array, and peaks above the start in bytes.

The model is the 4B's shape made small: the embedding table is the largest array and a seventh of the whole.
"""

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from models import checkpoints

from intraskill.models.qwen35 import hf
from intraskill.models.qwen35.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=16_384,
    hidden_size=256,
    intermediate_size=1536,
    num_layers=24,
    full_attention_interval=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def peak(work: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes by which resident memory rose at its highest during `work`, and what that returned."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier work has freed counts for nobody
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    result = work()
    return status("VmHWM") - before, result


def main() -> None:
    directory = Path(sys.argv[1])
    checkpoints.multimodal(directory / "warm", ModelConfig(**{**vars(CONFIG), "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}))
    hf.import_hf(directory / "warm", directory / "warm-imported")  # what libraries allocate once
    config, params = hf.load_hf(directory / "warm-imported")
    hf.save_hf(directory / "warm-saved", config, params, source=directory / "warm")

    checkpoints.multimodal(directory / "published", CONFIG)
    peaks = {}
    peaks["import"], _ = peak(lambda: hf.import_hf(directory / "published", directory / "imported"))
    peaks["export"], _ = peak(lambda: hf.export_imported(directory / "imported", directory / "out"))
    params = None
    for kind, dtype in (("published", "float32"), ("imported", "bfloat16")):
        params = None
        peaks[f"load {kind} {dtype}"], (config, params) = peak(lambda k=kind, d=dtype: hf.load_hf(directory / k, param_dtype=d))
        peaks[f"save {kind} {dtype}"], _ = peak(lambda c=config, p=params, k=kind: hf.save_hf(directory / f"saved-{k}", c, p, source=directory / k))
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    print(json.dumps({"parameters": sum(sizes), "largest": max(sizes), "peaks": peaks}))


if __name__ == "__main__":
    main()
