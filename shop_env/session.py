"""The shop as a pure state machine: home -> results -> product -> done.

`Shop` is read-only and shared by all episodes; `Session` is one episode. Two tools whose schema never changes, so that an episode is one
contiguous token sequence. An invalid action leaves the page as it is, costs a step, and is answered with a typed reason.
"""

import dataclasses
import enum
import functools
from collections.abc import Mapping
from typing import Any

from shop_env import observation as text_view
from shop_env.catalog import Product
from shop_env.errors import EpisodeEnded, InvalidSetting, InvalidTask
from shop_env.pricing import price_range, variant_price
from shop_env.reward import score
from shop_env.search import Index, Searcher
from shop_env.tasks import Task, World
from shop_env.text import norm

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the shop.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "click",
            "description": "Click a row label, axis=value or a control shown.",
            "parameters": {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]},
        },
    },
]
_ARGUMENT = {"search": "query", "click": "target"}
LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NEXT, PREVIOUS, BACK, BUY = "next", "previous", "back to search", "buy now"


class Reason(enum.StrEnum):
    """Why an action was refused."""

    INVALID_FORMAT = "invalid_format"  # unknown tool, or arguments that do not fit its schema
    MULTIPLE_ACTIONS = "multiple_actions"  # a list of several arguments where one is due
    EMPTY_ARGUMENT = "empty_argument"
    SEARCH_UNAVAILABLE = "search_unavailable"  # a product page is open
    UNAVAILABLE_TARGET = "unavailable_target"
    AMBIGUOUS_TARGET = "ambiguous_target"
    ALREADY_SELECTED = "already_selected"
    INCOMPLETE_OPTIONS = "incomplete_options"


@dataclasses.dataclass(frozen=True)
class Step:
    """The shop's answer to one action.

    Attributes:
      observation: what the agent reads.
      state: the public state that it was rendered from (for an invalid action: the unchanged page's).
      feedback: "ok" or a `Reason`.
      done: whether the episode is over.
      status: "purchase", "action_limit" or "generation_length" when done, else "".
      reward: the strict reward, 0 unless a purchase earned it.
      success: whether the purchase met everything.
      reward_detail: every component of a purchase's reward, the goal included: not for the agent. Empty otherwise.
    """

    observation: str
    state: dict[str, Any]
    feedback: str
    done: bool
    status: str = ""
    reward: float = 0.0
    success: bool = False
    reward_detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Shop:
    """A world with its index (built here if none is given) and settings; read-only, shared by all sessions."""

    def __init__(self, world: World, page_size: int = 20, max_actions: int = 30, show_ids: bool = False, index: Searcher | None = None):
        if not 1 <= page_size <= len(LABELS):
            raise InvalidSetting(f"page_size must be in 1..{len(LABELS)} (one letter per row), got {page_size}")
        if max_actions < 1:
            raise InvalidSetting(f"max_actions must be >= 1, got {max_actions}")
        self.world = world
        self.page_size = page_size
        self.max_actions = max_actions
        self.show_ids = show_ids
        self.index: Searcher = Index(world.catalog) if index is None else index
        self._targets = functools.lru_cache(maxsize=4096)(lambda product_id: _option_targets(world.catalog[product_id]))

    def task(self, task_id: str) -> Task:
        try:
            return self.world.tasks[task_id]
        except KeyError:
            raise InvalidTask(f"unknown task {task_id!r}; GET /v1/tasks or World.splits lists the known ones") from None

    def option_targets(self, product_id: str) -> Mapping[str, frozenset[tuple[str, str]]]:
        """Click target in norm form -> the (axis, value) pairs that it may mean."""
        return self._targets(product_id)


def _option_targets(product: Product) -> dict[str, frozenset[tuple[str, str]]]:
    targets: dict[str, set[tuple[str, str]]] = {}
    for axis, values in product.options.items():
        for value in values:
            for name in (norm(value), norm(f"{axis}={value}")):
                targets.setdefault(name, set()).add((axis, value))
    return {name: frozenset(pairs) for name, pairs in targets.items()}


