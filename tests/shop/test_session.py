import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shop_env.catalog import Catalog, Product
from shop_env.errors import EpisodeEnded, InvalidProduct, InvalidSetting
from shop_env.observation import money, parse
from shop_env.session import TOOLS, Reason, Session, Shop
from shop_env.tasks import Goal, Task, World

from .conftest import make_world

WORLD = make_world()
SHOPS = {ids: Shop(WORLD, page_size=5, max_actions=8, show_ids=ids) for ids in (False, True)}
LONG = Shop(WORLD, page_size=5, max_actions=99)


def search(query):
    return "search", {"query": query}


def click(target):
    return "click", {"target": target}


def play(*actions, shop=LONG, task="task-jacket"):
    session = Session(shop, shop.task(task))
    return [session.step(*action) for action in actions]


def observations(*actions, **kwargs):
    return [step.observation for step in play(*actions, **kwargs)]


def test_pages_read_as_documented():
    assert Session(LONG, LONG.task("task-mug")).observation == "search page"
    results, page, chosen, complete, done = observations(search("jacket no 3"), click("A"), click("red"), click("size=large"), click("buy now"))
    lines = results.split("\n")
    assert lines[0] == "results 1-5 of 12 | next | back to search"
    assert lines[1] == "A acme hooded jacket no 3 $24-$27.50" and len(lines) == 6
    assert page == (
        "product acme hooded jacket no 3 $24-$27.50 | previous | back to search\n"
        'has hooded zippered "cotton blend"\n'
        'colour red "dark blue"\n'
        "size small $24 large $27.50"
    )
    assert chosen == "chosen colour red missing size price $24-$27.50"
    assert complete == "chosen colour red size large price $27.50 | buy now"
    assert done == "done"


def test_a_product_without_options_can_be_bought_at_once():
    assert observations(search("ceramic"), click("a"))[-1] == "product plain mug $5 | previous | back to search | buy now\nhas ceramic"


def test_pagination():
    steps = observations(search("jacket"), click("next"), click("next"), click("previous"), click("previous"))
    heads = [text.split("\n")[0] for text in steps]
    assert heads == [
        "results 1-5 of 12 | next | back to search",
        "results 6-10 of 12 | next | previous | back to search",
        "results 11-12 of 12 | previous | back to search",
        "results 6-10 of 12 | next | previous | back to search",
        "results 1-5 of 12 | next | back to search",
    ]
    assert steps[0] == steps[4]


def test_previous_on_a_product_returns_to_the_same_results_page_and_forgets_the_choice():
    steps = play(search("jacket"), click("next"), click("B"), click("red"), click("previous"), click("B"), click("size=small"))
    assert steps[4].observation == steps[1].observation
    assert steps[6].observation == "chosen size small missing colour price $24"


def test_no_results():
    assert observations(search("zebra"))[0] == "results 0 of 0 | back to search"


def test_choosing_again():
    steps = play(search("jacket"), click("A"), click("red"), click("dark blue"), click("RED"), click("colour=red"))
    assert [s.feedback for s in steps] == ["ok"] * 5 + ["already_selected"]
    assert steps[3].observation == 'chosen colour "dark blue" missing size price $24-$27.50'


