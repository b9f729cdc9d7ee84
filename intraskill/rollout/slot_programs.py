"""The embedded engine's device programs: copy rows of the cache, prefill rows, decode rows.

Each gathers the rows it is given into a batch of its own fixed size, computes, and writes them back; how many slots the cache has does not
enter the computation. Programs are compiled ahead of time and called as such, so a call can fail but never compiles behind one's back.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from intraskill.models.qwen35 import cache, model
from intraskill.models.qwen35.config import ModelConfig
from intraskill.rollout.scheduler import Shapes

# A turn's stop ids and the distinct sets of banned ids that an engine can hold at a time.
MAX_STOP_IDS = 8
MAX_BANNED_SETS = 4


class State(NamedTuple):
    """Everything an episode has on the device, one row each: the model's cache and the hidden state that predicts the next token."""

    cache: cache.Cache
    hidden: Float[Array, "rows D"]


class DecodeRows(NamedTuple):
    """What a decode call needs to know about its rows: numpy arrays here, traced ones in the program. Unused rows have a budget of 0."""

    rows: Int[Any, " R"]
    budget: Int[Any, " R"]  # tokens this call may emit
    forced: Int[Any, "R block"]  # tokens to feed instead of sampled ones,
    num_forced: Int[Any, " R"]  # for this many steps
    last: Bool[Any, " R"]  # whether the budget's last token ends the turn and need not be fed
    position: Int[Any, " R"]  # of the first token that is emitted, in the episode
    key: UInt32[Any, "R 2"]
    temperature: Float[Any, " R"]
    stop_ids: Int[Any, "R stops"]  # -1 where there are fewer
    banned_set: Int[Any, " R"]


class Decoded(NamedTuple):
    """Ids, their log-probs, and how many of the block's steps were taken, per row."""

    ids: Int[Array, "block R"]
    logprobs: Float[Array, "block R"]
    counts: Int[Array, " R"]


def sample(
    scores: Float[Array, "R V"], banned: Bool[Array, "R V"], temperature: Float[Array, " R"], key: UInt32[Array, "R 2"], position: Int[Array, " R"]
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """One token a row and its log-prob, by Gumbel noise that depends on the row's key and position alone.

    Temperature 0 takes the most likely token and reports its log-prob at temperature 1.
    """
    greedy = temperature == 0
    scores = jnp.where(banned, -jnp.inf, scores) / jnp.where(greedy, 1, temperature)[:, None]
    logprobs = jax.nn.log_softmax(scores, axis=-1)

    def noise(key: UInt32[Array, " 2"], position: Int[Array, ""]) -> Float[Array, " V"]:
        return jax.random.gumbel(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position), scores.shape[-1:], jnp.float32)

    ids = jnp.argmax(jnp.where(greedy[:, None], logprobs, logprobs + jax.vmap(noise)(key, position)), axis=-1).astype(jnp.int32)
    return ids, jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0]


