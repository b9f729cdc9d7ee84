"""The rule-based analyst: replays a failed episode, names the first rule it broke, and proves it by playing on from there.

It needs no model. What it can find is a fixed list of mechanisms; what it proposes for each is data (`cards.load_mechanisms`). Every proposal, ADD
or REWRITE, rests on a trial that really succeeded in the shop: the failed episode's calls up to the divergence, then a repair within the same limits.
"""

import dataclasses
import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from intraskill.skills import repair, shop_view, words
from intraskill.skills.bank import Bank
from intraskill.skills.cards import Card, CardStatus, Deployable, Mechanisms, Secrets, deployable_of
from intraskill.skills.repair import Repair, Wanted
from intraskill.skills.shop_view import UnreadableAnswer, View
from intraskill.types import Chunk, InputError, Shop, ShopError, StepResult, Task, ToolCall, Trajectory

MAX_REPAIR_CALLS = 60  # a bound for a shop without an action limit


class Mechanism(enum.StrEnum):
    """The rules whose violation the analyst recognises."""

    QUERY = "query_all_attributes"  # the search left out a required attribute that the instruction states
    PERSONA = "persona_option"  # an option that only the persona tells was chosen otherwise
    STATED = "stated_over_persona"  # an option that the instruction states was chosen otherwise
    ATTRIBUTES = "page_attributes"  # bought although the page lacks a required attribute
    AVAILABLE = "option_available"  # the page lacks a wanted value; another was chosen instead of going back
    PRICE = "price_ceiling"  # bought above the stated budget
    PURCHASE = "no_purchase"  # never bought


