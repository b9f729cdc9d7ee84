"""A full update (old log-probs, clipped loss, backward, AdamW) against the same loop in torch with Hugging Face's model, and its growth with the row.

    python benchmarks/bench_train.py [--rows=8] [--length=512] [--microbatches=1,2,4,8] [--rounds=5] [--short=1024] [--long=8192]

One episode a row, every fourth token trained, the same weights, batch, cores and dtype (float32, 7.9 M parameters). Both sides are run with
microbatches of several sizes, and the best of each counts. First both do two updates on one set of old log-probs, for every size: these, the losses
and the gradient norms must agree. Then all are timed in turn. The last part times our update alone on the same number of tokens in long and in short
rows. Targets: >= 1.4 times as fast; tokens a second at long rows >= 0.6 of those at short ones.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks import interleave  # noqa: E402
from benchmarks.peers import hf_qwen35, hf_train  # noqa: E402
from intraskill.grpo.learner import Learner, OptimizerConfig, TrainState  # noqa: E402
from intraskill.grpo.loss import ClippedPolicyGradient  # noqa: E402
from intraskill.grpo.packing import Episode, Rows, pack_microbatches  # noqa: E402
from intraskill.grpo.policy import qwen35_learner  # noqa: E402
from intraskill.models.qwen35 import model  # noqa: E402
from intraskill.models.qwen35.config import ModelConfig  # noqa: E402
from intraskill.models.qwen35.sharding import make_mesh  # noqa: E402
from intraskill.types import Batch  # noqa: E402

OPTIMIZER, OBJECTIVE = OptimizerConfig(learning_rate=1e-4), ClippedPolicyGradient()
TRAINED = 4  # one token in so many


def draw(config: ModelConfig, rows: int, length: int) -> hf_train.Rows:
    rng = np.random.default_rng(0)
    trained = np.zeros((rows, length), bool)
    trained[:, 1::TRAINED] = True
    return hf_train.Rows(rng.integers(0, config.vocab_size, (rows, length), dtype=np.int32), trained, rng.standard_normal(rows))


def packed(rows: hf_train.Rows, microbatch: int) -> list[Batch]:
    """The same rows as our microbatches."""
    episodes = [Episode(*columns) for columns in zip(rows.tokens, rows.trained, [None] * len(rows.tokens), rows.advantage, strict=True)]
    num_trained = int(rows.trained.sum(axis=1).max())
    microbatches, report = pack_microbatches(episodes, Rows(microbatch, rows.tokens.shape[1], num_trained))
    if report.padding:
        raise AssertionError(f"padding {report.padding:.1%}: the sides would not compute the same tokens; make --rows a multiple of --microbatch")
    return microbatches


def make_learner(config: ModelConfig) -> Learner:
    return qwen35_learner(config, make_mesh(devices=jax.devices()[:1]), OPTIMIZER, OBJECTIVE)


class Ours:
    """Our side of the timing: a state that every call replaces."""

    def __init__(self, learner: Learner, state: TrainState, microbatches: list[Batch]):
        self._learner, self._state, self._microbatches = learner, state, microbatches

    def __call__(self) -> None:
        self._state, _ = self._learner.update(self._state, self._learner.old_log_probs(self._state, self._microbatches))
        jax.block_until_ready(self._state)


def check(learner: Learner, state: TrainState, microbatches: list[Batch], loop: hf_train.Loop, parts: list[hf_train.Rows]) -> None:
    """Raises AssertionError unless old log-probs agree to 1e-4, and losses and gradient norms of two updates to 1e-3 of the norm's size."""
    filled, old = learner.old_log_probs(state, microbatches), loop.old_log_probs(parts)
    ours = np.concatenate([batch.old_logprobs[batch.mask] for batch in filled])
    np.testing.assert_allclose(ours, torch.cat(old).numpy(), atol=1e-4, rtol=0)
    for number in range(2):
        state, metrics = learner.update(state, filled)
        loss, norm = loop.update(parts, old)
        print(f"update {number}: loss {metrics['loss']:.6f} and {loss:.6f}, gradient norm {metrics['grad_norm']:.5f} and {norm:.5f}")
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-3)


def against_torch(config: ModelConfig, rows: int, length: int, sizes: Sequence[int], rounds: int) -> float:
    """How many times as fast as torch our update is, each at the best of these sizes of microbatches."""
    params = jax.jit(model.init_params, static_argnums=0)(config, jax.random.key(0))
    drawn, learner, sides = draw(config, rows, length), make_learner(config), {}
    for size in sizes:
        microbatches, parts = packed(drawn, size), drawn.split(size)
        loop = hf_train.Loop(hf_qwen35.build(config, params), OPTIMIZER, OBJECTIVE)
        check(learner, learner.init(params), microbatches, loop, parts)
        sides[f"ours {size}"] = Ours(learner, learner.init(params), microbatches)
        sides[f"HF and torch {size}"] = lambda loop=loop, parts=parts: loop.update(parts, loop.old_log_probs(parts))
    times = interleave.measure(sides, rounds)
    print(f"{'side, microbatch':18s} {'wall s':>8s} {'CPU s':>8s} {'tokens/s':>10s}")
    for name, timing in sorted(times.items()):
        print(f"{name:18s} {timing.wall:8.3f} {timing.cpu:8.3f} {drawn.tokens.size / timing.wall:10.0f}")
    ours, theirs = (min(timing.wall for name, timing in times.items() if name.startswith(side)) for side in ("ours", "HF"))
    return theirs / ours


def growth(config: ModelConfig, short: int, long: int, rounds: int) -> float:
    """Tokens a second of our update in rows of `long` tokens, relative to rows of `short`, which are computed together."""
    params, sides = jax.jit(model.init_params, static_argnums=0)(config, jax.random.key(0)), {}
    for length in (short, long):
        learner, count = make_learner(config), long // length
        sides[str(length)] = Ours(learner, learner.init(params), packed(draw(config, count, length), count))
    times = interleave.measure(sides, rounds)
    print(f"{'row':>8s} {'tokens/s':>10s} {'CPU s':>8s}")
    for name, timing in times.items():
        print(f"{name:>8s} {long / timing.wall:10.0f} {timing.cpu:8.2f}")
    return times[str(short)].wall / times[str(long)].wall


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--rows", 8), ("--length", 512), ("--rounds", 5), ("--short", 1024), ("--long", 8192)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--microbatches", default="1,2,4,8")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.microbatches.split(",")]
    for large, small in [(arguments.rows, size) for size in sizes] + [(arguments.long, arguments.short)]:
        if large % small:
            parser.error(f"{large} must be a multiple of {small}")
    torch.set_num_threads(os.cpu_count() or 1)
    config = hf_qwen35.SHAPE
    faster = against_torch(config, arguments.rows, arguments.length, sizes, arguments.rounds)
    kept = growth(config, arguments.short, arguments.long, arguments.rounds)
    return interleave.verdict("train", {"update HF/ours": (faster, 1.4, True), "long/short tokens/s": (kept, 0.6, True)})


if __name__ == "__main__":
    sys.exit(main())
