"""The text that an agent reads, rendered from the public state of a page, and the parser that proves nothing was lost.

One space between words, one line per row or axis. A value with a space in it is quoted where values are listed; catalogue text never
contains a double quote (see `shop_env.text.clean`). Pages:

    search page
    results 1-5 of 40 | next | back to search      then a line `A title $24` per row
    product TITLE $24-$27 | previous | back to search   then `has ...` and a line per axis
    chosen colour red missing size price $24-$27   the answer to an option click
    done
"""

import re
from collections.abc import Mapping
from typing import Any

_VALUE_WORDS = frozenset({"|", "missing", "price"})
_AXIS_WORDS = _VALUE_WORDS | {"has"}
_TOKEN = re.compile(r'"([^"]*)"|([^ ]+)')
_PRICE_UNKNOWN = "$?"


def money(amount: float) -> str:
    """`$24` for whole amounts, else `$24.50`."""
    return f"${amount:.0f}" if amount == int(amount) else f"${amount:.2f}"


def price_text(price: tuple[float, float] | list[float] | None) -> str:
    """`$24`, `$24-$29`, or `$?` when no price is stated."""
    if price is None:
        return _PRICE_UNKNOWN
    low, high = price
    return money(low) if low == high else f"{money(low)}-{money(high)}"


def quote(text: str, reserved: frozenset[str] = _VALUE_WORDS) -> str:
    """Quotes what would not read back as one word."""
    return f'"{text}"' if " " in text or text.startswith("$") or text in reserved else text


def quote_axis(axis: str) -> str:
    return quote(axis, _AXIS_WORDS)


def render(state: Mapping[str, Any]) -> str:
    """Text of a page's public state."""
    match state["page"]:
        case "home":
            return "search page"
        case "results":
            return _render_results(state)
        case "product":
            return _render_product(state)
        case "selection":
            return _render_selection(state)
        case "done":
            return "done"
    raise ValueError(f"unknown page {state['page']!r}")


def _render_results(state: Mapping[str, Any]) -> str:
    span = f"{state['first']}-{state['last']}" if state["total"] else "0"
    lines = [" | ".join([f"results {span} of {state['total']}", *state["controls"]])]
    for row in state["rows"]:
        shown_id = f"[{row['id']}] " if "id" in row else ""
        lines.append(f"{row['label']} {shown_id}{row['title']} {price_text(row['price'])}")
    return "\n".join(lines)


def _render_product(state: Mapping[str, Any]) -> str:
    lines = [" | ".join([f"product {state['title']} {price_text(state['price'])}", *state["controls"]])]
    if state["attributes"]:
        lines.append(" ".join(["has", *map(quote, state["attributes"])]))
    for axis, values in state["axes"].items():
        words = [quote_axis(axis)]
        for value, price in values.items():
            words.append(quote(value))
            if price is not None:
                words.append(money(price))
        lines.append(" ".join(words))
    return "\n".join(lines)


def _render_selection(state: Mapping[str, Any]) -> str:
    words = ["chosen"]
    for axis, value in state["chosen"].items():
        words += [quote_axis(axis), quote(value)]
    if state["missing"]:
        words += ["missing", *map(quote_axis, state["missing"])]
    words += ["price", price_text(state["price"])]
    return " | ".join([" ".join(words), *state["controls"]])


def parse(text: str, *, show_ids: bool = False) -> dict[str, Any]:
    """Inverse of `render`; an invalid action's answer parses to {"page": "invalid", "reason", "hint"}."""
    if text == "search page":
        return {"page": "home"}
    if text == "done":
        return {"page": "done"}
    head, *lines = text.split("\n")
    kind = head.split(" ", 1)[0]
    if kind == "results":
        return _parse_results(head, lines, show_ids)
    if kind == "product":
        return _parse_product(head, lines)
    if kind == "chosen":
        return _parse_selection(head)
    if kind == "invalid":
        reason, hint = head.removeprefix("invalid ").split(" | ", 1)
        return {"page": "invalid", "reason": reason, "hint": hint}
    raise ValueError(f"not an observation: {text[:80]!r}")


def _parse_price(word: str) -> list[float] | None:
    if word == _PRICE_UNKNOWN:
        return None
    low, _, high = word.partition("-")
    return [float(low[1:]), float((high or low)[1:])]


def _words(line: str) -> list[tuple[str, bool]]:
    """Words of a line, and whether each was quoted."""
    return [(m[1], True) if m[2] is None else (m[2], False) for m in _TOKEN.finditer(line)]


def _parse_results(head: str, lines: list[str], show_ids: bool) -> dict[str, Any]:
    span, *controls = head.removeprefix("results ").split(" | ")
    shown, total = span.split(" of ")
    first, _, last = shown.partition("-")
    rows = []
    for line in lines:
        label, rest = line.split(" ", 1)
        row: dict[str, Any] = {"label": label}
        if show_ids:
            shown_id, rest = rest.split(" ", 1)
            row["id"] = shown_id[1:-1]
        row["title"], price = rest.rsplit(" ", 1)
        rows.append({**row, "price": _parse_price(price)})
    return {"page": "results", "first": int(first), "last": int(last or first), "total": int(total), "rows": rows, "controls": controls}


def _parse_product(head: str, lines: list[str]) -> dict[str, Any]:
    controls: list[str] = []
    for control in ("buy now", "back to search", "previous"):
        if head.endswith(f" | {control}"):
            head = head.removesuffix(f" | {control}")
            controls.insert(0, control)
    title, price = head.removeprefix("product ").rsplit(" ", 1)
    attributes: list[str] = []
    axes: dict[str, dict[str, float | None]] = {}
    for line in lines:
        (name, quoted), *words = _words(line)
        if name == "has" and not quoted:
            attributes = [word for word, _ in words]
            continue
        values: dict[str, float | None] = {}
        for word, was_quoted in words:
            if word.startswith("$") and not was_quoted:
                values[next(reversed(values))] = float(word[1:])
            else:
                values[word] = None
        axes[name] = values
    return {"page": "product", "title": title, "price": _parse_price(price), "attributes": attributes, "axes": axes, "controls": controls}


def _parse_selection(head: str) -> dict[str, Any]:
    words = _words(head)[1:]
    end = words.index(("price", False))
    middle = words.index(("missing", False)) if ("missing", False) in words[:end] else end
    pairs = [word for word, _ in words[:middle]]
    return {
        "page": "selection",
        "chosen": dict(zip(pairs[::2], pairs[1::2], strict=True)),
        "missing": [word for word, _ in words[middle + 1 : end]],
        "price": _parse_price(words[end + 1][0]),
        "controls": ["buy now"] if len(words) > end + 2 else [],
    }
