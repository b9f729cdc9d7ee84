"""What each phrase allows to spend follows from the rules in docs/shop.md: bound = itself, about = x 1.10, range = upper end, else none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shop_env.budget import stated_budget

UPPER = {
    "预算在1000元以下。": 1000,
    "价格不超过 2199 元": 2199,
    "价格别超过160元": 160,
    "不要超过99块": 99,
    "预算不超过一千八": 1800,
    "预算1万2以内": 12000,
    "价格1.5万以内": 15000,
    "一万二千元以下": 12000,
    "一百零五元以内": 105,
    "两百五以内的预算": 250,
    "十五元以内": 15,
    "五元以内": 5,
    "想买300块钱以内的": 300,
    "价格不到99.9元": 99.9,
    "¥99以内": 99,
    "预算是17000元": 17000,
    "预算两万": 20000,
    "买2个不超过300元": 300,
    "15.6寸电脑包，预算200": 200,
    "under $50": 50,
    "price lower than 50.00 dollars": 50,
    "less than 1,299 dollars": 1299,
    "no more than $40": 40,
    "not over $25": 25,
    "I don’t want to spend more than 30 dollars": 30,
    "USD 30 or less": 30,
    "up to $80": 80,
    "my budget is 60": 60,
    "$60 budget": 60,
    "a 15 inch bag under $40.50": 40.5,
    "a table of at least 20 inches under $80": 80,
    "over 5 stars, below $10": 10,
    "price under 30 and size 40": 30,
}
ABOUT = {
    "价格在70元左右": 77,
    "预算在1万元左右": 11000,
    "差不多30元左右": 33,
    "预算七十元上下": 77,
    "预算就二十来块钱": 22,
    "二十元左右": 22,
    "大概两百块钱": 220,
    "三百左右拿下": 330,
    "给5岁孩子买，价格50元左右": 55,
    "around $50": 55,
    "about 40 bucks": 44,
}
RANGE = {
    "价格在130-140元之间": 140,
    "价格30元到40元之间": 40,
    "价格在10-20之间": 20,
    "预期价格在350元和400元之间": 400,
    "5~10元": 10,
    "between $20 and $40": 40,
    "$20-$40": 40,
    "$20 to $40": 40,
}
NONE = [
    "预算4k+",
    "价格要超过20元",
    "300元以上",
    "不低于300元",
    "至少300块",
    "每平米不超过50元",
    "地毯50元/平方米",
    "单价20元一米",
    "300元的枕头",
    "买一个枕头",
    "nan",
    "",
    "at least $20",
    "over $40",
    "more than $40",
    "$3 per foot",
    "2-3 people tent",
    "size 38-40",
    "a 12 inch pan in red",
]


@pytest.mark.parametrize(("text", "ceiling"), [*UPPER.items(), *ABOUT.items(), *RANGE.items(), *((text, None) for text in NONE)])
def test_what_a_phrase_allows(text, ceiling):
    assert stated_budget(text) == ceiling


@given(st.text(alphabet="预算价格元块以内左右不超过到-~一二十百千万零0123456789.$kunder about per和/米 ", max_size=30))
def test_any_text_gives_a_finite_price_or_none(text):
    ceiling = stated_budget(text)
    assert ceiling is None or 0 < ceiling < float("inf")


@given(st.integers(1, 99_999))
def test_chinese_numerals_read_back(number):
    """Written out by the grammar of Chinese numerals, independently of the parser."""
    digits = "零一二三四五六七八九"
    text, gap = "", False
    for unit, name in ((10_000, "万"), (1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // unit % 10
        if digit:
            text += ("零" if gap and text else "") + digits[digit] + name
        gap = not digit
    assert stated_budget(f"预算{text}元以内") == number
