"""The pocket policy reads what it was trained on: every text of the pocket world's pages is pinned to those of the committed checkpoint.

Taken at the revision that trained it. When it has to change, so has the checkpoint: run launch/warm_start.py, commit both.
"""

import hashlib
import random

from configs import pocket
from pocket.warm_start import DEV_SEED
from shop_env.scripted import PROCEDURES, Shopper, play
from shop_env.session import Session, Shop
from shop_env.synthetic import SyntheticConfig, generate

PINNED = "37bcfcc04eb9f8b8931ec77528388bf66d5621a3bb0a3dd9fa718ce6bb37dc79"


class Listening(Session):
    """A session whose texts are collected."""

    def __init__(self, shop, task, texts):
        super().__init__(shop, task)
        self.texts = texts
        texts.append(self.observation)

    def step(self, tool, arguments):
        step = super().step(tool, arguments)
        self.texts.append(step.observation)
        return step


def texts_of_the_pocket_world() -> list[str]:
    """Careful, careless and mistaken episodes: every page, and every refusal that an agent can cause."""
    settings = pocket.get_config("demo").shop
    world = generate(SyntheticConfig(seed=DEV_SEED, num_products=settings.num_products, split_sizes=(("train", 200),)))
    shop = Shop(world, page_size=settings.page_size, max_actions=settings.max_actions)
    texts: list[str] = []
    for number, task_id in enumerate(world.splits["train"]):
        task = world.tasks[task_id]
        does = PROCEDURES if number % 2 else ("query",)
        play(Listening(shop, task, texts), Shopper(task.instruction, task.persona, does, random.Random(number)))
    session = Listening(shop, world.tasks[world.splits["train"][0]], texts)
    mistakes = [("buy", {}), ("search", {"query": ["a", "b"]}), ("search", {"query": " "}), ("click", {"target": "A"})]
    for action in [*mistakes, ("search", {"query": "cotton jacket"}), *mistakes[:3], ("click", {"target": "buy now"}), ("click", {"target": "A"})]:
        session.step(*action)
    return texts


def test_the_pocket_world_reads_as_when_its_policy_was_trained():
    texts = texts_of_the_pocket_world()
    kinds = {text.split(" ", 1)[0] for text in texts}
    assert kinds == {"search", "results", "product", "chosen", "invalid", "done"} and len(texts) > 1000
    assert hashlib.sha256("\n\n".join(texts).encode()).hexdigest() == PINNED
