"""The objective as its formulas are written, in plain float64 loops over episodes and tokens: no packing, no weights, no JAX.

Sources: GRPO (Shao et al. 2024, equations 3 and 4), clip-higher and token mean (DAPO, Yu et al. 2025), no std and fixed length (Dr. GRPO, Liu et al.
2025), sequence ratio (GSPO, Zheng et al. 2025), truncated sampler correction (Yao et al. 2025).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Options:
    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio: str = "token"
    sampler_correction: str = "none"
    sampler_cap: float = 2.0
    kl_coefficient: float = 0.0
    divide_by_std: bool = True
    aggregation: str = "episode_mean"
    fixed_length: int | None = None


@dataclasses.dataclass(frozen=True)
class Told:
    """The log-probs of one episode's trained tokens, from each of the four sides."""

    policy: Sequence[float]
    old: Sequence[float]
    sampler: Sequence[float]
    reference: Sequence[float]

    def first(self, count: int) -> "Told":
        return Told(*(list(getattr(self, f.name))[:count] for f in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Found:
    loss: float
    capped: int  # tokens whose sampler correction met the cap
    kl: float  # sum over tokens


def advantages(rewards: Sequence[float], divide_by_std: bool) -> list[float]:
    """(r - mean) / (sample standard deviation + 1e-6) in one group."""
    mean = sum(rewards) / len(rewards)
    if not divide_by_std:
        return [r - mean for r in rewards]
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5 if len(rewards) > 1 else 0.0
    return [(r - mean) / (std + 1e-6) for r in rewards]


def objective(episodes: Sequence[Told], advantage: Sequence[float], options: Options, num_masked: int = 0) -> Found:
    """The loss of one optimizer batch.

    Args:
      episodes: those that are trained on, cut where they were cut.
      advantage: one for each of them.
      options: which formulas.
      num_masked: further episodes that are averaged over with no token of their own.
    """
    sums, counts, num_capped, total_kl = [], [], 0, 0.0
    for told, a in zip(episodes, advantage, strict=True):
        if len(told.policy) == 0:
            continue  # nothing was sampled: there is nothing to average
        log_ratios = [p - o for p, o in zip(told.policy, told.old, strict=True)]
        if options.ratio == "sequence":
            log_ratios = [sum(log_ratios) / len(log_ratios)] * len(log_ratios)
        episode = 0.0
        for t, log_ratio in enumerate(log_ratios):
            with np.errstate(over="ignore"):
                ratio = np.exp(np.float64(log_ratio))
            clipped = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
            surrogate = min(ratio * a, clipped * a) if a != 0 else 0.0
            factor, met_cap = correction(told.old[t] - told.sampler[t], options)
            q = np.exp(told.reference[t] - told.policy[t]) if options.kl_coefficient else 1.0
            kl = q - np.log(q) - 1
            episode += -factor * surrogate + options.kl_coefficient * kl
            num_capped, total_kl = num_capped + met_cap, total_kl + kl
        sums.append(episode)
        counts.append(len(log_ratios))
    return Found(aggregate(sums, counts, options, num_masked), num_capped, total_kl)


def correction(log_gap: float, options: Options) -> tuple[float, bool]:
    c, cap = np.exp(log_gap), options.sampler_cap
    if options.sampler_correction == "truncate":
        return min(c, cap), c > cap
    if options.sampler_correction == "mask":
        outside = c > cap or c < 1 / cap
        return (0.0 if outside else c), outside
    return 1.0, False


def aggregate(sums: Sequence[float], counts: Sequence[int], options: Options, num_masked: int) -> float:
    """From each episode's sum over its tokens to the loss."""
    if not sums:
        return 0.0
    if options.aggregation == "token_mean":
        return sum(sums) / sum(counts)
    if options.aggregation == "fixed_length":
        return sum(s / options.fixed_length for s in sums) / (len(sums) + num_masked)
    return sum(s / n for s, n in zip(sums, counts, strict=True)) / (len(sums) + num_masked)


def slopes(episodes: Sequence[Told], advantage: Sequence[float], options: Options, num_masked: int = 0, step: float = 1e-5) -> list[list[float]]:
    """The derivative of the loss by each of the policy's log-probs, by central differences."""

    def loss(episode: int, token: int, by: float) -> float:
        policy = list(episodes[episode].policy)
        policy[token] += by
        changed = [dataclasses.replace(told, policy=policy) if n == episode else told for n, told in enumerate(episodes)]
        return objective(changed, advantage, options, num_masked).loss

    return [[(loss(n, t, step) - loss(n, t, -step)) / (2 * step) for t in range(len(told.policy))] for n, told in enumerate(episodes)]
