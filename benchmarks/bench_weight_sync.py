"""Publishing weights and reading them into torch as an engine does, against raw file reading and against safetensors.

    python benchmarks/bench_weight_sync.py [--megabytes=220] [--rounds=7]

Targets: reading is at least 0.7 of reading the same files from one end to the other, and 1.5 times safetensors (`load_file`, then a copy of
each tensor, without which its pages would be read later). Random bfloat16 weights of Qwen3.5's shapes; files in the page cache on every
side; the sides alternate, medians of wall time are compared. CPU seconds are printed beside them, and a fourth side that tells what bounds
the first target: raw reading throws the bytes away; this one copies each block from its buffer to new memory, where a reader of weights has to
leave them. tensorstore reads so, a chunk at a time. Needs torch: `make test-extra` installs it, or `pip install -e '.[parity]'`.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    import torch  # noqa: F401
    from safetensors.torch import load_file
except ImportError:
    sys.exit("torch is missing: pip install -e '.[parity]'")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.interleave import measure  # noqa: E402
from intraskill import manifest, weights  # noqa: E402
from intraskill.models.qwen35.config import ModelConfig  # noqa: E402
from intraskill.models.qwen35.model import init_params  # noqa: E402
from intraskill.rollout import sglang_loader  # noqa: E402

OF_RAW, OF_SAFETENSORS = 0.7, 1.5
_BLOCK = 8 << 20


def _model(megabytes: int) -> ModelConfig:
    """Qwen3.5's proportions at width 1024, as many layers as the size asks for."""
    shape = dict(vocab_size=32768, hidden_size=1024, intermediate_size=3072, num_heads=8, num_kv_heads=2, head_dim=128, full_attention_interval=4)
    linear = dict(linear_num_key_heads=8, linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128)
    layers = max(4, round((megabytes * 1e6 / 2 - 32768 * 1024) / 18.5e6) // 4 * 4)
    return ModelConfig(**shape, **linear, num_layers=layers, param_dtype="bfloat16")


def _raw(path: Path) -> None:
    buffer = bytearray(_BLOCK)
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        with file.open("rb", buffering=0) as f:
            while f.readinto(buffer):
                pass


def _raw_kept(path: Path) -> list[np.ndarray]:
    buffer, kept = np.empty(_BLOCK, np.uint8), []
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        content, at = np.empty(file.stat().st_size, np.uint8), 0
        with file.open("rb", buffering=0) as f:
            while count := f.readinto(buffer):
                content[at : at + count] = buffer[:count]
                at += count
        kept.append(content)
    return kept


def _orbax(path: Path, config: ModelConfig) -> dict:
    """What our loader does between the manifest and `model.load_weights`, for an engine of one rank."""
    names = {sglang_loader._bare(name): name for name in manifest.read(path)["tensors"]}
    splits = sglang_loader.published_splits(_Config(config), config.vocab_size)
    places = {name: sglang_loader.Place(splits[name], torch.empty(0), 0, 0) for name in names}
    return sglang_loader.read(path / manifest.ARRAYS, names, places, 0, 1)


class _Config:
    """The model's config as SGLang shows it."""

    def __init__(self, config: ModelConfig):
        self.__dict__ |= config.to_hf()
        self.layers_block_type = ["attention" if config.is_full(i) else "linear_attention" for i in range(config.num_layers)]


def _safetensors(path: Path) -> dict:
    return {name: tensor.clone() for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _check(path: Path, loaded: dict) -> None:
    """What was read is what was published: a benchmark of the wrong bytes proves nothing."""
    entries = manifest.read(path)["tensors"]
    assert len(loaded) == len(entries)
    for name, entry in entries.items():
        tensor = loaded.get(name, loaded.get(sglang_loader._bare(name)))
        assert manifest.fingerprint(tensor.reshape(-1).view(torch.uint8).numpy())["sha256"] == entry["sha256"], name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=220)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    config = _model(arguments.megabytes)
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        published: dict[str, list[float]] = {layout: [] for layout in weights.LAYOUTS}
        versions: dict[str, Path] = {}
        for _ in range(3):
            for layout in weights.LAYOUTS:
                shutil.rmtree(directory / layout, ignore_errors=True)
                published[layout].append(_seconds(lambda layout=layout: weights.publish(directory / layout, 1, config, params, layout=layout)))
                versions[layout] = directory / layout / "00000001"
        sides: dict[str, Callable[[], object]] = {
            "raw files": lambda: _raw(versions["orbax"] / manifest.ARRAYS),
            "raw files, kept": lambda: _raw_kept(versions["orbax"] / manifest.ARRAYS),
            "orbax -> torch": lambda: _orbax(versions["orbax"], config),
            "safetensors -> torch": lambda: _safetensors(versions["safetensors"] / manifest.ARRAYS),
        }
        _check(versions["orbax"], _orbax(versions["orbax"], config))
        _check(versions["safetensors"], _safetensors(versions["safetensors"] / manifest.ARRAYS))
        timings = measure(sides, arguments.rounds)
    print(f"{size:.0f} MB of bfloat16, {config.num_layers} layers, chunks of {weights._CHUNK_BYTES >> 20} MiB")
    print(f"{'':28s} {'MB/s':>8s} {'MB/CPU-s':>8s}")
    for layout, seconds in published.items():
        print(f"{'publish, ' + layout:28s} {size / statistics.median(seconds):8.0f}")
    for name, timing in timings.items():
        print(f"{'read, ' + name:28s} {size / timing.wall:8.0f} {size / timing.cpu:8.0f}")
    ours, raw, other = (timings[name] for name in ("orbax -> torch", "raw files", "safetensors -> torch"))
    kept = timings["raw files, kept"]
    print(f"in CPU seconds: {raw.cpu / ours.cpu:.2f} of raw, {other.cpu / ours.cpu:.2f} of safetensors; raw, kept is {raw.cpu / kept.cpu:.2f} of raw")
    of_raw, of_other = raw.wall / ours.wall, other.wall / ours.wall
    met = of_raw >= OF_RAW and of_other >= OF_SAFETENSORS
    print(f"weight_sync of_raw={of_raw:.2f} of_safetensors={of_other:.2f} target={OF_RAW}/{OF_SAFETENSORS} {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
