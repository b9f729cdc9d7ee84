"""What long rows cost: tokens a second of forward and backward at rows of 8,192 tokens, relative to rows of 1,024.

    python benchmarks/bench_growth.py [--short=1024] [--long=8192] [--rounds=5]

Both sides hold the same number of tokens, each row one episode, so that the long side has all of its quadratic attention. Target: >= 0.6.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks import interleave  # noqa: E402
from benchmarks.bench_model import our_sides  # noqa: E402
from benchmarks.peers import hf_qwen35  # noqa: E402
from intraskill.models.qwen35 import model  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--short", 1024), ("--long", 8192), ("--rounds", 5)):
        parser.add_argument(name, type=int, default=value)
    arguments = parser.parse_args()
    if arguments.long % arguments.short:
        parser.error(f"--long={arguments.long} must be a multiple of --short={arguments.short}")
    config = hf_qwen35.SHAPE
    params = jax.jit(model.init_params, static_argnums=0)(config, jax.random.key(0))
    sides, bytes_of = {}, {}
    for length in (arguments.short, arguments.long):
        shape = (arguments.long // length, length)
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, shape, dtype=np.int32))
        compiled = our_sides(config, tokens)[1].lower(params, tokens).compile()
        bytes_of[str(length)] = compiled.memory_analysis().temp_size_in_bytes
        sides[str(length)] = lambda compiled=compiled, tokens=tokens: jax.block_until_ready(compiled(params, tokens))
    times = interleave.measure(sides, arguments.rounds)
    print(f"{'row':>6s} {'tokens/s':>9s} {'CPU s':>7s} {'temporary MiB':>14s}")
    for name, timing in times.items():
        print(f"{name:>6s} {arguments.long / timing.wall:9.0f} {timing.cpu:7.2f} {bytes_of[name] / 2**20:14.0f}")
    return interleave.verdict("growth", {"long/short tokens/s": (times[str(arguments.short)].wall / times[str(arguments.long)].wall, 0.6, True)})


if __name__ == "__main__":
    sys.exit(main())
