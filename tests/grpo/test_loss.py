"""The objectives by hand; every option against the written formulas is in test_objective."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def episodes_of(lengths, advantages, sampler=None):
    return [
        Episode([0] * (n + 1), [False] + [True] * n, [0.0, *(sampler[i] if sampler else [0.0] * n)], float(a))
        for i, (n, a) in enumerate(zip(lengths, advantages, strict=True))
    ]


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


def test_sequence_ratio_has_the_gradient_of_a_mean():
    """Two tokens, both ratios 1: d loss / d logprob = -A * weight summed over the episode, times 1 / 2 for each."""
    batch, episode_of = packed(episodes_of([2], [1.5]), [[-1.0, -2.0]])
    # the ratio stays 1 when the mean does; when it is clipped, it is so for both
    for logprobs, expected in (([-1.0, -2.0], -0.75), ([-0.9, -2.1], -0.75), ([200.0, -2.0], 0.0)):
        got = slopes(ClippedPolicyGradient(LOW, HIGH, ratio="sequence"), scattered(episode_of, [logprobs]), batch)
        np.testing.assert_allclose(np.asarray(got)[episode_of == 0], [expected, expected], rtol=1e-5)


def test_the_kl_estimate_by_hand():
    """Policy 0.5 against a reference of 0.25 and 0.8: q is 0.5 and 1.6; no advantage, so KL alone moves the policy, by 1 - q."""
    batch, episode_of = packed(episodes_of([2], [0.0]), [np.log([0.5, 0.5]).tolist()])
    told = np.zeros(episode_of.shape, np.float32)
    told[episode_of == 0] = np.log([0.25, 0.8])
    batch = batch._replace(reference_logprobs=jnp.asarray(told))
    objective = ClippedPolicyGradient(LOW, HIGH, kl_coefficient=0.1)
    logprob = scattered(episode_of, [np.log([0.5, 0.5]).tolist()])
    loss, sums = apply(objective, logprob, batch)
    each = np.array([0.5 - np.log(0.5) - 1, 1.6 - np.log(1.6) - 1])
    assert float(loss) == pytest.approx(0.1 * each.mean(), rel=1e-5) and float(sums["reference_kl"]) == pytest.approx(each.sum(), rel=1e-5)
    np.testing.assert_allclose(np.asarray(slopes(objective, logprob, batch))[episode_of == 0], 0.1 * np.array([0.5, -0.6]) / 2, rtol=1e-5)


def test_no_trained_token_is_a_loss_of_zero():
    loss, metrics = run([Episode([1, 2], [False, False])], [], [])
    assert loss == 0 and metrics == {name: 0 for name in metrics}


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
        ({"kl_coefficient": -0.1}, "kl_coefficient is -0.1"),
        ({"kl_coefficient": float("inf")}, "kl_coefficient is inf"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        ClippedPolicyGradient(**options)
