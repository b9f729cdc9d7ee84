"""A scripted shopper for the synthetic world: reads only what an agent sees, and performs each careful procedure or leaves it out.

It shows that tasks are solvable, measures what each procedure is worth, and (with its thoughts) demonstrates shopping to the pocket model.
It is never used when a policy is evaluated.
"""

import dataclasses
import random
import re
from collections.abc import Iterable, Mapping

from shop_env.session import Session, Step

PROCEDURES = ("query", "persona", "stated", "page", "stock", "price")
"""What a careful shopper does: searches with every attribute; takes the open option from the persona; lets the stated option win over the
persona; goes back when the page lacks an attribute; goes back when the wanted option is not there; goes back when the price is too high."""
SECOND = "second"  # the plan's word for opening the second row first

_INSTRUCTION = re.compile(r"find a (?P<attributes>.+) (?P<kind>\S+) in (?P<axis>colour|size) (?P<value>\S+) under \$(?P<budget>\d+)")
_AXES = ("colour", "size")


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the instruction says, word by word."""

    attributes: tuple[str, ...]
    kind: str
    stated_axis: str
    stated_value: str
    budget: int


def read_instruction(instruction: str) -> Wish:
    """Parses a synthetic instruction; raises ValueError for any other text."""
    match = _INSTRUCTION.fullmatch(instruction)
    if match is None:
        raise ValueError(f"not a synthetic instruction: {instruction!r}")
    return Wish(tuple(match["attributes"].split()), match["kind"], match["axis"], match["value"], int(match["budget"]))


@dataclasses.dataclass(frozen=True)
class Action:
    """One step: a thought (for demonstrations) and a tool call."""

    thought: str
    tool: str
    argument: str

    @property
    def arguments(self) -> dict[str, str]:
        return {"query" if self.tool == "search" else "target": self.argument}


def _page(text: str) -> tuple[set[str], dict[str, list[str]]]:
    """The attributes and the option values of a product page, from its text."""
    attributes: set[str] = set()
    options = {}
    for line in text.split("\n")[1:]:
        head, *words = line.split(" ")
        if head == "has":
            attributes = set(words)
        else:
            options[head] = [w for w in words if not w.startswith("$")]
    return attributes, options


class Shopper:
    """Chooses actions one by one. `does` names the procedures it performs; the others it leaves out.

    `skip_first` makes it open the second row before any other, as the stale skill advises.
    """

    def __init__(self, instruction: str, persona: Mapping[str, str], does: Iterable[str], rng: random.Random, *, skip_first: bool = False):
        self.wish = read_instruction(instruction)
        self.does = frozenset(does)
        self._rng = rng
        self._likes = {axis: persona[f"likes {axis}"] for axis in _AXES}
        self._order = [1, 0, 2, 3, 4] if skip_first else [0, 1, 2, 3, 4]
        self._tried = 0
        self._rows = 0
        self._more = False
        self._turned = False
        self._choices: dict[str, str] = {}
        self._intended = Action("", "click", "back to search")

    def wanted(self, axis: str) -> str | None:
        """The option value to look for, or None when the shopper has no opinion."""
        if axis == self.wish.stated_axis:
            return self.wish.stated_value if "stated" in self.does else self._likes[axis]
        return self._likes[axis] if "persona" in self.does else None

    def source(self, axis: str) -> str:
        """The word that stands before the axis where the wanted value is written: "in" the instruction, what the persona "likes"."""
        return "in" if axis == self.wish.stated_axis and "stated" in self.does else "likes"

    def act(self, observation: str) -> Action:
        """The next action, given the shop's last answer."""
        self._intended = self._next(observation)
        return self._intended

    def _next(self, observation: str) -> Action:
        head = observation.split(" ", 1)[0]
        if head == "invalid":
            return self._recover(observation)
        if head == "search":
            return self._search()
        if head == "results":
            return self._open(observation)
        if head == "product":
            return self._inspect(observation)
        return self._choose(observation)

    def _recover(self, observation: str) -> Action:
        """After a refused click (a demonstration may slip): leave a page whose option is not there, otherwise do what was meant."""
        if "=" in self._intended.argument and " missing " not in observation and self._may_leave:
            return Action("", "click", "previous")
        return dataclasses.replace(self._intended, thought="")

    @property
    def plan(self) -> tuple[str, ...]:
        """What it is going to do, in words: procedures in the order of `PROCEDURES`, and the stale habit."""
        return (*(p for p in PROCEDURES if p in self.does), *((SECOND,) if self._order[0] == 1 else ()))

    def _search(self) -> Action:
        words = self.wish.attributes if "query" in self.does else (self._rng.choice(self.wish.attributes),)
        return Action(" ".join(("do", *self.plan)), "search", " ".join(("a", *words, self.wish.kind)))

    def _open(self, observation: str) -> Action:
        lines = observation.split("\n")
        self._rows, self._more = len(lines) - 1, "| next" in lines[0]
        if self._tried >= self._rows and self._more and not self._turned:
            self._turned, self._tried = True, 0
            return Action("", "click", "next")
        order = [i for i in self._order if i < self._rows]
        row = order[min(self._tried, len(order) - 1)]
        self._tried += 1
        return Action("", "click", lines[1 + row].split(" ", 1)[0])

    @property
    def _may_leave(self) -> bool:
        return self._tried < self._rows or (self._more and not self._turned)

    def _inspect(self, observation: str) -> Action:
        attributes, options = _page(observation)
        thought: list[str] = []
        reject = False
        if "page" in self.does:
            thought.append("a")
            for attribute in self.wish.attributes:
                thought += [attribute, "yes" if attribute in attributes else "no"]
                reject = thought[-1] == "no"
                if reject:
                    break
        for axis in _AXES if not reject else ():
            value = self.wanted(axis)
            if value is not None:
                thought += [self.source(axis), axis, value]
                if "stock" in self.does:
                    thought.append("yes" if value in options[axis] else "no")
                    reject = thought[-1] == "no"
                    if reject:
                        break
        if reject and self._may_leave:
            return Action(" ".join(thought), "click", "previous")
        self._choices = {axis: v if (v := self.wanted(axis)) in options[axis] else self._rng.choice(options[axis]) for axis in _AXES}
        return self._select(_AXES[0], thought)

    def _select(self, axis: str, thought: list[str]) -> Action:
        return Action(" ".join(thought), "click", f"{axis}={self._choices[axis]}")

    def _choose(self, observation: str) -> Action:
        match = re.search(r" missing (\S+)", observation)
        if match is not None:
            return self._select(match[1], [])
        price = re.search(r" price (\$\d+)", observation)
        if price is None or "price" not in self.does:
            return Action("", "click", "buy now")
        over = int(price[1][1:]) > self.wish.budget
        thought = f"price {price[1]} budget ${self.wish.budget} {'exceeds' if over else 'ok'}"
        return Action(thought, "click", "previous" if over and self._may_leave else "buy now")


def play(session: Session, shopper: Shopper) -> tuple[list[Action], Step]:
    """Runs an episode to its end; returns the actions taken and the shop's last answer."""
    actions = []
    observation = session.observation
    while True:
        action = shopper.act(observation)
        actions.append(action)
        step = session.step(action.tool, action.arguments)
        observation = step.observation
        if step.done:
            return actions, step