class Session:
    """One episode. `state` and `observation` are public; nothing in them depends on the task's goal."""

    def __init__(self, shop: Shop, task: Task):
        self.shop = shop
        self.task = task
        self.steps = 0
        self.status = ""
        self._page = "home"
        self._results: list[str] = []
        self._offset = 0
        self._product: Product | None = None
        self._chosen: dict[str, str] = {}
        self.observation = text_view.render(self.state)

    @property
    def done(self) -> bool:
        return bool(self.status)

    @property
    def state(self) -> dict[str, Any]:
        """The current page as plain data: what `shop_env.observation.parse` reads back from its text, no more and no less."""
        build = {"home": dict, "done": dict, "results": self._results_state, "product": self._product_state, "selection": self._selection_state}
        return {"page": self._page, **build[self._page]()}

    def step(self, tool: Any, arguments: Any) -> Step:
        """Carries out one action. Any tool name and arguments are fine: bad ones are answered with a typed reason."""
        if self.done:
            raise EpisodeEnded(f"the episode ended with {self.status!r} after {self.steps} steps; open a new one")
        self.steps += 1
        reason = self._act(tool, arguments)
        if self.done:
            return self._purchase()
        if self.steps >= self.shop.max_actions:
            return self._end("action_limit", reason)
        state = self.state
        self.observation = f"invalid {reason} | {self._hint(reason)}" if reason else text_view.render(state)
        return Step(self.observation, state, str(reason or "ok"), False)

    def finish(self, reason: str) -> Step:
        """Ends the episode from outside with reward 0; the only such reason is "generation_length"."""
        if self.done:
            raise EpisodeEnded(f"the episode ended with {self.status!r} after {self.steps} steps; open a new one")
        if reason != "generation_length":
            raise InvalidSetting(f"an episode can only be finished for 'generation_length', got {reason!r}")
        return self._end(reason, None)

    # ------------------------------------------------------------------------------------------------------ actions

    def _act(self, tool: Any, arguments: Any) -> Reason | None:
        """Changes the page, or returns why not."""
        key = _ARGUMENT.get(tool) if isinstance(tool, str) else None
        if key is None or not isinstance(arguments, Mapping) or set(arguments) != {key}:
            return Reason.INVALID_FORMAT
        argument = arguments[key]
        if isinstance(argument, list | tuple) and len(argument) > 1 and all(isinstance(a, str) for a in argument):
            return Reason.MULTIPLE_ACTIONS
        if not isinstance(argument, str):
            return Reason.INVALID_FORMAT
        # Quotes only mark values in observations and never occur in the catalogue.
        argument = norm(argument.replace('"', ""))
        if not argument:
            return Reason.EMPTY_ARGUMENT
        if tool == "search":
            return self._search(argument)
        if self._page == "results":
            return self._click_results(argument)
        return self._click_product(argument) if self._product else Reason.UNAVAILABLE_TARGET

    def _search(self, query: str) -> Reason | None:
        if self._product:
            return Reason.SEARCH_UNAVAILABLE
        self._results, self._offset, self._page = self.shop.index.search(query), 0, "results"
        return None

    def _click_results(self, target: str) -> Reason | None:
        rows = self._rows()
        found = {f"row {i}" for i, (label, row) in enumerate(zip(LABELS, rows, strict=False)) if target in (norm(label), norm(row))}
        found |= {control for control in self._result_controls() if target == control}
        if len(found) != 1:
            return Reason.AMBIGUOUS_TARGET if found else Reason.UNAVAILABLE_TARGET
        (action,) = found
        if action == BACK:
            self._go_home()
        elif action in (NEXT, PREVIOUS):
            self._offset += self.shop.page_size * (1 if action == NEXT else -1)
        else:
            self._product, self._chosen, self._page = self.shop.world.catalog[rows[int(action[4:])]], {}, "product"
        return None

    def _click_product(self, target: str) -> Reason | None:
        product = self._product
        assert product is not None
        found: list[Any] = list(self.shop.option_targets(product.id).get(target, ()))
        found += [control for control in (PREVIOUS, BACK, BUY) if target == control]
        if len(found) != 1:
            return Reason.AMBIGUOUS_TARGET if found else Reason.UNAVAILABLE_TARGET
        (action,) = found
        if action == BACK:
            self._go_home()
        elif action == PREVIOUS:
            self._page, self._product, self._chosen = "results", None, {}
        elif action == BUY:
            if self._missing():
                return Reason.INCOMPLETE_OPTIONS
            self._page, self.status = "done", "purchase"
        else:
            axis, value = action
            if self._chosen.get(axis) == value:
                return Reason.ALREADY_SELECTED
            self._chosen[axis] = value
            self._page = "selection"
        return None

    def _go_home(self) -> None:
        self._page, self._results, self._offset, self._product, self._chosen = "home", [], 0, None, {}

    # --------------------------------------------------------------------------------------------------------- ends

    def _purchase(self) -> Step:
        product = self._product
        assert product is not None
        goal = self.task.goal
        price = variant_price(product, self._chosen)
        detail = score(product, self._chosen, price, goal, self.shop.world.catalog[goal.product_id])
        self.observation = text_view.render(self.state)
        return Step(self.observation, self.state, "ok", True, self.status, detail.strict, detail.success, detail.to_json())

    def _end(self, status: str, reason: Reason | None) -> Step:
        self.status, self._page = status, "done"
        self.observation = text_view.render(self.state)
        return Step(self.observation, self.state, str(reason or "ok"), True, status)

    # --------------------------------------------------------------------------------------------------------- pages

    def _rows(self) -> list[str]:
        return self._results[self._offset : self._offset + self.shop.page_size]

    def _result_controls(self) -> list[str]:
        controls = [NEXT] if self._offset + self.shop.page_size < len(self._results) else []
        return [*controls, *([PREVIOUS] if self._offset else []), BACK]

    def _missing(self) -> list[str]:
        return [axis for axis in self._product.options if axis not in self._chosen] if self._product else []

    def _results_state(self) -> dict[str, Any]:
        rows = []
        for label, product_id in zip(LABELS, self._rows(), strict=False):
            product = self.shop.world.catalog[product_id]
            shown_id = {"id": product_id} if self.shop.show_ids else {}
            rows.append({"label": label, **shown_id, "title": product.title, "price": _price_list(product, {})})
        first = self._offset + 1 if rows else 0
        return {"first": first, "last": self._offset + len(rows), "total": len(self._results), "rows": rows, "controls": self._result_controls()}

    def _product_state(self) -> dict[str, Any]:
        product = self._product
        assert product is not None
        priced = product.price_axis
        return {
            "title": product.title,
            "price": _price_list(product, {}),
            "attributes": list(product.attributes),
            "axes": {axis: {v: p if axis == priced else None for v, p in values.items()} for axis, values in product.options.items()},
            "controls": [PREVIOUS, BACK, *([] if product.options else [BUY])],
        }

    def _selection_state(self) -> dict[str, Any]:
        product = self._product
        assert product is not None
        missing = self._missing()
        chosen = {axis: self._chosen[axis] for axis in product.options if axis in self._chosen}
        return {"chosen": chosen, "missing": missing, "price": _price_list(product, chosen), "controls": [] if missing else [BUY]}

    def _hint(self, reason: Reason) -> str:
        """What is possible now, in a few words."""
        if reason == Reason.INCOMPLETE_OPTIONS:
            return " ".join(["missing", *map(text_view.quote_axis, self._missing())])
        if self._page == "home":
            return "search"
        if self._page == "results":
            return " | ".join(["search", *(["row"] if self._rows() else []), *self._result_controls()])
        option = ["axis=value"] if self._product and self._product.options else []
        return " | ".join([*option, PREVIOUS, BACK, *([] if self._missing() else [BUY])])


def _price_list(product: Product, chosen: Mapping[str, str]) -> list[float] | None:
    found = price_range(product, chosen)
    return None if found is None else list(found)
