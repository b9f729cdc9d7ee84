"""The embedded engine: continuous batching in this process, over slots that keep an episode's state between its turns.

Usual engines trade reproducibility for speed: shapes follow the load, so an episode's numbers depend on who shares the batch. Here every
call has a fixed shape (see `scheduler`), which costs padding and gives the same bits alone, in a crowd, in any order of arrival and after an
eviction, on one machine. There is no other mode.

Everything but the device calls runs on the event loop's thread; the calls run one at a time in one worker thread, so that the loop goes on
serving the shop. New weights are loaded between two calls by the same task that makes the calls, so nothing runs meanwhile.
"""

import asyncio
import concurrent.futures
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from intraskill import weights
from intraskill.models.qwen35.config import ModelConfig
from intraskill.rollout.scheduler import Call, CopyCall, DecodeCall, Episode, PrefillCall, Refused, Request, Scheduler, Shapes, noise_key
from intraskill.rollout.slot_programs import MAX_BANNED_SETS, MAX_STOP_IDS, Decoded, DecodeRows, Programs, State
from intraskill.types import Completion, EngineError, Health, InputError, Published, Sampling, Session

log = logging.getLogger(__name__)
T = TypeVar("T")

# How long an idle engine waits after its first request: the other episodes of a collection are about to ask as well.
_GATHER_SECONDS = 0.002


