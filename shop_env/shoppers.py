"""Scripted shoppers for the bilingual synthetic shop: they read what an agent reads, and show what care and the persona are worth.

They work on the structured public state, which an observation's text parses back to, so they shop in process and over HTTP alike. They
know the shop's vocabulary, and never a goal. None is used where a policy is evaluated.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from shop_env.bilingual_words import Language
from shop_env.budget import stated_budget
from shop_env.client import PublicTask, ShopClient, StepResult
from shop_env.observation import parse
from shop_env.session import BACK, BUY, NEXT, PREVIOUS, Session, Step
from shop_env.tasks import Task
from shop_env.text import norm

Action = tuple[str, dict[str, str]]
"""A tool and its arguments."""


@runtime_checkable
class Shopper(Protocol):
    """Chooses the next action from a page's public state."""

    def act(self, state: Mapping[str, Any]) -> Action: ...


@dataclasses.dataclass(frozen=True)
class Wants:
    """What to look for: values by facet and by option axis, and the most to spend."""

    kind: str
    facets: Mapping[str, str]
    options: Mapping[str, str]
    ceiling: float | None

    @property
    def query(self) -> str:
        return " ".join([*self.facets.values(), self.kind, *self.options.values()])


def read_wants(language: Language, instruction: str, persona: Mapping[str, Any], *, heed_persona: bool) -> Wants:
    """What the instruction says and, where it is silent, what the persona likes."""
    kind = _spotted(instruction, (kind for domain in language.domains for kind in domain.kinds))[0]
    domain = language.domain_of(kind)
    axes = {language.persona["colour"]: language.colours, domain.axis: domain.values}
    groups = {**domain.facets, **axes}
    group_of = {value: name for name, values in groups.items() for value in values}
    stated = {group_of[value]: value for value in _spotted(instruction, group_of)}
    likes = persona[language.persona["interests"]][language.persona["product preferences"]] if heed_persona else {}
    wanted = {**{name: value for name, value in likes.items() if name in groups}, **stated}
    return Wants(
        kind=kind,
        facets={name: value for name, value in wanted.items() if name in domain.facets},
        options={name: value for name, value in wanted.items() if name in axes},
        ceiling=stated_budget(instruction),
    )


def _spotted(text: str, words: Iterable[str]) -> list[str]:
    """The words that occur in the text, longer ones first, each place counted once. Latin words count only whole."""
    text, found = norm(text), []
    for word in sorted(words, key=lambda w: (-len(w), w)):
        pattern = rf"(?<![a-z0-9-]){re.escape(norm(word))}(?![a-z0-9-])"
        if re.search(pattern, text):
            found.append(word)
            text = re.sub(pattern, " ", text)
    return found


def _search(query: str) -> Action:
    return "search", {"query": query}


def _click(target: str) -> Action:
    return "click", {"target": target}


class RandomShopper:
    """Searches for the kind, then clicks whatever the page offers."""

    def __init__(self, language: Language, task: PublicTask | Task, rng: random.Random):
        self._kind = read_wants(language, task.instruction, task.persona, heed_persona=False).kind
        self._rng = rng
        self._values: list[str] = []

    def act(self, state: Mapping[str, Any]) -> Action:
        page = state["page"]
        if page == "home":
            return _search(self._kind)
        if page == "results":
            return _click(self._rng.choice([row["label"] for row in state["rows"]] + state["controls"]))
        if page == "product":
            self._values = [f"{axis}={value}" for axis, values in state["axes"].items() for value in values]
        return _click(self._rng.choice([*self._values, *state["controls"], PREVIOUS, BACK]))


class FirstResultShopper:
    """Searches for the whole instruction and buys the first result, in the options that the instruction states."""

    def __init__(self, language: Language, task: PublicTask | Task):
        self._query = task.instruction
        self._options = read_wants(language, task.instruction, task.persona, heed_persona=False).options
        self._axes: Mapping[str, Mapping[str, Any]] = {}

    def act(self, state: Mapping[str, Any]) -> Action:
        page = state["page"]
        if page == "home":
            return _search(self._query)
        if page == "results":
            return _click(state["rows"][0]["label"])
        if page == "product":
            self._axes = state["axes"]
        missing = state["missing"] if page == "selection" else list(self._axes)
        if not missing:
            return _click(BUY)
        axis = missing[0]
        wanted = self._options.get(axis)
        return _click(f"{axis}={wanted if wanted in self._axes[axis] else next(iter(self._axes[axis]))}")


