"""Hugging Face -> Orbax -> Hugging Face of a full-size Qwen3.5-4B with random weights, against copying its files.

    python benchmarks/bench_hf_roundtrip.py [--directory=/tmp] [--layers=32] [--vocabulary=248320]

Writes 8.4 GB of bfloat16 shards from a seeded generator, needs 26 GB of disk and 4 GB of memory, and deletes everything in the end. Import and export
are the commands that users run, in processes of their own whose peak memory is read from the kernel. Both sides read what is not in the page
cache and end with their files on disk (fsync); a copy is timed before and one after. Targets: every file byte for byte as it was; import and
export together within 2.5 times a copy; peak memory below the parameters plus 1.5 times the largest tensor.
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from intraskill.models.qwen35.config import QWEN35_4B, ModelConfig  # noqa: E402
from intraskill.models.qwen35.hf_layout import published_shapes  # noqa: E402
from intraskill.run_directory import require_disk  # noqa: E402
from intraskill.types import InputError  # noqa: E402

TARGET = 2.5
FULL_SIZE = 4_205_751_296
SHARD_BYTES = 4 << 30
BLOCK = 1 << 25


def model_config(layers: int, vocabulary: int) -> ModelConfig:
    """Qwen3.5-4B, or a part of it."""
    return dataclasses.replace(QWEN35_4B, vocab_size=vocabulary, num_layers=layers, param_dtype="bfloat16")


def write_source(directory: Path, config: ModelConfig) -> list[int]:
    """Writes shards of random bits, a block in memory at a time; returns the tensors' sizes in bytes."""
    sizes = {}
    for name, shape in published_shapes(config).items():
        wide = name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
        sizes["model.language_model." + name] = (shape, "F32" if wide else "BF16", math.prod(shape) * (4 if wide else 2))
    shards: list[list[str]] = [[]]
    for name, (*_, size) in sizes.items():
        if shards[-1] and sum(sizes[n][2] for n in shards[-1]) + size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    rng, weight_map = np.random.default_rng(0), {}
    for number, names in enumerate(shards, start=1):
        header, end = {}, 0
        for name in names:
            shape, dtype, size = sizes[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        file = directory / f"model.safetensors-{number:05d}-of-{len(shards):05d}.safetensors"
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, end, BLOCK):
                out.write(rng.bytes(min(BLOCK, end - start)))
            out.flush()
            os.fsync(out.fileno())
        weight_map |= dict.fromkeys(names, file.name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    return [size for *_, size in sizes.values()]


def forget(directory: Path) -> None:
    """Drops a directory's files from the page cache."""
    for file in (path for path in directory.rglob("*") if path.is_file()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_seconds(source: Path, target: Path) -> tuple[float, float]:
    """Copies the files, syncs and deletes them; returns seconds by the clock and of CPU."""
    forget(source)
    target.mkdir()
    start, cpu = time.perf_counter(), time.process_time()
    for file in source.iterdir():
        with shutil.copyfile(file, target / file.name).open("rb") as copied:
            os.fsync(copied.fileno())
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    shutil.rmtree(target)
    return seconds, cpu


def run(source: Path, *command: str) -> tuple[float, float, int]:
    """Seconds by the clock and of CPU, and peak resident bytes, of a command that reads `source`."""
    forget(source)
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise InputError(f"{' '.join(command)} ended with status {process.returncode}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def same_tensors(source: Path, out: Path) -> bool:
    """Whether every shard's header says the same and its data is the same, byte for byte."""
    for file in source.glob("*.safetensors"):
        with file.open("rb") as x, (out / file.name).open("rb") as y:
            headers = [json.loads(f.read(int.from_bytes(f.read(8), "little"))) for f in (x, y)]
            if headers[0] != headers[1]:
                return False
            while block := x.read(BLOCK):
                if block != y.read(BLOCK):
                    return False
            if y.read(1):
                return False
    return {f.name for f in source.glob("*.safetensors")} == {f.name for f in out.glob("*.safetensors")}


def measure(scratch: Path, config: ModelConfig) -> bool:
    source, imported, out = (scratch / name for name in ("source", "imported", "out"))
    source.mkdir()
    sizes = write_source(source, config)
    total, largest = sum(sizes), max(sizes)
    copies = [copy_seconds(source, scratch / "copy")]
    steps = {
        "import": run(source, "launch/import_hf.py", f"--checkpoint={source}", f"--out={imported}"),
        "export": run(imported, "launch/export_hf.py", f"--imported={imported}", f"--out={out}"),
    }
    exact = same_tensors(source, out)
    shutil.rmtree(imported)
    shutil.rmtree(out)
    copies.append(copy_seconds(source, scratch / "copy"))

    copied = sum(seconds for seconds, _ in copies) / len(copies)
    allowed = total + 1.5 * largest
    elements = sum(math.prod(shape) for shape in published_shapes(config).values())
    print(f"{elements:,} parameters, {total / 1e9:.2f} GB, largest tensor {largest / 1e9:.2f} GB, {len(list(source.glob('*.safetensors')))} shards")
    print(f"{'step':10s} seconds    CPU   GB/s   peak memory, GB (allowed {allowed / 1e9:.2f})")
    for number, (seconds, cpu) in enumerate(copies, start=1):
        print(f"{f'copy {number}':10s} {seconds:7.1f} {cpu:6.1f} {total / seconds / 1e9:6.2f}")
    for name, (seconds, cpu, peak) in steps.items():
        print(f"{name:10s} {seconds:7.1f} {cpu:6.1f} {total / seconds / 1e9:6.2f}   {peak / 1e9:.2f}")
    ratio = sum(seconds for seconds, *_ in steps.values()) / copied
    peak = max(peak for *_, peak in steps.values())
    met = exact and ratio <= TARGET and peak <= allowed
    print(f"bit-exact: {exact}")
    print(f"hf_roundtrip ratio={ratio:.2f} target={TARGET} peak_gb={peak / 1e9:.2f} allowed_gb={allowed / 1e9:.2f} {'met' if met else 'missed'}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where to work")
    parser.add_argument("--layers", type=int, default=32, help="fewer for a trial")
    parser.add_argument("--vocabulary", type=int, default=248_320, help="smaller for a trial")
    arguments = parser.parse_args()
    config = model_config(arguments.layers, arguments.vocabulary)
    elements = sum(math.prod(shape) for shape in published_shapes(config).values())
    if (arguments.layers, arguments.vocabulary) == (32, 248_320) and elements != FULL_SIZE:
        raise AssertionError(f"{elements} parameters are not those of the 4B, {FULL_SIZE}")
    try:
        require_disk(arguments.directory, 7 * elements)
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="hf_roundtrip-") as scratch:
            return 0 if measure(Path(scratch), config) else 1
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
