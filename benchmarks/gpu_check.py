"""Parity with Hugging Face, tokens a second of decoding and of a full update, and peak memory, on whatever JAX computes on.

    python benchmarks/gpu_check.py [--shape=4b|tiny] [--row=8192] [--slots=64] [--steps=64] [--repeats=3] [--parity=yes|no]

`benchmarks/gpu_check.sh` runs it on a GPU at the shape of the 4B; with --shape=tiny it runs anywhere. Weights are random: speed and memory
do not depend on them. Parity is that of benchmarks/bench_model.py: a model of 7.9 M parameters in float32; logits, loss and every gradient against
torch on the CPU. Decoding feeds a cache of `slots` sequences, one greedy token a call, in bfloat16. The update is old log-probs, loss, backward and
AdamW on one full row, a quarter of it trained, with float32 parameters, as configs/coevolve.py computes. Peak memory is since the program's start;
decoding comes before the update, since it needs less. Exit status: 0, or 1 when parity fails or something does not fit.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from configs import coevolve  # noqa: E402
from intraskill import parts  # noqa: E402
from intraskill.grpo.learner import OptimizerConfig  # noqa: E402
from intraskill.grpo.packing import Episode, Rows, pack_microbatches  # noqa: E402
from intraskill.grpo.policy import qwen35_learner  # noqa: E402
from intraskill.models.qwen35 import cache, model  # noqa: E402
from intraskill.models.qwen35.config import QWEN35_4B, ModelConfig  # noqa: E402
from intraskill.models.qwen35.sharding import make_mesh  # noqa: E402

TINY = dataclasses.replace(
    QWEN35_4B,
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
SHAPES = {"4b": QWEN35_4B, "tiny": TINY}


def numerics(shape: ModelConfig, row: int) -> ModelConfig:
    """The shape as configs/coevolve.py computes it; the kernel for TPUs is left out, and pieces are no longer than the row."""
    settings = parts.numerics(coevolve.get_config()) | {"attention": "blocked"}
    settings["piece_length"] = settings["piece_length"] if row > settings["piece_length"] else 0
    return dataclasses.replace(shape, **settings)


def parity() -> str:
    """Compares with torch; raises AssertionError where they differ."""
    from benchmarks import bench_model
    from benchmarks.peers import hf_qwen35

    config = hf_qwen35.SHAPE
    params = jax.jit(model.init_params, static_argnums=0)(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 160), dtype=np.int32)
    bench_model.check(config, params, tokens, hf_qwen35.build(config, params), *bench_model.our_sides(config, tokens))
    return "logits, loss and gradients agree"


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call that has finished its work when it returns, after one to warm up."""
    call()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def decode(shape: ModelConfig, slots: int, steps: int, row: int, repeats: int) -> str:
    """Tokens a second of greedy decoding."""
    config = dataclasses.replace(numerics(shape, row), param_dtype="bfloat16", scan_layers=False)
    params = jax.jit(model.init_params, static_argnums=0)(config, jax.random.key(0))

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, held, token):
        hidden, held = model.extend(params, config, held, token[:, None], jnp.ones(slots, jnp.int32))
        return jnp.argmax(model.logits(params, config, hidden), axis=-1).astype(jnp.int32), held

    def run() -> None:
        token, held = jnp.ones(slots, jnp.int32), cache.init_cache(config, slots, row)
        for _ in range(steps):
            token, held = step(params, held, token)
        jax.block_until_ready(token)

    took = seconds(run, repeats)
    return f"{slots * steps / took:,.0f} tokens/s ({slots} sequences, {1e3 * took / steps:.2f} ms a step)"


def update(shape: ModelConfig, row: int, repeats: int) -> str:
    """Tokens a second of a full update."""
    config, settings = numerics(shape, row), coevolve.get_config()
    optimizer = OptimizerConfig(settings.grpo.learning_rate, weight_decay=settings.grpo.weight_decay)
    mesh = make_mesh(devices=jax.devices()[:1])
    learner = qwen35_learner(config, mesh, optimizer, parts.make_objective(settings), temperature=settings.rollout.temperature)
    state = learner.init(jax.jit(model.init_params, static_argnums=0)(config, jax.random.key(0)))
    mask = np.zeros(row, bool)
    mask[1::4] = True
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, row)
    microbatches, _ = pack_microbatches([Episode(tokens, mask, None, 1.0)], Rows(1, row, int(mask.sum())))

    def run() -> None:
        nonlocal state
        state, _ = learner.update(state, learner.old_log_probs(state, microbatches))
        jax.block_until_ready(state)

    took = seconds(run, repeats)
    return f"{row / took:,.0f} tokens/s (a row of {row}, {took:.2f} s)"


def peak_memory() -> str:
    stats = jax.devices()[0].memory_stats()
    return f"{stats['peak_bytes_in_use'] / 2**30:.1f} GiB" if stats else f"not reported by the backend {jax.default_backend()}"


def attempt(name: str, measure: Callable[[], str]) -> bool:
    """Prints one line; False when the sides differ or memory does not suffice."""
    try:
        result, ok = measure(), True
    except AssertionError as error:
        result, ok = f"DIFFERS: {' '.join(str(error).split())[:400]}", False
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        result, ok = "does not fit this device's memory; try a shorter --row or fewer --slots", False
    print(f"{name:8s} {result}; peak memory {peak_memory()}", flush=True)
    return ok


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--parity", choices=("yes", "no"), default="yes", help="no: without torch")
    for name, value in (("--row", 8192), ("--slots", 64), ("--steps", 64), ("--repeats", 3)):
        parser.add_argument(name, type=int, default=value)
    given = parser.parse_args(argv)
    shape = SHAPES[given.shape]
    print(f"{jax.devices()[0].device_kind} ({jax.default_backend()}), jax {jax.__version__}, shape {given.shape}", flush=True)
    done = [attempt("parity", parity)] if given.parity == "yes" else []
    done.append(attempt("decode", lambda: decode(shape, given.slots, given.steps, given.row, given.repeats)))
    done.append(attempt("update", lambda: update(shape, given.row, given.repeats)))
    print(f"gpu_check {'ok' if all(done) else 'failed'}")
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
