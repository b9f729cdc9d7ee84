"""A seeded synthetic shop of any size in English or Chinese, for runs with a real model.

Carelessness costs here, as in the pocket world (`shop_env.synthetic`), and so does ignoring the persona: a task's short instruction states two
attributes, perhaps one option, and a budget; what the persona alone says counts too, unless the instruction says otherwise. Around each wanted
product stand near misses: one wrong attribute, one attribute that only the persona rules out, a wanted option out of stock, a price over the
budget. Some products list search words of attributes that they lack, and some have prices that nobody can verify; no task wants those.

Same config, same bytes on every machine: every draw comes from `random.Random(seed).random()`, the one stream that Python guarantees.
"""

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from shop_env.bilingual_words import LANGUAGES, Domain, Language
from shop_env.budget import ABOUT
from shop_env.catalog import Catalog, Product
from shop_env.errors import InvalidSetting
from shop_env.tasks import SPLIT_SIZES, Goal, Task, World, split_tasks

NUM_PRODUCTS = 22_726
_SURCHARGES = (1.0, 1.0, 1.12, 1.25, 1.4)
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Config:
    """What follows from a seed.

    Attributes:
      language: a key of `LANGUAGES`.
      seed: everything follows from it.
      num_products: catalogue size. A product is wanted by one task, a tenth of them by two or more; near misses and others fill up the rest.
      split_sizes: tasks in each split.
    """

    language: str = "en"
    seed: int = 0
    num_products: int = NUM_PRODUCTS
    split_sizes: tuple[tuple[str, int], ...] = tuple(SPLIT_SIZES.items())

    def __post_init__(self):
        if self.language not in LANGUAGES:
            raise InvalidSetting(f"language must be one of {sorted(LANGUAGES)}, got {self.language!r}")
        if self.num_products < max(self.num_tasks, 1):
            raise InvalidSetting(f"{self.num_tasks} tasks need as many products, got num_products={self.num_products}: raise it or ask for fewer")
        if self.num_products > 1_000_000:
            raise InvalidSetting(f"num_products must be at most 1,000,000, got {self.num_products}")

    @property
    def num_tasks(self) -> int:
        return sum(size for _, size in self.split_sizes)


class _Draw:
    """Random choices from uniform numbers in [0, 1) alone."""

    def __init__(self, seed: int):
        self._uniform = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._uniform() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._uniform()

    def below(self, n: int) -> int:
        return int(self._uniform() * n)

    def one(self, values: Sequence[_T]) -> _T:
        return values[self.below(len(values))]

    def some(self, values: Sequence[_T], k: int) -> list[_T]:
        """`k` different values in random order."""
        pool = list(values)
        for i in range(k):
            j = i + self.below(len(pool) - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:k]

    def but(self, values: Sequence[_T], taken: _T) -> _T:
        """One of the values that is not `taken`."""
        return self.one([value for value in values if value != taken])


@dataclasses.dataclass(frozen=True)
class _Item:
    """A product before it gets its id: facets by name, options as in the catalogue."""

    kind: str
    facets: Mapping[str, str]
    options: Mapping[str, Mapping[str, float | None]]
    price: float | None


@dataclasses.dataclass(frozen=True)
class _Wish:
    """What a shopper wants of an item; values by facet or axis.

    Attributes:
      stated: facets in the instruction.
      liked: facets that only the persona tells.
      stated_option, liked_option: the same for option axes.
      ceiling: the budget, or None.
      budget: how the instruction says it.
    """

    stated: Mapping[str, str]
    liked: Mapping[str, str]
    stated_option: Mapping[str, str]
    liked_option: Mapping[str, str]
    ceiling: float | None
    budget: str


def generate(config: Config) -> World:
    """The catalogue, the tasks and their splits, all from `config`."""
    return _Generator(config).world()


