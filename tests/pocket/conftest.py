"""The pocket tokenizer's chat and two small worlds, built once."""

import pytest

from intraskill.rollout.chat import Chat, load_tokenizer
from pocket import tokenizer, vocabulary
from shop_env.session import TOOLS, Shop
from shop_env.synthetic import SyntheticConfig, generate


@pytest.fixture(scope="session")
def chat(tmp_path_factory) -> Chat:
    path = tmp_path_factory.mktemp("pocket-tokenizer")
    tokenizer.save(tokenizer.build(vocabulary.words(), TOOLS), path)
    return Chat(load_tokenizer(path), TOOLS)


@pytest.fixture(scope="session")
def shops() -> list[Shop]:
    """Small worlds with the shop settings of a run."""
    return _shops()


@pytest.fixture(scope="session")
def drill_shops() -> list[Shop]:
    """The same, with less in stock."""
    return _shops(colour_stock=0.6, size_stock=0.6)


def _shops(**hazards: float) -> list[Shop]:
    return [Shop(generate(SyntheticConfig(seed=seed, num_products=200, split_sizes=(("train", 200),), **hazards)), 5, 22) for seed in (50, 51)]
