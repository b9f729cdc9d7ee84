"""The catalogue that the shop's benchmarks share: `--catalogue DIR` for a saved world, otherwise a synthetic one of `--products` products."""

import argparse
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shop_env import synthetic  # noqa: E402
from shop_env.catalog import Catalog  # noqa: E402
from shop_env.tasks import World  # noqa: E402
from shop_env.text import unique_tokens  # noqa: E402


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--catalogue", type=Path, help="directory of a world; default: a synthetic one")
    made.add_argument("--products", type=int, default=22726, help="size of the synthetic catalogue")
    return made


def load(arguments: argparse.Namespace) -> World:
    if arguments.catalogue:
        return World.load(arguments.catalogue)
    return synthetic.generate(synthetic.SyntheticConfig(num_products=arguments.products))


def random_query(rng: random.Random, catalog: Catalog, ids: list[str], num_words: int) -> str:
    """Words of one product's title and attributes in random order: a query that finds something, and hardly ever the same one twice."""
    product = catalog[rng.choice(ids)]
    words = unique_tokens(" | ".join([product.title, *product.attributes, *product.category]))
    return " ".join(rng.sample(words, min(num_words, len(words))))
