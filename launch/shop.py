"""Brings the shop to the loop: serves a synthetic world on a loopback port and adapts the shop's client to the loop's `Shop` protocol.

`intraskill` and `shop_env` do not know each other; in a run they meet here and nowhere else (the warm start in `pocket/` plays in the shop
without HTTP).
"""

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from intraskill.skills import records
from intraskill.types import Opened, ShopError, StepResult, Task, ToolCall
from shop_env import session, synthetic
from shop_env.client import PublicTask, ShopClient
from shop_env.errors import ShopRefused, ShopUnavailable
from shop_env.server import ServerThread


@contextlib.contextmanager
def _shop_errors() -> Iterator[None]:
    try:
        yield
    except (ShopUnavailable, ShopRefused) as error:
        raise ShopError(str(error)) from error


def _task(task: PublicTask) -> Task:
    return Task(task.id, task.instruction, task.persona)


class ClientShop:
    """`intraskill.types.Shop` over HTTP."""

    def __init__(self, client: ShopClient):
        self._client = client

    async def tools(self) -> list[Mapping[str, Any]]:
        with _shop_errors():
            return list(await self._client.tools())

    async def tasks(self, split: str) -> list[Task]:
        with _shop_errors():
            return [_task(t) for t in await self._client.tasks(split)]

    async def open(self, task_id: str, *, privileged: bool = False) -> Opened:
        with _shop_errors():
            opened = await self._client.open(task_id, privileged=privileged)
        return Opened(opened.episode_id, _task(opened.task), opened.observation)

    async def step(self, episode_id: str, call: ToolCall) -> StepResult:
        with _shop_errors():
            return StepResult(**dataclasses.asdict(await self._client.step(episode_id, call.name, call.arguments)))

    async def close(self, episode_id: str) -> None:
        with _shop_errors():
            await self._client.close(episode_id)

    async def goal(self, task_id: str) -> Mapping[str, Any]:
        with _shop_errors():
            return await self._client.goal(task_id)

    async def product(self, product_id: str) -> Mapping[str, Any]:
        with _shop_errors():
            return await self._client.product(product_id)


@dataclasses.dataclass(frozen=True)
class Served:
    """A running shop: where it is, the key to its private side, and what identifies its answers."""

    url: str
    key: str
    identity: str


@contextlib.contextmanager
def serve(config: Any) -> Iterator[Served]:
    """Serves the synthetic world of `config.shop` until the block ends."""
    settings = config.shop
    splits = tuple((name, settings[name]) for name in ("train", "validation", "test"))
    world = synthetic.generate(synthetic.SyntheticConfig(seed=settings.seed, num_products=settings.num_products, split_sizes=splits))
    shop = session.Shop(world, page_size=settings.page_size, max_actions=settings.max_actions)
    key = secrets.token_hex(16)
    identity = {"catalogue": world.catalog.hash, "splits": world.splits, "page_size": settings.page_size, "max_actions": settings.max_actions}
    capacity = 2 * config.rollout.num_slots + 16
    with ServerThread(shop, port=settings.port, privileged_key=key, capacity=capacity) as server:
        yield Served(server.url, key, records.digest({**identity, "splits": {k: list(v) for k, v in world.splits.items()}}))
