"""What an agent could see in an episode, read back from the shop's answers.

`advance` follows an episode call by call: which rows were offered, which page is open, what is chosen and what it costs. The analyst decides from
these views (and the goal), so whatever it says about an episode was visible to the agent that played it.
"""

import dataclasses
import re
from collections.abc import Mapping

from intraskill.skills import words
from intraskill.types import ToolCall

_WORD = re.compile(r'"([^"]*)"|(\S+)')
_CONTROLS = ("next", "previous", "back to search", "buy now")
NEXT, PREVIOUS, BACK, BUY = _CONTROLS


class UnreadableAnswer(ValueError):
    """The shop answered something that none of its known pages looks like."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a results page."""

    label: str
    title: str
    low: float | None  # the lowest price, None when the shop states none


@dataclasses.dataclass(frozen=True)
class Results:
    """One page of results."""

    query: str
    first: int
    rows: tuple[Row, ...]
    has_next: bool


@dataclasses.dataclass(frozen=True)
class Page:
    """A product's page. `place` says which row of which results it was opened from: titles are not unique."""

    place: tuple[str, int, str]
    title: str
    prices: tuple[float, float] | None
    attributes: tuple[str, ...]
    axes: Mapping[str, Mapping[str, float | None]]


@dataclasses.dataclass(frozen=True)
class View:
    """Where an episode stands. On the home page there is neither page nor results; a page keeps the results that it was opened from."""

    results: Results | None = None
    page: Page | None = None
    chosen: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prices: tuple[float, float] | None = None  # of what is chosen
    done: bool = False


def advance(view: View, call: ToolCall, observation: str, feedback: str = "ok") -> View:
    """The view after the shop answered `call` with `observation`; a refused call changes nothing."""
    head, *lines = observation.split("\n")
    kind = head.split(" ", 1)[0]
    try:
        if feedback != "ok" or kind == "invalid":
            return view
        if head == "done":
            return dataclasses.replace(view, done=True)
        if head == "search page":
            return View()
        if kind == "results":
            query = str(call.arguments.get("query", "")) if call.name == "search" else view.results.query if view.results else ""
            return View(results=_results(query, head, lines))
        if kind == "product" and view.results is not None:
            place = (view.results.query, view.results.first, _label(view.results, str(call.arguments.get("target", ""))))
            page = _page(place, head, lines)
            return View(view.results, page, {}, page.prices)
        if kind == "chosen" and view.page is not None:
            chosen, prices = _selection(head)
            return dataclasses.replace(view, chosen=chosen, prices=prices)
    except (ValueError, IndexError, StopIteration) as error:
        raise UnreadableAnswer(f"cannot read the shop's answer {observation[:80]!r} ({error})") from error
    raise UnreadableAnswer(f"cannot read the shop's answer {observation[:80]!r} to {call.name} {dict(call.arguments)}")


def _label(results: Results, target: str) -> str:
    """The row that a click meant; a click by product id keeps the target itself."""
    return next((r.label for r in results.rows if words.normal(r.label) == words.normal(target)), target)


def _prices(word: str) -> tuple[float, float] | None:
    if word == "$?":
        return None
    low, _, high = word.partition("-")
    return float(low.removeprefix("$")), float((high or low).removeprefix("$"))


def _split_controls(head: str) -> tuple[str, tuple[str, ...]]:
    """Takes the controls off a head line; a title may itself contain a bar."""
    controls: list[str] = []
    while " | " in head and head.rsplit(" | ", 1)[1] in _CONTROLS:
        head, control = head.rsplit(" | ", 1)
        controls.insert(0, control)
    return head, tuple(controls)


def _spelled(line: str) -> list[tuple[str, bool]]:
    """The line's words, and whether each was quoted (a quoted word is a value, never a price or a keyword)."""
    return [(m[1], True) if m[2] is None else (m[2], False) for m in _WORD.finditer(line)]


def _results(query: str, head: str, lines: list[str]) -> Results:
    head, controls = _split_controls(head)
    span = head.split(" ")[1]
    rows = []
    for line in lines:
        label, rest = line.split(" ", 1)
        title, price = re.sub(r"^\[\S+\] ", "", rest).rsplit(" ", 1)
        prices = _prices(price)
        rows.append(Row(label, title, prices and prices[0]))
    return Results(query, int(span.split("-")[0]), tuple(rows), NEXT in controls)


def _page(place: tuple[str, int, str], head: str, lines: list[str]) -> Page:
    head, _ = _split_controls(head)
    title, price = head.removeprefix("product ").rsplit(" ", 1)
    attributes: tuple[str, ...] = ()
    axes: dict[str, dict[str, float | None]] = {}
    for line in lines:
        (name, quoted), *rest = _spelled(line)
        if name == "has" and not quoted:
            attributes = tuple(word for word, _ in rest)
            continue
        values: dict[str, float | None] = {}
        for word, quoted in rest:
            if word.startswith("$") and not quoted:
                values[next(reversed(values))] = float(word[1:])  # a price belongs to the value before it
            else:
                values[word] = None
        axes[name] = values
    return Page(place, title, _prices(price), attributes, axes)


def _selection(head: str) -> tuple[dict[str, str], tuple[float, float] | None]:
    head, _ = _split_controls(head)
    spelled = _spelled(head)[1:]
    end = len(spelled) - 2  # `price $27` closes the line
    if end < 0 or spelled[end] != ("price", False):
        raise ValueError("no price at the end")
    middle = spelled.index(("missing", False)) if ("missing", False) in spelled[:end] else end
    pairs = [word for word, _ in spelled[:middle]]
    return dict(zip(pairs[::2], pairs[1::2], strict=True)), _prices(spelled[end + 1][0])
