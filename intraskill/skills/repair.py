"""Plays on from a point of an episode as an agent would that knows the goal: the analyst's counterfactual trial.

It uses nothing but the shop's public tools and answers, and of the hidden goal only the targets: it never jumps to the goal's product, so a trial
that succeeds shows that following the rule would have been enough.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from intraskill.skills import shop_view, words
from intraskill.skills.shop_view import Page, View
from intraskill.types import ToolCall


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a purchase has to meet.

    Attributes:
      kind: words that name the product type, as far as the instruction states them.
      attributes: all of them needed.
      options: axis -> value.
      ceiling: the budget, or None.
      query: a search that states everything.
    """

    kind: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    ceiling: float | None
    query: str

    def missing(self, page: Page) -> tuple[str, ...]:
        """The required attributes that neither the page's facts nor its title state."""
        return tuple(a for a in self.attributes if not any(words.says(text, a) for text in (*page.attributes, page.title)))

    def placed(self, page: Page) -> dict[str, str] | None:
        """Axis of the page -> the value to choose there; None when a wanted value is not offered.

        An axis that the goal leaves open gets its cheapest value, then the first one.
        """
        found: dict[str, str] = {}
        for axis, value in self.options.items():
            place = locate(page, axis, value)
            if place is None:
                return None
            found[place[0]] = place[1]
        for axis, values in page.axes.items():
            if axis not in found:
                found[axis] = min(values, key=lambda v, prices=values: (prices[v] is None, prices[v] or 0.0))
        return {axis: found[axis] for axis in page.axes}

    def affordable(self, price: float | None) -> bool:
        return self.ceiling is None or price is None or price <= self.ceiling + 1e-9

    def met_by(self, page: Page) -> bool:
        """Whether the page can be bought in a way that meets everything, as far as it shows."""
        placed = self.placed(page)
        if placed is None or self.missing(page) or not all(words.says(page.title, w) for w in self.kind):
            return False
        priced = [page.axes[axis][value] for axis, value in placed.items() if page.axes[axis][value] is not None]
        return self.affordable(priced[0] if priced else page.prices and page.prices[0])


def locate(page: Page, axis: str, value: str) -> tuple[str, str] | None:
    """The page's own spelling of an axis and value; any axis will do when the page has none of that name."""
    named = [a for a in page.axes if words.normal(a) == words.normal(axis)]
    places = [(a, v) for a in named or page.axes for v in page.axes[a] if words.normal(v) == words.normal(value)]
    return places[0] if places else None


def wanted_of(goal: Mapping[str, Any], goal_title: str, instruction: str) -> Wanted:
    """What the goal wants; the product type is the part of the goal product's title that the instruction says and no attribute covers."""
    attributes = tuple(goal["attributes"])
    covered = {t for a in attributes for t in words.tokens(a)}
    kind = tuple(t for t in dict.fromkeys(words.tokens(goal_title)) if t not in covered and words.says(instruction, t))
    # Without a common word (another language, a synonym) the instruction itself is the best public description.
    query = " ".join([*attributes, *kind]) if kind else " ".join(words.tokens(instruction))
    ceiling = goal["price_ceiling"]
    return Wanted(kind, attributes, dict(goal["options"]), None if ceiling is None else float(ceiling), query)


class Repair:
    """Chooses the next call of the trial. `rejected` are the places of pages that were seen and do not meet the goal."""

    def __init__(self, wanted: Wanted, seen: Sequence[Page] = ()):
        self._wanted = wanted
        self._rejected = {page.place for page in seen if not wanted.met_by(page)}

    def next_call(self, view: View) -> ToolCall | None:
        """The next call, or None when there is nothing left to try."""
        if view.done:
            return None
        if view.page is not None:
            return self._on_page(view, view.page)
        results = view.results
        if results is None or not self._fits(results.query):
            return ToolCall("search", {"query": self._wanted.query})
        for row in results.rows:
            if (results.query, results.first, row.label) not in self._rejected and self._wanted.affordable(row.low):
                return _click(row.label)
        return _click(shop_view.NEXT) if results.has_next else None

    def _fits(self, query: str) -> bool:
        """Whether the results are those of a query that states everything, the agent's own or the trial's."""
        spelled = set(words.tokens(query))
        return words.normal(query) == words.normal(self._wanted.query) or set(words.tokens(self._wanted.query)) <= spelled

    def _on_page(self, view: View, page: Page) -> ToolCall:
        placed = self._wanted.placed(page)
        price = view.prices[0] if view.prices and view.prices[0] == view.prices[1] else None
        settled = placed is not None and all(view.chosen.get(axis) == value for axis, value in placed.items())
        if placed is None or not self._wanted.met_by(page) or (settled and not self._wanted.affordable(price)):
            self._rejected.add(page.place)
            return _click(shop_view.PREVIOUS)
        for axis, value in placed.items():
            if view.chosen.get(axis) != value:
                return _click(f"{axis}={value}")
        return _click(shop_view.BUY)


def _click(target: str) -> ToolCall:
    return ToolCall("click", {"target": target})
