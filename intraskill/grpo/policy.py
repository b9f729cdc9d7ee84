"""Where training meets the model: Qwen3.5 as the `log_probs(params, batch)` that the learner asks for.

Nothing else in `intraskill.grpo` imports a model.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from intraskill.grpo.learner import Learner, LogProbsFn, OptimizerConfig
from intraskill.grpo.loss import DeviceBatch, Objective
from intraskill.models.qwen35 import fsdp, sharding
from intraskill.models.qwen35.config import ModelConfig
from intraskill.models.qwen35.model import LogProbs, abstract_params, log_probs
from intraskill.types import InputError


def log_probs_fn(config: ModelConfig, mesh: Mesh | None = None, *, temperature: float = 1.0, banned_ids: Sequence[int] = ()) -> LogProbsFn:
    """The model's log-probs under the sampler's convention: softmax(logits / temperature) over the ids that are not banned.

    Both must be those of `Sampling`, for pi_old and pi alike, or the ratio compares two different distributions with the sampler's.
    Without a mesh, or with one of a single device, nothing is exchanged between devices.
    """
    outside = [i for i in banned_ids if not 0 <= i < config.vocab_size]
    if outside:
        raise InputError(f"banned ids {outside[:5]} lie outside the vocabulary of {config.vocab_size}: take them from the model's own tokenizer")
    if not temperature > 0:
        raise InputError(f"the trainer's temperature is {temperature}: it must be > 0, and that of the sampling")
    banned = None
    if banned_ids:
        banned = np.zeros(config.vocab_size, bool)
        banned[list(banned_ids)] = True

    score = log_probs if mesh is None or mesh.size == 1 else partial(fsdp.log_probs, mesh=mesh)

    def scores(params: PyTree, batch: DeviceBatch) -> LogProbs:
        return score(
            params,
            config,
            batch.tokens,
            batch.positions,
            batch.segment_ids,
            batch.index,
            batch.targets,
            temperature=temperature,
            banned=None if banned is None else jnp.asarray(banned),
        )

    return scores


def decay_mask(config: ModelConfig) -> PyTree[bool]:
    """Which parameters weight decay applies to: those that are matrices in the published layout, the convolution among them.

    Left out are its vectors, the norms, A_log and dt_bias, whatever shape they have here: heads are split off and equal layers may be stacked.
    """

    def decays(path: tuple[Any, ...], _: jax.ShapeDtypeStruct) -> bool:
        name = str(path[-1].key)
        return not (name.endswith("norm") or name in ("a_log", "dt_bias"))

    return jax.tree_util.tree_map_with_path(decays, abstract_params(config))


def qwen35_learner(
    config: ModelConfig,
    mesh: Mesh,
    optimizer: OptimizerConfig,
    objective: Objective,
    *,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
) -> Learner:
    """The learner of a Qwen3.5 on a (data, fsdp, tensor) mesh; a microbatch's rows are spread over the first two axes."""
    return Learner(
        log_probs_fn(config, mesh, temperature=temperature, banned_ids=banned_ids),
        objective,
        optimizer,
        mesh=mesh,
        param_shardings=sharding.param_shardings(config, mesh),
        decay_mask=decay_mask(config),
        rows_axes=sharding.ROWS[0],
    )
