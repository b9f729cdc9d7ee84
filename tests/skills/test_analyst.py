import asyncio
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest

from intraskill.skills.analyst import Mechanism, RuleAnalyst
from intraskill.skills.bank import Bank
from intraskill.skills.cards import CardStatus, Deployable, load_mechanisms
from intraskill.skills.shop_view import UnreadableAnswer, View, advance
from intraskill.types import Completion, InputError, Opened, ShopError, Status, StepResult, Task, ToolCall, Trajectory, Turn

# ------------------------------------------------------------------- a tiny shop with the real one's answers, two results a page

MAX_ACTIONS = 14
PAGE = 2


@dataclasses.dataclass(frozen=True)
class Product:
    id: str
    title: str
    attributes: tuple[str, ...]
    options: Mapping[str, Mapping[str, float | None]]
    price: float
    listed: tuple[str, ...]  # the words that the search knows


def priced(**sizes: float) -> dict[str, dict[str, float | None]]:
    return {"colour": {"red": None, "blue": None}, "size": dict(sizes)}


CATALOGUE = [
    Product("p1", "acme jacket", ("waterproof", "slim"), priced(small=20.0, large=20.0), 20.0, ("jacket", "slim", "waterproof")),
    Product("p2", "nova jacket", ("waterproof", "hooded"), priced(small=24.0, large=40.0), 24.0, ("jacket", "waterproof", "hooded", "padded")),
    Product("p3", "orion jacket", ("waterproof", "hooded", "padded"), priced(small=22.0, large=27.0), 22.0, ("jacket", "waterproof", "hooded")),
    Product(
        "p4", "lumen jacket", ("waterproof", "hooded"), {"colour": {"blue": None}, "size": {"large": None}}, 21.0, ("jacket", "waterproof", "hooded")
    ),
]
TASK = Task("task-77", "find a waterproof hooded jacket in colour red under budget 30", {"likes": {"colour": "blue"}, "wears": {"size": "large"}})
GOAL = {"product_id": "p3", "attributes": ["waterproof", "hooded"], "options": {"colour": "red", "size": "large"}, "price_ceiling": 30.0}