class _Generator:
    def __init__(self, config: Config):
        self.config = config
        self.draw = _Draw(config.seed)
        self.words: Language = LANGUAGES[config.language]
        self.kinds = [kind for domain in self.words.domains for kind in domain.kinds]
        self.colour_axis = self.words.persona["colour"]

    def world(self) -> World:
        wanted: list[tuple[int, _Wish]] = []  # (item, wish) of each task
        items: list[_Item] = []
        while len(wanted) < self.config.num_tasks:
            if not items or not self.draw.chance(0.1):
                items.append(self._item(self.kinds[len(items) % len(self.kinds)], sound=True))
            wanted.append((len(items) - 1, self._wish(items[-1])))
        for target, wish in wanted:
            items += self._near_misses(items[target], wish, self.config.num_products - len(items))
        while len(items) < self.config.num_products:
            items.append(self._item(self.kinds[len(items) % len(self.kinds)], sound=False))
        ids = self._ids(len(items))
        products = [self._product(product_id, item) for product_id, item in zip(ids, items, strict=True)]
        tasks = self._tasks([(products[target], wish) for target, wish in wanted])
        splits = split_tasks(tasks, dict(self.config.split_sizes), self.config.seed)
        return World(Catalog(products), {task.id: task for task in tasks}, {name: tuple(ids) for name, ids in splits.items()})

    def _ids(self, n: int) -> list[str]:
        """Twelve digits, in no order that tells the wanted products from others."""
        found: dict[str, None] = {}
        while len(found) < n:
            found[str(100_000_000_000 + self.draw.below(900_000_000_000))] = None
        return list(found)

    # -------------------------------------------------------------------------------------------------------- products

    def _item(self, kind: str, *, sound: bool) -> _Item:
        """A random item; a sound one has a verifiable price for everything it offers."""
        domain, draw = self.words.domain_of(kind), self.draw
        facets = {facet: draw.one(values) for facet, values in domain.facets.items()}
        base = math.floor(draw.between(*domain.prices)) + 0.9 * draw.chance(0.3)
        axes: dict[str, Sequence[str]] = {}
        if not draw.chance(0.06):
            axes[self.colour_axis] = self._stocked(self.words.colours, 0.6)
        if not draw.chance(0.1):
            axes[domain.axis] = self._stocked(domain.values, 0.8)
        priced = draw.one(list(axes)) if axes and draw.chance(0.7) else None
        options = {axis: {v: self._variant(base) if axis == priced else None for v in values} for axis, values in axes.items()}
        if sound or not draw.chance(0.05):
            return _Item(kind, facets, options, base)
        if priced is not None:  # one value of the price axis states no price
            options[priced][draw.one(list(options[priced]))] = None
        return _Item(kind, facets, options, None)

    def _stocked(self, values: Sequence[str], share: float) -> list[str]:
        return [v for v in values if self.draw.chance(share)] or [self.draw.one(values)]

    def _variant(self, base: float) -> float:
        return round(base * self.draw.one(_SURCHARGES), 1)

    def _product(self, product_id: str, item: _Item) -> Product:
        draw, domain = self.draw, self.words.domain_of(item.kind)
        facets = list(item.facets)
        shown = draw.some(facets, 2)
        brand = draw.one(self.words.brands)
        code = f"{draw.one('ABCDEHKLMNPRTVX')}{draw.below(9000) + 1000}"
        # A search word for something that the product is not; honest facts are all on the page.
        facet = draw.one(facets)
        spam = draw.but(domain.facets[facet], item.facets[facet]) if draw.chance(0.3) else ""
        gap = "" if self.words.code == "zh" else " "
        return Product(
            id=product_id,
            title=f"{brand} {gap.join([*(item.facets[f] for f in shown), item.kind])} {code}",
            brand=brand,
            category=(domain.name, item.kind),
            attributes=(*draw.some(list(item.facets.values()), len(facets)), *draw.some(self.words.extras, draw.below(3))),
            options=item.options,
            price=item.price,
            model=f"{code} {spam}",
            bullets=(f"{brand} {item.kind} {code}",),
        )

    def _near_misses(self, item: _Item, wish: _Wish, room: int) -> list[_Item]:
        """Items that differ from the wanted one in what a careless shopper overlooks; at most `room` of them."""
        made = []
        for make, chance in ((self._wrong_stated, 0.6), (self._wrong_liked, 0.9), (self._sold_out, 0.6), (self._too_dear, 0.6)):
            if self.draw.chance(chance):
                made.append(make(item, wish))
        return [near for near in made if near is not None][: max(room, 0)]

    def _wrong_stated(self, item: _Item, wish: _Wish) -> _Item:
        return self._wrong(item, self.draw.one(list(wish.stated)))

    def _wrong_liked(self, item: _Item, wish: _Wish) -> _Item | None:
        return self._wrong(item, self.draw.one(list(wish.liked))) if wish.liked else None

    def _wrong(self, item: _Item, facet: str) -> _Item:
        other = self.draw.but(self.words.domain_of(item.kind).facets[facet], item.facets[facet])
        return dataclasses.replace(item, facets={**item.facets, facet: other})

    def _sold_out(self, item: _Item, wish: _Wish) -> _Item | None:
        wanted = [(axis, v) for axis, v in {**wish.liked_option, **wish.stated_option}.items() if len(item.options[axis]) > 1]
        if not wanted:
            return None
        axis, value = self.draw.one(wanted)
        left = {v: price for v, price in item.options[axis].items() if v != value}
        return dataclasses.replace(item, options={**item.options, axis: left})

    def _too_dear(self, item: _Item, wish: _Wish) -> _Item | None:
        """The same item, with every price above the budget."""
        stated = [p for values in item.options.values() for p in values.values() if p is not None]
        lowest = min(stated, default=item.price)
        if wish.ceiling is None or lowest is None or item.price is None:
            return None
        factor = wish.ceiling / lowest * self.draw.between(1.02, 1.2)
        options = {axis: {v: None if p is None else round(p * factor + 0.1, 1) for v, p in values.items()} for axis, values in item.options.items()}
        return dataclasses.replace(item, options=options, price=round(item.price * factor + 0.1, 1))

    # ----------------------------------------------------------------------------------------------------------- tasks

    def _wish(self, item: _Item) -> _Wish:
        draw = self.draw
        order = draw.some(list(item.facets), len(item.facets))
        stated = {facet: item.facets[facet] for facet in order[:2]}
        liked = {facet: item.facets[facet] for facet in order[2:] if draw.chance(0.4)}
        stated_option: dict[str, str] = {}
        liked_option: dict[str, str] = {}
        for axis in draw.some(list(item.options), len(item.options)):
            value = draw.one(list(item.options[axis]))
            if not stated_option and draw.chance(0.6):
                stated_option[axis] = value
            elif draw.chance(0.6):
                liked_option[axis] = value
        ceiling, budget = self._budget(self._price(item, {**stated_option, **liked_option}))
        return _Wish(stated, liked, stated_option, liked_option, ceiling, budget)

    def _price(self, item: _Item, chosen: Mapping[str, str]) -> float:
        """What the wanted variant costs: the cheapest one where nobody minds which."""
        for axis, values in item.options.items():
            prices = {v: p for v, p in values.items() if p is not None}
            if prices:
                return prices[chosen[axis]] if axis in chosen else min(prices.values())
        assert item.price is not None, "wanted items are sound"
        return item.price

    def _budget(self, price: float) -> tuple[float | None, str]:
        """A ceiling at or a little above `price`, and the phrase that states it."""
        draw = self.draw
        if draw.chance(0.15):
            return None, ""
        style = draw.one(("upper", "upper", "about", "range"))
        room = price * draw.between(1.0, 1.06)
        number = math.ceil(room / ABOUT) if style == "about" else math.ceil(room)
        ceiling = round(number * ABOUT, 2) if style == "about" else float(number)
        return ceiling, draw.one(self.words.budgets[style]).format(n=number, low=math.floor(price * 0.6))

    def _tasks(self, wanted: Sequence[tuple[Product, _Wish]]) -> list[Task]:
        tasks: list[Task] = []
        user: dict[str, Any] = {}
        for number, (product, wish) in enumerate(wanted):
            if not user or not self.draw.chance(0.15):
                user = self._user(number)
            tasks.append(self._task(number, product, wish, user))
        return tasks

    def _user(self, number: int) -> dict[str, Any]:
        draw, name = self.draw, self.words.persona
        return {
            name["user id"]: f"U{self.config.seed}-{number:06d}",
            name["location"]: draw.one(self.words.cities),
            name["demographics"]: {
                name["gender"]: draw.one(self.words.genders),
                name["age"]: 18 + draw.below(62),
                name["occupation"]: draw.one(self.words.jobs),
            },
        }

    def _task(self, number: int, product: Product, wish: _Wish, user: Mapping[str, Any]) -> Task:
        options = {**wish.liked_option, **wish.stated_option}
        goal = Goal(
            product_id=product.id,
            attributes=(*wish.stated.values(), *wish.liked.values()),
            options={axis: options[axis] for axis in product.options if axis in options},
            price_ceiling=wish.ceiling,
        )
        kind = product.category[1]
        user_id = str(user[self.words.persona["user id"]])
        return Task(
            id=f"synth-{self.words.code}-{self.config.seed}-{number:05d}",
            instruction=self._instruction(kind, wish.stated, wish.stated_option, wish.budget, bool(wish.liked or wish.liked_option)),
            full_instruction=self._instruction(kind, {**wish.stated, **wish.liked}, goal.options, wish.budget, False),
            persona={**user, self.words.persona["interests"]: self._interests(product, wish)},
            goal=goal,
            user_id=user_id,
        )

    def _instruction(self, kind: str, attributes: Mapping[str, str], options: Mapping[str, str], budget: str, taste: bool) -> str:
        text = self.draw.one(self.words.templates).format(
            attributes=self.words.comma.join(attributes.values()),
            kind=kind,
            option="".join(self.words.option.format(axis=axis, value=value) for axis, value in options.items()),
            budget=budget,
        )
        return text + self.words.taste[0 if taste else 1]

    def _interests(self, product: Product, wish: _Wish) -> dict[str, Any]:
        """What the shopper likes: what counts, what the instruction overrules, and what has nothing to do with this purchase."""
        draw, name, domain = self.draw, self.words.persona, self.words.domain_of(product.category[1])
        likes = dict(wish.liked)
        for facet, value in wish.stated.items():
            if draw.chance(0.4):
                likes[facet] = draw.but(domain.facets[facet], value)
        elsewhere = draw.one([other for other in self.words.domains if other is not domain])
        facet = draw.one([f for f in elsewhere.facets if f not in domain.facets] or list(elsewhere.facets))
        if facet not in domain.facets:
            likes[facet] = draw.one(elsewhere.facets[facet])
        likes |= wish.liked_option
        for axis, value in wish.stated_option.items():
            if draw.chance(0.4):
                likes[axis] = draw.but(self._values(domain, axis), value)
        likes |= {name["price range"]: draw.one(self.words.price_ranges), name["brand"]: draw.one(self.words.brands)}
        return {
            name["favourite categories"]: draw.some([domain.name, elsewhere.name], 2),
            name["product preferences"]: {key: likes[key] for key in draw.some(list(likes), len(likes))},
        }

    def _values(self, domain: Domain, axis: str) -> tuple[str, ...]:
        return self.words.colours if axis == self.colour_axis else domain.values
