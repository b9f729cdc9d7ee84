"""A seeded synthetic shop: small English vocabulary, honest pages, near misses on purpose.

The world is built so that carelessness costs: products hide search keywords for attributes that they lack (only the page tells), sizes
and colours run out, one axis changes the price, personas hold the option that the instruction leaves open and contradict, half of
the time, the one that it states. Every task has a product that meets everything: the one it was drawn from.

Same config, same bytes on every machine: only `random.Random(seed)` is used, whose streams Python keeps stable.
"""

import dataclasses
import random

from shop_env.catalog import Catalog, Product
from shop_env.errors import InvalidSetting
from shop_env.tasks import Goal, Task, World, split_tasks

TYPES: tuple[str, ...] = tuple(
    "jacket shirt dress skirt jeans sweater coat boots sandals sneakers backpack wallet belt scarf hat gloves robe lamp pillow blanket".split()
)
ATTRIBUTES: tuple[str, ...] = tuple(
    "waterproof breathable lightweight cotton wool leather linen slim loose padded quilted striped floral plain vintage casual formal "
    "stretchy soft sturdy washable foldable insulated reflective organic handmade recycled hooded zippered lined".split()
)
BRANDS: tuple[str, ...] = tuple("acme nova zephyr orion lumen tundra cobalt maple vertex harbor summit ember willow atlas pioneer quartz".split())
COLOURS: tuple[str, ...] = tuple("black white red blue green yellow pink grey".split())
SIZES = tuple("tiny small medium large huge".split())
BASE_PRICES = (20, 30)
SURCHARGES = (0, 0, 3, 6, 9)


@dataclasses.dataclass(frozen=True)
class SyntheticConfig:
    """Sizes and hazards of a synthetic world.

    Attributes:
      seed: everything follows from it.
      num_products: catalogue size, spread evenly over the 20 types.
      split_sizes: tasks in each split; each task has a product of its own, so their sum may not exceed num_products.
      stuffing: probability that each of a product's two hidden search keywords (its `model` field) is an attribute that it lacks.
      colour_stock, size_stock: probability that a product has a given colour of its type's palette, or a given size.
      budget_slack: the budget is the wanted variant's price plus a uniform integer in this closed interval.
      conflict: probability that the persona contradicts the stated option.
    """

    seed: int = 0
    num_products: int = 2400
    split_sizes: tuple[tuple[str, int], ...] = (("train", 1200), ("validation", 400), ("test", 400))
    attributes_per_type: int = 10
    attributes_per_product: int = 4
    colours_per_type: int = 5
    stuffing: float = 0.5
    colour_stock: float = 0.88
    size_stock: float = 0.92
    budget_slack: tuple[int, int] = (3, 9)
    conflict: float = 0.5

    def __post_init__(self):
        wanted = sum(n for _, n in self.split_sizes)
        if wanted > self.num_products:
            raise InvalidSetting(f"{wanted} tasks need as many products, got num_products={self.num_products}: raise it or ask for fewer tasks")


def _stocked(rng: random.Random, values: tuple[str, ...] | list[str], probability: float) -> list[str]:
    return [v for v in values if rng.random() < probability] or [rng.choice(list(values))]


def _product(rng: random.Random, config: SyntheticConfig, number: int, kind: str, pool: list[str], palette: list[str]) -> Product:
    attributes = rng.sample(pool, config.attributes_per_product)
    lacking = [a for a in pool if a not in attributes]
    keywords = [rng.choice(lacking if rng.random() < config.stuffing else attributes) for _ in range(2)]
    brand = rng.choice(BRANDS)
    listed = attributes[:]
    rng.shuffle(listed)
    base = rng.randint(*BASE_PRICES)
    options = {"colour": _stocked(rng, palette, config.colour_stock), "size": _stocked(rng, SIZES, config.size_stock)}
    priced = rng.choice(("colour", "size"))
    return Product(
        id=f"p{number:05d}",
        title=f"{brand} {attributes[0]} {kind}",
        brand=brand,
        category=("goods", kind),
        attributes=tuple(listed),
        options={axis: {v: float(base + rng.choice(SURCHARGES)) if axis == priced else None for v in values} for axis, values in options.items()},
        price=float(base),
        model=" ".join(keywords),
    )


def _task(rng: random.Random, config: SyntheticConfig, number: int, product: Product, palettes: dict[str, list[str]]) -> Task:
    kind = product.category[1]
    attributes = rng.sample(product.attributes, 2)
    wanted = {axis: rng.choice(list(values)) for axis, values in product.options.items()}
    price = next(p for axis, v in wanted.items() if (p := product.options[axis][v]) is not None)
    budget = int(price) + rng.randint(*config.budget_slack)
    stated = rng.choice(("colour", "size"))
    likes = dict(wanted)
    if rng.random() < config.conflict:
        likes[stated] = rng.choice([v for v in (palettes[kind] if stated == "colour" else SIZES) if v != wanted[stated]])
    need = f"find a {' '.join(attributes)} {kind}"
    return Task(
        id=f"t{config.seed}-{number:05d}",
        instruction=f"{need} in {stated} {wanted[stated]} under ${budget}",
        full_instruction=f"{need} in colour {wanted['colour']} and size {wanted['size']} under ${budget}",
        persona={
            "age": str(rng.randint(18, 79)),
            "likes brand": rng.choice(BRANDS),
            "likes colour": likes["colour"],
            "likes size": likes["size"],
        },
        goal=Goal(product_id=product.id, attributes=tuple(attributes), options=wanted, price_ceiling=float(budget)),
        user_id=f"u{config.seed}-{number:05d}",
    )


def generate(config: SyntheticConfig) -> World:
    """The catalogue, the tasks and their splits, all from `config.seed`."""
    rng = random.Random(config.seed)
    pools = {kind: rng.sample(ATTRIBUTES, config.attributes_per_type) for kind in TYPES}
    palettes = {kind: rng.sample(COLOURS, config.colours_per_type) for kind in TYPES}
    products: list[Product] = []
    for number in range(config.num_products):
        kind = TYPES[number % len(TYPES)]
        products.append(_product(rng, config, number, kind, pools[kind], palettes[kind]))
    order = products[:]
    rng.shuffle(order)
    wanted = sum(n for _, n in config.split_sizes)
    tasks = [_task(rng, config, number, product, palettes) for number, product in enumerate(order[:wanted])]
    splits = split_tasks(tasks, dict(config.split_sizes), config.seed)
    return World(catalog=Catalog(products), tasks={t.id: t for t in tasks}, splits={name: tuple(ids) for name, ids in splits.items()})
