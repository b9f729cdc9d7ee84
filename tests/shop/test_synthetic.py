"""The synthetic world: the same bytes for the same seed, and every task solvable through the shop's own pages."""

import asyncio
import random

from shop_env.client import ShopClient
from shop_env.scripted import Shopper
from shop_env.server import ServerThread
from shop_env.session import Session, Shop
from shop_env.synthetic import SyntheticConfig, generate

CONFIG = SyntheticConfig(num_products=300, split_sizes=(("train", 150), ("test", 60)))
CAREFUL = ("query", "page", "stock", "persona", "stated", "price")


def test_same_seed_same_bytes(tmp_path):
    for name in ("one", "two"):
        generate(CONFIG).save(tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_every_task_can_be_bought_in_full():
    world = generate(CONFIG)
    shop = Shop(world, page_size=5, max_actions=60)
    assert len(world.tasks) == 210
    for task in world.tasks.values():
        product = world.catalog[task.goal.product_id]
        session = Session(shop, task)
        step = session.step("search", {"query": product.title})
        while session.step("click", {"target": product.id}).feedback != "ok":
            step = session.step("click", {"target": "next"})
            assert step.feedback == "ok", f"{product.id} is not among the results for its own title"
        for axis, values in product.options.items():
            session.step("click", {"target": f"{axis}={task.goal.options.get(axis, next(iter(values)))}"})
        step = session.step("click", {"target": "buy now"})
        assert step.success, (task, step.reward_detail)


def test_a_careful_shopper_does_well_over_http_and_a_careless_one_does_not():
    world = generate(CONFIG)

    async def rate(client, does):
        async def episode(task):
            opened = await client.open(task.id)
            shopper = Shopper(task.instruction, task.persona, does, random.Random(task.id))
            observation, done = opened.observation, False
            while not done:
                action = shopper.act(observation)
                step = await client.step(opened.episode_id, action.tool, action.arguments)
                observation, done = step.observation, step.done
            return step.success

        return sum(await asyncio.gather(*map(episode, await client.tasks("train")))) / 150

    async def both(url):
        async with ShopClient(url) as client:
            return await rate(client, CAREFUL), await rate(client, ("query",))

    with ServerThread(Shop(world, page_size=5, max_actions=30)) as server:
        careful, careless = asyncio.run(both(server.url))
        assert server.service.counts["steps"] > 500
    assert careful >= 0.8 and careless <= careful - 0.3
