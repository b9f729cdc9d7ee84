"""The bilingual world: the same bytes everywhere, honest words, near misses on purpose, and every task solvable by what an agent sees."""

import asyncio
import itertools
import os
import random
import subprocess
import sys

import pytest

from shop_env.bilingual import Config, generate
from shop_env.bilingual_words import LANGUAGES
from shop_env.budget import stated_budget
from shop_env.client import ShopClient
from shop_env.errors import InvalidSetting
from shop_env.importers.run import met_by_own_product
from shop_env.pricing import price_range, variant_price
from shop_env.reward import similar
from shop_env.server import ServerThread
from shop_env.session import Session, Shop
from shop_env.shoppers import CarefulShopper, FirstResultShopper, RandomShopper, play, play_over_http, read_wants
from shop_env.tasks import World

SIZES = (("train", 140), ("validation", 30), ("test", 30))
CODES = pytest.mark.parametrize("code", ["en", "zh"])


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    return {code: generate(Config(code, seed=3, num_products=1100, split_sizes=SIZES)) for code in LANGUAGES}


def test_same_seed_same_bytes_whatever_the_process(tmp_path):
    """Another process, another hash seed, another locale, without optimisation and with."""
    for name, flags, environment in (
        ("one", [], {"PYTHONHASHSEED": "1", "LC_ALL": "C"}),
        ("two", ["-O"], {"PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8"}),
    ):
        command = [sys.executable, *flags, "-m", "shop_env", "synth", "--language", "zh", "--num_products", "150", "--seed", "5"]
        subprocess.run(
            [*command, "--splits", "train=40,test=20", "--out", str(tmp_path / name)], check=True, env={**os.environ, **environment}, timeout=120
        )
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
    assert World.load(tmp_path / "one") == generate(Config("zh", 5, 150, (("train", 40), ("test", 20))))


def test_other_seeds_give_other_worlds():
    small = dict(num_products=150, split_sizes=(("train", 40),))
    assert generate(Config("en", 1, **small)).catalog.hash != generate(Config("en", 2, **small)).catalog.hash


def test_both_languages_are_the_same_shop(worlds):
    en, zh = worlds["en"], worlds["zh"]
    assert list(en.catalog) == list(zh.catalog)
    assert [t.goal.price_ceiling for t in en.tasks.values()] == [t.goal.price_ceiling for t in zh.tasks.values()]
    assert [price_range(p, {}) for p in en.catalog.values()] == [price_range(p, {}) for p in zh.catalog.values()]


@pytest.mark.parametrize("language", LANGUAGES.values(), ids=LANGUAGES)
def test_no_word_of_a_domain_passes_for_another(language):
    elsewhere = [*language.brands, *language.extras, *language.cities]
    for domain in language.domains:
        words = [*itertools.chain(*domain.facets.values()), *domain.kinds, *domain.values, *language.colours]
        assert len(set(words)) == len(words)
        assert [(a, b) for a, b in itertools.permutations(words, 2) if similar(a, b)] == []
        facets = list(itertools.chain(*domain.facets.values()))
        assert [(a, b) for a in facets for b in elsewhere if similar(a, b)] == []


@CODES
def test_sizes_and_goals(worlds, code):
    world = worlds[code]
    assert len(world.catalog) == 1100 and {name: len(ids) for name, ids in world.splits.items()} == dict(SIZES)
    assert all(met_by_own_product(world.catalog, task) for task in world.tasks.values())


@CODES
def test_the_instruction_states_the_budget_that_counts(worlds, code):
    tasks = list(worlds[code].tasks.values())
    for task in tasks:
        assert stated_budget(task.instruction) == stated_budget(task.full_instruction) == task.goal.price_ceiling
    ceilings = [task.goal.price_ceiling for task in tasks]
    assert 10 < ceilings.count(None) < 60  # 15% of 200
    assert sum(c is not None and c != int(c) for c in ceilings) > 15  # "about N" allows a tenth more


@CODES
def test_public_text_and_persona_tell_exactly_what_counts(worlds, code):
    language, only_persona = LANGUAGES[code], 0
    for task in worlds[code].tasks.values():
        wants = read_wants(language, task.instruction, task.persona, heed_persona=True)
        assert sorted(wants.facets.values()) == sorted(task.goal.attributes)
        assert wants.options == task.goal.options and wants.ceiling == task.goal.price_ceiling
        stated = read_wants(language, task.instruction, task.persona, heed_persona=False)
        whole = read_wants(language, task.full_instruction, task.persona, heed_persona=False)
        assert whole.facets == wants.facets and whole.options == wants.options
        only_persona += len(wants.facets) + len(wants.options) > len(stated.facets) + len(stated.options)
    assert only_persona > 100  # in more than half of the tasks the persona decides


