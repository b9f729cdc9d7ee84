"""Demonstrations and drills, checked from their tokens alone: what is trained, and that every answer is right."""

import dataclasses
import itertools
import random
import re

import pytest

from pocket import tokenizer
from pocket.demonstrations import DemonstrationConfig, Demonstrator, reworded
from pocket.skills import mechanisms
from shop_env.scripted import read_instruction
from shop_env.session import Session, Shop
from shop_env.synthetic import SyntheticConfig, generate

CONFIG = DemonstrationConfig(bare=0.3, drills=0.5, slip=0.0, observation_weight=0.25, answer_weight=4.0)
_TURN = re.compile(
    r"<think>\n(.*?)\n</think>\n\n<tool_call>\n<function=(\w+)>\n<parameter=(\w+)>\n(.*?)\n</parameter>\n</function>\n</tool_call><\|im_end\|>", re.S
)


@pytest.fixture(scope="module")
def demonstrator(chat, shops, drill_shops):
    return Demonstrator(shops, drill_shops, chat, CONFIG)


def spans(chat, episode):
    """(start, stop, written by the policy) of every stretch of the episode's tokens, in order, by the chat's own marks."""
    opens = {i for token, i in chat._tokenizer.get_vocab().items() if token.endswith("<|im_start|>assistant\n<think>\n")}
    found, start, writes = [], 0, False
    for i, token in enumerate(episode.tokens):
        if (writes and token == chat.stop_ids[0]) or (not writes and token in opens):
            found.append((start, i + 1, writes))
            start, writes = i + 1, not writes
    return [*found, (start, len(episode.tokens), writes)] if start < len(episode.tokens) else found


def read(chat, episode):
    """Instruction, persona, and for each turn (last observation, thought, tool, argument)."""
    text = chat.decode(episode.tokens)
    instruction, first = re.search(r"<\|im_start\|>user\n(.*?)\n(.*?)<\|im_end\|>", text).groups()
    persona = dict(re.findall(r"^(age|likes \w+) ([^\s<]+)", text.split("<|im_start|>user")[0], re.M))
    observations = [first, *re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.S)]
    turns = [(thought, tool, argument) for thought, tool, _, argument in _TURN.findall(text)]
    return instruction, persona, observations, turns


def test_a_demonstration_trains_what_the_policy_writes_and_a_little_of_what_the_shop_answers(chat, demonstrator):
    rng = random.Random(0)
    for _ in range(40):
        episode, _ = demonstrator.demonstration(rng)
        (prompt, *rest) = spans(chat, episode)
        assert prompt[0] == 0 and not prompt[2] and not any(episode.loss_mask[: prompt[1]])
        assert rest[-1][2], "a demonstration ends with the policy's last turn"
        for start, stop, writes in rest:
            assert set(episode.token_weights[start:stop]) == {1.0 if writes else 0.25}
        assert [w > 0 for w in episode.token_weights] == list(episode.loss_mask)


def test_a_demonstration_is_a_conversation_that_the_shop_would_have_had(chat, demonstrator, shops):
    rng = random.Random(1)
    successes = 0
    for _ in range(30):
        episode, success = demonstrator.demonstration(rng)
        successes += success
        instruction, persona, observations, turns = read(chat, episode)
        assert len(observations) == len(turns) and observations[0] == "search page"
        task = next(t for shop in shops for t in shop.world.tasks.values() if t.instruction == instruction and t.persona == persona)
        session = Session(next(shop for shop in shops if shop.world.tasks.get(task.id) is task), task)
        for observation, (_, tool, argument) in zip(observations, turns, strict=True):
            assert session.observation == observation
            session.step(tool, {"query" if tool == "search" else "target": argument})
        assert session.done
    assert 5 < successes < 30


def test_slips_are_refused_untrained_and_recovered_from(chat, shops, drill_shops):
    source = Demonstrator(shops, drill_shops, chat, dataclasses.replace(CONFIG, slip=0.3))
    rng = random.Random(3)
    left, repeated, wins = 0, 0, 0
    for _ in range(80):
        episode, success = source.demonstration(rng)
        wins += success
        weights = [set(episode.token_weights[start:stop]) for start, stop, writes in spans(chat, episode) if writes]
        _, _, observations, turns = read(chat, episode)
        for i, answer in enumerate(observations[1:]):
            refused = answer.startswith("invalid ")
            assert weights[i] == {0.0 if refused else 1.0}
            if refused:
                left += turns[i + 1][2] == "previous"
                repeated += turns[i + 1][2] not in ("previous", turns[i][2])
    assert left >= 10 and repeated >= 10 and wins >= 20


