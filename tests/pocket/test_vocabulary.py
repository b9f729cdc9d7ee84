"""Everything that the pocket shop, its skills and its demonstrator spell is made of whole words."""

import json
import random

import pytest

from intraskill.types import Task, ToolCall
from pocket import tokenizer, vocabulary
from pocket.skills import mechanisms
from shop_env import observation as text_view
from shop_env.scripted import PROCEDURES, Shopper, play
from shop_env.session import TOOLS, Session, Shop
from shop_env.synthetic import SyntheticConfig, generate


def pieces(chat, ids):
    return chat._tokenizer.convert_ids_to_tokens(ids)


def assert_whole_words(chat, ids, text):
    """No unknown token and no word spelled by letters; decoding gives the text back."""
    found = pieces(chat, ids)
    spelled = [p for p in found if p.startswith("##") or p == tokenizer.UNKNOWN]
    assert not spelled, f"{text!r} is spelled {found}"
    assert chat.decode(ids) == text


def wander(session: Session, rng: random.Random):
    """Every valid kind of click and search, at random, so that all kinds of pages are seen."""
    words = [w for p in session.shop.world.catalog.values() for w in (*p.attributes, p.category[1])]
    text = session.observation
    while True:
        yield text
        state = text_view.parse(text)
        targets = [row["label"] for row in state.get("rows", ())] + state.get("controls", [])
        targets += [f"{axis}={value}" for axis, values in state.get("axes", {}).items() for value in values]
        if state["page"] == "selection":
            targets += [f"{axis}={value}" for axis in state["missing"] for value in ("red", "small")]
        if state["page"] == "home" or not targets:
            step = session.step("search", {"query": " ".join(rng.sample(words, 2))})
        else:
            step = session.step("click", {"target": rng.choice(targets)})
        if step.done:
            yield step.observation
            return
        text = step.observation if step.feedback == "ok" else session.observation
        if step.feedback != "ok":
            return


def test_the_pages_of_a_shop_as_large_as_a_run_s(chat):
    shop = Shop(generate(SyntheticConfig(seed=60)), page_size=5, max_actions=60)
    rng = random.Random(0)
    pages = {text for task in list(shop.world.tasks.values())[:60] for text in wander(Session(shop, task), rng)}
    kinds = {text.split(" ", 1)[0] for text in pages}
    assert kinds >= {"search", "results", "product", "chosen", "done"} and len(pages) > 200
    for text in pages:
        assert_whole_words(chat, chat._encode(text), text)


def test_instructions_personas_and_skills(chat, shops):
    for task in shops[0].world.tasks.values():
        prompt = chat.prompt(Task(task.id, task.instruction, task.persona), (), "search page")
        assert_whole_words(chat, prompt, chat.decode(prompt))
    for mechanism in mechanisms().values():
        for chunk in (*mechanism.paraphrases, *mechanism.held_out):
            assert_whole_words(chat, chat._encode(f"- {chunk.text}"), f"- {chunk.text}")


def test_demonstrated_turns(chat, shops):
    rng = random.Random(1)
    for task in list(shops[1].world.tasks.values())[:100]:
        actions, _ = play(Session(shops[1], task), Shopper(task.instruction, task.persona, PROCEDURES, rng))
        for action in actions:
            ids = chat.assistant(action.thought, ToolCall(action.tool, action.arguments))
            assert not [p for p in pieces(chat, ids) if p.startswith("##")], action


def test_words_are_unique_in_a_fixed_order_and_free_of_markup():
    words = vocabulary.words()
    assert len(set(words)) == len(words) and words == vocabulary.words()
    assert not [w for w in words if "<" in w or ">" in w or " " in w or "\n" in w]


def test_the_tokenizer_s_files_are_the_same_bytes_each_time(tmp_path):
    for name in ("one", "two"):
        tokenizer.save(tokenizer.build(vocabulary.words(), TOOLS), tmp_path / name)
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert files == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert str(tmp_path) not in json.dumps((tmp_path / "one" / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("token", [*tokenizer.SPECIAL, *tokenizer.MARKUP, *tokenizer.SPANS, *tokenizer.PHRASES])
def test_fixed_spans_are_single_tokens(chat, token):
    assert len(chat._encode(token)) == 1 and chat.decode(chat._encode(token)) == token