class JaxEngine:
    """An `Engine` over a model in this process.

    Args:
      config: the model; its activation dtype is the cache's.
      params: not copied, so nobody may donate these arrays while the engine serves them. `load_weights` replaces them by arrays of its own.
      num_slots: episodes whose state is kept.
      max_length: tokens an episode may have.
      seed: with a session's `noise` and a token's position, the source of all randomness.
      version: of `params`.
      sizes: further fields of `Shapes`, where its defaults do not suit the machine.
    """

    def __init__(self, config: ModelConfig, params: Any, *, num_slots: int, max_length: int, seed: int, version: int = 0, **sizes: Any):
        if max_length > config.max_positions:
            raise InputError(f"engine max_length is {max_length}: the model has {config.max_positions} positions, give at most that many")
        shapes = Shapes(num_slots=num_slots, max_length=max_length, **{"decode_rows": min(Shapes.decode_rows, num_slots), **sizes})
        self.config = config
        self.shapes = shapes
        self._seed = seed
        self._params = jax.device_put(params, jax.devices()[0])
        self._version = version
        self._digest = ""
        self._programs = Programs(config, shapes)
        self._scheduler = Scheduler(shapes)
        self._state: State | None = None
        self._banned_sets: list[tuple[int, ...]] = [()]
        self._banned = jnp.zeros((MAX_BANNED_SETS, config.vocab_size), bool)
        self._paused = False
        self._loads: deque[tuple[Published, asyncio.Future[None]]] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jax-engine")
        self._seconds = {"prefill": 0.0, "decode": 0.0, "copy": 0.0}
        self._decode_steps = 0

    # ------------------------------------------------------------------------------------------------------------ Engine

    async def generate(self, prompt_ids: Sequence[int], *, session: Session, sampling: Sampling) -> Completion:
        """Continues the session. Cancelling it forgets the session and frees its slot."""
        self._check(prompt_ids, sampling)
        request = Request(sampling, len(prompt_ids), asyncio.get_running_loop().create_future(), time.monotonic())
        self._scheduler.add(session, noise_key(self._seed, session), prompt_ids, request)
        self._wake()
        try:
            return await request.done
        except asyncio.CancelledError:
            self._scheduler.drop(session.id, request)
            raise

    async def release(self, session: Session) -> None:
        """Forgets the session; a turn of it that is in flight raises EngineError."""
        request = self._scheduler.drop(session.id)
        if request is not None:
            _fail(request, f"session {session.id} was released while a turn was in flight")

    async def load_weights(self, published: Published) -> None:
        """Serves `published` from here on; turns in flight pause, and go on with the new weights and no stale state.

        Raises:
          EngineError: the weights could not be read or verified. The engine then still serves what it served before.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loads.append((published, done))
        self._wake()
        await done

    async def healthy(self) -> Health:
        """The version served, and the digest of the arrays that serve it."""
        if not self._digest:
            params = self._params
            digest = await self._in_worker(lambda: weights.digest_of(self.config, params))
            if params is self._params:
                self._digest = digest
        return Health(True, self._version, self._digest)

    # ------------------------------------------------------------------------------------------------------ around the run

    def pause(self) -> None:
        """Computes nothing until `resume`; turns wait, and weights can be loaded."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake()

    async def warmup(self) -> None:
        """Compiles every program; after this nothing compiles."""
        await self._in_worker(lambda: self._programs.compile_all(self._params, self._take_state()))

    async def close(self) -> None:
        """Fails what is in flight and stops the worker thread."""
        self._fail_all("the engine was closed")
        self._worker.shutdown()

    def metrics(self) -> dict[str, float]:
        """Totals since the start.

        `new_tokens` came with prompts and were in no cache yet. `prefilled_tokens` were computed (padding not counted), `copied_tokens` taken
        from another episode's first prompt; together they exceed `new_tokens` by what was rebuilt.
        """
        counts = self._scheduler.counts
        names = ("new_tokens", "prefilled_tokens", "copied_tokens", "padded_tokens", "sampled_tokens", "evictions")
        return {
            **{name: counts[name] for name in names},
            "decode_steps": self._decode_steps,
            **{f"{kind}_seconds": seconds for kind, seconds in self._seconds.items()},
            "compilations": self._programs.num_compilations,
            "compile_seconds": self._programs.compile_seconds,
        }

    # ------------------------------------------------------------------------------------------------------------ running

    def _wake(self) -> None:
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Makes calls until nothing is left to do. It ends then: an idle engine has no task."""
        try:
            await asyncio.sleep(_GATHER_SECONDS)
            while True:
                while self._loads:
                    await self._load(*self._loads.popleft())
                call = None if self._paused else self._scheduler.next_call()
                if call is None:
                    return
                await self._compute(call)
        except Exception as e:
            log.exception("the engine's call failed; every session starts over")
            self._fail_all(f"a device call failed: {type(e).__name__}: {e}")
        except asyncio.CancelledError:
            self._fail_all("the engine was stopped")
            raise

    def _fail_all(self, why: str) -> None:
        for request in self._scheduler.drop_all():
            _fail(request, why)
        self._scheduler.flush()
        while self._loads:
            _settle(self._loads.popleft()[1], EngineError(why))

    async def _compute(self, call: Call) -> None:
        if isinstance(call, CopyCall):
            await self._on_device("copy", lambda state: self._programs.copy(self._params, state, call.pairs))
        elif isinstance(call, PrefillCall):
            arguments = self._prefill_arguments(call)
            await self._on_device("prefill", lambda state: self._programs.prefill(self._params, state, *arguments))
            copies = self._scheduler.prefilled(call)
            if copies is not None:
                await self._compute(copies)
        else:
            await self._decode(call)

    def _prefill_arguments(self, call: PrefillCall) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Rows, fresh, tokens, num_new."""
        n = self.shapes.prefill_rows(call.bucket)
        rows, num_new = np.full(n, self.shapes.no_row, np.int32), np.zeros(n, np.int32)
        fresh, tokens = np.ones(n, bool), np.zeros((n, call.bucket), np.int32)
        for i, episode in enumerate(call.episodes):
            piece = episode.pieces[0]
            rows[i], fresh[i], num_new[i] = episode.row, episode.fresh, piece.stop - piece.start
            tokens[i, : num_new[i]] = episode.tokens[piece.start : piece.stop]
        return rows, fresh, tokens, num_new

    async def _decode(self, call: DecodeCall) -> None:
        rows = self._decode_rows(call.episodes)
        decoded: Decoded | None = None

        def compute(state: State) -> State:
            nonlocal decoded
            state, result = self._programs.decode(self._params, state, self._banned, rows)
            decoded = jax.device_get(result)
            return state

        await self._on_device("decode", compute)
        assert decoded is not None
        counts = np.asarray(decoded.counts)
        self._decode_steps += int(counts.max())
        ids, logprobs = np.asarray(decoded.ids).T.tolist(), np.asarray(decoded.logprobs).T.tolist()
        for i, episode in enumerate(call.episodes):
            request, n = episode.request, int(counts[i])
            if request is None:  # dropped while the call ran
                continue
            if rows.num_forced[i]:
                self._scheduler.forced(episode, n)
                continue
            reason = self._scheduler.sampled(episode, ids[i][:n], logprobs[i][:n], self._version)
            if reason:
                _settle(request.done, _completion(request, episode, reason))

    def _decode_rows(self, episodes: Sequence[Episode]) -> DecodeRows:
        rows, block = self._programs.empty_decode_rows(), self.shapes.decode_block
        for i, episode in enumerate(episodes):
            assert episode.request is not None
            sampling = episode.request.sampling
            rows.rows[i] = episode.row
            rows.key[i] = episode.key
            rows.temperature[i] = sampling.temperature
            rows.stop_ids[i, : len(sampling.stop_ids)] = sampling.stop_ids
            rows.banned_set[i] = self._banned_sets.index(sampling.banned_ids)
            if episode.pieces:  # single steps that built the cache once and build it again
                known = episode.tokens[episode.fed : min(episode.pieces[0].stop, episode.fed + block)]
                rows.budget[i] = rows.num_forced[i] = len(known)
                rows.forced[i, : len(known)] = known
            else:
                left = sampling.max_new_tokens - episode.request.num_sampled
                rows.budget[i], rows.last[i] = min(block, left), left <= block
                rows.position[i] = len(episode.tokens)
        return rows

    async def _on_device(self, kind: str, compute: Callable[[State], State]) -> None:
        """Runs a call that consumes the state and makes the next one, in the worker."""

        def run() -> None:
            state, self._state = self._take_state(), None  # donated: if the call fails there is no state any more
            started, compiled = time.monotonic(), self._programs.compile_seconds
            self._state = jax.block_until_ready(compute(state))
            self._seconds[kind] += time.monotonic() - started - (self._programs.compile_seconds - compiled)

        await self._in_worker(run)

    def _take_state(self) -> State:
        if self._state is None:
            self._state = self._programs.init_state()
        return self._state

    async def _in_worker(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    # ------------------------------------------------------------------------------------------------------------ weights

    async def _load(self, published: Published, done: "asyncio.Future[None]") -> None:
        try:
            params = await self._in_worker(lambda: self._read(published))
        except (Exception, asyncio.CancelledError) as e:
            _settle(done, EngineError(f"version {published.version} was not loaded, version {self._version} is still served: {e}"))
            if not isinstance(e, weights.WeightsError):
                raise
            return
        self._params, self._version, self._digest = params, published.version, published.digest
        self._scheduler.flush()
        _settle(done, None)

    def _read(self, published: Published) -> Any:
        """The published parameters on the device, compared with what was published after they got there."""
        params = jax.device_put(weights.read(published, self.config), jax.devices()[0])
        weights.verify(published, self.config, params)
        return params

    # -------------------------------------------------------------------------------------------------------------- checks

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Refuses what the programs could not do, before anything is queued."""
        ids = np.asarray(prompt_ids, np.int64)
        if ids.size == 0 or ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise Refused(f"a prompt needs ids in [0, {self.config.vocab_size}), at least one: got {ids.size}, {ids[:8].tolist()}...")
        if sampling.top_p != 1 or sampling.top_k != 0:
            raise InputError(f"top_p {sampling.top_p}, top_k {sampling.top_k}: the embedded engine samples the whole distribution, set 1 and 0")
        if len(sampling.stop_ids) > MAX_STOP_IDS:
            raise InputError(f"{len(sampling.stop_ids)} stop ids: the embedded engine takes at most {MAX_STOP_IDS}")
        if sampling.banned_ids not in self._banned_sets:
            self._add_banned(sampling.banned_ids)

    def _add_banned(self, banned_ids: tuple[int, ...]) -> None:
        if len(self._banned_sets) == MAX_BANNED_SETS:
            raise InputError(f"more than {MAX_BANNED_SETS - 1} different sets of banned ids: use one set for all requests")
        if min(banned_ids) < 0 or max(banned_ids) >= self.config.vocab_size or len(set(banned_ids)) >= self.config.vocab_size:
            raise InputError(f"banned ids must lie in [0, {self.config.vocab_size}) and leave one to sample")
        row = np.zeros(self.config.vocab_size, bool)
        row[list(banned_ids)] = True
        self._banned = self._banned.at[len(self._banned_sets)].set(jnp.asarray(row))
        self._banned_sets.append(banned_ids)


def _completion(request: Request, episode: Episode, reason: str) -> Completion:
    return Completion(
        ids=tuple(episode.tokens[request.prompt_length :]),
        logprobs=tuple(request.logprobs),
        finish_reason=reason,
        weight_versions=tuple(request.versions),
        cached_tokens=request.cached_tokens,
        latency=time.monotonic() - request.started,
    )


def _fail(request: Request, why: str) -> None:
    _settle(request.done, EngineError(why))


def _settle(future: "asyncio.Future[Any]", outcome: Any) -> None:
    """Resolves a future that its waiter may have cancelled."""
    if future.done():
        return
    if isinstance(outcome, EngineError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
