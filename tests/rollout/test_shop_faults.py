"""A shop that restarts in the middle of an episode: the episode is technical, and is played again from its start."""

import asyncio

import pytest
from rollout import fakes
from rollout.fakes import CLICK, STOP, completion

from intraskill.rollout.agent import Limits
from intraskill.rollout.collect import Assignment, Rollout, collect_groups
from intraskill.types import Mask, MaskKind, Status, ToolCall
from launch.shop import ClientShop
from shop_env import synthetic
from shop_env.client import ShopClient
from shop_env.server import ServerThread
from shop_env.session import Shop


@pytest.fixture(scope="module")
def world():
    return synthetic.generate(synthetic.SyntheticConfig(seed=3, num_products=60, split_sizes=(("train", 8),)))


class SearchingChat(fakes.Chat):
    """Every call is a search."""

    def parse(self, ids):
        return ToolCall("search", {"query": "lamp"})


async def play(url: str, engine: fakes.Engine, attempts: int):
    """One group of two episodes of four steps; the shop's own client retries nothing for long."""
    async with ShopClient(url, backoff_seconds=(0.05,) * 20) as client:
        shop = ClientShop(client)
        task = (await shop.tasks("train"))[0]
        rollout = Rollout(engine, shop, SearchingChat(), fakes.SAMPLING, Limits(200, 4), (0, 0), 2, concurrency=2, attempts=attempts, backoff=0.0)
        return (await collect_groups(rollout, [Assignment(0, task, Mask(MaskKind.SKILL_FREE), ())], lambda g: None))[0]


@pytest.mark.parametrize(("attempts", "scored"), [(2, True), (1, False)])
async def test_a_shop_that_restarts_mid_episode(world, attempts, scored):
    shop = Shop(world, page_size=5, max_actions=10)
    first = ServerThread(shop)
    first.__enter__()
    port = int(first.url.rpartition(":")[2])
    second = ServerThread(shop, port=port)

    def turns(session, turn):
        nonlocal restarted
        if turn == 2 and not restarted:
            restarted = True
            first.__exit__()
            second.__enter__()
        return completion(CLICK, STOP)

    restarted = False
    engine = fakes.Engine(turns)
    try:
        group = await play(first.url, engine, attempts)
        if scored:
            assert [t.status for t in group.trajectories] == [Status.ACTION_LIMIT] * 2 and all(len(t.turns) == 4 for t in group.trajectories)
        else:
            broken = [t for t in group.trajectories if t.status == Status.TECHNICAL]
            assert broken and not group.scored and all("unknown_episode" in t.error and len(t.turns) <= 2 for t in broken)
        assert restarted and second.service is not None and not second.service.episodes, "no lease is left behind"
        assert set(engine.released) == set(engine.counts)
    finally:
        second.__exit__()
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
