"""The figures of one step: what its groups were like, and how fast the machine was. docs/training.md names every one of them.

A speed is tokens over seconds of wall time. What cannot be known is left out: without a peak in the config there is no share of it.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from intraskill.evaluation import num_invalid_actions, num_protocol_errors
from intraskill.grpo.sampling_filter import is_uniform
from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.model import abstract_params
from intraskill.skills.curriculum import Curriculum
from intraskill.types import Batch, Group, MaskKind, Trajectory

_MAX_LOG_RATIO = 20.0  # one runaway token leaves a readable mean


def rollout_metrics(groups: Sequence[Group], curriculum: Curriculum, step: int) -> dict[str, Any]:
    """Figures over ALL generated, scored episodes; what the trainer admitted is counted apart.

    Args:
      groups: of the step.
      curriculum: that their masks were drawn from.
      step: index of the step, which is also the version of the weights that will train on the groups.
    """
    episodes = [t for g in groups for t in g.trajectories]
    scored = [t for t in episodes if t.scored]
    return {
        "reward": _mean([t.reward for t in scored]),
        "success": _mean([float(t.success) for t in scored]),
        "scored_rate": len(scored) / len(episodes),
        "all_wrong_rate": _mean([float(g.all_wrong) for g in groups]),
        "zero_variance_share": _mean([float(is_uniform(g)) for g in groups if g.scored]),
        "generated_groups": len(groups),
        "mean_turns": _mean([len(t.turns) for t in scored]),
        "tokens_per_turn": _mean([sum(t.loss_mask) / len(t.turns) for t in scored if t.turns]),
        "prefilled_per_new_token": prefilled_per_new_token(episodes),
        "tokens_sampled": _sampled(episodes),
        "weight_lag": _weight_lag(episodes, step),
        "protocol_errors": _mean([num_protocol_errors(t) for t in scored]),
        "invalid_actions": _mean([num_invalid_actions(t) for t in scored]),
        **_mask_rates(groups, curriculum),
    }


def rollout_speed(played: Sequence[Group], seconds: float) -> dict[str, float]:
    """How fast the groups that were really played, in `seconds`, were."""
    episodes = [t for g in played for t in g.trajectories]
    speeds = {"tokens_per_second": _sampled(episodes) / seconds, "prefill_tokens_per_second": _prefilled(episodes) / seconds}
    return {**speeds, "seconds": seconds}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _mask_rates(groups: Sequence[Group], curriculum: Curriculum) -> dict[str, Any]:
    """How often chunks were shown, each beside what the curriculum promises; rho only where it is the same for every group."""
    masks = [m for g in groups for m in g.masks]
    assisted = [m for m in masks if m.kind != MaskKind.SKILL_FREE]
    included = Counter(i for m in assisted for i in m.chunk_ids)
    constant = not (curriculum.withdraw_over or curriculum.retrieve)
    return {
        "skill_free_rate": _mean([float(m.kind == MaskKind.SKILL_FREE) for m in masks]),
        "q": curriculum.q,
        "inclusion": {i: included[i] / len(assisted) if assisted else 0.0 for i in curriculum.chunk_ids},
        **({"rho": dict(zip(curriculum.chunk_ids, curriculum.rho, strict=True))} if constant else {}),
        "mixed_groups": sum(g.mask.kind == MaskKind.MIXED for g in groups),  # their advantages compare contexts
    }


def _weight_lag(episodes: Sequence[Trajectory], step: int) -> float:
    """Mean over sampled tokens of how many steps their weights are behind those that train on them; a turn of several versions counts its oldest."""
    turns = [t for e in episodes for t in e.turns if t.completion.ids]
    total = sum(len(t.completion.ids) for t in turns)
    return sum((step - t.completion.weight_versions[0]) * len(t.completion.ids) for t in turns) / total if total else 0.0


def _sampled(episodes: Sequence[Trajectory]) -> int:
    return sum(sum(t.loss_mask) for t in episodes)


def _prefilled(episodes: Sequence[Trajectory]) -> int:
    """Prompt tokens that the engine computed."""
    return sum(t.prompt_length - t.completion.cached_tokens for e in episodes for t in e.turns)


def prefilled_per_new_token(episodes: Sequence[Trajectory]) -> float:
    """Prompt tokens that the engine computed, per token that it had not computed on before; 1 when every prefix stayed cached."""
    known = sum(t.prompt_length + len(t.completion.ids) - 1 for e in episodes for t in e.turns[:-1])  # the last sampled one never entered
    new = sum(t.prompt_length for e in episodes for t in e.turns) - known
    return _prefilled(episodes) / new if new else 0.0


# ---------------------------------------------------------------------------------------------------------------- update


def update_figures(config: Any, shape: ModelConfig, microbatches: Sequence[Batch], seconds: float) -> dict[str, float]:
    """Speed of one optimizer update, and how far apart trainer and sampler are.

    Args:
      config: the run's.
      shape: of the model.
      microbatches: all of the update, with `old_logprobs`.
      seconds: that the update took.
    """
    num_tokens = sum(int((b.segment_ids > 0).sum()) for b in microbatches)
    num_trained = sum(int(b.mask.sum()) for b in microbatches)
    gaps = np.concatenate([(b.old_logprobs - b.sampler_logprobs)[b.mask] for b in microbatches]).astype(np.float64)
    found = {"tokens_per_second": num_tokens / seconds, "sampler_ratio": _mean(np.exp(np.clip(gaps, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)).tolist())}
    peak = config.telemetry.peak_flops * math.prod((config.mesh.data, config.mesh.fsdp, config.mesh.tensor))
    return {**found, "mfu": update_flops(shape, num_tokens, num_trained) / seconds / peak} if peak else found


def update_flops(shape: ModelConfig, num_tokens: int, num_trained: int) -> float:
    """Floating-point operations that an update needs at least: 6 for each parameter and token that meet in a product.

    Two for the product, four for its two gradients. Every token meets the layers, a trained position the vocabulary's matrix as well. Left out are
    what grows with the row (attention scores, the delta rule's state), what is computed twice to save memory, and the pass for the old log-probs: so
    a share of the peak that is made of this is a lower bound.
    """
    layers, vocabulary = _num_params(shape)
    return 6.0 * (layers * num_tokens + vocabulary * num_trained)


@functools.lru_cache(maxsize=4)
def _num_params(shape: ModelConfig) -> tuple[int, int]:
    """Parameters of the layers, and of the matrix that scores the vocabulary."""
    params: Mapping[str, Any] = abstract_params(shape)
    layers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params["layers"]))
    return layers, math.prod(params["embed"].shape)
