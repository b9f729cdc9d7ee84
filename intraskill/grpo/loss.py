"""The objectives: what the update minimises, on the arrays of `types.Batch`.

An objective gets the log-probs of the trained positions and returns the loss of a microbatch as a plain sum of weight * token loss (the weights
carry all normalisation, see `packing`), and SUMS over trained tokens of what is worth watching. Both add up over microbatches; `mean_metrics`
divides once at the end.

KL to a frozen reference policy is estimated for each token by k3 = (q - 1) - log q with q = reference / policy of the sampled token: never negative,
0 where they agree, and unbiased for tokens that the policy sampled (J. Schulman, "Approximating KL divergence", 2020; as GRPO has it, Shao et al.
2024, equation 4). Its gradient by the policy's log-prob is 1 - q.

| metric | mean over trained tokens of |
|---|---|
| entropy | entropy of the policy at the position, nats |
| probability | the policy's probability of the target |
| clip_fraction | 1 where the clip removes the token's gradient |
| ratio_gap | abs(ratio - 1), ratio = policy / old policy |
| approx_kl | (ratio - 1) - log ratio, an estimate of KL(old policy to policy) that is never negative |
| sampler_gap | abs(old log-prob - sampler's log-prob): what separates the engine's arithmetic from the trainer's |
| sampler_capped | 1 where the sampler correction met its cap |
| reference_kl | k3 estimate of KL(policy to reference), see below; only with a KL term |

In ratio_gap and approx_kl the log ratio is limited to +-20, so that one runaway token leaves a readable number; the loss itself is never limited.
"""

import dataclasses
import math
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from intraskill.types import Batch, InputError

_METRIC_LOG_RATIO = 20.0


class DeviceBatch(NamedTuple):
    """The fields of `types.Batch` that the update reads, as one JAX argument. `types.Batch` documents them."""

    tokens: Int[Array, "R T"]
    positions: Int[Array, "R T"]
    segment_ids: Int[Array, "R T"]
    index: Int[Array, "R M"]
    targets: Int[Array, "R M"]
    mask: Bool[Array, "R M"]
    weight: Float[Array, "R M"]
    advantage: Float[Array, "R M"]
    sampler_logprobs: Float[Array, "R M"]
    old_logprobs: Float[Array, "R M"]
    reference_logprobs: Float[Array, "R M"]

    @classmethod
    def of(cls, batch: Batch) -> "DeviceBatch":
        return cls(**{name: getattr(batch, name) for name in cls._fields})


@runtime_checkable
class Scores(Protocol):
    """What the model says about the trained positions. Padding may hold anything finite or not: it is masked here."""

    @property
    def logprob(self) -> Float[Array, "R M"]: ...

    @property
    def entropy(self) -> Float[Array, "R M"]: ...


@runtime_checkable
class Objective(Protocol):
    """A loss over trained tokens. The two flags say whether it reads the fields that `Learner.old_log_probs` and `reference_log_probs` fill."""

    needs_old_logprobs: ClassVar[bool]

    @property
    def needs_reference(self) -> bool: ...

    def __call__(self, scores: Scores, batch: DeviceBatch) -> tuple[Float[Array, "R M"], dict[str, Float[Array, ""]]]:
        """Returns each token's weighted loss (0 in padding), whose plain sum is the loss, and the sums for `mean_metrics`."""
        ...


