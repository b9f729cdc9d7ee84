import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo import toy

from intraskill.grpo.learner import NonFiniteUpdate, OptimizerConfig
from intraskill.grpo.loss import ClippedPolicyGradient, CrossEntropy
from intraskill.grpo.packing import Episode, pack
from intraskill.types import InputError

ROW = dict(row_length=16, max_trained_per_row=12)


def rl_batch(rows=8, num_episodes=30, seed=0):
    rng = np.random.default_rng(seed)
    return pack([toy.episode(rng, n) for n in rng.integers(2, 13, num_episodes)], **ROW, rows_multiple_of=rows)[0]


def host(state):
    return jax.tree.map(np.asarray, state)


def assert_close(a, b, tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), host(a), host(b))


def train(learner, batches, rows, num_updates=3):
    state, metrics = learner.init(toy.params()), None
    for _ in range(num_updates):
        state, metrics = learner.update(state, [part for batch in batches for part in toy.split_rows(batch, rows)])
    return state, metrics


def with_old(learner, batch, rows=8):
    return learner.old_log_probs(learner.init(toy.params(seed=1)), toy.split_rows(batch, rows))


def joined(parts):
    return dataclasses.replace(parts[0], **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(parts[0])})


def test_a_first_step_by_hand():
    """One target, 3 after 2: the gradient of row 2 is softmax - onehot(3), and Adam's first step is lr * sign(gradient)."""
    learner = toy.learner(CrossEntropy(), learning_rate=0.01, weight_decay=0.5, eps=1e-12)
    before = {"table": jnp.zeros((8, 8), jnp.float32).at[5, 5].set(1.0), "scale": jnp.ones((1,), jnp.float32)}
    batch, _ = pack([Episode([2, 3], [False, True])], **ROW)
    state, metrics = learner.update(learner.init(before), [batch])
    expected = np.zeros((8, 8), np.float32)
    expected[2] = -0.01
    expected[2, 3] = 0.01
    expected[5, 5] = 1 - 0.01 * 0.5  # no gradient there: weight decay alone
    np.testing.assert_allclose(state.params["table"], expected, atol=1e-7)
    np.testing.assert_allclose(state.params["scale"], [1.0], atol=1e-7)  # no decay, and no gradient: row 2 was all zeros
    assert metrics["loss"] == pytest.approx(np.log(8), rel=1e-6) and int(state.step) == 1
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(7 / 64 + 49 / 64), rel=1e-5)
    assert metrics["probability"] == pytest.approx(1 / 8, rel=1e-5) and metrics["entropy"] == pytest.approx(np.log(8), rel=1e-5)


def test_gradients_above_the_norm_are_scaled():
    """With beta1 = 0 the moment `mu` is the gradient that AdamW saw."""
    batch, _ = pack([Episode([2, 3], [False, True])], **ROW)
    norms = []
    for limit in (0.25, np.inf):
        learner = toy.learner(CrossEntropy(), beta1=0.0, max_grad_norm=limit)
        state, metrics = learner.update(learner.init(toy.params()), [batch])
        norms.append((metrics["grad_norm"], float(np.sqrt(sum((np.asarray(m) ** 2).sum() for m in jax.tree.leaves(state.opt_state[0].mu))))))
    assert norms[0][0] == norms[1][0] == pytest.approx(norms[1][1], rel=1e-5) and norms[1][1] > 0.25
    assert norms[0][1] == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("objective", [ClippedPolicyGradient(), CrossEntropy()])
def test_accumulation_equals_the_unsplit_batch(objective):
    learner = toy.learner(objective, learning_rate=1e-2)
    batch = joined(with_old(learner, rl_batch()))
    assert batch.tokens.shape[0] == 16
    whole, a = train(learner, [batch], 16)
    for rows in (1, 2, 8):
        split, b = train(learner, [batch], rows)
        assert_close(whole, split, 1e-6)
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)


def test_eight_devices_equal_one():
    one, eight = (toy.learner(ClippedPolicyGradient(), num_devices=n, learning_rate=1e-2) for n in (1, 8))
    a, b = (joined(with_old(learner, rl_batch())) for learner in (one, eight))
    np.testing.assert_allclose(a.old_logprobs, b.old_logprobs, atol=1e-6)
    (state_a, metrics_a), (state_b, metrics_b) = train(one, [a], 8), train(eight, [a], 8)
    assert_close(state_a, state_b, 1e-6)
    assert metrics_a == pytest.approx(metrics_b, rel=1e-5, abs=1e-6)
    table = state_b.params["table"]
    assert not table.is_fully_replicated and state_b.opt_state[0].mu["table"].sharding == table.sharding


