"""The shop as a service: an aiohttp process, all its episodes on one read-only catalogue and index.

Every step carries a sequence number, so a request repeated after a lost response is answered again and not executed twice. Idle episodes
expire. Errors are JSON {"error", "message"}; what an agent did wrong is an ordinary answer, what a client did wrong is a 4xx.
"""

import asyncio
import collections
import contextlib
import dataclasses
import errno
import hmac
import math
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from aiohttp import web

from shop_env import ui
from shop_env.answers import Refusal, dumps, json_answer, read_object, typed_errors
from shop_env.errors import EpisodeEnded, InvalidSetting, InvalidTask, PortBusy, ShopEnvError
from shop_env.peers import FORWARDED, KEY_HEADER, Peers
from shop_env.reward import public_detail
from shop_env.session import TOOLS, Session, Shop, Step
from shop_env.tasks import Task

MAX_DEPTH = 16  # of nested values in an action's arguments; the tools take strings


@dataclasses.dataclass
class Episode:
    """One open or finished episode. `answer` is the response to step `seq`, kept for repeated requests."""

    session: Session
    privileged: bool
    expires: float
    seq: int = 0
    request: tuple[Any, Any] = (None, None)
    answer: bytes = b""
    transcript: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def public_task(task: Task) -> dict[str, Any]:
    return {"id": task.id, "instruction": task.instruction, "persona": dict(task.persona)}


