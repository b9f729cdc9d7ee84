"""Forward pass and training step against Hugging Face on the same weights, batch, cores and dtype, and against the matrix products alone.

    python benchmarks/bench_model.py [--rows=8] [--length=512] [--rounds=7]

Each side is timed with the whole batch at once and with the batch cut into 4, 2 and 1 rows at once, gradients added up: what works on fewer rows
stays in the caches. The best of each side counts. First every cut must give Hugging Face's logits, loss and gradients; then all are timed in turn.
"Products" is one plain float32 matrix product per projection of the model, on the same backend, forward (and for training twice more): what the
machine can do when nothing else is computed. Targets: forward >= 1.6 times as fast as Hugging Face and <= 1.6 times the products' time; forward and
backward >= 1.4 times, <= 2 times.
"""

import argparse
import functools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks import interleave  # noqa: E402
from benchmarks.peers import hf_qwen35  # noqa: E402
from intraskill.models.qwen35 import hf, model  # noqa: E402
from intraskill.models.qwen35.config import ModelConfig  # noqa: E402

CUTS = (1, 2, 4)  # rows at once, beside all of them
TARGETS = {
    "forward HF/ours": (1.6, True),
    "forward ours/products": (1.6, False),
    "step HF/ours": (1.4, True),
    "step ours/products": (2.0, False),
}


def our_sides(config: ModelConfig, tokens: Any, at_once: int | None = None):
    """Compiled (logits, loss and gradients) of (params, tokens), computed on `at_once` rows at a time (None: on all)."""
    rows, length = tokens.shape
    at_once = at_once or rows
    positions = jnp.broadcast_to(jnp.arange(length)[None], (at_once, length))
    segments = jnp.ones((at_once, length), jnp.int32)

    def cut(tokens):
        return tokens.reshape(rows // at_once, at_once, length)

    def logits(params, tokens):
        def some(tokens):
            return model.logits(params, config, model.forward(params, config, tokens, positions, segments))

        return some(tokens) if at_once == rows else jax.lax.map(some, cut(tokens)).reshape(rows, length, -1)

    def loss(params, tokens):
        return -jnp.mean(model.log_probs(params, config, tokens, positions, segments, positions[:, :-1], tokens[:, 1:]).logprob)

    def step(params, tokens):
        def add(total, tokens):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, tokens)), None

        if at_once == rows:
            return jax.value_and_grad(loss)(params, tokens)
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return jax.tree.map(lambda total: total * (at_once / rows), jax.lax.scan(add, zero, cut(tokens))[0])

    return jax.jit(logits), jax.jit(step)


def products(config: ModelConfig, num_tokens: int):
    """One product per weight matrix, and the two of its gradient, in one compiled function each."""
    shapes = [leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(model.abstract_params(config)) if leaf.ndim > 1]
    d, rng = config.hidden_size, np.random.default_rng(0)
    # Every projection has the hidden size on one side, whatever its axes.
    widths = [int(np.prod(shape)) // d for shape in shapes if int(np.prod(shape)) % d == 0 and d in shape]
    inputs = jnp.asarray(rng.normal(size=(num_tokens, d)), jnp.float32)
    weights = [jnp.asarray(rng.normal(size=(d, width)), jnp.float32) for width in widths]
    multiply = functools.partial(jnp.matmul, precision="highest")

    def forward(inputs, weights):
        return [multiply(inputs, w) for w in weights]

    def backward(inputs, weights, outputs):
        return [(multiply(out, w.T), multiply(inputs.T, out)) for w, out in zip(weights, outputs, strict=True)]

    forward, backward = jax.jit(forward), jax.jit(backward)
    operations = 2 * num_tokens * d * sum(widths)
    return (
        operations,
        lambda: jax.block_until_ready(forward(inputs, weights)),
        lambda: jax.block_until_ready(backward(inputs, weights, forward(inputs, weights))),
    )


def check(config: ModelConfig, params, tokens, peer, our_logits, our_step, at_once: int | None = None) -> None:
    """Ours against Hugging Face's, the latter on `at_once` rows at a time.

    Raises:
      AssertionError: logits differ by more than 2e-4, the loss by 1e-5, or a gradient by 1e-3 of its largest entry.
    """
    np.testing.assert_allclose(our_logits(params, tokens), hf_qwen35.logits(peer, tokens, at_once), atol=2e-4, rtol=0)
    (loss, grads), (expected_loss, expected) = our_step(params, tokens), hf_qwen35.loss_and_gradients(peer, tokens, at_once)
    np.testing.assert_allclose(loss, expected_loss, atol=1e-5)
    for name, gradient in hf.to_hf_tensors(config, jax.device_get(grads)):
        np.testing.assert_allclose(gradient, expected[name], atol=1e-3 * np.abs(expected[name]).max(), rtol=0, err_msg=name)


def compare(config: ModelConfig, rows: int, length: int, rounds: int) -> dict[str, float]:
    """Checks, times and prints; returns the ratios of the last line."""
    params = jax.jit(model.init_params, static_argnums=0)(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, length), dtype=np.int32)
    peer, sides = hf_qwen35.build(config, params), {}
    for at_once in [cut for cut in CUTS if rows % cut == 0 and cut < rows] + [rows]:
        our_logits, our_step = our_sides(config, tokens, at_once)
        check(config, params, tokens, peer, our_logits, our_step, at_once)
        sides[f"forward ours {at_once}"] = lambda logits=our_logits: jax.block_until_ready(logits(params, tokens))
        sides[f"forward HF {at_once}"] = functools.partial(hf_qwen35.logits, peer, tokens, at_once)
        sides[f"step ours {at_once}"] = lambda step=our_step: jax.block_until_ready(step(params, tokens))
        sides[f"step HF {at_once}"] = functools.partial(hf_qwen35.loss_and_gradients, peer, tokens, at_once)
    operations, sides["forward products"], sides["step products"] = products(config, tokens.size)
    times = interleave.measure(sides, rounds)
    print(f"{'side, rows at once':18s} {'wall s':>8s} {'CPU s':>8s} {'tokens/s':>10s}")
    for name, timing in sorted(times.items()):
        print(f"{name:18s} {timing.wall:8.3f} {timing.cpu:8.3f} {tokens.size / timing.wall:10.0f}")
    print(f"matrix products alone: {operations / times['forward products'].wall / 1e9:.0f} GFLOP/s forward")
    ratios = {}
    for work in ("forward", "step"):
        ours, theirs, alone = (min(t.wall for name, t in times.items() if name.startswith(f"{work} {side}")) for side in ("ours", "HF", "products"))
        ratios |= {f"{work} HF/ours": theirs / ours, f"{work} ours/products": ours / alone}
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--rows", 8), ("--length", 512), ("--rounds", 7)):
        parser.add_argument(name, type=int, default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    ratios = compare(hf_qwen35.SHAPE, arguments.rows, arguments.length, arguments.rounds)
    return interleave.verdict("model", {name: (ratio, *TARGETS[name]) for name, ratio in ratios.items()})


if __name__ == "__main__":
    sys.exit(main())
