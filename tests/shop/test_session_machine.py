"""Hypothesis drives the state machine: arbitrary calls and offered ones, on pages of any size, against a model of where the shopper is."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shop_env.errors import EpisodeEnded
from shop_env.observation import parse
from shop_env.search import RESULT_LIMIT
from shop_env.session import Reason, Session, Shop

from .conftest import make_world

WORLD = make_world()
INDEX = Shop(WORLD).index
PRIVATE = ("zz secret", "zz full", "zz user", "31.41")

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6), lambda inner: st.lists(inner, max_size=3), max_leaves=4
)
queries = st.lists(st.sampled_from(["jacket", "mug", "hooded", "red", "外套", "防水", "no", "7", "nothing"]), min_size=1, max_size=3).map(" ".join)


def offered(state, product) -> list[str]:
    """Every target that the page in front of the shopper offers."""
    axes = {axis: list(values) for axis, values in product.options.items()} if product else {}
    options = [f"{axis}={value}" for axis, values in axes.items() for value in values if state.get("chosen", {}).get(axis) != value]
    rows = [name for row in state.get("rows", ()) for name in (row["label"], row.get("id")) if name]
    return [*rows, *options, *state.get("controls", ())]


class Shopping(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 5, 20, 26]), show_ids=st.booleans(), max_actions=st.sampled_from([3, 12, 40]))
    def open(self, page_size, show_ids, max_actions):
        self.shop = Shop(WORLD, page_size, max_actions, show_ids, INDEX)
        self.session = Session(self.shop, WORLD.tasks["task-jacket"])
        self.results: list[str] = []  # the model: what was searched, where in it, and what is open
        self.offset = 0
        self.product = None

    def hidden(self):
        """All that a session holds, apart from what every call changes: the number of steps and the text of the last answer."""
        return {name: repr(value) for name, value in vars(self.session).items() if name not in ("steps", "observation", "shop", "task")}

    def call(self, tool, arguments):
        before, state, steps = self.hidden(), self.session.state, self.session.steps
        step = self.session.step(tool, arguments)
        assert self.session.steps == steps + 1 <= self.shop.max_actions
        assert step.observation == self.session.observation and step.state == self.session.state
        if step.feedback != "ok":
            assert step.feedback in set(Reason)
            if not step.done:
                assert self.hidden() == before and step.state == state
                assert parse(step.observation) == {"page": "invalid", "reason": step.feedback, "hint": parse(step.observation)["hint"]}
        else:
            assert parse(step.observation, show_ids=self.shop.show_ids) == step.state
        if step.done:
            assert step.status == ("purchase" if step.feedback == "ok" and step.reward_detail else "action_limit")
            assert 0.0 <= step.reward <= 1.0 and (step.reward_detail or step.reward == 0.0)
        else:
            assert (step.status, step.reward, step.success, step.reward_detail) == ("", 0.0, False, {})
        return step

    def on_results(self):
        self.product = None
        return self.results[self.offset : self.offset + self.shop.page_size]

    @precondition(lambda self: not self.session.done)
    @rule(query=queries)
    def search(self, query):
        step = self.call("search", {"query": query})
        if self.product is not None:
            assert step.feedback == Reason.SEARCH_UNAVAILABLE
        else:
            assert step.feedback == "ok"
            self.results, self.offset = self.shop.index.search(query), 0

    @precondition(lambda self: not self.session.done and offered(self.session.state, self.product))
    @rule(data=st.data())
    def click_what_is_offered(self, data):
        state = self.session.state
        target = data.draw(st.sampled_from(offered(state, self.product)))
        step = self.call("click", {"target": target})
        ambiguous = self.product is not None and target in ("buy now", "next") and any(target in values for values in self.product.options.values())
        if ambiguous:  # the odd mug has option values that are called like controls
            assert step.feedback in (Reason.AMBIGUOUS_TARGET, "ok", Reason.ALREADY_SELECTED)
            return
        assert step.feedback == "ok", (target, state)
        if step.done:
            return
        if self.product is None and target in ("next", "previous"):
            self.offset += self.shop.page_size if target == "next" else -self.shop.page_size
        elif target == "back to search":
            self.results, self.offset, self.product = [], 0, None
        elif target == "previous":
            self.product = None
        elif self.product is None:
            rows = self.on_results()
            labels = [row["label"] for row in state["rows"]]
            self.product = WORLD.catalog[rows[labels.index(target)] if target in labels else target]

    @precondition(lambda self: not self.session.done)
    @rule(
        tool=st.sampled_from(["search", "click", "buy", ""]) | anything,
        arguments=anything | st.dictionaries(st.sampled_from(["query", "target", "x"]), anything),
    )
    def call_anything(self, tool, arguments):
        step = self.call(tool, arguments)
        if step.feedback == "ok" and not step.done:  # a lucky hit: the model follows what the session says
            self.results, self.offset, self.product = list(self.session._results), self.session._offset, self.session._product

    @precondition(lambda self: self.session.done)
    @rule(tool=st.sampled_from(["search", "click"]), arguments=anything)
    def nothing_happens_after_the_end(self, tool, arguments):
        before = (self.hidden(), self.session.steps)
        with pytest.raises(EpisodeEnded):
            self.session.step(tool, arguments)
        assert (self.hidden(), self.session.steps) == before and self.session.observation == "done"

    @invariant()
    def the_page_is_the_models(self):
        if not hasattr(self, "session") or self.session.done:
            return
        state = self.session.state
        if state["page"] == "results":
            shown = self.results[self.offset : self.offset + self.shop.page_size]
            assert [row["title"] for row in state["rows"]] == [WORLD.catalog[i].title for i in shown]
            assert state["total"] == len(self.results) <= RESULT_LIMIT and 0 <= self.offset < max(1, state["total"])
        elif state["page"] == "selection":
            assert self.product is not None and set(state["chosen"]) | set(state["missing"]) == set(self.product.options)
            assert all(value in self.product.options[axis] for axis, value in state["chosen"].items())
            assert ("buy now" in state["controls"]) == (not state["missing"])

    @invariant()
    def nothing_private_is_shown(self):
        if hasattr(self, "session"):
            shown = json.dumps([self.session.observation, self.session.state], ensure_ascii=False)
            assert not any(secret in shown for secret in PRIVATE)


TestShopping = Shopping.TestCase
TestShopping.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