class Service:
    """Episodes and the handlers over them. Handlers never await between reading and changing an episode, so each step is atomic.

    Args:
      shop: what is served.
      privileged_key: callers that send it may see goals and products; None: nobody may.
      lease_seconds: an episode that is not touched for this long is forgotten.
      capacity: most episodes that run at once. As many finished ones are kept for those who ask again; beyond that the oldest is forgotten.
      open_wait_seconds: how long opening one waits for room before it is refused with 503.
      max_body_bytes: larger request bodies are refused with 413.
      peers: the other processes of this service, when there are any.
      clock: seconds that only grow; leases are measured with it.
    """

    def __init__(
        self,
        shop: Shop,
        *,
        privileged_key: str | None = None,
        lease_seconds: float = 900.0,
        capacity: int = 512,
        open_wait_seconds: float = 10.0,
        max_body_bytes: int = 65536,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        for name, value in (("lease_seconds", lease_seconds), ("capacity", capacity), ("max_body_bytes", max_body_bytes)):
            if not 0 < value < math.inf:
                raise InvalidSetting(f"{name} must be > 0 and finite, got {value}")
        if not 0 <= open_wait_seconds < math.inf or privileged_key == "":
            raise InvalidSetting("open_wait_seconds must be >= 0 and finite, and privileged_key may not be empty (None: no privileged access)")
        self.shop = shop
        self.lease_seconds = lease_seconds
        self.capacity = capacity
        self.open_wait_seconds = open_wait_seconds
        self.max_body_bytes = max_body_bytes
        self.peers = peers
        self.episodes: dict[str, Episode] = {}
        self._finished: dict[str, None] = {}  # ids of finished episodes, oldest first
        self._clock = clock
        self._catalog_hash = shop.world.catalog.hash  # half a second for a large catalogue: now, not in the first request
        self.counts: collections.Counter[str] = collections.Counter()
        self._key = privileged_key
        self._room = asyncio.Semaphore(capacity)
        self._split_bodies: dict[str, bytes] = {}
        self._tools_body = dumps({"tools": TOOLS})
        self._limits = {"max_actions": shop.max_actions, "page_size": shop.page_size, "lease_seconds": lease_seconds}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/episodes", self.open),
            web.post("/v1/episodes/{id}/step", self.step),
            web.delete("/v1/episodes/{id}", self.close),
            web.get("/v1/episodes/{id}", self.transcript),
            web.get("/v1/tasks", self.tasks),
            web.get("/v1/tasks/{id}/goal", self.goal),
            web.get("/v1/products/{id}", self.product),
            web.get("/v1/tools", self.tools),
            web.get("/healthz", self.healthz),
            web.get("/metrics", self.metrics),
        ]

    # ----------------------------------------------------------------------------------------------------- episodes

    async def open(self, request: web.Request) -> web.Response:
        body = await read_object(request, required=set(), allowed={"task_id", "task", "privileged"})
        privileged = body.get("privileged", False)
        if not isinstance(privileged, bool):
            raise Refusal(400, "bad_field", f"privileged must be true or false, got {privileged!r:.40}")
        if privileged or "task" in body:
            self._require_key(request)
        task = self._task_of(body)
        if self._is_full() and (elsewhere := await self._open_elsewhere(request)):
            return elsewhere
        await self._take_room(0.0 if FORWARDED in request.headers else self.open_wait_seconds)
        session = Session(self.shop, task)
        episode_id = self.peers.new_id() if self.peers else secrets.token_urlsafe(12)
        self.episodes[episode_id] = Episode(session, privileged, self._clock() + self.lease_seconds)
        self.counts["opened"] += 1
        answer = {"episode_id": episode_id, "task": public_task(task), "observation": session.observation, "state": session.state}
        return json_answer(dumps({**answer, "limits": self._limits}), 201)

    def _task_of(self, body: Mapping[str, Any]) -> Task:
        if ("task_id" in body) == ("task" in body):
            raise Refusal(400, "bad_field", "give exactly one of task_id and task")
        if "task_id" in body:
            if not isinstance(body["task_id"], str):
                raise Refusal(400, "bad_field", f"task_id must be a string, got {type(body['task_id']).__name__}")
            return self._known_task(body["task_id"])
        try:
            task = Task.from_json(body["task"])
            found = task.goal.product_id in self.shop.world.catalog
        except (InvalidTask, TypeError, ValueError, AttributeError) as e:
            raise Refusal(400, "bad_field", f"task: {e}") from None
        if not found:
            raise Refusal(400, "bad_field", f"task {task.id!r}: its product is not in this catalogue")
        return task

    def _known_task(self, task_id: str) -> Task:
        try:
            return self.shop.task(task_id)
        except InvalidTask as e:
            raise Refusal(404, "unknown_task", str(e)) from None

    def _is_full(self) -> bool:
        if self._room.locked():
            self._expire()
        return self._room.locked()

    async def _open_elsewhere(self, request: web.Request) -> web.Response | None:
        """The answer of the first other worker that has room."""
        if self.peers is None or FORWARDED in request.headers:
            return None
        for number in self.peers.others:
            with contextlib.suppress(Refusal):  # a worker that does not answer has no room
                answer = await self.peers.pass_on(number, request)
                if answer.status != 503:
                    return answer
        return None

    async def _take_room(self, wait_seconds: float) -> None:
        if not self._room.locked():
            await self._room.acquire()
            return
        try:
            await asyncio.wait_for(self._room.acquire(), wait_seconds)
        except TimeoutError:
            self.counts["refused_for_capacity"] += 1
            wait = str(max(1, math.ceil(wait_seconds)))
            message = f"all {self.capacity} episodes are in use; close some, wait, or raise --capacity"
            raise Refusal(503, "at_capacity", message, {"Retry-After": wait}) from None

    async def step(self, request: web.Request) -> web.Response:
        body = await read_object(request, required={"seq", "tool", "arguments"}, allowed={"seq", "tool", "arguments"})
        seq, tool, arguments = body["seq"], body["tool"], body["arguments"]
        if isinstance(seq, bool) or not isinstance(seq, int):
            raise Refusal(400, "bad_field", f"seq must be an integer, got {seq!r:.40}")
        if not isinstance(tool, str) or not isinstance(arguments, dict):
            raise Refusal(400, "bad_field", "tool must be a string and arguments an object")
        if _is_deep(arguments):
            raise Refusal(400, "bad_field", f"arguments are nested more than {MAX_DEPTH} deep; the tools take one string each")
        episode = self._episode(request)
        if seq == episode.seq and seq > 0:
            if episode.request != (tool, arguments):
                raise Refusal(409, "sequence_conflict", f"step {seq} was already taken with another action; is a second client on this episode?")
            self.counts["replayed"] += 1
            return json_answer(episode.answer)
        if seq != episode.seq + 1:
            raise Refusal(409, "sequence_gap", f"got step {seq}, expected {episode.seq + 1}: number the steps 1, 2, 3, ...")
        try:
            step = episode.session.step(tool, arguments)
        except EpisodeEnded as e:
            raise Refusal(410, "episode_ended", str(e)) from None
        episode.seq, episode.request, episode.answer = seq, (tool, arguments), dumps(_step_answer(step, seq, episode.privileged))
        episode.transcript.append({"tool": tool, "arguments": arguments, "feedback": step.feedback, "observation": step.observation})
        self.counts["steps"] += 1
        if step.done:
            self.counts[f"ended_{step.status}"] += 1
            self._room.release()
            self._finished[request.match_info["id"]] = None
            if len(self._finished) > self.capacity:
                self._forget(next(iter(self._finished)))
        return json_answer(episode.answer)

    async def close(self, request: web.Request) -> web.Response:
        self._episode(request)
        self._forget(request.match_info["id"])
        self.counts["closed"] += 1
        return json_answer(b"{}")

    async def transcript(self, request: web.Request) -> web.Response:
        session = (episode := self._episode(request)).session
        answer = {"task": public_task(session.task), "steps": episode.transcript, "state": session.state}
        return json_answer(dumps({**answer, "done": session.done, "status": session.status}))

    def _episode(self, request: web.Request) -> Episode:
        """The episode of the address, its lease renewed."""
        episode_id = request.match_info["id"]
        episode = self.episodes.get(episode_id)
        now = self._clock()
        if episode is not None and episode.expires <= now:
            self._forget(episode_id)
            self.counts["expired"] += 1
            episode = None
        if episode is None:
            message = f"no episode {episode_id[:64]!r}: it was never opened, was closed, or was idle for {self.lease_seconds:g} s"
            raise Refusal(404, "unknown_episode", message)
        episode.expires = now + self.lease_seconds
        return episode

    def _forget(self, episode_id: str) -> None:
        if not self.episodes.pop(episode_id).session.done:
            self._room.release()
        self._finished.pop(episode_id, None)

    def _expire(self) -> None:
        now = self._clock()
        for episode_id in [key for key, episode in self.episodes.items() if episode.expires <= now]:
            self._forget(episode_id)
            self.counts["expired"] += 1

    async def sweep(self, _: web.Application) -> AsyncIterator[None]:
        """Cleanup context: forgets expired episodes while the application runs."""

        async def run() -> None:
            while True:
                await asyncio.sleep(min(self.lease_seconds / 2, 10.0))
                self._expire()

        task = asyncio.create_task(run())
        yield
        task.cancel()

    # ---------------------------------------------------------------------------------------------------- read only

    async def tasks(self, request: web.Request) -> web.Response:
        split, splits = request.query.get("split", ""), self.shop.world.splits
        if split not in splits:
            raise Refusal(404, "unknown_split", f"no split {split[:64]!r}; ?split= takes one of {sorted(splits)}")
        if split not in self._split_bodies:
            self._split_bodies[split] = dumps({"tasks": [public_task(self.shop.world.tasks[i]) for i in splits[split]]})
        return json_answer(self._split_bodies[split])

    async def goal(self, request: web.Request) -> web.Response:
        self._require_key(request)
        task = self._known_task(request.match_info["id"])
        return json_answer(dumps({**task.goal.to_json(), "full_instruction": task.full_instruction}))

    async def product(self, request: web.Request) -> web.Response:
        self._require_key(request)
        product = self.shop.world.catalog.get(request.match_info["id"])
        if product is None:
            raise Refusal(404, "unknown_product", f"no product {request.match_info['id'][:64]!r} in this catalogue")
        return json_answer(dumps(product.to_json()))

    async def tools(self, _: web.Request) -> web.Response:
        return json_answer(self._tools_body)

    async def healthz(self, request: web.Request) -> web.Response:
        world = self.shop.world
        facts = {"products": len(world.catalog), "tasks": len(world.tasks), "splits": {name: len(ids) for name, ids in world.splits.items()}}
        numbers = await self._all_numbers(request)
        answer = {"ok": True, "catalog": self._catalog_hash, **facts, "episodes": numbers["episodes_held"], "workers": numbers["workers"]}
        return json_answer(dumps(answer))

    async def metrics(self, request: web.Request) -> web.Response:
        if FORWARDED in request.headers:
            return json_answer(dumps(self._numbers()))
        numbers = sorted((await self._all_numbers(request)).items())
        kinds = {name: "counter" if name.endswith("_total") else "gauge" for name, _ in numbers}
        lines = [line for name, value in numbers for line in (f"# TYPE shop_{name} {kinds[name]}", f"shop_{name} {value}")]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    def _numbers(self) -> dict[str, int]:
        """This process's part of /metrics."""
        held = len(self.episodes)
        gauges = {"workers": 1, "episodes_active": held - len(self._finished), "episodes_held": held}
        return gauges | {f"{name}_total": count for name, count in self.counts.items()}

    async def _all_numbers(self, request: web.Request) -> collections.Counter[str]:
        """Summed over the workers that answer; how many did is one of the numbers."""
        total = collections.Counter(self._numbers())
        if self.peers and FORWARDED not in request.headers:
            for numbers in await self.peers.ask_all("/metrics"):
                total.update(numbers)
        return total

    def _require_key(self, request: web.Request) -> None:
        given = request.headers.get(KEY_HEADER, "")
        if self._key is None or not hmac.compare_digest(given.encode("utf-8", "replace"), self._key.encode()):
            raise Refusal(403, "not_privileged", f"this needs the server's privileged key in the header {KEY_HEADER}")


