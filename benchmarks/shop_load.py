"""Load for a shop over HTTP: episodes that search, look at two products, choose options and buy, as fast as the shop answers.

Seven steps an episode or so, one of them a search with a query of its own: an agent's mix, and one that flatters no cache.
"""

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import shop_world

from shop_env.tasks import World


@dataclasses.dataclass
class Load:
    """What came back: seconds of every step, and how long it all took."""

    latencies: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds


def shopping(world: World, ids: list[str], rng: random.Random) -> "Iterator[tuple[str, dict[str, str]] | None]":
    """A generator of actions: send() it the state of every page. Ends after `buy now`."""
    state: Mapping[str, Any] = yield ("search", {"query": shop_world.random_query(rng, world.catalog, ids, 4)})
    rows = [row["label"] for row in state["rows"]]
    yield ("click", {"target": rng.choice(rows)})
    yield ("click", {"target": "previous"})
    state = yield ("click", {"target": rng.choice(rows)})
    for axis, values in state["axes"].items():
        yield ("click", {"target": f"{axis}={rng.choice(list(values))}"})
    yield ("click", {"target": "buy now"})


class LoadGenerator:
    """`num_episodes` at once, each followed by the next, for a given time."""

    def __init__(self, world: World, url: str, num_episodes: int, seed: int):
        self._world, self._url, self._num = world, url, num_episodes
        self._ids, self._tasks = list(world.catalog), list(world.tasks)
        self._seed = seed

    async def run(self, seconds: float) -> Load:
        load = Load()
        start = time.perf_counter()
        end = start + seconds
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            await asyncio.gather(*(self._shopper(http, end, random.Random(f"{self._seed} {i}"), load) for i in range(self._num)))
        load.seconds = time.perf_counter() - start
        return load

    async def _shopper(self, http: aiohttp.ClientSession, end: float, rng: random.Random, load: Load) -> None:
        while time.perf_counter() < end:
            opened = await self._post(http, "/v1/episodes", {"task_id": rng.choice(self._tasks)})
            path = f"/v1/episodes/{opened['episode_id']}"
            actions = shopping(self._world, self._ids, rng)
            state = None
            for seq in itertools.count(1):
                try:
                    tool, arguments = actions.send(state)  # type: ignore[attr-defined]
                except StopIteration:
                    break
                before = time.perf_counter()
                answer = await self._post(http, f"{path}/step", {"seq": seq, "tool": tool, "arguments": arguments})
                load.latencies.append(time.perf_counter() - before)
                if answer["feedback"] != "ok":
                    raise RuntimeError(f"{tool} {arguments} was answered by {answer['feedback']}")
                state = answer["state"]
                if time.perf_counter() > end:
                    break
            async with http.delete(self._url + path) as response:
                response.raise_for_status()

    async def _post(self, http: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        async with http.post(self._url + path, json=body) as response:
            response.raise_for_status()
            return await response.json()
