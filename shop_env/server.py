"""The shop as a service: one aiohttp process, all episodes on one read-only catalogue and index.

Every step carries a sequence number, so a request repeated after a lost response is answered again and not executed twice. Idle episodes
expire. Errors are JSON {"error", "message"}; what an agent did wrong is an ordinary answer, what a client did wrong is a 4xx.
"""

import asyncio
import collections
import dataclasses
import errno
import hmac
import json
import logging
import math
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from shop_env.errors import EpisodeEnded, InvalidSetting, InvalidTask, PortBusy
from shop_env.reward import public_detail
from shop_env.session import TOOLS, Session, Shop, Step
from shop_env.tasks import Task

KEY_HEADER = "X-Privileged-Key"
_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _json(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


class Refusal(Exception):
    """An answer with a 4xx or 503 status."""

    def __init__(self, status: int, error: str, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.error, self.headers = status, error, headers


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
      capacity: most episodes that run at once; finished ones do not count.
      open_wait_seconds: how long opening one waits for room before it is refused with 503.
      max_body_bytes: larger request bodies are refused with 413.
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
    ):
        for name, value in (("lease_seconds", lease_seconds), ("capacity", capacity), ("max_body_bytes", max_body_bytes)):
            if not value > 0:
                raise InvalidSetting(f"{name} must be > 0, got {value}")
        if open_wait_seconds < 0 or privileged_key == "":
            raise InvalidSetting("open_wait_seconds must be >= 0, and privileged_key may not be empty (None: no privileged access)")
        self.shop = shop
        self.lease_seconds = lease_seconds
        self.capacity = capacity
        self.open_wait_seconds = open_wait_seconds
        self.max_body_bytes = max_body_bytes
        self.episodes: dict[str, Episode] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self._key = privileged_key
        self._room = asyncio.Semaphore(capacity)
        self._split_bodies: dict[str, bytes] = {}
        self._tools_body = _dumps({"tools": TOOLS})
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
        body = await _read_object(request, required=set(), allowed={"task_id", "task", "privileged"})
        privileged = body.get("privileged", False)
        if not isinstance(privileged, bool):
            raise Refusal(400, "bad_field", f"privileged must be true or false, got {privileged!r:.40}")
        if privileged or "task" in body:
            self._require_key(request)
        task = self._task_of(body)
        await self._take_room()
        session = Session(self.shop, task)
        episode_id = secrets.token_urlsafe(12)
        self.episodes[episode_id] = Episode(session, privileged, time.monotonic() + self.lease_seconds)
        self.counts["opened"] += 1
        answer = {"episode_id": episode_id, "task": public_task(task), "observation": session.observation, "state": session.state}
        return _json(_dumps({**answer, "limits": self._limits}), 201)

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

    async def _take_room(self) -> None:
        if self._room.locked():
            self._expire()
        if not self._room.locked():
            await self._room.acquire()
            return
        try:
            await asyncio.wait_for(self._room.acquire(), self.open_wait_seconds)
        except TimeoutError:
            self.counts["refused_for_capacity"] += 1
            wait = str(max(1, math.ceil(self.open_wait_seconds)))
            message = f"all {self.capacity} episodes are in use; close some, wait, or raise --capacity"
            raise Refusal(503, "at_capacity", message, {"Retry-After": wait}) from None

    async def step(self, request: web.Request) -> web.Response:
        body = await _read_object(request, required={"seq", "tool", "arguments"}, allowed={"seq", "tool", "arguments"})
        seq, tool, arguments = body["seq"], body["tool"], body["arguments"]
        if isinstance(seq, bool) or not isinstance(seq, int):
            raise Refusal(400, "bad_field", f"seq must be an integer, got {seq!r:.40}")
        if not isinstance(tool, str) or not isinstance(arguments, dict):
            raise Refusal(400, "bad_field", "tool must be a string and arguments an object")
        episode = self._episode(request)
        if seq == episode.seq and seq > 0:
            if episode.request != (tool, arguments):
                raise Refusal(409, "sequence_conflict", f"step {seq} was already taken with another action; is a second client on this episode?")
            self.counts["replayed"] += 1
            return _json(episode.answer)
        if seq != episode.seq + 1:
            raise Refusal(409, "sequence_gap", f"got step {seq}, expected {episode.seq + 1}: number the steps 1, 2, 3, ...")
        try:
            step = episode.session.step(tool, arguments)
        except EpisodeEnded as e:
            raise Refusal(410, "episode_ended", str(e)) from None
        episode.seq, episode.request, episode.answer = seq, (tool, arguments), _dumps(_step_answer(step, seq, episode.privileged))
        episode.transcript.append({"tool": tool, "arguments": arguments, "feedback": step.feedback, "observation": step.observation})
        self.counts["steps"] += 1
        if step.done:
            self.counts[f"ended_{step.status}"] += 1
            self._room.release()
        return _json(episode.answer)

    async def close(self, request: web.Request) -> web.Response:
        self._episode(request)
        self._forget(request.match_info["id"])
        self.counts["closed"] += 1
        return _json(b"{}")

    async def transcript(self, request: web.Request) -> web.Response:
        session = (episode := self._episode(request)).session
        answer = {"task": public_task(session.task), "steps": episode.transcript, "state": session.state}
        return _json(_dumps({**answer, "done": session.done, "status": session.status}))

    def _episode(self, request: web.Request) -> Episode:
        """The episode of the address, its lease renewed."""
        episode_id = request.match_info["id"]
        episode = self.episodes.get(episode_id)
        now = time.monotonic()
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

    def _expire(self) -> None:
        now = time.monotonic()
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
            self._split_bodies[split] = _dumps({"tasks": [public_task(self.shop.world.tasks[i]) for i in splits[split]]})
        return _json(self._split_bodies[split])

    async def goal(self, request: web.Request) -> web.Response:
        self._require_key(request)
        task = self._known_task(request.match_info["id"])
        return _json(_dumps({**task.goal.to_json(), "full_instruction": task.full_instruction}))

    async def product(self, request: web.Request) -> web.Response:
        self._require_key(request)
        product = self.shop.world.catalog.get(request.match_info["id"])
        if product is None:
            raise Refusal(404, "unknown_product", f"no product {request.match_info['id'][:64]!r} in this catalogue")
        return _json(_dumps(product.to_json()))

    async def tools(self, _: web.Request) -> web.Response:
        return _json(self._tools_body)

    async def healthz(self, _: web.Request) -> web.Response:
        world = self.shop.world
        facts = {"products": len(world.catalog), "tasks": len(world.tasks), "splits": {name: len(ids) for name, ids in world.splits.items()}}
        return _json(_dumps({"ok": True, "catalog": world.catalog.hash, **facts, "episodes": len(self.episodes)}))

    async def metrics(self, _: web.Request) -> web.Response:
        active = sum(not episode.session.done for episode in self.episodes.values())
        lines = ["# TYPE shop_episodes_active gauge", f"shop_episodes_active {active}", "# TYPE shop_episodes_held gauge"]
        lines.append(f"shop_episodes_held {len(self.episodes)}")
        for name, count in sorted(self.counts.items()):
            lines += [f"# TYPE shop_{name}_total counter", f"shop_{name}_total {count}"]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    def _require_key(self, request: web.Request) -> None:
        given = request.headers.get(KEY_HEADER, "")
        if self._key is None or not hmac.compare_digest(given.encode("utf-8", "replace"), self._key.encode()):
            raise Refusal(403, "not_privileged", f"this needs the server's privileged key in the header {KEY_HEADER}")


def _step_answer(step: Step, seq: int, privileged: bool) -> dict[str, Any]:
    answer = {"seq": seq, "observation": step.observation, "state": step.state, "feedback": step.feedback, "done": step.done}
    if step.done:
        detail = step.reward_detail if privileged else public_detail(step.reward_detail)
        answer |= {"status": step.status, "reward": step.reward, "success": step.success, "reward_detail": dict(detail)}
    return answer


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


async def _read_object(request: web.Request, required: set[str], allowed: set[str]) -> dict[str, Any]:
    try:
        body = json.loads(await request.read(), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as e:
        raise Refusal(400, "bad_json", f"the body must be a JSON object: {e!s:.120}") from None
    if not isinstance(body, dict):
        raise Refusal(400, "bad_json", f"the body must be a JSON object, got {type(body).__name__}")
    if unknown := set(body) - allowed:
        raise Refusal(400, "unknown_field", f"unknown fields {sorted(unknown)[:5]!r:.200}; known are {sorted(allowed)}")
    if missing := required - set(body):
        raise Refusal(400, "missing_field", f"missing fields {sorted(missing)}")
    return body


@web.middleware
async def _typed_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Every error leaves as JSON {"error", "message"}."""
    try:
        return await handler(request)
    except Refusal as e:
        return _json(_dumps({"error": e.error, "message": str(e)}), e.status, e.headers)
    except web.HTTPException as e:
        names = {404: "unknown_route", 405: "method_not_allowed", 413: "body_too_large"}
        return _json(_dumps({"error": names.get(e.status, "http_error"), "message": e.text or e.reason}), e.status)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        return _json(_dumps({"error": "internal", "message": "a bug in the shop; its log has the traceback"}), 500)


def make_app(shop: Shop, **settings: Any) -> web.Application:
    """The application; `settings` are those of `Service`. Call it inside the event loop's thread or before the loop starts."""
    service = Service(shop, **settings)
    app = web.Application(middlewares=[_typed_errors], client_max_size=service.max_body_bytes)
    app.add_routes(service.routes())
    app.cleanup_ctx.append(service.sweep)
    app[SERVICE] = service
    return app


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


async def start(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Binds and serves; returns the runner (to be cleaned up) and the port that was bound."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as e:
        await runner.cleanup()
        if e.errno == errno.EADDRINUSE:
            raise PortBusy(f"port {port} on {host} is in use; stop what listens there, choose another port, or 0 for any free one") from None
        raise InvalidSetting(f"cannot listen on {host}:{port} ({e.strerror or e}); choose another host or port") from None
    return runner, runner.addresses[0][1]


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
