"""Greedy decoding against Hugging Face's `generate`: time of a step at batch 1, 8 and 32, with the same tokens from both.

    python benchmarks/bench_decode.py [--prompt=64] [--new=128] [--rounds=3] [--batches=1,8,32]

A step's time is that of `new` tokens minus that of one, divided by new - 1. Ours feeds a donated cache of fixed shape, one compiled call a step, as
an engine does whose members change. Targets: 6, 4 and 2.5 times as fast.
"""

import argparse
import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks import interleave  # noqa: E402
from benchmarks.peers import hf_qwen35  # noqa: E402
from intraskill.models.qwen35 import cache, model  # noqa: E402
from intraskill.models.qwen35.config import ModelConfig  # noqa: E402

TARGETS = {1: 6.0, 8: 4.0, 32: 2.5}


def our_decoder(config: ModelConfig, batch: int, max_length: int):
    """A function of (params, prompts, num_new) that returns the new tokens."""
    one = jnp.ones(batch, jnp.int32)

    @functools.partial(jax.jit, donate_argnums=1)
    def prefill(params, slots, prompts):
        hidden, slots = model.extend(params, config, slots, prompts, one * prompts.shape[1])
        return jnp.argmax(model.logits(params, config, hidden), axis=-1).astype(jnp.int32), slots

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, slots, token):
        hidden, slots = model.extend(params, config, slots, token[:, None], one)
        return jnp.argmax(model.logits(params, config, hidden), axis=-1).astype(jnp.int32), slots

    def decode(params, prompts: np.ndarray, num_new: int) -> np.ndarray:
        token, slots = prefill(params, cache.init_cache(config, batch, max_length), prompts)
        tokens = [token]
        for _ in range(num_new - 1):
            token, slots = step(params, slots, token)
            tokens.append(token)
        return np.stack([np.asarray(t) for t in tokens], axis=1)

    return decode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--prompt", 64), ("--new", 128), ("--rounds", 3)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--batches", default="1,8,32")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    config, new = hf_qwen35.SHAPE, arguments.new
    params = jax.jit(model.init_params, static_argnums=0)(config, jax.random.key(0))
    peer, ratios = hf_qwen35.build(config, params), {}
    print(f"{'batch':>5s} {'ours ms':>9s} {'HF ms':>9s} {'ratio':>7s}")
    for batch in map(int, arguments.batches.split(",")):
        prompts = np.random.default_rng(batch).integers(0, config.vocab_size, (batch, arguments.prompt), dtype=np.int32)
        decode = our_decoder(config, batch, arguments.prompt + new)
        np.testing.assert_array_equal(decode(params, prompts, new), hf_qwen35.decode(peer, prompts, new))
        sides = {
            f"{name} {count}": functools.partial(side, prompts, count)
            for name, side in (("ours", functools.partial(decode, params)), ("HF", functools.partial(hf_qwen35.decode, peer)))
            for count in (1, new)
        }
        times = interleave.measure(sides, arguments.rounds)
        ours, theirs = ((times[f"{name} {new}"].wall - times[f"{name} 1"].wall) / (new - 1) for name in ("ours", "HF"))
        ratios[f"batch {batch}"] = (theirs / ours, TARGETS.get(batch, 1.0), True)
        print(f"{batch:5d} {ours * 1e3:9.2f} {theirs * 1e3:9.2f} {theirs / ours:7.2f}")
    return interleave.verdict("decode", ratios)


if __name__ == "__main__":
    sys.exit(main())
