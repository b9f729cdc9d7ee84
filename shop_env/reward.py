"""The reward of a purchase: pure, total, and the same on every machine.

Three departures from comparing strings naively: a substring counts only between word boundaries ("red" is not in "zippered"); similar
strings must agree on every number asked for ("10 inch" is not "12 inch"); and when the purchased product offers exactly the wanted option
value, only that value is a hit (for "red", "dark red" is one only where plain "red" is not on offer).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from rapidfuzz import fuzz

from shop_env.catalog import Product
from shop_env.tasks import Goal
from shop_env.text import has_han, norm, tokenize

FUZZY_THRESHOLD = 85.0
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
PRIVATE_KEYS = frozenset({"attribute_targets", "attribute_hits", "option_targets", "option_hits", "ceiling", "goal_product_id"})


@dataclasses.dataclass(frozen=True)
class RewardDetail:
    """Every component of a purchase's reward. `strict` is the training reward."""

    strict: float
    loose: float
    success: bool
    r_type: float
    r_att: float
    r_opt: float
    r_price: float
    num_attributes: int
    num_attribute_hits: int
    num_options: int
    num_option_hits: int
    shared_categories: int
    title_overlap: float
    price: float | None
    price_verified: bool
    ceiling_source: str  # "instruction", or "none" when no budget was stated
    product_id: str
    # What follows would tell an agent the goal.
    attribute_targets: tuple[str, ...]
    attribute_hits: tuple[str, ...]
    option_targets: Mapping[str, str]
    option_hits: Mapping[str, str]
    ceiling: float | None
    goal_product_id: str

    def to_json(self) -> dict[str, Any]:
        """Everything, the goal included."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in record.items()}


def public_detail(detail: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a detail that does not tell the goal."""
    return {k: v for k, v in detail.items() if k not in PRIVATE_KEYS}


@functools.lru_cache(maxsize=65536)
def _words(text: str) -> str:
    return " ".join(tokenize(text))


def _contains(text: str, part: str) -> bool:
    """Whether `part` occurs in `text` (both in norm form) without cutting a non-Han word."""
    start = text.find(part)
    while start >= 0:
        end = start + len(part)
        if not (_joined(text, start) or _joined(text, end)):
            return True
        start = text.find(part, start + 1)
    return False


def _joined(text: str, i: int) -> bool:
    """Whether a cut before position i would go through a word of letters and digits."""
    return 0 < i < len(text) and text[i - 1 : i + 1].isalnum() and not has_han(text[i - 1 : i + 1])


def similar(wanted: str, offered: str) -> bool:
    """Whether `offered` says what `wanted` asks for: contains it, or token-set ratio over words and Han pairs above the threshold."""
    a, b = norm(wanted), norm(offered)
    if not a or not b:
        return False
    if _contains(b, a):
        return True
    return set(_NUMBER.findall(a)) <= set(_NUMBER.findall(b)) and fuzz.token_set_ratio(_words(a), _words(b)) > FUZZY_THRESHOLD


def _has_attribute(product: Product, wanted: str) -> bool:
    if any(similar(wanted, attribute) for attribute in product.attributes):
        return True
    part = norm(wanted)
    return bool(part) and any(_contains(norm(text), part) for text in (product.title, *product.bullets))


def _has_option(product: Product, chosen: Mapping[str, str], axis: str, wanted: str) -> bool:
    """Looks at the axis of that name; at all chosen values when the product has no such axis."""
    named = [own for own in product.options if norm(own) == norm(axis)]
    axes = named or list(product.options)
    exact = [own for own in axes if any(norm(value) == norm(wanted) for value in product.options[own])]
    if exact:
        return any(norm(chosen.get(own, "")) == norm(wanted) for own in exact)
    return any(similar(wanted, chosen[own]) for own in axes if own in chosen)


def _type_score(product: Product, goal_product: Product) -> tuple[float, int, float]:
    """r_type, the number of shared category nodes, and the share of the goal title's words that the product's title has."""
    shared = len({norm(node) for node in product.category} & {norm(node) for node in goal_product.category})
    goal_words = set(tokenize(goal_product.title))
    overlap = len(goal_words & set(tokenize(product.title))) / len(goal_words) if goal_words else 0.0
    if product.id == goal_product.id or shared >= 2 or overlap > 0.2:
        return 1.0, shared, overlap
    if overlap == 0:
        return 0.0, shared, overlap
    return (0.1 if overlap < 0.1 else 0.5), shared, overlap


def score(product: Product, chosen: Mapping[str, str], price: float | None, goal: Goal, goal_product: Product) -> RewardDetail:
    """Scores the purchase of `product` with the options `chosen` at `price` (None: not verifiable) against `goal`."""
    if price is not None and not math.isfinite(price):
        price = None  # no catalogue states such a price
    r_type, shared, overlap = _type_score(product, goal_product)
    attribute_hits = tuple(wanted for wanted in goal.attributes if _has_attribute(product, wanted))
    option_hits = {axis: wanted for axis, wanted in goal.options.items() if _has_option(product, chosen, axis, wanted)}
    num_att, num_opt = len(goal.attributes), len(goal.options)
    r_att = len(attribute_hits) / num_att if num_att else 1.0
    r_opt = len(option_hits) / num_opt if num_opt else 1.0
    r_price = 1.0 if goal.price_ceiling is None or (price is not None and price <= goal.price_ceiling + 1e-9) else 0.0
    return RewardDetail(
        strict=r_type * r_att * r_opt * r_price,
        loose=r_type * (len(attribute_hits) + len(option_hits) + r_price) / (num_att + num_opt + 1),
        success=r_type == r_att == r_opt == r_price == 1.0,
        r_type=r_type,
        r_att=r_att,
        r_opt=r_opt,
        r_price=r_price,
        num_attributes=num_att,
        num_attribute_hits=len(attribute_hits),
        num_options=num_opt,
        num_option_hits=len(option_hits),
        shared_categories=shared,
        title_overlap=overlap,
        price=price,
        price_verified=price is not None,
        ceiling_source="none" if goal.price_ceiling is None else "instruction",
        product_id=product.id,
        attribute_targets=goal.attributes,
        attribute_hits=attribute_hits,
        option_targets=dict(goal.options),
        option_hits=option_hits,
        ceiling=goal.price_ceiling,
        goal_product_id=goal_product.id,
    )
