import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from intraskill.grpo.advantages import group_advantages
from intraskill.grpo.loss import ClippedPolicyGradient, CrossEntropy, DeviceBatch, mean_metrics
from intraskill.grpo.packing import Episode, pack
from intraskill.types import InputError

LOW, HIGH = 0.2, 0.28


def packed(episodes, old, **options):
    """A batch of always one shape with the given old log-probs, one list per episode, and where each episode's tokens are."""
    batch, _ = pack(episodes, row_length=16, max_trained_per_row=8, rows_multiple_of=2, **options)
    filled = np.zeros_like(batch.old_logprobs)
    for n, values in enumerate(old):
        filled[batch.episode == n] = values
    return jax.tree.map(jnp.asarray, DeviceBatch.of(batch)._replace(old_logprobs=filled)), batch.episode


@functools.partial(jax.jit, static_argnums=0)
def apply(objective, logprob, batch):
    token_loss, sums = objective(SimpleNamespace(logprob=logprob, entropy=jnp.where(batch.mask, jnp.float32(0.5), jnp.nan)), batch)
    return jnp.sum(token_loss), sums


@functools.partial(jax.jit, static_argnums=0)
def slopes(objective, logprob, batch):
    """Derivative of the loss by each log-prob."""
    return jax.grad(lambda x: apply(objective, x, batch)[0])(logprob)


def scattered(episode_of, logprobs):
    """The model's word, with NaN in the padding, where it must not matter."""
    logprob = np.full(episode_of.shape, np.nan, np.float32)
    for n, values in enumerate(logprobs):
        logprob[episode_of == n] = values
    return jnp.asarray(logprob)


def run(episodes, logprobs, old, objective=ClippedPolicyGradient(LOW, HIGH), **options):  # noqa: B008 (frozen)
    batch, episode_of = packed(episodes, old, **options)
    loss, sums = apply(objective, scattered(episode_of, logprobs), batch)
    return float(loss), mean_metrics({k: float(v) for k, v in sums.items()})


def reference(logprobs, old, advantages, *, token_mean=False, sequence=False, correction=None):
    """The published formulas, literally, over lists of episodes' tokens in float64."""
    losses = []
    for i, (new, before, advantage) in enumerate(zip(logprobs, old, advantages, strict=True)):
        log_ratio = np.array(new, np.float64) - np.array(before, np.float64)
        ratio = np.exp(np.full_like(log_ratio, log_ratio.mean()) if sequence else log_ratio)
        loss = -np.minimum(ratio * advantage, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
        losses.append(loss if correction is None else loss * correction[i])
    return np.concatenate(losses).mean() if token_mean else np.mean([x.mean() for x in losses])


def episodes_of(lengths, advantages, sampler=None):
    return [
        Episode([0] * (n + 1), [False] + [True] * n, [0.0, *(sampler[i] if sampler else [0.0] * n)], float(a))
        for i, (n, a) in enumerate(zip(lengths, advantages, strict=True))
    ]


@pytest.mark.parametrize("token_mean", [False, True])
@pytest.mark.parametrize(
    ("logprobs", "old", "rewards"),
    [
        pytest.param([[-1.0, -0.5], [-0.2], [-2.0, -1.0, -0.1]], [[-1.1, -0.4], [-0.9], [-1.0, -1.5, -0.1]], [1, 0, 0.5], id="mixed"),
        pytest.param([[-1.0, -0.5]], [[-1.3, -0.4]], [1], id="one episode"),
        pytest.param([[-1.0], [-0.5, -0.25]], [[-3.0], [-0.1, -0.2]], [0.4, 0.4], id="equal rewards"),
        pytest.param([[-0.01, -50.0], [-0.01, -40.0]], [[-30.0, -0.1], [-20.0, -0.1]], [1, 0], id="huge ratios"),
        pytest.param([[-1.0], [-1.0]], [[-1.0], [-1.0]], [1, 0], id="ratio one"),
    ],
)
def test_clipped_objective_equals_the_reference(logprobs, old, rewards, token_mean):
    advantages = group_advantages(np.array(rewards, np.float64))
    episodes = episodes_of([len(x) for x in logprobs], advantages)
    loss, metrics = run(episodes, logprobs, old, aggregation="token_mean" if token_mean else "episode_mean")
    np.testing.assert_allclose(loss, reference(logprobs, old, advantages, token_mean=token_mean), rtol=2e-5, atol=1e-7)
    assert all(np.isfinite(v) for v in metrics.values())


def test_metrics_by_hand():
    """Ratios 1.5, 0.5 under A = +1 and 1.5, 0.5 under A = -1: the first and the last are clipped."""
    new = [np.log([0.6, 0.2]).tolist(), np.log([0.6, 0.2]).tolist()]
    old = [np.log([0.4, 0.4]).tolist()] * 2
    sampler = [np.log([0.4, 0.4]).tolist(), (np.log([0.4, 0.4]) + 0.1).tolist()]
    loss, metrics = run(episodes_of([2, 2], [1, -1], sampler), new, old)
    assert loss == pytest.approx((-1.28 - 0.5 + 1.5 + 0.8) / 4, rel=1e-5)
    assert metrics["trained_tokens"] == 4 and metrics["clip_fraction"] == 0.5
    assert metrics["ratio_gap"] == pytest.approx(0.5, rel=1e-5)
    assert metrics["approx_kl"] == pytest.approx((0.5 - np.log(1.5) - 0.5 - np.log(0.5)) / 2, rel=1e-5)
    assert metrics["sampler_gap"] == pytest.approx(0.05, rel=1e-4)
    assert metrics["entropy"] == 0.5 and metrics["probability"] == pytest.approx(0.4, rel=1e-5)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "slope"),
    [
        (1.0, 0.0, -1.0),  # -A * ratio
        (2.0, np.log(1.2), -2.4),
        (1.0, np.log(1.3), 0.0),  # above the upper clip
        (1.0, 200.0, 0.0),  # the ratio overflows float32, the gradient is still 0
        (1.0, -200.0, 0.0),  # ratio 0
        (-1.0, np.log(0.9), 0.9),
        (-1.0, np.log(0.7), 0.0),  # below the lower clip
        (-1.0, -200.0, 0.0),
        (-1.0, np.log(3.0), 3.0),  # not clipped: the objective keeps pushing
        (0.0, 200.0, 0.0),
    ],
)
def test_gradient_by_hand(advantage, log_ratio, slope):
    batch, episode_of = packed(episodes_of([1], [advantage]), [[-1.0]])
    got = np.asarray(slopes(ClippedPolicyGradient(LOW, HIGH), scattered(episode_of, [[log_ratio - 1.0]]), batch))
    assert got[episode_of == 0] == pytest.approx(slope, rel=1e-5) and not got[episode_of < 0].any()


