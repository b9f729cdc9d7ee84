"""The learner around the real model, tiny."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo.toy import split_rows

from intraskill.grpo.learner import OptimizerConfig
from intraskill.grpo.loss import ClippedPolicyGradient, CrossEntropy
from intraskill.grpo.packing import Episode, pack
from intraskill.grpo.policy import decay_mask, log_probs_fn, qwen35_learner
from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.model import init_params, log_probs
from intraskill.models.qwen35.sharding import make_mesh
from intraskill.types import InputError

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    full_attention_interval=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    chunk_size=8,
)


def mesh(*shape):
    return make_mesh(*shape, devices=jax.devices()[: int(np.prod(shape))])


@pytest.fixture(scope="module")
def params():
    return jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(0))


def batch(rows=4, num_episodes=12):
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(num_episodes):
        n = int(rng.integers(3, 14))
        mask = rng.random(n) < 0.5
        mask[0], mask[-1] = False, True
        episodes.append(Episode(rng.integers(0, 30, n), mask, np.where(mask, -3.0, 0.0), rng.normal()))
    return split_rows(pack(episodes, row_length=16, max_trained_per_row=12, rows_multiple_of=rows)[0], rows)


def by_its_episode_alone(params, part, row, m):
    """The log-prob of one trained token from softmax(logits / 0.6) over the first 30 ids, with nothing but its episode in the row."""
    segment = part.segment_ids[row] == part.segment_ids[row, part.index[row, m]]
    tokens = part.tokens[row : row + 1, segment]
    at = part.positions[row : row + 1, part.index[row, m]][None]
    arrays = (tokens, np.arange(tokens.shape[1])[None], np.ones_like(tokens), np.repeat(at, 32, 1), np.arange(CONFIG.vocab_size)[None])
    alone = jax.jit(log_probs, static_argnums=1)(params, CONFIG, *(jnp.asarray(a, jnp.int32) for a in arrays))
    scaled = np.asarray(alone.logprob[0])[:30] / 0.6
    return scaled[part.targets[row, m]] - np.log(np.exp(scaled).sum())


def test_policy_and_reference_follow_the_samplers_convention(params):
    """Temperature 0.6 and two banned ids."""
    objective = ClippedPolicyGradient(kl_coefficient=0.5)
    learner = qwen35_learner(CONFIG, mesh(1, 1, 1), OptimizerConfig(), objective, temperature=0.6, banned_ids=(30, 31))
    state, other = learner.init(params), jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(1))
    (part, *_) = learner.reference_log_probs(learner.reference(other), 0, learner.old_log_probs(state, batch()))
    row, m = 0, int(part.mask[0].sum()) - 1
    assert part.old_logprobs[row, m] == pytest.approx(by_its_episode_alone(params, part, row, m), abs=1e-5)
    assert part.reference_logprobs[row, m] == pytest.approx(by_its_episode_alone(other, part, row, m), abs=1e-5)
    log_q = (part.reference_logprobs - part.old_logprobs)[part.mask].astype(np.float64)
    _, metrics = learner.update(state, [part])
    assert metrics["ratio_gap"] < 1e-6
    assert metrics["reference_kl"] == pytest.approx((np.exp(log_q) - log_q - 1).mean(), rel=1e-4)


def test_accumulated_gradients_equal_the_unsplit_batch_s(params):
    """With beta1 = 0 the moment `mu` is the gradient that AdamW saw."""
    optimizer = OptimizerConfig(beta1=0.0, max_grad_norm=np.inf)
    learner = qwen35_learner(CONFIG, mesh(1, 1, 1), optimizer, ClippedPolicyGradient())
    (whole,) = learner.old_log_probs(learner.init(params), batch(rows=8))
    (state, first), (other, second) = (learner.update(learner.init(params), split_rows(whole, rows)) for rows in (8, 2))
    assert first["grad_norm"] > 0.1 and first == pytest.approx(second, rel=1e-5, abs=1e-6)

    # 1e-6 is met by a toy (test_learner). Here products over eight rows and over two are summed in other orders: 3e-6 was seen.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-6), state.opt_state[0].mu, other.opt_state[0].mu)


def test_it_learns_a_fixed_sequence(params):
    learner = qwen35_learner(CONFIG, mesh(1, 1, 1), OptimizerConfig(learning_rate=0.02, weight_decay=0.0), CrossEntropy())
    sequence = [1, 7, 3, 9, 3, 5, 2, 2, 8, 4]
    packed, _ = pack([Episode(sequence, [False] + [True] * 9)], row_length=16, max_trained_per_row=12)
    state = learner.init(params)
    for _ in range(60):
        state, metrics = learner.update(state, [packed])
    assert metrics["loss"] < 0.1 and metrics["probability"] > 0.9


def test_eight_devices_equal_one(params):
    results = []
    for shape in ((1, 1, 1), (2, 2, 2)):
        learner = qwen35_learner(CONFIG, mesh(*shape), OptimizerConfig(learning_rate=1e-3), ClippedPolicyGradient())
        state = learner.init(params)
        parts = learner.old_log_probs(state, batch())
        for _ in range(3):
            state, metrics = learner.update(state, parts)
        assert all(leaf.sharding.num_devices == np.prod(shape) for leaf in jax.tree.leaves(state))
        results.append((jax.tree.map(np.asarray, state), metrics))
    assert state.params["embed"].addressable_shards[0].data.shape == (16, 8) == state.opt_state[0].mu["embed"].addressable_shards[0].data.shape
    (a, metrics_a), (b, metrics_b) = results
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a.params, b.params)
    assert metrics_a == pytest.approx(metrics_b, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_weight_decay_skips_the_published_vectors(scan_layers):
    mask = decay_mask(dataclasses.replace(CONFIG, num_layers=4, scan_layers=scan_layers))
    linear, full = mask["layers"]["0"], mask["layers"]["1"]
    assert mask["embed"] and not mask["final_norm"]
    assert linear == {
        "attention_norm": False,
        "mlp_norm": False,
        "mlp": {"gate_up": True, "down": True},
        "linear": {"qkv": True, "z": True, "ba": True, "conv": True, "out": True, "a_log": False, "dt_bias": False, "norm": False},
    }
    assert full["full"] == {"q": True, "kv": True, "out": True, "q_norm": False, "k_norm": False}


def test_bad_conventions_are_refused():
    with pytest.raises(InputError, match=r"banned ids \[32\]"):
        log_probs_fn(CONFIG, banned_ids=(3, 32))
    with pytest.raises(InputError, match="temperature is 0"):
        log_probs_fn(CONFIG, temperature=0.0)
