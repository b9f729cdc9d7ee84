"""The price ceiling that an instruction states, in Chinese or English.

Only the text is read, never a product: an upper bound is the ceiling itself, "about N" allows a tenth more, a range means its upper end. A
lower bound ("at least N") and a price for a unit of measure ("N a metre") are no budget. A number is money only if a currency stands at it
or a word such as "budget" leads to it within the same clause.
"""

import dataclasses
import re
import unicodedata

ABOUT = 1.10  # what "about N" allows, as a multiple of N

_DIGITS = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_UNITS = {"十": 10, "百": 100, "千": 1000}
_SCALES = {"万": 10_000.0, "千": 1_000.0, "百": 100.0, "k": 1_000.0, "": 1.0}
_HAN_NUMBER = f"[{''.join(_DIGITS)}十百千万]"

# A number with its scale; "1万2" is 12,000 and "一千八" is 1,800. A currency may stand before or behind.
_AMOUNT = re.compile(
    rf"""(?P<sign>rmb|usd|[$¥]|us\$)?\s*
    (?P<number>(?<![\w.])\d+(?:\.\d+)?|(?<=[^\x00-\x7f])\d+(?:\.\d+)?|{_HAN_NUMBER}+)
    \s*(?P<scale>万(?P<rest>\d)?(?!\d)|[千百]|k\b)?
    (?P<odd>[来多几])?
    \s*(?P<fuzzy>左右|上下)?
    \s*(?P<word>元|块钱|块|人民币|dollars?\b|bucks\b|usd\b|rmb\b|yuan\b)?""",
    re.VERBOSE,
)
_PRICE_WORD = re.compile(r"预算|价格|价钱|价位|售价|总价|花费|费用|价|budget|price|cost|spend|pay(?:ing)?\b")
_CLAUSE = re.compile(r"[，。；;！!？?、\n]|,\s|\.(?:\s|$)")
_JOIN = re.compile(r"\s*(?:-|~|—|–|至|到|和|与|to\b|and\b|or\b)\s*$")
_UNIT_BEFORE = re.compile(r"单价|每(?:平方?|平米|米|斤|公斤|千克|克|升|尺|码)[^，。]{0,3}$")
_UNIT_BEHIND = re.compile(
    r"\s*(?:/|每|一|per\b|a\b|an\b)\s*(?:平方米|平方|平米|平|㎡|m2|m²|米|m\b|斤|公斤|千克|kg\b|克|g\b|升|l\b|尺|码|"
    r"sq(?:uare)?\b|sqft\b|f(?:oo|ee)?t\b|yards?\b|met(?:er|re)s?\b|inch(?:es)?\b|lbs?\b|pounds?\b|oz\b|ounces?\b|lit(?:er|re)s?\b|gallons?\b)"
)
_UPPER_BEFORE = re.compile(
    r"(?:不得|不能|不要|不可|不|别)(?:超过|超出|高于|高过|大于|多于|超)|(?<!不)(?:低于|小于|少于)|不到|最高|最多|至多|顶多|上限|封顶|"
    r"\b(?:under|below|within|up to|at most|maximum|max|(?:less|lower|cheaper|fewer) than)\b|"
    r"(?:\bno|\bnot|n't|\bnever)\b[^.,;]{0,24}?(?:more than|over|above|exceed(?:ing)?|higher than|greater than)\b"
)
_UPPER_BEHIND = re.compile(r"\s*(?:以内|之内|以下|之下|内|封顶|都不到|or (?:less|under|below|cheaper)|max(?:imum)?\b|at most|tops)")
_LOWER_BEFORE = re.compile(
    r"不低于|不少于|不小于|至少|最低|起码|超过|高于|大于|多于|"
    r"\b(?:at least|over|above|more than|higher than|greater than|exceed(?:ing|s)?|minimum|from|starting at)\b"
)
_LOWER_BEHIND = re.compile(r"\s*(?:以上|之上|起步|起(?!码)|\+|or (?:more|above|over|higher)|and (?:up|above)|minimum\b)")
_ABOUT_BEFORE = re.compile(r"(?:大约|大概|差不多|约|接近)(?:在|是|为)?\s*$|\b(?:around|about|approximately|roughly|near|close to|circa)\s*$|~\s*$")
_ABOUT_BEHIND = re.compile(r"\s*(?:左右|上下|出头|大约|上下浮动|or so|-?ish\b|approximately)")
_BUYS_BEHIND = re.compile(r"\s*(?:的)?\s*(?:预算|价位|价格|能?拿下|能?搞定|能买|budget\b)")