@CODES
def test_near_misses_exist(worlds, code):
    catalog, tasks = worlds[code].catalog, worlds[code].tasks.values()
    language = LANGUAGES[code]
    facts = {p.id: (p.category[1], frozenset(p.attributes) - set(language.extras)) for p in catalog.values()}
    of_kind: dict[str, list[str]] = {}
    for product_id, (kind, _) in facts.items():
        of_kind.setdefault(kind, []).append(product_id)
    wrong_stated = wrong_liked = dear_variant = sold_out = 0
    for task in tasks:
        gold = catalog[task.goal.product_id]
        kind, own = facts[gold.id]
        num_stated = len(read_wants(language, task.instruction, task.persona, heed_persona=False).facets)
        stated, liked = set(task.goal.attributes[:num_stated]), set(task.goal.attributes[num_stated:])
        others = [p for p in of_kind[kind] if p != gold.id]
        missing = [own - facts[p][1] for p in others]
        wrong_stated += any(len(m) == 1 and m <= stated for m in missing)
        wrong_liked += any(len(m) == 1 and m <= liked for m in missing)
        same = [catalog[p] for p in others if facts[p][1] == own]
        sold_out += any(value not in p.options.get(axis, {}) for p in same for axis, value in task.goal.options.items())
        axis, ceiling = gold.price_axis, task.goal.price_ceiling
        prices = [variant_price(gold, {axis: value}) for value in gold.options[axis]] if axis and axis not in task.goal.options else []
        dear_variant += ceiling is not None and any(price > ceiling for price in prices)
    assert wrong_stated > 60 and wrong_liked > 60 and sold_out > 40 and dear_variant > 10


@CODES
def test_unverifiable_prices_exist_but_no_task_wants_them(worlds, code):
    catalog = worlds[code].catalog
    wanted = {task.goal.product_id for task in worlds[code].tasks.values()}

    def verifiable(product) -> bool:
        axis = product.price_axis
        return all(variant_price(product, {axis: v} if axis else {}) is not None for v in (product.options[axis] if axis else [""]))

    assert all(verifiable(catalog[product_id]) for product_id in wanted)
    assert sum(not verifiable(product) for product in catalog.values()) > 10


@CODES
def test_every_task_is_solved_over_http_by_what_an_agent_sees(worlds, code):
    """All 200 tasks of the small world; benchmarks/bench_scripted_full.py --http does the same for the whole one."""
    patience = 400  # enough to look at all 150 results

    async def solve(url: str) -> list[str]:
        async with ShopClient(url) as client:
            tasks = [task for split, _ in SIZES for task in await client.tasks(split)]
            gate = asyncio.Semaphore(16)

            async def one(task) -> str | None:
                async with gate:
                    end = await play_over_http(client, task, lambda t: CarefulShopper(LANGUAGES[code], t, heed_persona=True, max_actions=patience))
                return None if end.success else task.id

            return [failed for failed in await asyncio.gather(*map(one, tasks)) if failed]

    with ServerThread(Shop(worlds[code], page_size=20, max_actions=patience)) as server:
        assert asyncio.run(solve(server.url)) == []


@CODES
def test_care_and_the_persona_pay(worlds, code):
    language, shop = LANGUAGES[code], Shop(worlds[code], page_size=20)

    def success(make) -> float:
        ends = [play(Session(shop, worlds[code].tasks[i]), make(worlds[code].tasks[i])) for i in worlds[code].splits["train"][:80]]
        return sum(end.success for end in ends) / len(ends)

    careful = success(lambda t: CarefulShopper(language, t, heed_persona=True))
    without = success(lambda t: CarefulShopper(language, t, heed_persona=False))
    first = success(lambda t: FirstResultShopper(language, t))
    clicking = success(lambda t: RandomShopper(language, t, random.Random(t.id)))
    assert careful >= 0.97 and careful - without >= 0.1 and without > first > clicking and clicking <= 0.02


@pytest.mark.parametrize("changes", [{"language": "fr"}, {"num_products": 10}, {"num_products": 2_000_000}, {"num_products": 0, "split_sizes": ()}])
def test_bad_settings_are_refused(changes):
    with pytest.raises(InvalidSetting):
        Config(**changes)