@dataclasses.dataclass(frozen=True)
class Event:
    """One call of the episode, the view that its agent had before it, and the view after."""

    call: ToolCall
    before: View
    after: View


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first violated rule: everything before event `index` is kept, the repair starts there."""

    index: int
    mechanism: Mechanism
    detail: str


class _Undecided(Exception):
    """There is no proposal to make; the message says why."""


class RuleAnalyst:
    """Implements `cards.Analyst`.

    Args:
      shop: with privileged access.
      mechanisms: mechanism -> wordings to propose, in order of preference; a mechanism without an entry is never proposed.
    """

    def __init__(self, shop: Shop, mechanisms: Mechanisms):
        unknown = sorted(set(mechanisms) - set(Mechanism))
        if unknown:
            raise InputError(f"mechanisms {unknown} are not known to the rule-based analyst; it detects {', '.join(Mechanism)}")
        self._shop = shop
        self._mechanisms = mechanisms

    async def analyse(self, card_id: str, task: Task, retry: Trajectory, bank: Bank, *, tried: Collection[str] = ()) -> Card:
        """Analyses one failed full-bank retry.

        Args:
          card_id: the card's id.
          task: what the agent saw.
          retry: the failed episode.
          bank: active chunks; one about the violated mechanism turns the proposal into a rewrite.
          tried: digests of wordings that a gate already turned down; they are not proposed again.
        """
        found: dict[str, Any] = {}
        mechanism = ""
        public = [task.instruction, *_leaves(task.persona)]
        secrets = Secrets(task_ids=(task.id,))
        try:
            goal = await self._shop.goal(task.id)
            product = await self._shop.product(goal["product_id"])
            found["goal"] = dict(goal)
            secrets = _secrets(task, goal, product)
            events, detail = await self._replay(task, retry)
            public += [t.observation for t in retry.turns if t.observation]
            secrets = dataclasses.replace(secrets, titles=(*secrets.titles, *sorted({e.after.page.title for e in events if e.after.page})))
            wanted = repair.wanted_of(goal, product["title"], task.instruction)
            divergence = first_divergence(task, events, wanted, detail)
            mechanism = str(divergence.mechanism)
            found["divergence"] = {**dataclasses.asdict(divergence), "mechanism": mechanism}
            trial = await self._trial(task, events[: divergence.index], wanted)
            found["trial"] = trial
            public += trial["observations"]
            if not trial["success"]:
                raise _Undecided(f"the repaired episode did not succeed either: {trial['outcome']}")
            target, wording = self._wording(mechanism, bank, tried)
        except (_Undecided, UnreadableAnswer) as error:
            return Card(card_id, CardStatus.NO_PROPOSAL, str(error), mechanism, public=tuple(public), secrets=secrets, privileged=found)
        except ShopError as error:
            reason = f"the shop failed during the analysis: {error}"
            return Card(card_id, CardStatus.NO_PROPOSAL, reason, mechanism, public=tuple(public), secrets=secrets, privileged=found)
        status = CardStatus.PROPOSE_REWRITE if target else CardStatus.PROPOSE_ADD
        return Card(card_id, status, "", mechanism, wording, target.id if target else "", tuple(public), secrets, found)

    async def _replay(self, task: Task, retry: Trajectory) -> tuple[list[Event], Mapping[str, Any] | None]:
        """Makes the calls again in a fresh episode and checks that the answers are the same; returns a purchase's privileged reward detail."""
        turns = [t for t in retry.turns if t.call is not None and t.feedback]
        opened = await self._shop.open(task.id, privileged=True)
        events, view, answer = [], View(), None
        try:
            for i, turn in enumerate(turns):
                assert turn.call is not None
                answer = await self._shop.step(opened.episode_id, turn.call)
                if turn.feedback != answer.feedback or turn.observation not in ("", answer.observation):
                    raise _Undecided(f"the replay of call {i} was answered differently: {answer.observation[:60]!r}, then {turn.observation[:60]!r}")
                after = _advance(view, turn.call, answer)
                events.append(Event(turn.call, view, after))
                view = after
                if answer.done and i + 1 < len(turns):
                    raise _Undecided(f"the replay ended after call {i}, the episode had {len(turns)}")
        finally:
            await self._shop.close(opened.episode_id)
        if answer is None or not answer.done or answer.status != "purchase":
            return events, None
        if answer.success:
            raise _Undecided("the replayed episode succeeds: there is no failure to explain")
        return events, answer.reward_detail

    async def _trial(self, task: Task, prefix: Sequence[Event], wanted: Wanted) -> dict[str, Any]:
        """Replays the prefix in a fresh episode and lets `Repair` play on; the record of what happened."""
        opened = await self._shop.open(task.id, privileged=True)
        calls, observations, view, answer = [], [opened.observation], View(), None
        seen = [e.after.page for e in prefix if e.after.page is not None]
        plan = Repair(wanted, seen)
        try:
            while len(calls) < len(prefix) + MAX_REPAIR_CALLS:
                call = prefix[len(calls)].call if len(calls) < len(prefix) else plan.next_call(view)
                if call is None:
                    break
                answer = await self._shop.step(opened.episode_id, call)
                calls.append({"name": call.name, "arguments": dict(call.arguments), "feedback": answer.feedback})
                observations.append(answer.observation)
                view = _advance(view, call, answer)
                if answer.done or (len(calls) > len(prefix) and answer.feedback != "ok"):
                    break
        finally:
            await self._shop.close(opened.episode_id)
        success = answer is not None and answer.done and answer.success
        outcome = "nothing left to try" if answer is None or not answer.done else f"{answer.status}, reward {answer.reward:.3f}"
        if answer is not None and not answer.done and answer.feedback != "ok":
            outcome = f"the shop refused {calls[-1]['arguments']}: {answer.feedback}"
        return {"success": success, "outcome": outcome, "kept": len(prefix), "calls": calls, "observations": observations}

    def _wording(self, mechanism: str, bank: Bank, tried: Collection[str]) -> tuple[Chunk | None, Deployable]:
        """The active chunk about a mechanism, if there is one, and the first wording that is neither active nor turned down."""
        target = next((c for c in bank.chunks if c.provenance.get("mechanism", c.logical_id) == mechanism), None)
        active = {deployable_of(c).digest for c in bank.chunks}
        fresh = [w for w in self._mechanisms.get(mechanism, ()) if w.digest not in active and w.digest not in tried]
        if not fresh:
            raise _Undecided(f"no wording left to propose for {mechanism}")
        return target, fresh[0]


# ----------------------------------------------------------------------------------------------------------------- rules


def first_divergence(task: Task, events: Sequence[Event], wanted: Wanted, detail: Mapping[str, Any] | None) -> Divergence:
    """The earliest event at which the episode left the way to the goal, judged by what its agent could see.

    Only what the failure itself shows counts: a short query of an episode that then bought the right product in the wrong size is no divergence.
    `detail` is the purchase's privileged reward detail, None when nothing was bought.
    """
    found = list(_without_purchase(task, events, wanted) if detail is None else _after_purchase(task, events, wanted, detail))
    if not found:
        raise _Undecided("no known rule explains the failure from what the agent could see")
    order = list(Mechanism)
    return min(found, key=lambda d: (d.index, order.index(d.mechanism)))