def _is_deep(value: Any) -> bool:
    """Whether containers are nested more than MAX_DEPTH deep; deeper ones could be read but not be written again."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer) if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _step_answer(step: Step, seq: int, privileged: bool) -> dict[str, Any]:
    answer = {"seq": seq, "observation": step.observation, "state": step.state, "feedback": step.feedback, "done": step.done}
    if step.done:
        detail = step.reward_detail if privileged else public_detail(step.reward_detail)
        answer |= {"status": step.status, "reward": step.reward, "success": step.success, "reward_detail": dict(detail)}
    return answer


def make_app(shop: Shop, *, peers: Peers | None = None, **settings: Any) -> web.Application:
    """The application; `settings` are those of `Service`. Call it inside the event loop's thread or before the loop starts."""
    service = Service(shop, peers=peers, **settings)
    middlewares = [typed_errors, *([peers.forward] if peers else [])]
    app = web.Application(middlewares=middlewares, client_max_size=service.max_body_bytes)
    app.add_routes([*service.routes(), *ui.routes()])
    app.cleanup_ctx.extend([service.sweep, *([peers.connections] if peers else [])])
    app[SERVICE] = service
    return app


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


async def start(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Binds and serves; returns the runner (to be cleaned up) and the port. A worker shares the port, and listens on its unix socket, too."""
    peers = app[SERVICE].peers
    # An agent may think for long between two steps, and a new connection might reach another worker.
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=3600.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, reuse_port=bool(peers)).start()
        bound = runner.addresses[0][1]
        if peers:
            await web.UnixSite(runner, str(peers.socket)).start()
    except OSError as e:
        await runner.cleanup()
        raise cannot_listen(host, port, e) from None
    return runner, bound


def cannot_listen(host: str, port: int, error: OSError) -> ShopEnvError:
    """Why an address cannot be served, in words."""
    if error.errno == errno.EADDRINUSE:
        return PortBusy(f"port {port} on {host} is in use; stop what listens there, choose another port, or 0 for any free one")
    return InvalidSetting(f"cannot listen on {host}:{port} ({error.strerror or error}); choose another host or port")


class ServerThread:
    """The real application on a loopback port, in a thread with its own event loop. A context manager.

    >>> with ServerThread(shop) as server:  # doctest: +SKIP
    ...     client = ShopClient(server.url)
    """

    def __init__(self, shop: Shop, port: int = 0, host: str = "127.0.0.1", **settings: Any):
        self._shop, self._port, self._host, self._settings = shop, port, host, settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.url = ""
        self.service: Service | None = None  # for tests and metrics; touch it only through the loop

    def __enter__(self) -> "ServerThread":
        started = threading.Event()
        failure: list[BaseException] = []
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(started, failure),), name="shop-server", daemon=True)
        self._thread.start()
        started.wait()
        if failure:
            self._thread.join()
            raise failure[0]
        return self

    async def _serve(self, started: threading.Event, failure: list[BaseException]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            app = make_app(self._shop, **self._settings)
            runner, port = await start(app, self._host, self._port)
            self.service, self.url = app[SERVICE], f"http://{self._host}:{port}"
        except BaseException as e:  # handed to the thread that waits in __enter__
            failure.append(e)
            return
        finally:
            started.set()
        await self._stop.wait()
        await runner.cleanup()

    def __exit__(self, *_: Any) -> None:
        assert self._loop is not None and self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
