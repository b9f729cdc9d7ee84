"""SGLang, or anything that speaks its contract, as the run's engine: one client over any number of replicas.

A session stays with one replica, which keeps its prefix; new sessions go where the fewest are. A replica that drops a connection or
samples with other weights than it was told takes no more traffic until it answers again and serves, verified, the current weights: so one
that was restarted gets them before its first turn, and one that still compiles is waited for. The client never restarts or kills a server.

A turn that failed is asked for again from its start, from the replica that is there, under the same limits. Nothing of a turn that was not
received whole is used.
"""

import asyncio
import collections
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

import aiohttp

from intraskill import manifest
from intraskill.rollout import wire
from intraskill.rollout.replica import Limits, Replica, Transient
from intraskill.types import Completion, EngineError, Health, InputError, Published, Sampling, Session

log = logging.getLogger(__name__)

BACKOFF_SECONDS = (0.2, 0.4, 0.8, 1.6, 3.2)  # waits between the attempts of a turn or an update
_PROBE_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)  # waits between the looks at a replica that is away; the last one repeats
_KEEPALIVE_SECONDS = 4.0  # below the 5 s after which SGLang's server closes an idle connection


class SGLangEngine:
    """An `Engine` over HTTP. For one event loop.

    Args:
      addresses: of the servers themselves; a router between does not forward weight updates.
      layout: of the published weights: "orbax", or "safetensors" for `/update_weights_from_disk`. Either way the servers need our loader,
        which also verifies.
      limits: see `Limits`.
      backoff: waits between attempts, in seconds.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        layout: str = manifest.ORBAX,
        limits: Limits | None = None,
        backoff: Sequence[float] = BACKOFF_SECONDS,
    ):
        if not addresses or len(set(addresses)) != len(addresses):
            raise InputError(f"engine addresses {list(addresses)}: give each server's address once, e.g. ('http://127.0.0.1:30000',)")
        self._limits = limits or Limits()
        self._replicas = [Replica(a, self._connections, self._limits, layout) for a in addresses]
        self._backoff = tuple(backoff)
        self._http: aiohttp.ClientSession | None = None
        self._sessions: dict[str, Replica] = {}
        self._turns: dict[str, Replica] = {}  # request id -> where it runs
        self._numbers = itertools.count()
        self._published: Published | None = None
        self._loading = asyncio.Lock()
        self._recoveries: dict[Replica, asyncio.Task[None]] = {}
        self._reasons: dict[Replica, str] = {}  # why a replica is away
        self._changed = asyncio.Event()  # set, and replaced, whenever a replica begins to serve or is given up

    # ------------------------------------------------------------------------------------------------------------ Engine

    async def generate(self, prompt_ids: Sequence[int], *, session: Session, sampling: Sampling) -> Completion:
        """Continues the session, wherever it is served; cancelling it aborts the turn on the server."""
        if self._published is None:
            raise EngineError("no weights were loaded yet: call load_weights first")
        problem, too_slow = "", set[Replica]()
        for wait in (*self._backoff, None):
            replica = await self._place(session, too_slow)
            try:
                return await self._turn(replica, prompt_ids, session, sampling)
            except Transient as e:
                problem = str(e)
                if e.timed_out:  # what answers /model_info may still hang where it computes: its next update has to show
                    too_slow.add(replica)
                    replica.settled = False
                if not e.busy:
                    self._suspect(replica, problem)
            if wait is not None:
                await asyncio.sleep(wait)
        raise EngineError(f"a turn of session {session.id} failed {len(self._backoff) + 1} times, last: {problem}")

    async def release(self, session: Session) -> None:
        """Forgets where the session was served, and lets the replica forget it."""
        replica = self._sessions.pop(session.id, None)
        if replica is not None and replica.serving:
            await replica.abort(wire.request_id(session, ""))

    async def load_weights(self, published: Published) -> None:
        """Returns when every replica that takes traffic serves exactly `published`; those that are away get it before they take any.

        The first call waits for every replica to come up; later ones do not wait for those that were lost meanwhile.

        Raises:
          EngineError: a replica could not be verified, or none is there.
        """
        async with self._loading:
            first, self._published = self._published is None, published
            serving = [r for r in self._replicas if first or r.serving]
            for replica in set(self._replicas) - set(serving):
                self._suspect(replica, self._reasons.get(replica, ""))
            patience = self._limits.start_seconds if first else 0.0
            outcomes = await asyncio.gather(*(self._update(r, published, patience) for r in serving), return_exceptions=True)
            for replica, outcome in zip(serving, outcomes, strict=True):
                if outcome is None:
                    self._serve(replica)
                elif isinstance(outcome, Transient) and not first:
                    self._suspect(replica, str(outcome))
                else:
                    replica.serving = False
            for outcome in outcomes:
                if isinstance(outcome, Transient) and first:
                    raise EngineError(f"{outcome}; waited {patience:g} s: start the server, or correct engine.addresses") from outcome
                if outcome is not None and not isinstance(outcome, Transient):
                    raise outcome
            await self._somebody()

    @contextlib.asynccontextmanager
    async def lending_memory(self) -> AsyncIterator[None]:
        """For the block, the servers give up their memory on devices that they share with the trainer. `load_weights` has to follow.

        The servers must have been started with `--enable-memory-saver`. A server that does not answer is looked after like any other that is lost.

        Raises:
          EngineError: a server refuses.
        """
        lenders = [r for r in self._replicas if r.serving]
        await self._each(lenders, Replica.lend_memory)
        try:
            yield
        finally:
            await self._each([r for r in lenders if r.serving], Replica.take_memory_back)

    async def _each(self, replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[None]]) -> None:
        for replica, outcome in zip(replicas, await asyncio.gather(*map(call, replicas), return_exceptions=True), strict=True):
            if isinstance(outcome, Transient):
                self._suspect(replica, str(outcome))
            elif outcome is not None:
                raise outcome

    async def healthy(self) -> Health:
        """Reads the digest of every serving replica's live parameters anew."""
        serving = [r for r in self._replicas if r.serving]
        away = [f"{r.address} is away: {self._reasons.get(r, 'never loaded')}" for r in self._replicas if not r.serving]
        try:
            digests = await asyncio.gather(*(r.digest() for r in serving))
        except (EngineError, Transient) as e:
            return Health(False, -1, "", str(e))
        if self._published is None or not serving:
            return Health(False, -1, "", "; ".join(away))
        same = set(digests) == {self._published.digest}
        return Health(same, self._published.version if same else -1, digests[0], "; ".join(away))

    async def close(self) -> None:
        """Aborts what still runs on the servers, and closes the connections."""
        recoveries = list(self._recoveries.values())
        for task in recoveries:
            task.cancel()
        await asyncio.gather(*recoveries, return_exceptions=True)
        await asyncio.gather(*(r.abort(request) for request, r in self._turns.items() if r.serving))
        if self._http is not None:
            await self._http.close()
            self._http = None

    # ------------------------------------------------------------------------------------------------------------- turns

    async def _turn(self, replica: Replica, prompt_ids: Sequence[int], session: Session, sampling: Sampling) -> Completion:
        request = wire.request_id(session, str(next(self._numbers)))
        self._turns[request] = replica
        try:
            return await replica.generate(request, prompt_ids, session, sampling)
        except asyncio.CancelledError:
            await replica.abort(request)
            raise
        except Transient as e:
            if e.timed_out:  # it may still be running there
                await replica.abort(request)
            raise
        finally:
            del self._turns[request]

    async def _place(self, session: Session, avoid: Collection[Replica]) -> Replica:
        """The session's replica, or the one with the fewest sessions; waits while none serves, and takes one to avoid if there is no other."""
        await self._somebody()
        serving = [r for r in self._replicas if r.serving]
        allowed = [r for r in serving if r not in avoid] or serving
        replica = self._sessions.get(session.id)
        if replica not in allowed:
            held = collections.Counter(self._sessions.values())
            replica = min(allowed, key=lambda r: held[r])
            self._sessions[session.id] = replica
        return replica

    async def _somebody(self) -> None:
        """Waits until a replica serves. Raises EngineError when none does in time, or none is expected back."""
        try:
            async with asyncio.timeout(self._limits.start_seconds):
                while not any(r.serving for r in self._replicas):
                    if not self._recoveries:
                        raise EngineError(self._nobody())
                    await self._changed.wait()
        except TimeoutError:
            raise EngineError(self._nobody()) from None

    def _nobody(self) -> str:
        reasons = "; ".join(f"{r.address}: {self._reasons.get(r, 'never loaded')}" for r in self._replicas)
        return f"no engine serves ({reasons}): look at the servers' logs, restart them, then resume the run"

    # ---------------------------------------------------------------------------------------------------------- replicas

    def _serve(self, replica: Replica) -> None:
        replica.serving = True
        self._reasons.pop(replica, None)
        self._notify()

    def _suspect(self, replica: Replica, why: str) -> None:
        """Takes a replica out of traffic until it serves the current weights again."""
        if replica.serving:
            log.warning("engine %s takes no turns for now: %s", replica.address, why)
        replica.serving = False
        self._reasons[replica] = why
        if replica not in self._recoveries:
            task = asyncio.get_running_loop().create_task(self._recover(replica))
            self._recoveries[replica] = task
            task.add_done_callback(lambda _: self._recovered(replica))

    async def _recover(self, replica: Replica) -> None:
        """Looks at a replica until it answers, brings it to the current weights, and gives it back to traffic."""
        for wait in itertools.chain(_PROBE_SECONDS, itertools.repeat(_PROBE_SECONDS[-1])):
            published = self._published
            assert published is not None
            try:
                if not replica.settled or await replica.version_name() != str(published.version):
                    replica.warm = False
                    await self._update(replica, published, 0.0)
                if published == self._published:
                    self._serve(replica)
                    return
            except Transient as e:
                self._reasons[replica] = str(e)
                await asyncio.sleep(wait)
            except EngineError as e:
                self._reasons[replica] = str(e)
                log.error("engine %s stays out until the next weights: %s", replica.address, e)
                return

    def _recovered(self, replica: Replica) -> None:
        del self._recoveries[replica]
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _update(self, replica: Replica, published: Published, patience: float) -> None:
        """Loads and verifies; starts over while the connection is bad, a fixed number of times and then for `patience` seconds."""
        end = asyncio.get_running_loop().time() + patience
        for attempt in itertools.count():
            try:
                async with replica.updating:
                    return await replica.update(published)
            except Transient:
                if attempt >= len(self._backoff) and asyncio.get_running_loop().time() >= end:
                    raise
            await asyncio.sleep(self._backoff[attempt] if attempt < len(self._backoff) else _PROBE_SECONDS[-1])

    # ------------------------------------------------------------------------------------------------------- connections

    def _connections(self) -> aiohttp.ClientSession:
        """Opened on first use, because it belongs to the running loop. No limit on connections: every episode may have a turn in flight."""
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS))
        return self._http
