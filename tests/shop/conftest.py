"""A tiny hand-made world. Everything private in it contains `zz`, so a leak is a substring test."""

import pytest

from shop_env.catalog import Catalog, Product
from shop_env.session import Shop
from shop_env.tasks import Goal, Task, World

KEY = "a-privileged-key"


def make_products() -> list[Product]:
    jackets = [
        Product(
            f"zzid-{i:02d}",
            f"acme hooded jacket no {i}",
            "acme",
            ("clothes", "jackets"),
            ("hooded", "zippered", "cotton blend"),
            {"colour": {"red": None, "dark blue": None}, "size": {"small": 24, "large": 27.5}},
            24,
        )
        for i in range(12)
    ]
    mug = Product("zzid-mug", "plain mug", "bolt", ("home", "mugs"), ("ceramic",), {}, 5)
    odd = Product(
        "zzid-odd", "odd mug", "bolt", ("home", "mugs"), (), {"front": {"red": None, "next": None}, "back": {"red": None, "buy now": None}}, 9
    )
    han = Product("zzid-han", "防水连帽外套 acme", "爱家", ("服装", "外套"), ("防水", "连帽"), {"颜色": {"红色": None, "深蓝": None}}, 88)
    return [*jackets, mug, odd, han]


def make_tasks() -> list[Task]:
    goal = Goal("zzid-03", ("hooded", "zz secret attribute"), {"colour": "zz secret value", "size": "large"}, 31.41)
    plain = Goal("zzid-mug", ("ceramic",), {}, None)
    return [
        Task("task-jacket", "a hooded jacket", "zz full instruction", {"likes": ["cotton"], "budget": "modest"}, goal, "zz user"),
        Task("task-mug", "a mug", "zz a ceramic mug", {}, plain),
    ]


def make_world() -> World:
    tasks = make_tasks()
    return World(Catalog(make_products()), {t.id: t for t in tasks}, {"train": ("task-jacket",), "dev": ("task-mug",)})


@pytest.fixture(scope="session")
def world() -> World:
    return make_world()


@pytest.fixture(scope="session")
def shop(world) -> Shop:
    return Shop(world, page_size=5, max_actions=8)
