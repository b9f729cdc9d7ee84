"""A model small enough to differentiate by hand: the next token's logits are a row of a table, chosen by the present token."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from intraskill.grpo.learner import Learner, OptimizerConfig
from intraskill.grpo.packing import Episode
from intraskill.types import Batch

VOCABULARY = 8


class ToyScores(NamedTuple):
    logprob: jax.Array
    entropy: jax.Array


def log_probs(params, batch):
    here = jnp.take_along_axis(batch.tokens, batch.index, axis=1)
    logp = jax.nn.log_softmax(params["table"][here] * params["scale"][0])
    chosen = jnp.take_along_axis(logp, batch.targets[..., None], axis=2)[..., 0]
    return ToyScores(chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1))


def params(seed=0):
    table = jax.random.normal(jax.random.key(seed), (VOCABULARY, VOCABULARY), jnp.float32)
    return {"table": table, "scale": jnp.ones((1,), jnp.float32)}


DECAY = {"table": True, "scale": False}


def learner(objective, *, num_devices=1, log_probs=log_probs, **optimizer):
    mesh = Mesh(np.array(jax.devices()[:num_devices]).reshape(-1), ("data",))
    shardings = {"table": NamedSharding(mesh, P("data")), "scale": NamedSharding(mesh, P())}
    return Learner(log_probs, objective, OptimizerConfig(**optimizer), mesh=mesh, param_shardings=shardings, decay_mask=DECAY, rows_axes=("data",))


def episode(rng, num_tokens, *, trained=0.5, advantage=None, token_weights=False):
    mask = rng.random(num_tokens) < trained
    mask[0] = False
    mask[-1] = num_tokens > 1
    logprobs = np.where(mask, -rng.random(num_tokens), 0.0)
    weights = rng.uniform(0.2, 2.0, num_tokens) if token_weights else None
    return Episode(rng.integers(0, VOCABULARY, num_tokens), mask, logprobs, rng.normal() if advantage is None else advantage, weights)


def split_rows(batch, rows):
    """A batch of one shape, cut into microbatches of `rows` rows each."""
    columns = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    assert len(batch.tokens) % rows == 0
    return [Batch(**{name: c[start : start + rows] for name, c in columns.items()}) for start in range(0, len(batch.tokens), rows)]
