"""Values of public data sets as the catalogue wants them. None of these functions raises: what makes no sense is dropped, and counted."""

import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from shop_env.reward import similar
from shop_env.text import clean, norm

EMPTY_PRICE = 100.0  # what an empty price list means in both public systems
_PRICE_LIMIT = 1e9
_PRICE = re.compile(r"\d+(?:\.\d+)?")
_SIGNED_PRICE = re.compile(r"[$¥]\s*(\d+(?:\.\d+)?)")

Note = Callable[[str], None]
"""Counts one repair under the given phrase."""


def text_of(value: Any) -> str:
    """One clean line; "" for None, NaN, the word "nan" and anything that is neither text nor number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    if isinstance(value, float):
        value = "" if not math.isfinite(value) else int(value) if value.is_integer() else value
    text = clean(str(value))
    return "" if text.casefold() == "nan" else text


def texts_of(value: Any, note: Note, what: str) -> tuple[str, ...]:
    """The texts of a list, or of a single text; blank ones are dropped and counted."""
    values = value if isinstance(value, list) else [] if value is None or value == "" else [value]
    texts = [text_of(v) for v in values]
    if not all(texts):
        note(f"blank {what} dropped")
    return tuple(dict.fromkeys(text for text in texts if text))


def prices_of(value: Any) -> list[float]:
    """All prices in a number, a text such as "$12.50 to $20" or "1,299元", or a list of these."""
    if isinstance(value, list):
        return [price for v in value for price in prices_of(v)]
    if isinstance(value, bool):
        return []
    if isinstance(value, int | float):
        return [float(value)] if 0 <= value < _PRICE_LIMIT else []
    if not isinstance(value, str):
        return []
    text = re.sub(r"(?<=\d),(?=\d{3})", "", unicodedata.normalize("NFKC", value))
    if text.lstrip("$¥ ").startswith("-"):
        return []  # a negative price is none, and no range either
    return [price for number in _SIGNED_PRICE.findall(text) or _PRICE.findall(text) if (price := float(number)) < _PRICE_LIMIT]


def list_price(value: Any, note: Note) -> float | None:
    """The list price; None where several are given, which is a range and not what anything costs."""
    prices = [round(price, 2) for price in prices_of(value)]
    if not prices:
        note(f"no price: {EMPTY_PRICE:g}")
        return EMPTY_PRICE
    return prices[0] if len(set(prices)) == 1 else None


def options_of(value: Any, note: Note) -> dict[str, dict[str, float | None]]:
    """Axis -> value -> price from {axis: [{"value", "price"} or text]}.

    A slash is read as " | " and values are lower-cased, as both public systems do. Of a value that is listed twice the last price counts.
    """
    options: dict[str, dict[str, float | None]] = {}
    for raw_axis, entries in value.items() if isinstance(value, Mapping) else ():
        axis = text_of(raw_axis)
        named = {norm(own): own for own in options}
        values = dict(options.get(named.get(norm(axis), axis), {}))
        spelled = {norm(own): own for own in values}
        for entry in entries if isinstance(entries, list) else ():
            name, price = _option(entry)
            if not name:
                note("blank option value dropped")
                continue
            if norm(name) in spelled:
                note("option value listed twice: the last price counts")
            own = spelled.setdefault(norm(name), name)
            values[own] = price
        if axis and values:
            options[named.get(norm(axis), axis)] = values
        else:
            note("option axis without name or values dropped")
    return options


def _option(entry: Any) -> tuple[str, float | None]:
    prices = prices_of(entry.get("price")) if isinstance(entry, Mapping) else []
    return option_value(entry.get("value") if isinstance(entry, Mapping) else entry), prices[0] if len(set(prices)) == 1 else None


def option_value(value: Any) -> str:
    return clean(text_of(value).replace("/", " | ").lower())


def goal_options(wanted: Any, options: Mapping[str, Mapping[str, Any]], note: Note) -> dict[str, str]:
    """Axis -> wanted value, from a list of values, {axis: value} or one value.

    A value is filed under the axis of its product that offers it. One that none offers is kept under a name that is no axis, so that the
    reward looks for it among all chosen values; so is a second value for the same axis.
    """
    if isinstance(wanted, Mapping):
        pairs = [(text_of(axis), option_value(value)) for axis, value in wanted.items()]
    else:
        pairs = [("", option_value(value)) for value in (wanted if isinstance(wanted, list) else [wanted])]
    goal: dict[str, str] = {}
    for stated, value in pairs:
        if not value:
            if wanted not in (None, "", [], {}):
                note("blank goal option dropped")
            continue
        axis = _axis_offering(stated, value, options)
        if axis is None:
            note("goal option that its product does not offer")
        if axis is None or axis in goal:
            axis = next(name for i in range(1, len(pairs) + 2) if (name := f"option {i}") not in goal and name not in options)
        goal[axis] = value
    return goal


def _axis_offering(stated: str, value: str, options: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The axis that offers exactly this value (blanks aside), else one with a similar value; the stated axis before others."""
    axes = sorted(options, key=lambda axis: norm(axis) != norm(stated))
    tight = norm(value).replace(" ", "")
    exact = (axis for axis in axes if any(norm(own).replace(" ", "") == tight for own in options[axis]))
    alike = (axis for axis in axes if any(similar(value, own) for own in options[axis]))
    return next(exact, None) or next(alike, None)


def plain(value: Any) -> Any:
    """A JSON value with clean texts, and without NaN, blank texts, empty containers and model-written reasoning; None if nothing is left."""
    if isinstance(value, Mapping):
        items = {text_of(key): plain(child) for key, child in value.items() if key != "__reasoning__"}
        return {key: child for key, child in items.items() if key and child is not None} or None
    if isinstance(value, list):
        return [child for child in map(plain, value) if child is not None] or None
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return text_of(value) or None
