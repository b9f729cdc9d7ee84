"""What the tests of the client need to know about the server that they run against, and how an episode is played on it."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from intraskill import weights
from intraskill.models.qwen35 import model
from intraskill.models.qwen35.config import ModelConfig
from intraskill.types import Published, Sampling, Session

# What a run of these tests measured, for the table in docs/rollout.md.
FIGURES: dict[str, str] = {}

_log_probs = jax.jit(model.log_probs, static_argnames=("config", "temperature"))


@dataclasses.dataclass(frozen=True)
class Served:
    """A running server.

    Attributes:
      address: of the server.
      config: its model, as the trainer computes it.
      params: in float32.
      max_length: tokens an episode may have.
      stops: ids that end a turn; a server may know them as such whatever it is asked.
      banned: ids that the tests never want to see.
      mean_error, max_error: how far its log-probs may be from the trainer's.
    """

    address: str
    config: ModelConfig
    params: Any
    max_length: int
    stops: tuple[int, ...]
    banned: tuple[int, ...]
    mean_error: float
    max_error: float

    def publish(self, directory: Path, version: int, params: Any = None, layout: str = "orbax") -> Published:
        """In bfloat16, as servers hold them."""
        return weights.publish(directory, version, self.config, self.params if params is None else params, dtype="bfloat16", layout=layout)

    def nudged(self, leaf: str = "final_norm") -> Any:
        """The parameters, one bfloat16 ulp up in one element of one tensor."""
        bits = np.asarray(jnp.asarray(self.params[leaf], jnp.bfloat16)).view(np.uint16).copy()
        bits.reshape(-1)[3] += 1
        return {**self.params, leaf: jnp.asarray(bits.view(jnp.bfloat16), jnp.float32)}

    def sampling(self, **changes: Any) -> Sampling:
        return dataclasses.replace(Sampling(9, temperature=0.8, stop_ids=self.stops, banned_ids=self.banned), **changes)

    def endless(self, max_new_tokens: int) -> Sampling:
        """Never stops before its limit."""
        return self.sampling(max_new_tokens=max_new_tokens, banned_ids=tuple(sorted({*self.stops, *self.banned})))

    def prompt(self, seed: int, length: int) -> list[int]:
        return np.random.default_rng(seed).integers(4, self.config.vocab_size, length).tolist()

    def trainer_log_probs(self, published: Published, tokens: list[int], sampled: list[bool], sampling: Sampling) -> np.ndarray:
        """The sampled tokens' log-probs by the trainer's own function, with the published parameters."""
        row = np.zeros((1, self.max_length), np.int32)
        row[0, : len(tokens)] = tokens
        columns = np.arange(self.max_length, dtype=np.int32)[None]
        index = np.zeros_like(row)
        count = sum(sampled)
        index[0, :count] = np.flatnonzero(sampled) - 1
        banned = np.zeros(self.config.vocab_size, bool)
        banned[list(sampling.banned_ids)] = True
        params = weights.read(published, self.config)
        segments = (columns < len(tokens)).astype(np.int32)
        arrays = (row, columns, segments, index, np.take(row[0], index + 1))
        found = _log_probs(params, self.config, *arrays, temperature=sampling.temperature, banned=banned)
        return np.asarray(found.logprob)[0, :count]


async def play(engine, name: str, noise: tuple[int, ...], first: list[int], sampling: Sampling, results=((7, 8, 9), (10,) * 11, (4, 5))):
    """Turns of one session: everything it spelled, which of it was sampled, the log-probs, and the completions."""
    tokens, sampled, logprobs, turns = list(first), [False] * len(first), [], []
    for result in results:
        turn = await engine.generate(tokens, session=Session(name, noise), sampling=sampling)
        tokens += [*turn.ids, *result]
        sampled += [True] * len(turn.ids) + [False] * len(result)
        logprobs += turn.logprobs
        turns.append(turn)
    return tokens, sampled, logprobs, turns