class FakeShop:
    """Implements `intraskill.types.Shop` for TASK; `order` is the rank of products that match a query equally well."""

    def __init__(self, order: tuple[str, ...] = ("p1", "p2", "p4", "p3"), goal: Mapping[str, Any] = GOAL, fail_goal: Exception | None = None):
        self.products = {p.id: p for p in CATALOGUE}
        self.order, self._goal, self.fail_goal = order, goal, fail_goal
        self.open_episodes: dict[str, dict[str, Any]] = {}
        self.num_opened = 0

    async def tools(self):
        return []

    async def tasks(self, split: str):
        return [TASK]

    async def goal(self, task_id: str):
        if self.fail_goal:
            raise self.fail_goal
        assert task_id == TASK.id
        return self._goal

    async def product(self, product_id: str):
        return dataclasses.asdict(self.products[product_id])

    async def open(self, task_id: str, *, privileged: bool = False) -> Opened:
        self.num_opened += 1
        episode = f"e{self.num_opened}"
        self.open_episodes[episode] = {"page": "home", "steps": 0, "privileged": privileged}
        return Opened(episode, TASK, "search page")

    async def close(self, episode_id: str) -> None:
        del self.open_episodes[episode_id]

    async def step(self, episode_id: str, call: ToolCall) -> StepResult:
        e = self.open_episodes[episode_id]
        e["steps"] += 1
        if call == ToolCall("click", {"target": "buy now"}) and e["page"] == "product" and set(e["chosen"]) == set(e["product"].options):
            return self._buy(e)
        answer = self._act(e, call)
        if e["steps"] >= MAX_ACTIONS:
            return StepResult("done", answer or "ok", True, "action_limit")
        return StepResult(f"invalid {answer} | try again", answer, False) if answer else StepResult(self._render(e), "ok", False)

    def _act(self, e: dict[str, Any], call: ToolCall) -> str:
        target = str(call.arguments.get("target", ""))
        if call.name == "search":
            if e["page"] == "product":
                return "search_unavailable"
            asked = set(call.arguments["query"].split())
            ranked = sorted(self.order, key=lambda i: (-len(asked & set(self.products[i].listed)), self.order.index(i)))
            e.update(page="results", ranked=ranked, offset=0)
        elif target == "back to search":
            e.update(page="home")
        elif e["page"] == "results" and target in ("A", "B"):
            e.update(page="product", product=self.products[e["ranked"][e["offset"] + "AB".index(target)]], chosen={}, last=None)
        elif e["page"] == "results" and target == "next" and e["offset"] == 0:
            e.update(offset=PAGE)
        elif e["page"] == "product" and target == "previous":
            e.update(page="results")
        elif e["page"] == "product" and "=" in target:
            axis, value = target.split("=")
            if value not in e["product"].options.get(axis, {}):
                return "unavailable_target"
            e["chosen"][axis] = e["last"] = value
        else:
            return "unavailable_target"
        return ""

    def _render(self, e: dict[str, Any]) -> str:
        if e["page"] == "home":
            return "search page"
        if e["page"] == "results":
            shown = [self.products[i] for i in e["ranked"][e["offset"] : e["offset"] + PAGE]]
            head = f"results {e['offset'] + 1}-{e['offset'] + len(shown)} of 4 | " + ("previous | " if e["offset"] else "next | ") + "back to search"
            return "\n".join([head, *(f"{label} {p.title} ${p.price:.0f}" for label, p in zip("AB", shown, strict=True))])
        p, chosen = e["product"], e["chosen"]
        if e["last"] is None:
            lines = [f"product {p.title} {self._price(p, {})} | previous | back to search", "has " + " ".join(p.attributes)]
            for axis, values in p.options.items():
                lines.append(" ".join([axis, *(v if price is None else f"{v} ${price:.0f}" for v, price in values.items())]))
            return "\n".join(lines)
        missing = [a for a in p.options if a not in chosen]
        words = ["chosen", *(w for a in p.options if a in chosen for w in (a, chosen[a])), *(["missing", *missing] if missing else [])]
        return " ".join([*words, "price", self._price(p, chosen)]) + ("" if missing else " | buy now")

    @staticmethod
    def _price(p: Product, chosen: Mapping[str, str]) -> str:
        sizes = [x for x in p.options["size"].values() if x is not None] or [p.price]
        if chosen.get("size") and p.options["size"][chosen["size"]] is not None:
            sizes = [p.options["size"][chosen["size"]]]
        return f"${min(sizes):.0f}" if min(sizes) == max(sizes) else f"${min(sizes):.0f}-${max(sizes):.0f}"

    def _buy(self, e: dict[str, Any]) -> StepResult:
        p, chosen, goal = e["product"], e["chosen"], self._goal
        price = p.options["size"][chosen["size"]] or p.price
        hits = [a for a in goal["attributes"] if a in p.attributes]
        options = {a: v for a, v in goal["options"].items() if chosen.get(a) == v}
        parts = {"r_type": 1.0, "r_att": len(hits) / 2, "r_opt": len(options) / 2, "r_price": float(price <= goal["price_ceiling"])}
        reward = parts["r_type"] * parts["r_att"] * parts["r_opt"] * parts["r_price"]
        detail = {**parts, "attribute_hits": hits, "option_hits": options} if e["privileged"] else parts
        return StepResult("done", "ok", True, "purchase", reward, reward == 1, detail)


async def play(shop: FakeShop, *calls: str) -> Trajectory:
    """An episode: `?query` searches, anything else clicks, `!` is an output that could not be parsed."""
    opened = await shop.open(TASK.id)
    turns, answer = [], None
    for i, text in enumerate(calls):
        completion = Completion((i,), (0.0,), "stop", (0,), 0, 0.0)
        if text == "!":
            turns.append(Turn(0, completion, text, None, "no_call", "", "no call found"))
            continue
        call = ToolCall("search", {"query": text[1:]}) if text.startswith("?") else ToolCall("click", {"target": text})
        answer = await shop.step(opened.episode_id, call)
        turns.append(Turn(0, completion, text, call, "", answer.feedback, "" if answer.done else answer.observation))
    await shop.close(opened.episode_id)
    n = len(turns)
    ended = answer is not None and answer.done
    status = Status(answer.status) if ended else Status.GENERATION_LENGTH
    reward, success = (answer.reward, answer.success) if ended else (0.0, False)
    return Trajectory(tuple(range(n)), (True,) * n, (0.0,) * n, tuple(turns), status, reward, success)


# ---------------------------------------------------------------------------------------------------------------- analyst

WORDINGS = {str(m): (Deployable(f"{m} one", "now", f"do {m}"), Deployable(f"{m} two", "now", f"really do {m}")) for m in Mechanism}
EMPTY = Bank()
FULL, SHORT = "?waterproof hooded jacket", "?waterproof jacket"


def analyse(*calls: str, shop: FakeShop | None = None, bank=EMPTY, tried=(), task=TASK, mechanisms=WORDINGS):
    shop = shop or FakeShop()

    async def go():
        retry = await play(shop, *calls)
        return retry, await RuleAnalyst(shop, mechanisms).analyse("c0", task, retry, bank, tried=tried)

    retry, card = asyncio.run(go())
    assert not retry.success
    assert shop.open_episodes == {}  # whatever happens, every episode is closed
    return card