class CarefulShopper:
    """Searches for everything it wants, opens results in order, and buys the first product that has all of it within the budget.

    When only as many actions are left as the open product takes to buy, it buys that.

    Args:
      language: of the shop.
      task: its instruction and persona are read.
      heed_persona: whether the persona's likes count where the instruction is silent.
      max_actions: after which the shop ends an episode.
    """

    def __init__(self, language: Language, task: PublicTask | Task, *, heed_persona: bool, max_actions: int = 30):
        self.wants = read_wants(language, task.instruction, task.persona, heed_persona=heed_persona)
        self._left = max_actions
        self._next = 1  # place of the next result to look at, counted from 1 over all pages
        self._controls: list[str] = []
        self._axes: Mapping[str, Mapping[str, float | None]] = {}

    def act(self, state: Mapping[str, Any]) -> Action:
        action = {"home": self._home, "results": self._results, "product": self._product, "selection": self._selection}[state["page"]](state)
        self._left -= 1
        return action

    def _home(self, state: Mapping[str, Any]) -> Action:
        return _search(self.wants.query)

    def _results(self, state: Mapping[str, Any]) -> Action:
        self._controls = state["controls"]
        for place, row in enumerate(state["rows"], state["first"]):
            if place >= self._next and self._affordable(None if row["price"] is None else row["price"][0]):
                self._next = place + 1
                return _click(row["label"])
        self._next = state["last"] + 1
        return _click(NEXT) if NEXT in self._controls else _click(state["rows"][-1]["label"])

    def _affordable(self, price: float | None) -> bool:
        return self.wants.ceiling is None or (price is not None and price <= self.wants.ceiling)

    def _product(self, state: Mapping[str, Any]) -> Action:
        self._axes = state["axes"]
        fits = set(self.wants.facets.values()) <= set(state["attributes"])
        fits &= all(value in self._axes.get(axis, ()) for axis, value in self.wants.options.items())
        fits &= self._affordable(self._price(state["price"]))
        if not fits and self._left > len(self._axes) + 3:
            return _click(PREVIOUS)
        return self._choose(list(self._axes))

    def _price(self, shown: list[float] | None) -> float | None:
        """Of the selection to be made: the wanted value's price, or the lowest, where one axis changes the price."""
        for axis, values in self._axes.items():
            if any(price is not None for price in values.values()):
                return values[self._value(axis)]
        return shown[0] if shown else None

    def _value(self, axis: str) -> str:
        """The wanted value if it is on offer, else the cheapest, else the first."""
        values, wanted = self._axes[axis], self.wants.options.get(axis)
        if wanted is not None and wanted in values:
            return wanted
        priced = {value: price for value, price in values.items() if price is not None}
        return min(priced, key=lambda value: priced[value]) if priced else next(iter(values))

    def _selection(self, state: Mapping[str, Any]) -> Action:
        return self._choose(state["missing"])

    def _choose(self, missing: list[str]) -> Action:
        return _click(f"{missing[0]}={self._value(missing[0])}") if missing else _click(BUY)


def play(session: Session, shopper: Shopper) -> Step:
    """Shops in process; returns the shop's last answer."""
    state = session.state
    while True:
        step = session.step(*shopper.act(state))
        if step.done:
            return step
        state = step.state


async def play_over_http(client: ShopClient, task: PublicTask, make: Callable[[PublicTask], Shopper], *, show_ids: bool = False) -> StepResult:
    """Shops through the service, reading its observations as text; returns the last answer."""
    opened = await client.open(task.id)
    shopper, state = make(opened.task), parse(opened.observation, show_ids=show_ids)
    while True:
        tool, arguments = shopper.act(state)
        step = await client.step(opened.episode_id, tool, arguments)
        if step.done:
            await client.close(opened.episode_id)
            return step
        if step.feedback == "ok":
            state = parse(step.observation, show_ids=show_ids)