@dataclasses.dataclass(frozen=True)
class _Amount:
    """A number in the text: its value, where it stands, and what its own words say."""

    value: float
    start: int
    end: int
    currency: bool
    about: bool


def stated_budget(text: str) -> float | None:
    """The first price ceiling that `text` states, rounded to cents, or None.

    >>> stated_budget("预算300元左右"), stated_budget("between $20 and $40"), stated_budget("at least $20")
    (330.0, 40.0, None)
    """
    text = re.sub(r"(?<=\d),(?=\d{3})", "", unicodedata.normalize("NFKC", text).casefold().replace("’", "'"))
    amounts = _amounts(text)
    skip = -1
    for i, amount in enumerate(amounts):
        if i == skip:
            continue
        clause = _clause_before(text, amounts[i - 1].end if i else 0, amount.start)
        led = amount.currency or bool(_PRICE_WORD.search(clause))
        if i + 1 < len(amounts) and amount.value <= amounts[i + 1].value and _JOIN.fullmatch(text[amount.end : amounts[i + 1].start]):
            skip, high = i + 1, amounts[i + 1]
            if (led or high.currency or _buys(text, high)) and not _is_unit(text, clause, high):
                return round(high.value, 2)
            continue
        ceiling = _ceiling(text, clause, amount) if led or _buys(text, amount) else None
        if ceiling is not None:
            return round(ceiling, 2)
    return None


def _ceiling(text: str, clause: str, amount: _Amount) -> float | None:
    """What one amount of money says, given the words before it in its clause and those right behind it."""
    if amount.value <= 0 or _is_unit(text, clause, amount):
        return None
    if _UPPER_BEFORE.search(clause) or _UPPER_BEHIND.match(text, amount.end):
        return amount.value
    if _LOWER_BEFORE.search(clause) or _LOWER_BEHIND.match(text, amount.end):
        return None
    if amount.about or _ABOUT_BEFORE.search(clause) or _ABOUT_BEHIND.match(text, amount.end):
        return amount.value * ABOUT
    return amount.value if _PRICE_WORD.search(clause) or _buys(text, amount) else None


def _is_unit(text: str, clause: str, amount: _Amount) -> bool:
    return bool(_UNIT_BEFORE.search(clause) or _UNIT_BEHIND.match(text, amount.end))


def _buys(text: str, amount: _Amount) -> bool:
    """Whether a word right behind makes it a budget: "$50 budget", "三百左右拿下"."""
    behind = _ABOUT_BEHIND.match(text, amount.end) or _UPPER_BEHIND.match(text, amount.end)
    return bool(_BUYS_BEHIND.match(text, behind.end() if behind else amount.end))


def _clause_before(text: str, start: int, end: int) -> str:
    """The text between the last number or clause mark and `end`."""
    return _CLAUSE.split(text[start:end])[-1]


def _amounts(text: str) -> list[_Amount]:
    found = []
    for m in _AMOUNT.finditer(text):
        scale = _SCALES[(m["scale"] or "")[:1]]
        value = float(m["number"]) if m["number"][0].isascii() else _han_value(m["number"])
        value = value * scale + (float(m["rest"]) * scale / 10 if m["rest"] else 0.0)
        found.append(_Amount(value, m.start(), m.end(), bool(m["sign"] or m["word"]), bool(m["odd"] or m["fuzzy"])))
    return found


def _han_value(text: str) -> float:
    """Value of a Chinese numeral; a last digit without unit counts tenths of the unit before it (一千八 = 1,800)."""
    if all(c in _DIGITS for c in text):
        return float("".join(str(_DIGITS[c]) for c in text))
    total, section, digit, unit, zero = 0, 0, None, 1, False
    for c in text:
        if c in _DIGITS:
            digit, zero = _DIGITS[c], zero or _DIGITS[c] == 0
        elif c == "万":
            total, section, digit, unit, zero = (total + section + (digit or 0)) * 10_000 or 10_000, 0, None, 10_000, False
        else:
            unit, zero = _UNITS[c], False
            section += (1 if digit is None else digit) * unit
            digit = None
    tail = 0 if digit is None else digit * (unit // 10 if unit > 10 and not zero else 1)
    return float(total + section + tail)