# With the full query the ranking is p2, p4 (hooded first), then p3, p1 by FakeShop's order; with the short one p1, p2, p4, p3.
CASES = {
    # p1 lacks hooded; the query never asked for it: the first call was already wrong.
    "query_all_attributes": ((SHORT, "A", "colour=red", "size=large", "buy now"), 0),
    # p3 with the persona's colour although the instruction says red (third call).
    "stated_over_persona": ((FULL, "next", "A", "colour=blue", "size=large", "buy now"), 3),
    # p3 small although the persona wears large (fifth call).
    "persona_option": ((FULL, "next", "A", "colour=red", "size=small", "buy now"), 4),
    # p1 lacks hooded; the query had asked for it, the page showed it (the call after opening).
    "page_attributes": ((FULL, "next", "B", "colour=red", "size=large", "buy now"), 3),
    # p4 has no red: blue was taken instead of going back.
    "option_available": ((FULL, "B", "colour=blue", "size=large", "buy now"), 2),
    # p2 large costs 40, the budget is 30: wrong only at the last call.
    "price_ceiling": ((FULL, "A", "colour=red", "size=large", "buy now"), 4),
    # p3 was fine and left (call 3), then nothing.
    "no_purchase": ((FULL, "next", "A", "previous", "!", "back to search"), 3),
}


@pytest.mark.parametrize("mechanism", CASES)
def test_each_mechanism_is_found_at_its_first_call_and_repaired(mechanism):
    calls, index = CASES[mechanism]
    card = analyse(*calls)
    assert (card.mechanism, card.status, card.reason) == (mechanism, CardStatus.PROPOSE_ADD, "")
    assert card.privileged["divergence"]["index"] == index
    trial = card.privileged["trial"]
    assert trial["success"] and trial["kept"] == index
    kept = [c["arguments"] for c in trial["calls"][:index]]
    assert kept == [{"query": c[1:]} if c[0] == "?" else {"target": c} for c in calls if c != "!"][:index]
    assert trial["calls"][-1]["arguments"] == {"target": "buy now"}
    assert card.deployable == WORDINGS[mechanism][0]


def test_the_analysis_is_deterministic():
    assert analyse(*CASES["price_ceiling"][0]) == analyse(*CASES["price_ceiling"][0])


def test_an_active_chunk_of_the_mechanism_turns_the_proposal_into_a_rewrite():
    calls = CASES["persona_option"][0]
    one, two = WORDINGS["persona_option"]
    by_id = Bank((one.chunk("persona_option", 4, {}),))
    card = analyse(*calls, bank=by_id)
    assert (card.status, card.target, card.deployable) == (CardStatus.PROPOSE_REWRITE, "persona_option@4", two)
    by_provenance = Bank((dataclasses.replace(two.chunk("seed-3", 1, {"mechanism": "persona_option"})),))
    card = analyse(*calls, bank=by_provenance)
    assert (card.target, card.deployable) == ("seed-3@1", one)


def test_wordings_that_were_turned_down_are_not_proposed_again():
    calls = CASES["persona_option"][0]
    one, two = WORDINGS["persona_option"]
    assert analyse(*calls, tried={one.digest}).deployable == two
    card = analyse(*calls, tried={one.digest, two.digest})
    assert card.status == CardStatus.NO_PROPOSAL and card.reason == "no wording left to propose for persona_option"
    assert analyse(*calls, mechanisms={"no_purchase": WORDINGS["no_purchase"]}).status == CardStatus.NO_PROPOSAL


def test_without_a_successful_trial_there_is_no_proposal():
    wasted = ("back to search",) * 5
    card = analyse(*wasted, FULL, "A", "colour=red", "size=large", "buy now")  # call 9 is the divergence, one action is left
    assert card.status == CardStatus.NO_PROPOSAL and "did not succeed either: action_limit" in card.reason
    assert card.mechanism == "price_ceiling" and card.privileged["trial"]["success"] is False
    nothing_fits = {**GOAL, "options": {"colour": "red", "size": "large"}, "price_ceiling": 10.0}
    card = analyse(*CASES["price_ceiling"][0], shop=FakeShop(goal=nothing_fits))
    assert "nothing left to try" in card.reason


def test_what_the_agent_could_not_see_is_no_divergence():
    """Neither instruction nor persona tell the size: choosing another one breaks no rule."""
    card = analyse(*CASES["persona_option"][0], task=dataclasses.replace(TASK, persona={}))
    assert card.status == CardStatus.NO_PROPOSAL and "no known rule explains" in card.reason
    assert card.secrets.values == ("large",)


def test_running_out_of_actions_without_a_good_page():
    card = analyse(FULL, *("back to search",) * (MAX_ACTIONS - 1))
    assert (card.mechanism, card.privileged["divergence"]["index"]) == ("no_purchase", 0)
    card = analyse(SHORT, *("back to search",) * (MAX_ACTIONS - 1))
    assert (card.mechanism, card.privileged["divergence"]["index"]) == ("query_all_attributes", 0)
    assert analyse("!").mechanism == "no_purchase"


