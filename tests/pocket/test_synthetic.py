"""The shop that the pocket policy trains in: carefulness pays, each careful procedure by itself, and luck does not."""

import random

import pytest

from configs import pocket
from pocket.warm_start import DEV_SEED, WarmStartConfig
from shop_env import observation as text_view
from shop_env.scripted import PROCEDURES, Shopper, play
from shop_env.session import Session, Shop
from shop_env.synthetic import ATTRIBUTES, TYPES, SyntheticConfig, generate

NUM_TASKS = 400


@pytest.fixture(scope="module")
def shop() -> Shop:
    """The dev world under the demo's settings."""
    settings = pocket.get_config("demo").shop
    splits = tuple((name, settings[name]) for name in ("train", "validation", "test"))
    world = generate(SyntheticConfig(seed=DEV_SEED, num_products=settings.num_products, split_sizes=splits))
    return Shop(world, page_size=settings.page_size, max_actions=settings.max_actions)


def tasks(shop):
    return [shop.world.tasks[i] for i in shop.world.splits["validation"][:NUM_TASKS]]


def rate(shop, does) -> float:
    wins = 0
    for number, task in enumerate(tasks(shop)):
        wins += play(Session(shop, task), Shopper(task.instruction, task.persona, does, random.Random(number)))[1].success
    return wins / NUM_TASKS


@pytest.fixture(scope="module")
def careful(shop) -> float:
    return rate(shop, PROCEDURES)


def test_a_careful_shopper_hardly_ever_fails(careful):
    assert careful >= 0.93


@pytest.mark.parametrize("procedure", PROCEDURES)
def test_leaving_out_one_procedure_costs_8_points_or_more(shop, careful, procedure):
    assert rate(shop, [p for p in PROCEDURES if p != procedure]) <= careful - 0.08


def test_clicking_at_random_does_not_buy_the_right_thing(shop):
    """A random attribute and a random type are searched for, then everything is a uniform choice among what is on the page."""
    rng = random.Random(0)
    wins = purchases = 0
    for task in tasks(shop):
        session = Session(shop, task)
        step = session.step("search", {"query": f"{rng.choice(ATTRIBUTES)} {rng.choice(TYPES)}"})
        axes: dict = {}
        while not step.done:
            state = text_view.parse(step.observation)
            axes = state.get("axes", axes)
            open_axes = axes if state["page"] == "product" else {a: axes[a] for a in state.get("missing", ())}
            targets = [row["label"] for row in state.get("rows", ())]
            targets += [f"{axis}={value}" for axis, values in open_axes.items() for value in values]
            targets += [c for c in state["controls"] if c != "back to search"]
            step = session.step("click", {"target": rng.choice(targets)})
        wins += step.success
        purchases += step.status == "purchase"
    assert purchases > NUM_TASKS / 2 and wins / NUM_TASKS < 0.01


def test_a_run_never_meets_a_world_that_the_warm_start_saw():
    config = WarmStartConfig()
    seen = {DEV_SEED, *range(config.world_seed, config.world_seed + config.worlds)}
    assert len(seen) == config.worlds + 1
    assert pocket.get_config("dev").shop.seed == DEV_SEED
    assert not {pocket.get_config(v).shop.seed for v in ("", "demo", "smoke", "plain_grpo")} & seen