class Programs:
    """Compiles on demand (or all at once, see `compile_all`), counts compilations, and runs.

    Args:
      config: the model.
      shapes: the fixed shapes.
    """

    def __init__(self, config: ModelConfig, shapes: Shapes):
        self.config = config
        self.shapes = shapes
        self.num_compilations = 0
        self.compile_seconds = 0.0
        self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}

    def init_state(self) -> State:
        hidden = jnp.zeros((self.shapes.num_rows, self.config.hidden_size), self.config.activation_dtype)
        return State(cache.init_cache(self.config, self.shapes.num_rows, self.shapes.max_length), hidden)

    def compile_all(self, params: Any, state: State) -> None:
        """Compiles every program that the shapes allow."""
        self._program("copy", 0, params, state)
        self._program("decode", 0, params, state)
        for bucket in self.shapes.prefill_buckets:
            self._program("prefill", bucket, params, state)

    def trace_decode(self, params: Any, state: State) -> jax.stages.Traced:
        """The decode program for arguments that may be shapes only; their shardings say where it runs. For plans of memory and work."""
        function, arguments = self._definition("decode", 0)
        where = jax.tree.leaves(params)[0].sharding
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arguments)
        return jax.jit(function, donate_argnums=(1,)).trace(params, state, *shapes)

    # ------------------------------------------------------------------------------------------------------------- calls

    def copy(self, params: Any, state: State, pairs: Sequence[tuple[int, int]]) -> State:
        """Copies rows. A fixed number at a time; what is left over of a call is dropped."""
        size = self.shapes.decode_rows
        for start in range(0, len(pairs), size):
            rows = np.full((2, size), self.shapes.no_row, np.int32)
            some = pairs[start : start + size]
            rows[:, : len(some)] = np.array(some, np.int32).T
            state = self._program("copy", 0, params, state)(params, state, rows[0], rows[1])
        return state

    def prefill(self, params: Any, state: State, rows: np.ndarray, fresh: np.ndarray, tokens: np.ndarray, num_new: np.ndarray) -> State:
        """Appends `num_new` of each row's tokens to its cache; a fresh row is cleared first."""
        return self._program("prefill", tokens.shape[1], params, state)(params, state, rows, fresh, tokens, num_new)

    def decode(self, params: Any, state: State, banned: Array, rows: DecodeRows) -> tuple[State, Decoded]:
        """Up to `decode_block` steps: sample (or force) a token for each row, feed it."""
        return self._program("decode", 0, params, state)(params, state, banned, rows)

    def empty_decode_rows(self) -> DecodeRows:
        """Rows that do nothing, to be filled in."""
        n, block = self.shapes.decode_rows, self.shapes.decode_block

        def ints(*shape: int) -> np.ndarray:
            return np.zeros(shape, np.int32)

        return DecodeRows(
            rows=np.full(n, self.shapes.no_row, np.int32),
            budget=ints(n),
            forced=ints(n, block),
            num_forced=ints(n),
            last=np.zeros(n, bool),
            position=ints(n),
            key=np.zeros((n, 2), np.uint32),
            temperature=np.ones(n, np.float32),
            stop_ids=np.full((n, MAX_STOP_IDS), -1, np.int32),
            banned_set=ints(n),
        )

    # ---------------------------------------------------------------------------------------------------------- programs

    def _program(self, kind: str, bucket: int, params: Any, state: State) -> Callable[..., Any]:
        program = self._compiled.get((kind, bucket))
        if program is None:
            started = time.monotonic()
            function, arguments = self._definition(kind, bucket)
            program = jax.jit(function, donate_argnums=(1,)).lower(params, state, *arguments).compile()
            self._compiled[kind, bucket] = program
            self.num_compilations += 1
            self.compile_seconds += time.monotonic() - started
        return program

    def _definition(self, kind: str, bucket: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A program and example arguments after (params, state)."""
        if kind == "copy":
            rows = np.zeros(self.shapes.decode_rows, np.int32)
            return self._copy, (rows, rows)
        if kind == "decode":
            return self._decode, (np.zeros((MAX_BANNED_SETS, self.config.vocab_size), bool), self.empty_decode_rows())
        n = self.shapes.prefill_rows(bucket)
        rows = np.zeros(n, np.int32)
        return self._prefill, (rows, np.zeros(n, bool), np.zeros((n, bucket), np.int32), rows)

    def _copy(self, params: Any, state: State, source: Int[Array, " R"], target: Int[Array, " R"]) -> State:
        del params  # every program takes the same first arguments
        hidden = state.hidden.at[target].set(state.hidden[source], mode="drop")
        return State(cache.copy_slots(state.cache, source, target), hidden)

    def _prefill(
        self, params: Any, state: State, rows: Int[Array, " P"], fresh: Bool[Array, " P"], tokens: Int[Array, "P T"], num_new: Int[Array, " P"]
    ) -> State:
        part = cache.reset_slots(cache.gather_slots(state.cache, rows), fresh)
        hidden, part = model.extend(params, self.config, part, tokens, num_new)
        return State(cache.scatter_slots(state.cache, part, rows), state.hidden.at[rows].set(hidden, mode="drop"))

    def _decode(self, params: Any, state: State, banned: Bool[Array, "sets V"], d: DecodeRows) -> tuple[State, Decoded]:
        block, n = self.shapes.decode_block, self.shapes.decode_rows
        not_allowed = banned[d.banned_set]

        def unfinished(carry: tuple[Any, ...]) -> Bool[Array, ""]:
            step, active = carry[0], carry[1]
            return (step < block) & jnp.any(active)

        def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            step, active, hidden, part, ids, logprobs, counts = carry
            token, logprob = sample(model.logits(params, self.config, hidden), not_allowed, d.temperature, d.key, d.position + step)
            forced = step < d.num_forced
            token = jnp.where(forced, d.forced[:, step], token)
            stopped = jnp.any(token[:, None] == d.stop_ids, axis=-1) & ~forced
            spent = step + 1 == d.budget
            feed = active & ~stopped & ~(spent & d.last)
            new_hidden, part = model.extend(params, self.config, part, token[:, None], feed.astype(jnp.int32))
            hidden = jnp.where(feed[:, None], new_hidden, hidden)
            counts = counts + active.astype(jnp.int32)
            return step + 1, active & ~stopped & ~spent, hidden, part, ids.at[step].set(token), logprobs.at[step].set(logprob), counts

        start = (
            jnp.int32(0),
            d.budget > 0,
            state.hidden[d.rows],
            cache.gather_slots(state.cache, d.rows),
            jnp.zeros((block, n), jnp.int32),
            jnp.zeros((block, n), jnp.float32),
            jnp.zeros(n, jnp.int32),
        )
        _, _, hidden, part, ids, logprobs, counts = lax.while_loop(unfinished, advance, start)
        state = State(cache.scatter_slots(state.cache, part, d.rows), state.hidden.at[d.rows].set(hidden, mode="drop"))
        return state, Decoded(ids, logprobs, counts)