def test_no_token_of_the_stream_is_spelled_by_letters(chat):
    worlds = [[Shop(generate(SyntheticConfig(seed=60, **hazards)), 5, 22)] for hazards in ({}, {"colour_stock": 0.6, "size_stock": 0.6})]
    source = Demonstrator(*worlds, chat, dataclasses.replace(CONFIG, slip=0.3))
    for episode in itertools.islice(source.stream(0), 100):
        found = chat._tokenizer.convert_ids_to_tokens(episode.tokens)
        assert not [t for t in found if t.startswith("##") or t == tokenizer.UNKNOWN]


def test_a_reworded_chunk_has_words_of_its_own_mechanism_only_and_is_never_a_held_out_text():
    rng = random.Random(0)
    for mechanism in mechanisms().values():
        known = {w for c in mechanism.paraphrases for text in (c.title, c.applies_when, c.procedure) for w in text.split()}
        chunks = [reworded(rng, mechanism) for _ in range(2000)]
        for chunk in chunks:
            assert {w for text in (chunk.title, chunk.applies_when, chunk.procedure) for w in text.split()} <= known
            assert chunk.title and chunk.procedure and chunk.logical_id == mechanism.name
        assert {c.title for c in mechanism.paraphrases} <= {c.title for c in chunks}
        assert len({c.text for c in chunks}) > 1000  # no sequence of words is shown often enough to be waited for
        assert not {c.text for c in mechanism.held_out} & {c.text for c in chunks}


def test_a_held_out_text_that_comes_up_is_drawn_again():
    """A mechanism whose paraphrases can say what is held out."""
    mechanism = mechanisms()["calm_tone"]
    common = next(c for c in mechanism.paraphrases if len(c.procedure.split()) <= 2)
    hiding = dataclasses.replace(mechanism, held_out=(common,))
    rng = random.Random(0)
    assert common.text in {reworded(rng, mechanism).text for _ in range(500)}
    assert common.text not in {reworded(rng, hiding).text for _ in range(500)}


def test_a_drill_recites_the_skills_that_its_prompt_carries(chat, demonstrator):
    """Told by the titles of unmixed chunks: the prompt's lines and the recital name the same mechanisms."""
    rng = random.Random(4)
    seen = set()
    titles = {c.title: m for m in mechanisms().values() for c in m.paraphrases}
    for _ in range(60):
        text = chat.decode(demonstrator.drill(rng).tokens)
        recited = re.search(r"<think>\nskills (.*?)\bneed ", text)[1].split()
        lines = re.findall(r"^- (.*?):", text.split("<|im_start|>user")[0], re.M)
        told = {titles[title].shopper for title in lines if title in titles}
        words = {"second" if shopper == "skip_first" else shopper for shopper in told if shopper}
        assert words <= set(recited)
        assert len(recited) <= len(lines)
        seen |= words
    assert seen == {"query", "persona", "stated", "page", "stock", "price", "second"}


def test_a_demonstration_says_first_what_it_will_do(chat, shops):
    """With certain procedures, the plan is the procedures; a plan without "price" is never followed by a price check, and so on."""
    source = Demonstrator(shops, shops, chat, dataclasses.replace(CONFIG, bare=1.0, absent=(("query", 1.0), ("page", 1.0), ("price", 0.5))))
    rng = random.Random(6)
    plans = []
    for _ in range(40):
        episode, _ = source.demonstration(rng)
        _, _, _, turns = read(chat, episode)
        plans.append(turns[0][0])
        checked = any(thought.startswith("price ") for thought, _, _ in turns)
        assert checked <= ("price" in turns[0][0].split())
    assert set(plans) == {"do query page", "do query page price"}


def test_drills_answer_right_and_train_the_answers_only(chat, demonstrator):
    rng = random.Random(2)
    verdicts = {"yes": 0, "no": 0, "ok": 0, "exceeds": 0}
    for _ in range(60):
        episode = demonstrator.drill(rng)
        instruction, persona, observations, turns = read(chat, episode)
        wish = read_instruction(instruction)
        trained = []
        for observation, (thought, _, _) in zip(observations, turns, strict=False):
            trained += check_thought(thought.split(), observation, wish, persona, verdicts)
        words = [chat.decode([t]) for t, w in zip(episode.tokens, episode.token_weights, strict=True) if w > 0]
        assert words == trained
        assert {w for w in episode.token_weights if w > 0} == {4.0}
    assert min(verdicts.values()) >= 15, verdicts
    assert 0.35 < verdicts["no"] / (verdicts["yes"] + verdicts["no"]) < 0.65
    assert 0.25 < verdicts["exceeds"] / (verdicts["ok"] + verdicts["exceeds"]) < 0.75


