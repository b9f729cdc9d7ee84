"""Every expected number below is worked out by hand from the formulas in docs/shop.md."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shop_env.catalog import Product
from shop_env.errors import InvalidProduct
from shop_env.reward import public_detail, score, similar
from shop_env.tasks import Goal

JACKET = Product(
    "gold", "acme hooded jacket", "acme", ("clothes", "outdoor", "jackets"), ("hooded", "waterproof"), {"colour": {"red": None, "blue": None}}, 30
)


def other(title="something else", category=(), **changes) -> Product:
    return Product("other", title, "", category, changes.pop("attributes", ()), changes.pop("options", {}), changes.pop("price", 30), **changes)


def test_the_gold_variant_earns_everything():
    detail = score(JACKET, {"colour": "red"}, 30.0, Goal("gold", ("hooded", "waterproof"), {"colour": "red"}, 30.0), JACKET)
    assert (detail.strict, detail.loose, detail.success) == (1.0, 1.0, True)
    assert detail.attribute_hits == ("hooded", "waterproof") and detail.option_hits == {"colour": "red"}
    assert (detail.price, detail.ceiling, detail.ceiling_source, detail.price_verified) == (30.0, 30.0, "instruction", True)


@pytest.mark.parametrize(
    ("title", "category", "r_type", "overlap"),
    [
        ("zz", ("Clothes", "jackets"), 1.0, 0.0),  # two nodes shared, no word shared
        ("zz", ("clothes",), 0.0, 0.0),  # one node is not enough, and no word is shared
        ("a b c", (), 1.0, 0.3),
        ("a b", (), 0.5, 0.2),  # not above 0.2
        ("a", (), 0.5, 0.1),  # not below 0.1
        ("zz", (), 0.0, 0.0),
    ],
)
def test_type_by_categories_and_title_words(title, category, r_type, overlap):
    gold = Product("gold", "a b c d e f g h i j", "", ("clothes", "outdoor", "jackets"), (), {}, 5)
    detail = score(other(title, category), {}, 5.0, Goal("gold", (), {}, None), gold)
    assert detail.r_type == r_type and detail.title_overlap == pytest.approx(overlap)


def test_type_below_a_tenth():
    gold = Product("gold", "a b c d e f g h i j k", "", (), (), {}, 5)  # one of eleven words: 0.0909
    detail = score(other("a"), {}, 5.0, Goal("gold", (), {}, None), gold)
    assert detail.r_type == 0.1 and detail.strict == pytest.approx(0.1) and not detail.success


def test_partial_hits():
    goal = Goal("gold", ("hooded", "woolen"), {"colour": "red", "fit": "slim"}, 30.0)
    options = {"colour": {"red": None, "blue": None}, "fit": {"slim": None, "wide": None}}
    bought = other("hooded jacket", attributes=("hooded",), options=options)
    detail = score(bought, {"colour": "red", "fit": "wide"}, 30.0, goal, JACKET)  # title: 2 of 3 words
    assert (detail.r_type, detail.r_att, detail.r_opt, detail.r_price) == (1.0, 0.5, 0.5, 1.0)
    assert detail.strict == pytest.approx(0.25)
    assert detail.loose == pytest.approx((1 + 1 + 1) / 5)
    assert not detail.success


@pytest.mark.parametrize(
    ("price", "ceiling", "r_price"),
    [(30.0, 30.0, 1.0), (30.01, 30.0, 0.0), (None, 30.0, 0.0), (None, None, 1.0), (99.0, None, 1.0), (math.nan, 30.0, 0.0), (math.inf, 30.0, 0.0)],
)
def test_price_against_the_stated_budget(price, ceiling, r_price):
    detail = score(JACKET, {"colour": "red"}, price, Goal("gold", ("hooded",), {"colour": "red"}, ceiling), JACKET)
    assert detail.r_price == detail.strict == r_price and detail.success == (r_price == 1)
    assert detail.loose == pytest.approx((2 + r_price) / 3)
    assert detail.ceiling_source == ("none" if ceiling is None else "instruction")


def test_no_targets_leave_only_type_and_price():
    detail = score(JACKET, {}, 30.0, Goal("gold", (), {}, None), JACKET)
    assert (detail.r_att, detail.r_opt, detail.strict, detail.loose) == (1.0, 1.0, 1.0, 1.0)


def test_another_product_that_meets_everything_succeeds():
    bought = other("blue hooded jacket", attributes=("Hooded", "WATERPROOF shell"), options={"Color": {"Red": None, "green": None}})
    detail = score(bought, {"Color": "Red"}, 20.0, Goal("gold", ("hooded", "waterproof"), {"colour": "red"}, 25.0), JACKET)
    assert detail.success and detail.product_id == "other"


def test_the_right_product_with_the_wrong_variant_fails():
    detail = score(JACKET, {"colour": "blue"}, 30.0, Goal("gold", ("hooded",), {"colour": "red"}, None), JACKET)
    assert (detail.r_opt, detail.strict, detail.success) == (0.0, 0.0, False)
    assert detail.loose == pytest.approx(2 / 3)


def test_an_offered_exact_value_must_be_chosen_and_else_a_similar_one_counts():
    goal = Goal("gold", (), {"colour": "red"}, None)
    both = other("acme hooded jacket", options={"colour": {"red": None, "dark red": None}})
    assert score(both, {"colour": "dark red"}, 1.0, goal, JACKET).r_opt == 0.0
    only_dark = other("acme hooded jacket", options={"colour": {"dark red": None, "blue": None}})
    assert score(only_dark, {"colour": "dark red"}, 1.0, goal, JACKET).r_opt == 1.0
    assert score(only_dark, {}, 1.0, goal, JACKET).r_opt == 0.0


def test_attributes_are_also_found_in_title_and_bullets():
    goal = Goal("gold", ("gore tex", "two pockets"), {}, None)
    assert score(other("acme gore tex jacket", bullets=("with two pockets inside",)), {}, 1.0, goal, JACKET).r_att == 1.0


@pytest.mark.parametrize(
    ("wanted", "offered", "hit"),
    [
        ("Ｒed", "RED", True),
        ("red", "zippered", False),  # inside a word
        ("cotton blend", "blend cotton", True),  # token set
        ("10 inch", "12 inch", False),  # 86% similar, but the number differs
        ("8 gb", "18 gb", False),
        ("long sleeve", "long sleeves", True),  # 96%
        ("leather", "linen", False),
        ("防水", "防水外套", True),
        ("红色", "蓝色", False),
        ("5米", "15米", False),
        ("", "x", False),
    ],
)
def test_similarity(wanted, offered, hit):
    assert similar(wanted, offered) is hit


def test_public_detail_hides_the_goal():
    goal = Goal("gold", ("hooded", "zz secret"), {"colour": "zz value"}, 31.41)
    public = public_detail(score(JACKET, {"colour": "red"}, 30.0, goal, JACKET).to_json())
    assert "zz" not in str(public) and "31.41" not in str(public) and "goal_product_id" not in public and public["num_attributes"] == 2


texts = st.text(alphabet="ab红色水 1０.$|é", max_size=6)
options = st.dictionaries(texts, st.dictionaries(texts, st.none() | st.floats(0, 9), max_size=3), max_size=2)


@st.composite
def products(draw):
    try:
        return Product(
            draw(st.sampled_from(["x", "y"])),
            draw(texts) + "t",
            "",
            tuple(draw(st.lists(texts, max_size=3))),
            tuple(draw(st.lists(texts, max_size=3))),
            draw(options),
            draw(st.none() | st.floats(0, 9)),
        )
    except InvalidProduct:
        return Product("x", "t", "", (), (), {}, None)


goals = st.builds(Goal, st.just("g"), st.lists(texts, max_size=3).map(tuple), st.dictionaries(texts, texts, max_size=2), st.none() | st.floats(0, 9))


@given(products(), st.dictionaries(texts, texts, max_size=2), st.none() | st.floats(), goals, products())
def test_the_reward_is_total_and_bounded(product, chosen, price, goal, goal_product):
    detail = score(product, chosen, price, goal, goal_product)
    values = (detail.strict, detail.loose, detail.r_type, detail.r_att, detail.r_opt, detail.r_price)
    assert all(math.isfinite(v) and 0 <= v <= 1 for v in values)
    assert detail.success == (detail.strict == 1.0)
    assert detail == score(product, chosen, price, goal, goal_product)