LOGPROBS = [[-1.0, -0.5], [-0.2], [-2.0, -1.0, -0.1]]
OLD = [[-1.1, -0.4], [-0.9], [-1.0, -1.5, -0.1]]


@pytest.mark.parametrize("token_mean", [False, True])
def test_sequence_ratio_equals_the_reference(token_mean):
    advantages = [1.0, -0.5, -1.0]
    objective = ClippedPolicyGradient(LOW, HIGH, ratio="sequence")
    loss, metrics = run(episodes_of([2, 1, 3], advantages), LOGPROBS, OLD, objective, aggregation="token_mean" if token_mean else "episode_mean")
    np.testing.assert_allclose(loss, reference(LOGPROBS, OLD, advantages, token_mean=token_mean, sequence=True), rtol=1e-5)
    mean_ratios = np.exp([0.0, 0.7, -0.5 / 3])
    assert metrics["ratio_gap"] == pytest.approx(np.abs(np.repeat(mean_ratios, [2, 1, 3]) - 1).mean(), rel=1e-4)


def test_sequence_ratio_has_the_gradient_of_a_mean():
    """Two tokens, both ratios 1: d loss / d logprob = -A * weight summed over the episode, times 1 / 2 for each."""
    batch, episode_of = packed(episodes_of([2], [1.5]), [[-1.0, -2.0]])
    # the ratio stays 1 when the mean does; when it is clipped, it is so for both
    for logprobs, expected in (([-1.0, -2.0], -0.75), ([-0.9, -2.1], -0.75), ([200.0, -2.0], 0.0)):
        got = slopes(ClippedPolicyGradient(LOW, HIGH, ratio="sequence"), scattered(episode_of, [logprobs]), batch)
        np.testing.assert_allclose(np.asarray(got)[episode_of == 0], [expected, expected], rtol=1e-5)


@pytest.mark.parametrize(
    ("correction", "factors", "capped"),
    [
        # old / sampler is 1, e^0.5, e^-1, e^2, 1, e^-0.2; the cap is 2
        ("none", [[1, 1], [1], [1, 1, 1]], 0),
        ("truncate", [[1, np.exp(0.5)], [np.exp(-1)], [2, 1, np.exp(-0.2)]], 1),
        ("mask", [[1, np.exp(0.5)], [0], [0, 1, np.exp(-0.2)]], 2),
    ],
)
def test_sampler_correction_equals_the_reference(correction, factors, capped):
    advantages = [1.0, -0.5, -1.0]
    sampler = [[-1.1, -0.9], [0.1], [-3.0, -1.5, 0.1]]
    objective = ClippedPolicyGradient(LOW, HIGH, sampler_correction=correction)
    loss, metrics = run(episodes_of([2, 1, 3], advantages, sampler), LOGPROBS, OLD, objective)
    np.testing.assert_allclose(loss, reference(LOGPROBS, OLD, advantages, correction=factors), rtol=1e-5)
    assert metrics["sampler_capped"] == pytest.approx(capped / 6)


def test_no_trained_token_is_a_loss_of_zero():
    loss, metrics = run([Episode([1, 2], [False, False])], [], [])
    assert loss == 0 and metrics == {name: 0 for name in metrics}


def test_an_overlong_episode_leaves_the_loss_of_the_others():
    advantages = [1.0, -1.0, 0.5]
    logprobs, old = [[-1.0], [-0.5], []], [[-1.2], [-0.6], []]
    loss, _ = run(episodes_of([1, 1, 9], advantages), logprobs, old)  # nine targets do not fit eight
    np.testing.assert_allclose(loss, reference(logprobs[:2], old[:2], advantages[:2]), rtol=1e-5)
    masked, _ = run(episodes_of([1, 1, 9], advantages), logprobs, old, overlong="mask")
    np.testing.assert_allclose(masked, loss * 2 / 3, rtol=1e-5)


def test_cross_entropy_weighs_tokens():
    """An answer of weight 1 and an observation of weight 0.3: (1 * 2 + 0.3 * 1) / 1.3."""
    episode = Episode([1, 2, 3], [False, True, True], token_weights=[0.0, 1.0, 0.3])
    loss, metrics = run([episode], [[-2.0, -1.0]], [], CrossEntropy())
    assert loss == pytest.approx(2.3 / 1.3, rel=1e-6) and metrics["trained_tokens"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": 0.0}, "clip_high"),
        ({"ratio": "word"}, "ratio is 'word'"),
        ({"sampler_correction": "yes"}, "sampler_correction is 'yes'"),
        ({"sampler_cap": 1.0}, "sampler_cap is 1.0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        ClippedPolicyGradient(**options)
