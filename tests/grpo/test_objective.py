"""Every option of the objective, from rewards to the loss and its gradient, against the formulas of `reference`, on hand-made log-probs."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo import reference
from grpo.reference import Options, Told

from intraskill.grpo.advantages import group_advantages
from intraskill.grpo.loss import ClippedPolicyGradient, DeviceBatch, mean_metrics
from intraskill.grpo.packing import Episode, pack

T, M = 16, 8  # an episode of more than M trained tokens is longer than a row

OPTIONS = {
    "published": Options(),
    "other clips": Options(clip_low=0.1, clip_high=0.5),
    "no std": Options(divide_by_std=False),
    "token mean": Options(aggregation="token_mean"),
    "fixed length": Options(aggregation="fixed_length", fixed_length=7),
    "sequence ratio": Options(ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    "sequence ratio, wide clips": Options(ratio="sequence"),
    "truncated correction": Options(sampler_correction="truncate"),
    "masked correction": Options(sampler_correction="mask", sampler_cap=1.5),
    "KL": Options(kl_coefficient=0.3),
    "Dr. GRPO": Options(divide_by_std=False, aggregation="fixed_length", fixed_length=12),
    "all at once": Options(
        ratio="sequence", sampler_correction="truncate", sampler_cap=1.2, kl_coefficient=0.05, divide_by_std=False, aggregation="token_mean"
    ),
}

# Log ratios 0.1, -0.1; 0.7; -1, 0.5, 0; corrections 1, e^0.5; e^-1; e^2, 1, e^-0.2.
MIXED = [
    Told([-1.0, -0.5], [-1.1, -0.4], [-1.1, -0.9], [-0.8, -0.7]),
    Told([-0.2], [-0.9], [0.1], [-0.3]),
    Told([-2.0, -1.0, -0.1], [-1.0, -1.5, -0.1], [-3.0, -1.5, 0.1], [-1.0, -1.0, -1.5]),
]
LONG = Told(*(np.linspace(low, low - 1, M + 2).tolist() for low in (-0.6, -0.7, -0.5, -0.9)))
HUGE = [  # with A > 0 the ratio e^29.99 is clipped; with A < 0 nothing clips e^30
    Told([-0.01, -50.0], [-30.0, -0.1], [-30.0, -0.1], [-0.01, -45.0]),
    Told([-0.01, -40.0], [-30.01, -0.1], [-1.0, -20.0], [-0.5, -41.0]),
]

CASES = {
    "two groups": (MIXED + [Told([-0.7], [-0.5], [-0.4], [-0.7])], [[1.0, 0.0], [0.25, 1.0]]),
    "one episode": (MIXED[:1], [[1.0]]),
    "equal rewards": (MIXED, [[0.4, 0.4, 0.4]]),
    "equal rewards that do not add up exactly": (MIXED, [[0.1, 0.1, 0.1]]),
    "no trained token": ([Told([], [], [], [])] * 2, [[1.0, 0.0]]),
    "one without a trained token": ([MIXED[0], Told([], [], [], []), MIXED[2]], [[1.0, 0.0, 0.5]]),
    "huge ratios": (HUGE, [[1.0, 0.0]]),
}


@functools.partial(jax.jit, static_argnums=0)
def loss_and_slopes(objective, logprob, batch):
    def loss(logprob):
        token_loss, sums = objective(SimpleNamespace(logprob=logprob, entropy=jnp.zeros_like(logprob)), batch)
        return jnp.sum(token_loss), sums

    return jax.value_and_grad(loss, has_aux=True)(logprob)


def run(told, rewards, options, overlong="drop"):
    """Loss, the slope of each packed token by episode, and metrics, of rewards -> advantages -> packed rows -> objective."""
    advantages = np.concatenate([group_advantages(np.array(r), divide_by_std=options.divide_by_std) for r in rewards])
    episodes = [
        Episode([0] * (len(t.policy) + 1), [False] + [True] * len(t.policy), [0.0, *t.sampler], a) for t, a in zip(told, advantages, strict=True)
    ]
    aggregation = {"aggregation": options.aggregation, "fixed_length": options.fixed_length}
    packed, report = pack(episodes, row_length=T, max_trained_per_row=M, rows_multiple_of=3, overlong=overlong, **aggregation)
    filled = {name: np.zeros(packed.mask.shape, np.float32) for name in ("policy", "old", "reference")}
    filled["policy"][~packed.mask] = np.nan  # what the model says about padding must not matter
    for n, t in enumerate(told):
        at = packed.episode == n
        for name in filled:
            filled[name][at] = getattr(t, name)[: at.sum()]
    batch = DeviceBatch.of(dataclasses.replace(packed, old_logprobs=filled["old"], reference_logprobs=filled["reference"]))
    fields = [f.name for f in dataclasses.fields(ClippedPolicyGradient)]
    objective = ClippedPolicyGradient(**{name: getattr(options, name) for name in fields})
    (loss, sums), slopes = loss_and_slopes(objective, filled["policy"], batch)
    slopes = np.asarray(slopes)
    assert not slopes[~packed.mask].any()
    return float(loss), [slopes[packed.episode == n].tolist() for n in range(len(told))], mean_metrics({k: float(v) for k, v in sums.items()}), report


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_gradient_and_counts_equal_the_reference(name, case):
    (told, rewards), options = CASES[case], OPTIONS[name]
    loss, slopes, metrics, _ = run(told, rewards, options)
    advantages = [a for group in rewards for a in reference.advantages(group, options.divide_by_std)]
    if case.startswith("equal rewards"):
        advantages = [0.0] * len(told)  # rounding in the mean may not become a gradient
    expected = reference.objective(told, advantages, options)
    np.testing.assert_allclose(loss, expected.loss, rtol=2e-5, atol=2e-7)
    num_tokens = sum(len(t.policy) for t in told)
    assert metrics["trained_tokens"] == num_tokens
    assert metrics["sampler_capped"] == pytest.approx(expected.capped / max(num_tokens, 1))
    assert ("reference_kl" in metrics) == (options.kl_coefficient > 0)
    if options.kl_coefficient:
        assert metrics["reference_kl"] == pytest.approx(expected.kl / max(num_tokens, 1), rel=1e-4)
    for found, wanted in zip(slopes, reference.slopes(told, advantages, options), strict=True):
        # Where one token's loss is 1e13, differences of the whole loss have few digits left for the others: those slopes are by hand in test_loss.
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=max(2e-6, 1e-15 * abs(expected.loss) / 1e-5))
    if case.startswith("equal rewards") and not options.kl_coefficient:
        assert loss == 0 and not any(map(any, slopes))


@pytest.mark.parametrize("overlong", ["drop", "mask", "truncate"])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_episode_longer_than_a_row(name, overlong):
    """It counts in its group's advantages in any case, and in the report; what else it does is the rule's."""
    told, rewards, options = [*MIXED, LONG], [[1.0, 0.0], [0.5, 0.0]], OPTIONS[name]
    loss, slopes, _, report = run(told, rewards, options, overlong)
    advantages = [a for group in rewards for a in reference.advantages(group, options.divide_by_std)]
    trained = [*MIXED, LONG.first(M)] if overlong == "truncate" else MIXED
    counted = (trained, advantages[: len(trained)], options, int(overlong == "mask"))
    np.testing.assert_allclose(loss, reference.objective(*counted).loss, rtol=2e-5, atol=2e-7)
    assert report.overlong == (3,) and report.metrics()["overlong"] == 1
    assert len(slopes[3]) == (M if overlong == "truncate" else 0)
    for found, wanted in zip(slopes, reference.slopes(*counted), strict=False):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=2e-6)


def test_each_option_changes_the_loss():
    """Otherwise the comparison above would hold for options that do nothing."""
    told, rewards = CASES["two groups"]
    losses = {name: run(told, rewards, options)[0] for name, options in OPTIONS.items()}
    for name in OPTIONS:
        others = [loss for other, loss in losses.items() if other != name]
        assert min(abs(losses[name] - loss) for loss in others) > 1e-4, name