def _after_purchase(task: Task, events: Sequence[Event], wanted: Wanted, detail: Mapping[str, Any]) -> Iterator[Divergence]:
    page = events[-1].before.page
    absent = sorted({"attribute_hits", "option_hits", "r_price"} - set(detail))
    if page is None or absent:
        raise _Undecided(f"the shop's reward detail lacks {absent}: was the episode opened with the privileged key?")
    opened = max(i for i, e in enumerate(events) if e.after.page is not None and e.before.page is None)
    lacking = [a for a in wanted.attributes if a not in detail["attribute_hits"] and _public(task, a)]
    if lacking:
        searched = max(i for i, e in enumerate(events[:opened]) if e.call.name == "search" and e.after.results is not None and e.after.page is None)
        unasked = _unasked(task, events[searched], wanted)
        if unasked:
            yield Divergence(searched, Mechanism.QUERY, f"the search left out {', '.join(unasked)}")
        yield Divergence(opened + 1, Mechanism.ATTRIBUTES, f"the page does not state {', '.join(lacking)}")
    for axis, value in wanted.options.items():
        if axis in detail["option_hits"]:
            continue
        place = repair.locate(page, axis, value)
        if place is None:
            if _public(task, value):
                yield Divergence(opened + 1, Mechanism.AVAILABLE, f"the page does not offer {axis} {value}")
        elif words.says(task.instruction, value):
            yield Divergence(_choice(events, opened, place[0]), Mechanism.STATED, f"the instruction states {axis} {value}")
        elif _public(task, value):
            yield Divergence(_choice(events, opened, place[0]), Mechanism.PERSONA, f"the persona tells {axis} {value}")
    if detail["r_price"] < 1 and wanted.ceiling is not None:
        yield Divergence(len(events) - 1, Mechanism.PRICE, f"bought above {wanted.ceiling:g}")


def _without_purchase(task: Task, events: Sequence[Event], wanted: Wanted) -> Iterator[Divergence]:
    """Either the episode passed by a good product, or every search was short of an attribute, or it only ran out of steps."""
    good = [i for i, e in enumerate(events) if e.before.page is None and e.after.page is not None and wanted.met_by(e.after.page)]
    searches = [i for i, e in enumerate(events) if e.call.name == "search"]
    unasked = [_unasked(task, events[i], wanted) for i in searches]
    if good:
        yield Divergence(good[0] + 1, Mechanism.PURCHASE, "a product that meets everything was not bought")
    elif searches and all(unasked):
        yield Divergence(searches[0], Mechanism.QUERY, f"the search left out {', '.join(unasked[0])}")
    else:
        # With no good page to return to, only a fresh start leaves the repair the steps that it needs.
        yield Divergence(0, Mechanism.PURCHASE, "no product was bought")


def _unasked(task: Task, event: Event, wanted: Wanted) -> list[str]:
    """The required attributes that the instruction states and a search left out."""
    query = str(event.call.arguments.get("query", ""))
    spelled = set(words.tokens(query))
    return [a for a in wanted.attributes if words.says(task.instruction, a) and not set(words.tokens(a)) <= spelled]


def _choice(events: Sequence[Event], opened: int, axis: str) -> int:
    """The event that made the final choice on an axis of the product opened at event `opened`."""
    changed = [i for i, e in enumerate(events) if i > opened and e.before.chosen.get(axis) != e.after.chosen.get(axis)]
    return changed[-1] if changed else len(events) - 1


def _public(task: Task, value: str) -> bool:
    """Whether the instruction or the persona tells a value."""
    return any(words.says(text, value) for text in (task.instruction, *_leaves(task.persona)))


def _leaves(value: Any) -> list[str]:
    """The texts of a persona, keys included, depth first."""
    if isinstance(value, Mapping):
        return [text for key, item in value.items() for text in (str(key), *_leaves(item))]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _leaves(item)]
    return [] if value is None else [str(value)]


def _secrets(task: Task, goal: Mapping[str, Any], product: Mapping[str, Any]) -> Secrets:
    """What the goal tells and the public side of the task does not."""
    public = " | ".join([task.instruction, *_leaves(task.persona)])
    hidden = [v for v in (*goal["options"].values(), *goal["attributes"]) if not words.says(public, v)]
    return Secrets((task.id,), (str(goal["product_id"]),), (str(product["title"]),), tuple(hidden))


def _advance(view: View, call: ToolCall, answer: StepResult) -> View:
    """The view after an answer; an episode that is over shows nothing new."""
    return dataclasses.replace(view, done=True) if answer.done else shop_view.advance(view, call, answer.observation, answer.feedback)