def _masked_sum(values: Float[Array, "R M"], mask: Bool[Array, "R M"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(mask, values, 0.0))


def _common_sums(scores: Scores, batch: DeviceBatch) -> dict[str, Float[Array, ""]]:
    return {
        "trained_tokens": jnp.sum(batch.mask.astype(jnp.float32)),
        "entropy": _masked_sum(scores.entropy, batch.mask),
        "probability": _masked_sum(jnp.exp(scores.logprob), batch.mask),
    }


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Minus the target's log-prob, by `weight` alone: the warm start."""

    needs_old_logprobs: ClassVar[bool] = False

    @property
    def needs_reference(self) -> bool:
        return False

    def __call__(self, scores: Scores, batch: DeviceBatch) -> tuple[Float[Array, "R M"], dict[str, Float[Array, ""]]]:
        return -batch.weight * jnp.where(batch.mask, scores.logprob, 0.0), _common_sums(scores, batch)


@dataclasses.dataclass(frozen=True)
class ClippedPolicyGradient:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), with ratio = policy / old policy. The defaults are the published run's.

    For A >= 0 the minimum is A * min(ratio, 1 + clip_high), for A < 0 it is A * max(ratio, 1 - clip_low): one bound each, and it can be put on
    the LOG ratio. Written so, a clipped token has a gradient of exactly 0 even where its ratio overflows. A token with A < 0 whose ratio explodes is
    not clipped by this objective: its loss may become infinite, and then the learner refuses the update.

    Attributes:
      clip_low: how far below 1 the ratio still moves the policy, in (0, 1).
      clip_high: how far above 1, > 0.
      ratio: "token", or "sequence": all tokens of an episode share the exponential of their mean log ratio (GSPO, Zheng et al. 2025); its clip
        range is some hundred times narrower, so set both bounds with it.
      sampler_correction: what multiplies a token's loss to make up for an engine that did not sample from the old policy. With
        c = old policy / sampler, "none" is 1, "truncate" is min(c, sampler_cap), "mask" is c inside [1 / sampler_cap, sampler_cap] and 0 outside.
      sampler_cap: > 1; read by "truncate" and "mask".
      kl_coefficient: >= 0; a token's loss gets this times its k3 estimate of KL(policy to reference). The sampler correction leaves it alone.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio: str = "token"
    sampler_correction: str = "none"
    sampler_cap: float = 2.0
    kl_coefficient: float = 0.0
    needs_old_logprobs: ClassVar[bool] = True

    def __post_init__(self):
        if not (0 < self.clip_low < 1 and self.clip_high > 0):
            raise InputError(f"clip_low must lie in (0, 1) and clip_high above 0, got {self.clip_low} and {self.clip_high}")
        if self.ratio not in ("token", "sequence"):
            raise InputError(f"ratio is {self.ratio!r}: use token or sequence")
        if self.sampler_correction not in ("none", "truncate", "mask"):
            raise InputError(f"sampler_correction is {self.sampler_correction!r}: use none, truncate or mask")
        if not self.sampler_cap > 1:
            raise InputError(f"sampler_cap is {self.sampler_cap}: it must be > 1, a correction of 1 means that engine and trainer agree")
        if not 0 <= self.kl_coefficient < math.inf:
            raise InputError(f"kl_coefficient is {self.kl_coefficient}: it must be >= 0 and finite; 0 leaves the reference out")

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0

    def __call__(self, scores: Scores, batch: DeviceBatch) -> tuple[Float[Array, "R M"], dict[str, Float[Array, ""]]]:
        mask, advantage = batch.mask, batch.advantage
        log_ratio = jnp.where(mask, scores.logprob - batch.old_logprobs, 0.0)
        if self.ratio == "sequence":
            log_ratio = _episode_mean(log_ratio, batch)
        low, high = jnp.log1p(-self.clip_low), jnp.log1p(self.clip_high)
        bounded = jnp.where(advantage >= 0, jnp.minimum(log_ratio, high), jnp.maximum(log_ratio, low))
        correction, corrected = self._correction(batch)
        token_loss = -batch.weight * correction * advantage * jnp.exp(bounded)
        clipped = ((advantage > 0) & (log_ratio > high)) | ((advantage < 0) & (log_ratio < low))
        shown = jnp.clip(log_ratio, -_METRIC_LOG_RATIO, _METRIC_LOG_RATIO)
        sums = _common_sums(scores, batch) | {
            "clip_fraction": _masked_sum(clipped.astype(jnp.float32), mask),
            "ratio_gap": _masked_sum(jnp.abs(jnp.expm1(shown)), mask),
            "approx_kl": _masked_sum(jnp.expm1(shown) - shown, mask),
            "sampler_gap": _masked_sum(jnp.abs(batch.old_logprobs - batch.sampler_logprobs), mask),
            "sampler_capped": _masked_sum(corrected.astype(jnp.float32), mask),
        }
        if self.needs_reference:
            log_q = jnp.where(mask, batch.reference_logprobs - scores.logprob, 0.0)
            kl = jnp.expm1(log_q) - log_q
            token_loss += batch.weight * self.kl_coefficient * kl
            sums["reference_kl"] = jnp.sum(kl)
        return token_loss, sums

    def _correction(self, batch: DeviceBatch) -> tuple[Float[Array, "R M"], Bool[Array, "R M"]]:
        """The factor of each token's loss (a constant: both log-probs are data), and where the cap decided it."""
        log_gap = jnp.where(batch.mask, batch.old_logprobs - batch.sampler_logprobs, 0.0)
        cap = jnp.log(jnp.float32(self.sampler_cap))
        if self.sampler_correction == "truncate":
            return jnp.exp(jnp.minimum(log_gap, cap)), log_gap > cap
        if self.sampler_correction == "mask":
            outside = jnp.abs(log_gap) > cap
            return jnp.where(outside, 0.0, jnp.exp(jnp.clip(log_gap, -cap, cap))), outside
        return jnp.ones_like(log_gap), jnp.zeros_like(batch.mask)


def _episode_mean(values: Float[Array, "R M"], batch: DeviceBatch) -> Float[Array, "R M"]:
    """Each token's value replaced by the mean over its episode's trained tokens; 0 in padding. Values must be 0 in padding."""
    most = batch.mask.shape[1] + 1  # every packed episode has a trained token, so a row holds at most M of them

    def row(values, segments, mask):
        total = jax.ops.segment_sum(values, segments, most)
        count = jax.ops.segment_sum(mask.astype(values.dtype), segments, most)
        return (total / jnp.maximum(count, 1.0))[segments]

    segments = jnp.where(batch.mask, jnp.take_along_axis(batch.segment_ids, batch.index, axis=1), 0)
    return jnp.where(batch.mask, jax.vmap(row)(values, segments, batch.mask), 0.0)


def mean_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Means over trained tokens from the sums of all microbatches; `trained_tokens` stays a count. All 0 without any trained token."""
    count = max(sums["trained_tokens"], 1.0)
    return {name: value if name == "trained_tokens" else value / count for name, value in sums.items()}
