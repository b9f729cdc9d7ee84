"""Async, typed client of the shop service. Connection errors and 5xx answers are retried with the same sequence number."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp

from shop_env.errors import ShopRefused, ShopUnavailable

_BACKOFF_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # waits between attempts: about 6 s in all
_RETRY_AFTER_LIMIT = 30.0


@dataclasses.dataclass(frozen=True)
class PublicTask:
    """What an agent may know of a task."""

    id: str
    instruction: str
    persona: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Opened:
    """An episode that just began."""

    episode_id: str
    task: PublicTask
    observation: str


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The shop's answer to one call; the fields after `done` are set when it is True.

    `reward_detail` holds the goal's targets only if the episode was opened with privileged=True.
    """

    observation: str
    feedback: str
    done: bool
    status: str = ""
    reward: float = 0.0
    success: bool = False
    reward_detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_STEP_FIELDS = tuple(f.name for f in dataclasses.fields(StepResult))


class ShopClient:
    """One client per event loop; any number of episodes at once, each of which must be stepped by one caller at a time.

    An episode keeps one connection from its first request to its last, and hands it on to a later episode: behind one port there may be several
    worker processes, and the one that a connection reached is then the one that holds the episode.

    Args:
      base_url: e.g. "http://127.0.0.1:8100".
      privileged_key: the server's key, for goals, products and privileged episodes.
      timeout_seconds: for one attempt of one request.
      backoff_seconds: waits before the second, third, ... attempt.
    """

    def __init__(
        self,
        base_url: str,
        privileged_key: str | None = None,
        *,
        timeout_seconds: float = 60.0,
        backoff_seconds: tuple[float, ...] = _BACKOFF_SECONDS,
    ):
        self._base = base_url.rstrip("/")
        self._headers = {"X-Privileged-Key": privileged_key} if privileged_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._backoff = backoff_seconds
        self._http: aiohttp.ClientSession | None = None  # for all that belongs to no episode
        self._lanes: dict[str, aiohttp.ClientSession] = {}  # episode -> its connection
        self._free_lanes: list[aiohttp.ClientSession] = []
        self._taken: dict[str, int] = {}  # episode -> steps answered so far

    async def __aenter__(self) -> "ShopClient":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.aclose()

    async def tools(self) -> list[Mapping[str, Any]]:
        """JSON schemas of the tools, fixed for all episodes."""
        return (await self._call("GET", "/v1/tools"))["tools"]

    async def tasks(self, split: str) -> list[PublicTask]:
        answer = await self._call("GET", f"/v1/tasks?split={quote(split, safe='')}")
        return [PublicTask(**task) for task in answer["tasks"]]

    async def open(self, task_id: str, privileged: bool = False) -> Opened:
        lane = self._free_lanes.pop() if self._free_lanes else self._connect(1)
        try:
            answer = await self._call("POST", "/v1/episodes", {"task_id": task_id, "privileged": privileged}, lane)
        except BaseException:
            self._free_lanes.append(lane)
            raise
        self._taken[answer["episode_id"]], self._lanes[answer["episode_id"]] = 0, lane
        return Opened(answer["episode_id"], PublicTask(**answer["task"]), answer["observation"])

    async def step(self, episode_id: str, tool: str, arguments: Mapping[str, Any]) -> StepResult:
        """One action. After `ShopUnavailable` the same call may be made again: it is executed once."""
        seq = self._taken.get(episode_id, 0) + 1
        body = {"seq": seq, "tool": tool, "arguments": dict(arguments)}
        answer = await self._call("POST", f"/v1/episodes/{quote(episode_id, safe='')}/step", body, self._lanes.get(episode_id))
        self._taken[episode_id] = seq
        return StepResult(**{name: answer[name] for name in _STEP_FIELDS if name in answer})

    async def close(self, episode_id: str) -> None:
        """Ends and forgets an episode; one that is already gone is fine."""
        self._taken.pop(episode_id, None)
        lane = self._lanes.pop(episode_id, None)
        try:
            await self._call("DELETE", f"/v1/episodes/{quote(episode_id, safe='')}", lane=lane)
        except ShopRefused as e:
            if e.error != "unknown_episode":
                raise
        finally:
            if lane is not None:
                self._free_lanes.append(lane)

    async def goal(self, task_id: str) -> Mapping[str, Any]:
        """The hidden goal and the full instruction; needs the privileged key."""
        return await self._call("GET", f"/v1/tasks/{quote(task_id, safe='')}/goal")

    async def product(self, product_id: str) -> Mapping[str, Any]:
        """A product's full record; needs the privileged key."""
        return await self._call("GET", f"/v1/products/{quote(product_id, safe='')}")

    async def aclose(self) -> None:
        """Closes the episodes that are still open here, then the connections."""
        await asyncio.gather(*(self._delete_quietly(episode_id) for episode_id in list(self._taken)))
        connections = [*([self._http] if self._http else []), *self._lanes.values(), *self._free_lanes]
        self._taken.clear()
        self._lanes.clear()
        self._free_lanes.clear()
        self._http = None
        for http in connections:
            await http.close()

    async def _delete_quietly(self, episode_id: str) -> None:
        """One attempt: a shop that is gone has no episode to close, and a lease covers the rest."""
        http = self._lanes.get(episode_id) or self._http  # one that another client opened has no connection of its own here
        assert http is not None, "an episode is known here after a call about it was answered"
        try:
            await self._attempt("DELETE", f"/v1/episodes/{quote(episode_id, safe='')}", None, http)
        except (aiohttp.ClientError, TimeoutError):
            pass

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, lane: aiohttp.ClientSession | None = None) -> dict[str, Any]:
        """Attempts until an answer below 500 arrives; raises ShopRefused for 4xx and ShopUnavailable when attempts run out."""
        if self._http is None:
            self._http = self._connect(0)  # opened on first use, because it belongs to the running loop
        problem = ""
        for wait in (*self._backoff, None):
            retry_after = 0.0
            try:
                status, answer, retry_after = await self._attempt(method, path, body, lane or self._http)
                if status < 400:
                    return answer
                if status < 500:
                    raise ShopRefused(status, str(answer.get("error", "")), str(answer.get("message", "")))
                problem = f"status {status}: {answer.get('message', '')}"
            except (aiohttp.ClientError, TimeoutError) as e:
                problem = f"{type(e).__name__}: {e}"
            if wait is not None:
                await asyncio.sleep(max(wait, min(retry_after, _RETRY_AFTER_LIMIT)))
        raise ShopUnavailable(f"{method} {self._base}{path} failed {len(self._backoff) + 1} times, last with {problem}; is the shop running there?")

    async def _attempt(
        self, method: str, path: str, body: Mapping[str, Any] | None, http: aiohttp.ClientSession
    ) -> tuple[int, dict[str, Any], float]:
        async with http.request(method, self._base + path, json=body) as response:
            try:
                answer = await response.json(content_type=None)
            except ValueError:
                answer = None
            if not isinstance(answer, dict):
                raise aiohttp.ClientPayloadError(f"status {response.status} and no JSON object; is this address a shop?")
            wait = response.headers.get("Retry-After", "")
            return response.status, answer, float(wait) if wait.isdigit() else 0.0

    def _connect(self, limit: int) -> aiohttp.ClientSession:
        """At most `limit` connections at once, 0 for any number; an idle one is given up before the server does so."""
        connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=1800)
        return aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