@pytest.mark.parametrize(
    ("before", "action", "answer"),
    [
        ([], ("buy", {}), "invalid invalid_format | search"),
        ([], ("search", {"q": "a"}), "invalid invalid_format | search"),
        ([], ("search", {"query": 3}), "invalid invalid_format | search"),
        ([], ("search", ["a"]), "invalid invalid_format | search"),
        ([], (None, None), "invalid invalid_format | search"),
        ([], ("search", {"query": ["a", "b"]}), "invalid multiple_actions | search"),
        ([], search(' " '), "invalid empty_argument | search"),
        ([], click("A"), "invalid unavailable_target | search"),
        ([search("mug")], click("C"), "invalid unavailable_target | search | row | back to search"),
        ([search("mug")], click("buy now"), "invalid unavailable_target | search | row | back to search"),
        ([search("zebra")], click("A"), "invalid unavailable_target | search | back to search"),
        ([search("jacket"), click("A")], search("mug"), "invalid search_unavailable | axis=value | previous | back to search"),
        ([search("jacket"), click("A"), click("red")], search("mug"), "invalid search_unavailable | axis=value | previous | back to search"),
        ([search("jacket"), click("A")], click("green"), "invalid unavailable_target | axis=value | previous | back to search"),
        ([search("jacket"), click("A"), click("red")], click("buy now"), "invalid incomplete_options | missing size"),
        ([search("ceramic"), click("A")], click("next"), "invalid unavailable_target | previous | back to search | buy now"),
        ([search("odd"), click("A")], click("red"), "invalid ambiguous_target | axis=value | previous | back to search"),
        ([search("odd"), click("A")], click("buy now"), "invalid ambiguous_target | axis=value | previous | back to search"),
    ],
)
def test_refusals(before, action, answer):
    session = Session(LONG, LONG.task("task-jacket"))
    for step in before:
        assert session.step(*step).feedback == "ok"
    state, steps = session.state, session.steps
    refused = session.step(*action)
    assert refused.observation == session.observation == answer
    assert refused.feedback == answer.split()[1] in set(Reason) and not refused.done
    assert session.state == state and session.steps == steps + 1


def test_targets_are_matched_after_folding_and_without_quotes():
    for target in ('"dark blue"', "DARK  Blue", 'colour="dark blue"', "ｃolour=dark blue"):
        assert play(search("jacket"), click("A"), click(target))[-1].state["chosen"] == {"colour": "dark blue"}
    assert play(search("外套"), click("ａ"), click("红色"))[-1].observation == "chosen 颜色 红色 price $88 | buy now"


def test_rows_can_be_clicked_by_id_only_while_they_are_shown():
    assert play(search("jacket"), click("zzid-01"))[-1].feedback == "ok"
    assert play(search("mug"), click("zzid-01"))[-1].feedback == "unavailable_target"
    shown = play(search("ceramic"), shop=SHOPS[True])[-1].observation
    assert shown == "results 1-1 of 1 | back to search\nA [zzid-mug] plain mug $5"


def test_purchase_is_scored():
    step = play(search("ceramic"), click("A"), click("buy now"), task="task-mug")[-1]
    assert (step.done, step.status, step.reward, step.success) == (True, "purchase", 1.0, True)
    assert step.reward_detail["goal_product_id"] == "zzid-mug"
    wrong = play(search("odd"), click("A"), click("front=red"), click("back=red"), click("back=buy now"), click("front=next"), task="task-mug")
    assert wrong[-1].observation == 'chosen front next back "buy now" price $9 | buy now' and not wrong[-1].done


def test_the_action_limit_ends_with_reward_zero_and_a_last_purchase_counts():
    steps = play(*[search("mug")] * 8, shop=SHOPS[False])
    assert [s.done for s in steps] == [False] * 7 + [True]
    assert (steps[-1].status, steps[-1].reward, steps[-1].observation, steps[-1].reward_detail) == ("action_limit", 0.0, "done", {})
    bought = play(*[search("ceramic")] * 6, click("A"), click("buy now"), shop=SHOPS[False], task="task-mug")
    assert bought[-1].status == "purchase" and bought[-1].reward == 1.0


def test_after_the_end_every_call_is_refused():
    session = Session(LONG, LONG.task("task-mug"))
    assert session.finish("generation_length").status == "generation_length" and session.observation == "done"
    with pytest.raises(EpisodeEnded, match="generation_length"):
        session.step(*search("mug"))
    with pytest.raises(EpisodeEnded):
        session.finish("generation_length")
    with pytest.raises(InvalidSetting):
        Session(LONG, LONG.task("task-mug")).finish("boredom")


def test_settings_are_checked():
    for bad in ({"page_size": 0}, {"page_size": 27}, {"max_actions": 0}):
        with pytest.raises(InvalidSetting, match=next(iter(bad))):
            Shop(WORLD, **bad)


def test_tool_schemas_are_fixed():
    assert [t["function"]["name"] for t in TOOLS] == ["search", "click"]
    assert [list(t["function"]["parameters"]["properties"]) for t in TOOLS] == [["query"], ["target"]]


# ------------------------------------------------------------------------------------------------------------ properties