def check_thought(words, observation, wish, persona, verdicts):
    """Recomputes every answer of a drill's thought from the page before it; returns the words that should be trained."""
    if not words:
        return []
    if words[0] == "skills":
        other = "size" if wish.stated_axis == "colour" else "colour"
        stated = ["a", *wish.attributes, wish.kind, "in", wish.stated_axis, wish.stated_value]
        needs = words.index("need")
        assert words[needs + 1 :] == [*stated, "likes", other, persona[f"likes {other}"], "budget", f"${wish.budget}"]
        return [w for w in words[1:] if w not in ("a", "colour", "size", "budget", "in", "likes")]
    if words[0] == "price":
        price = int(re.search(r" price \$(\d+)( \||$)", observation)[1])
        answer = "exceeds" if price > wish.budget else "ok"
        assert words == ["price", f"${price}", "budget", f"${wish.budget}", answer]
        verdicts[answer] += 1
        return [f"${price}", f"${wish.budget}", answer]
    lines = [line.split() for line in observation.split("\n")]
    assert lines[0][0] == "product" and lines[1][0] == "has"
    offers = {line[0]: {w for w in line[1:] if not w.startswith("$")} for line in lines[1:]}
    answers, axis, asked = [], "has", ""
    for word in words:
        if word in ("yes", "no"):
            assert word == ("yes" if asked in offers[axis] else "no"), (words, observation)
            verdicts[word] += 1
            answers.append(word)
            axis = "has"
        elif word in ("colour", "size"):
            axis = word
        else:
            asked = word
    assert len(answers) == 12
    return answers


def test_the_same_seed_gives_the_same_stream(chat, shops, drill_shops, demonstrator):
    def take(source, seed):
        return [(e.tokens, e.token_weights) for e in itertools.islice(source.stream(seed), 12)]

    first = take(demonstrator, 5)
    assert take(Demonstrator(shops, drill_shops, chat, CONFIG), 5) == first
    assert take(demonstrator, 6) != first


def test_a_glance_is_a_page_and_right_verdicts_on_it(chat, demonstrator):
    rng = random.Random(8)
    verdicts = {"yes": 0, "no": 0}
    for _ in range(100):
        episode = demonstrator.glance(rng)
        text = chat.decode(episode.tokens)
        page = re.search(r"<tool_response>\n(product .*?)\n</tool_response>", text, re.S)[1]
        thought = re.search(r"<think>\n(.*?)\n</think>", text, re.S)[1].split()
        expected = check_thought(thought, page, None, None, verdicts)
        assert [chat.decode([t]) for t, w in zip(episode.tokens, episode.token_weights, strict=True) if w > 0] == expected
        assert "<tools>" not in text and len(episode.tokens) < 80
    assert 0.35 < verdicts["no"] / sum(verdicts.values()) < 0.65


def test_the_mix_has_the_configured_shares(chat, shops):
    def shares(**changes):
        source = Demonstrator(shops, shops, chat, DemonstrationConfig(glances=0.0, **changes))
        texts = [chat.decode(e.tokens) for e in itertools.islice(source.stream(0), 60)]
        return sum(" need " in t for t in texts) / 60, sum("\nskills\n" not in t for t in texts) / 60

    assert shares(drills=0.0, bare=1.0) == (0.0, 1.0)
    assert shares(drills=1.0, bare=1.0) == (1.0, 1.0)
    source = Demonstrator(shops, shops, chat, DemonstrationConfig(glances=0.5))
    glances = sum("<tools>" not in chat.decode(e.tokens) for e in itertools.islice(source.stream(0), 100)) / 100
    assert 0.35 < glances < 0.65
    drills, bare = shares(drills=0.5, bare=0.3)
    assert 0.3 < drills < 0.7 and 0.15 < bare < 0.5


def test_a_chunk_in_the_prompt_raises_the_probability_of_its_procedure_and_of_no_other(chat, shops):
    source = Demonstrator(shops, shops, chat, DemonstrationConfig(present=1.0, absent=tuple((p, 0.0) for p, _ in CONFIG.absent), stale=1.0))
    task = next(iter(shops[0].world.tasks.values()))
    for mechanism in mechanisms().values():
        shopper = source.shopper(random.Random(0), task, [mechanism.paraphrases[0]])
        careful = {mechanism.shopper} - {None, "skip_first"}
        assert shopper.does == careful and (shopper._order[0] == 1) == (mechanism.shopper == "skip_first"), mechanism.name