def test_a_replay_that_is_answered_differently_proves_nothing():
    shop, other = FakeShop(), FakeShop(order=("p3", "p2", "p1", "p4"))

    async def go():
        retry = await play(shop, *CASES["price_ceiling"][0])
        return await RuleAnalyst(other, WORDINGS).analyse("c0", TASK, retry, Bank())

    card = asyncio.run(go())
    assert card.status == CardStatus.NO_PROPOSAL and "answered differently" in card.reason


def test_a_failing_shop_is_no_proposal_and_not_a_crash():
    card = analyse(FULL, "A", shop=FakeShop(fail_goal=ShopError("gone")))
    assert card.status == CardStatus.NO_PROPOSAL and card.reason == "the shop failed during the analysis: gone"


def test_secrets_and_public_text_are_kept_apart():
    card = analyse(*CASES["price_ceiling"][0])
    assert card.secrets.task_ids == ("task-77",) and card.secrets.product_ids == ("p3",)
    assert "orion jacket" in card.secrets.titles and "nova jacket" in card.secrets.titles
    assert card.secrets.values == ()  # red is in the instruction, large in the persona
    assert TASK.instruction in card.public and "large" in card.public
    json.dumps(card.to_json())


def test_mechanism_files(tmp_path):
    path = tmp_path / "mechanisms.json"
    path.write_text(json.dumps({"no_purchase": [{"title": "buy", "applies_when": "few steps are left", "procedure": "buy the best product"}]}))
    assert load_mechanisms(path)["no_purchase"][0].title == "buy"
    for bad in ({"no_purchase": []}, {"no_purchase": [{"title": "x"}]}, {"no_purchase": [{"title": "", "applies_when": "", "procedure": "p"}]}, []):
        path.write_text(json.dumps(bad))
        with pytest.raises(InputError):
            load_mechanisms(path)
    for name, value in (("title", 5), ("applies_when", None)):
        wording = {"title": "x", "applies_when": "", "procedure": "p", name: value}
        path.write_text(json.dumps({"no_purchase": [wording]}))
        with pytest.raises(InputError, match=f"no_purchase: a skill's texts are strings, but {name} is {value}"):
            load_mechanisms(path)
    with pytest.raises(InputError, match="not known"):
        RuleAnalyst(FakeShop(), {"telepathy": WORDINGS["no_purchase"]})


# ------------------------------------------------------------------------------------------------------------------- view


def test_the_shops_answers_are_read_back():
    view = advance(
        View(), ToolCall("search", {"query": "rain coat"}), "results 6-7 of 40 | next | previous | back to search\nA odd | title $24\nB [x9] b $?"
    )
    assert view.results is not None and (view.results.query, view.results.first, view.results.has_next) == ("rain coat", 6, True)
    assert [(r.label, r.title, r.low) for r in view.results.rows] == [("A", "odd | title", 24.0), ("B", "b", None)]
    page = 'product odd | title $24-$27.50 | previous | back to search\nhas waterproof "two way" a\n'
    page += '"shoe size" "size 4" $24 5 $27.50\ncolour "$5 red" blue'
    view = advance(view, ToolCall("click", {"target": "a"}), page)
    assert view.page is not None and view.page.place == ("rain coat", 6, "A")
    assert (view.page.title, view.page.prices, view.page.attributes) == ("odd | title", (24.0, 27.5), ("waterproof", "two way", "a"))
    assert view.page.axes == {"shoe size": {"size 4": 24.0, "5": 27.5}, "colour": {"$5 red": None, "blue": None}}
    same = advance(view, ToolCall("click", {"target": "zzz"}), "invalid unavailable_target | previous", "unavailable_target")
    assert same == view
    view = advance(view, ToolCall("click", {"target": "5"}), 'chosen "shoe size" 5 missing colour price $27.50')
    assert view.chosen == {"shoe size": "5"} and view.prices == (27.5, 27.5)
    view = advance(view, ToolCall("click", {"target": "blue"}), 'chosen "shoe size" 5 colour blue price $27.50 | buy now')
    assert view.chosen == {"shoe size": "5", "colour": "blue"}
    assert advance(view, ToolCall("click", {"target": "buy now"}), "done").done
    assert advance(view, ToolCall("click", {"target": "back to search"}), "search page") == View()


@pytest.mark.parametrize("text", ["", "results x", "product", "chosen colour red", "product x $1", "404 not found"])
def test_other_answers_are_unreadable(text):
    with pytest.raises(UnreadableAnswer):
        advance(View(), ToolCall("search", {"query": "x"}), text)