known_targets = st.sampled_from(
    [
        "A",
        "b",
        "C",
        "e",
        "next",
        "previous",
        "back to search",
        "buy now",
        "red",
        "dark blue",
        "colour=red",
        "size=large",
        "small",
        "size=small",
        "颜色=红色",
    ]
)
junk = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=3)
actions = st.one_of(
    st.tuples(st.just("click"), st.fixed_dictionaries({"target": known_targets | st.text(max_size=8)})),
    st.tuples(st.just("click"), st.fixed_dictionaries({"target": known_targets})),
    st.tuples(
        st.just("search"), st.fixed_dictionaries({"query": st.sampled_from(["jacket", "mug", "hooded 外套", "nothing"]) | st.text(max_size=8)})
    ),
    st.tuples(
        st.sampled_from(["click", "search", "", "buy"]) | junk, junk | st.dictionaries(st.sampled_from(["target", "query", "x"]), junk, max_size=2)
    ),
)


def assert_well_formed(text):
    assert text == text.strip() and "  " not in text and not re.search(r" \n|\n |\n\n|\t|<\|", text)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(actions, max_size=12), st.booleans())
@example([search("jacket"), click("B"), click("red"), click("large"), click("buy now")], True)
def test_any_actions_keep_the_invariants(sequence, show_ids):
    shop = SHOPS[show_ids]
    session = Session(shop, shop.task("task-jacket"))
    for number, action in enumerate(sequence, 1):
        before = session.state
        if session.done:
            with pytest.raises(EpisodeEnded):
                session.step(*action)
            assert session.state == before
            continue
        step = session.step(*action)
        assert session.steps == number and step.state == session.state and step.observation == session.observation
        assert_well_formed(step.observation)
        json.dumps(step.state)
        if step.done:
            assert step.observation == "done" and step.status in ("purchase", "action_limit") and 0 <= step.reward <= 1
        elif step.feedback == "ok":
            assert parse(step.observation, show_ids=show_ids) == step.state
        else:
            assert step.state == before
            assert parse(step.observation)["reason"] == step.feedback in set(Reason)
        if not step.done:
            assert step.reward == 0 and step.reward_detail == {} and step.status == ""
        public = json.dumps([step.observation, step.state]) if not show_ids else json.dumps([step.observation, step.state]).replace("zzid", "")
        assert "zz" not in public and "31.41" not in public  # private fields all contain zz; the budget is 31.41


nasty = st.sampled_from(
    ["|", "missing", "price", "$5", "$", "has", "a b", "chosen", "buy now", "next", "$3 x", "[x]", "=", "a=b", "done", '"', "<|x|>", "\n"]
)
words = nasty | st.text(max_size=6)
price = st.none() | st.sampled_from([0.0, 1.5, 24.0, 99.99, 1234567.0])


@settings(deadline=None)
@given(
    title=st.lists(words, max_size=4),
    attributes=st.lists(words, max_size=4),
    options=st.dictionaries(words, st.dictionaries(words, price, min_size=1, max_size=3), max_size=3),
    list_price=price,
    show_ids=st.booleans(),
)
@example(title=["| buy now"], attributes=[], options={"has": {"missing": 1.0, "price": 2.5}, "|": {"$5": None}}, list_price=None, show_ids=False)
def test_every_page_of_any_product_reads_back(title, attributes, options, list_price, show_ids):
    try:
        product = Product("p", " ".join(["mug", *title]), "", (), tuple(attributes), options, list_price)
    except InvalidProduct:
        return
    task = Task("t", "x", "y", {}, Goal("p", (), {}, None))
    shop = Shop(World(Catalog([product]), {"t": task}, {}), show_ids=show_ids)
    session = Session(shop, task)
    sequence = [search("mug"), click("A"), *(click(f"{axis}={value}") for axis, values in product.options.items() for value in values)]
    for action in sequence:
        step = session.step(*action)
        if step.done:
            break
        assert_well_formed(step.observation)
        if step.feedback == "ok":
            assert parse(step.observation, show_ids=show_ids) == step.state
            if step.state["page"] == "results":
                assert step.state["rows"][0]["title"] == product.title


@pytest.mark.parametrize(("amount", "text"), [(24, "$24"), (24.5, "$24.50"), (0, "$0"), (1999.99, "$1999.99"), (1e6, "$1000000")])
def test_money(amount, text):
    assert money(amount) == text