def test_it_learns_a_fixed_sequence():
    learner = toy.learner(
        CrossEntropy(), learning_rate=0.3, schedule="warmup_cosine", warmup_steps=5, total_steps=60, final_ratio=0.1, weight_decay=0.0
    )
    batch, _ = pack([Episode([0, 3, 1, 4, 2, 7, 5, 6], [False] + [True] * 7)], **ROW)
    state, rates = learner.init(toy.params()), []
    for _ in range(60):
        state, metrics = learner.update(state, [batch])
        rates.append(metrics["learning_rate"])
    assert metrics["loss"] < 0.05 and metrics["probability"] > 0.95
    assert rates[0] == 0 and rates[5] == pytest.approx(0.3) and 0.03 < rates[-1] < 0.031 and np.all(np.diff(rates[5:]) < 0)


def test_policy_gradient_moves_probability_to_the_rewarded_episode():
    learner = toy.learner(ClippedPolicyGradient(), learning_rate=0.05)
    good, bad = Episode([1, 2, 3], [False, True, True], advantage=1.0), Episode([1, 4, 5], [False, True, True], advantage=-1.0)
    batch, _ = pack([good, bad], **ROW)
    state = learner.init(toy.params())
    before = toy.log_probs(state.params, learner._place(batch)).logprob
    for _ in range(4):
        (filled,) = learner.old_log_probs(state, [batch])
        state, metrics = learner.update(state, [filled])
        assert metrics["ratio_gap"] < 1e-6 and metrics["clip_fraction"] == 0  # one update a step: the policy is the old policy
    change = np.asarray(toy.log_probs(state.params, learner._place(batch)).logprob - before)
    for n, sign in ((0, 1), (1, -1)):
        assert (sign * change[batch.episode == n] > 0).all()


def test_old_log_probs_are_the_trainers_and_only_they_change():
    learner = toy.learner(ClippedPolicyGradient())
    batch = rl_batch()
    state = learner.init(toy.params())
    parts = toy.split_rows(batch, 4)
    filled = joined(learner.old_log_probs(state, parts))
    logp = np.asarray(jax.nn.log_softmax(state.params["table"]))
    for r, m in zip(*np.nonzero(batch.mask), strict=True):
        assert filled.old_logprobs[r, m] == pytest.approx(logp[batch.tokens[r, batch.index[r, m]], batch.targets[r, m]], abs=1e-6)
    assert not filled.old_logprobs[~batch.mask].any()
    assert np.isnan(batch.old_logprobs[batch.mask]).all()
    for field in dataclasses.fields(batch):
        if field.name != "old_logprobs":
            np.testing.assert_array_equal(getattr(filled, field.name), getattr(batch, field.name))


def test_a_second_update_of_the_step_sees_the_first():
    learner = toy.learner(ClippedPolicyGradient(), learning_rate=0.05)
    filled = with_old(learner, rl_batch())
    state = learner.init(toy.params(seed=1))
    state, first = learner.update(state, filled)
    state, second = learner.update(state, filled)
    assert first["ratio_gap"] < 1e-6 < 1e-3 < second["ratio_gap"]


def test_init_copies_and_update_consumes():
    learner = toy.learner(CrossEntropy())
    params = toy.params()
    state = learner.init(params)
    learner.update(state, [rl_batch()])
    assert np.isfinite(np.asarray(params["table"])).all()
    assert state.params["table"].is_deleted()


def test_nothing_compiles_again():
    learner = toy.learner(ClippedPolicyGradient())
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name.endswith("jaxpr_to_mlir_module_duration") else None
    )
    try:
        state = learner.init(toy.params())
        state, _ = learner.update(state, learner.old_log_probs(state, toy.split_rows(rl_batch(4, 3), 4)))
        assert compiled
        compiled.clear()
        for num_episodes in (30, 3, 80):
            state, _ = learner.update(state, learner.old_log_probs(state, toy.split_rows(rl_batch(4, num_episodes), 4)))
        assert not compiled
    finally:
        jax.monitoring.clear_event_listeners()


