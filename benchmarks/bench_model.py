"""Forward pass and training step against Hugging Face on the same weights, batch, cores and dtype, and against the matrix products alone.

    python benchmarks/bench_model.py [--rows=8] [--length=512] [--rounds=7]

First it checks that both sides give the same logits, loss and gradients; then it times them in turn. "Products" is one plain float32 matrix product
per projection of the model, on the same backend, forward (and for training twice more): what the machine can do when nothing else is computed.
Targets: forward >= 1.6 times as fast as Hugging Face and <= 1.6 times the products' time; forward and backward >= 1.4 times, <= 2 times.
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


def our_sides(config: ModelConfig, tokens: Any):
    """Compiled (logits, loss and gradients) of (params, tokens)."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length)[None], (rows, length))
    segments = jnp.ones((rows, length), jnp.int32)

    def logits(params, tokens):
        return model.logits(params, config, model.forward(params, config, tokens, positions, segments))

    def loss(params, tokens):
        return -jnp.mean(model.log_probs(params, config, tokens, positions, segments, positions[:, :-1], tokens[:, 1:]).logprob)

    return jax.jit(logits), jax.jit(jax.value_and_grad(loss))


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


def check(config: ModelConfig, params, tokens, peer, our_logits, our_step) -> None:
    """Raises AssertionError unless logits agree to 2e-4, the loss to 1e-5 and each gradient to 1e-3 of its largest entry."""
    np.testing.assert_allclose(our_logits(params, tokens), hf_qwen35.logits(peer, tokens), atol=2e-4, rtol=0)
    (loss, grads), (expected_loss, expected) = our_step(params, tokens), hf_qwen35.loss_and_gradients(peer, tokens)
    np.testing.assert_allclose(loss, expected_loss, atol=1e-5)
    for name, gradient in hf.to_hf_tensors(config, jax.device_get(grads)):
        np.testing.assert_allclose(gradient, expected[name], atol=1e-3 * np.abs(expected[name]).max(), rtol=0, err_msg=name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--rows", 8), ("--length", 512), ("--rounds", 7)):
        parser.add_argument(name, type=int, default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    config = hf_qwen35.SHAPE
    params = jax.jit(model.init_params, static_argnums=0)(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (arguments.rows, arguments.length), dtype=np.int32)
    peer, (our_logits, our_step) = hf_qwen35.build(config, params), our_sides(config, tokens)
    check(config, params, tokens, peer, our_logits, our_step)
    operations, forward_products, step_products = products(config, tokens.size)
    sides = {
        "forward ours": lambda: jax.block_until_ready(our_logits(params, tokens)),
        "forward HF": lambda: hf_qwen35.logits(peer, tokens),
        "forward products": forward_products,
        "step ours": lambda: jax.block_until_ready(our_step(params, tokens)),
        "step HF": lambda: hf_qwen35.loss_and_gradients(peer, tokens),
        "step products": step_products,
    }
    times = interleave.measure(sides, arguments.rounds)
    print(f"{'side':18s} {'wall s':>8s} {'CPU s':>8s} {'tokens/s':>10s}")
    for name, timing in times.items():
        print(f"{name:18s} {timing.wall:8.3f} {timing.cpu:8.3f} {tokens.size / timing.wall:10.0f}")
    print(f"matrix products alone: {operations / times['forward products'].wall / 1e9:.0f} GFLOP/s forward")
    return interleave.verdict(
        "model",
        {
            "forward HF/ours": (times["forward HF"].wall / times["forward ours"].wall, 1.6, True),
            "forward ours/products": (times["forward ours"].wall / times["forward products"].wall, 1.6, False),
            "step HF/ours": (times["step HF"].wall / times["step ours"].wall, 1.4, True),
            "step ours/products": (times["step ours"].wall / times["step products"].wall, 2.0, False),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