def test_a_non_finite_loss_stops_and_changes_nothing():
    learner = toy.learner(ClippedPolicyGradient(), learning_rate=0.1)
    parts = with_old(learner, rl_batch())
    state, _ = learner.update(learner.init(toy.params()), parts)
    before = host(state)
    r, m = np.argwhere(parts[1].mask)[5]
    old, advantage = parts[1].old_logprobs.copy(), parts[1].advantage.copy()
    old[r, m], advantage[r, m] = -1e4, -1.0  # the ratio overflows, and with A < 0 nothing clips it
    with pytest.raises(NonFiniteUpdate, match="update 1: the loss") as caught:
        learner.update(state, [parts[0], dataclasses.replace(parts[1], old_logprobs=old, advantage=advantage)])
    assert caught.value.step == 1 and caught.value.episodes == (parts[1].episode[r, m],)
    jax.tree.map(np.testing.assert_array_equal, host(state), before)
    learner.update(state, parts)  # and the state is still good for an update


def test_a_non_finite_gradient_stops_and_names_the_microbatch():
    """The slope of a square root at 0 is infinite, its value is not."""

    def log_probs(params, batch):
        scores = toy.log_probs(params, batch)
        edge = jax.lax.cond(jnp.any(batch.advantage > 100), lambda x: jnp.sqrt(x - 1.0), jnp.zeros_like, params["scale"][0])
        return scores._replace(logprob=scores.logprob - edge)

    learner = toy.learner(CrossEntropy(), log_probs=log_probs)
    parts = toy.split_rows(rl_batch(), 8)
    parts[1] = dataclasses.replace(parts[1], advantage=np.where(parts[1].mask, np.float32(200), np.float32(0)))
    state = learner.init(toy.params())
    with pytest.raises(NonFiniteUpdate, match="update 0: the gradient") as caught:
        learner.update(state, parts)
    assert caught.value.episodes == tuple(sorted(set(parts[1].episode[parts[1].mask].tolist())))
    jax.tree.map(np.testing.assert_array_equal, host(state.params), host(toy.params()))


def test_a_non_finite_old_log_prob_stops():
    learner = toy.learner(ClippedPolicyGradient())
    params = toy.params()
    state = learner.init(params | {"table": params["table"].at[3].set(jnp.nan)})
    batch, _ = pack([Episode([1, 2], [False, True]), Episode([3, 2], [False, True])], **ROW)
    with pytest.raises(NonFiniteUpdate, match="old log-prob") as caught:
        learner.old_log_probs(state, [batch])
    assert caught.value.episodes == (1,)


def test_old_log_probs_may_not_be_forgotten():
    learner = toy.learner(ClippedPolicyGradient())
    with pytest.raises(ValueError, match="old_logprobs are not computed"):
        learner.update(learner.init(toy.params()), [rl_batch()])


def test_nor_those_of_one_microbatch():
    learner, (first, second) = toy.learner(ClippedPolicyGradient()), toy.split_rows(rl_batch(), 4)[:2]
    state = learner.init(toy.params())
    assert second.mask.any()
    with pytest.raises(ValueError, match="old_logprobs are not computed"):
        learner.update(state, [*learner.old_log_probs(state, [first]), second])


def test_a_policy_that_is_certain_of_every_token_has_log_probs_of_0_and_trains():
    """They are no forgotten ones; a policy that has converged, or a single token a turn, is like that."""
    learner = toy.learner(ClippedPolicyGradient())
    state = learner.init(toy.params() | {"table": 1e3 * jnp.eye(toy.VOCABULARY)})
    batch, _ = pack([Episode([2, 2, 2], [False, True, True], [0.0, 0.0, 0.0], 1.0), Episode([5, 5], [False, True], [0.0, 0.0], -1.0)], **ROW)
    filled = learner.old_log_probs(state, [batch])
    assert filled[0].mask.sum() == 3 and not filled[0].old_logprobs.any()
    state, metrics = learner.update(state, filled)
    assert int(state.step) == 1 and metrics["grad_norm"] == 0.0


def test_reference_log_probs_may_not_be_forgotten():
    learner = toy.learner(ClippedPolicyGradient(kl_coefficient=0.1))
    state = learner.init(toy.params())
    with pytest.raises(ValueError, match="reference_logprobs are not computed"):
        learner.update(state, learner.old_log_probs(state, [rl_batch()]))


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="multiple of 8"):
        learner = toy.learner(CrossEntropy(), num_devices=8)
        learner.update(learner.init(toy.params()), [rl_batch(4, 3)])
    with pytest.raises(InputError, match="bfloat16"):
        toy.learner(CrossEntropy()).init(jax.tree.map(lambda x: x.astype(jnp.bfloat16), toy.params()))
    with pytest.raises(InputError, match="schedule"):
        OptimizerConfig(schedule="linear")
    with pytest.raises(InputError, match="warmup_steps"):
        OptimizerConfig(schedule="warmup_cosine")
    with pytest.raises(InputError, match="learning_rate"):
        OptimizerConfig(learning_rate=0.0)
