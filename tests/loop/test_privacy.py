"""What a task keeps private never reaches a prompt: whole episodes through the agent and the shop's real HTTP service.

The worlds are made so that a leak is a substring. Every private field holds a word that occurs nowhere else, the goal product's id among them.
The engine behind the agent shops with care, clicks at random, and babbles, so every kind of answer of the shop and every protocol error is seen.
"""

import asyncio
import dataclasses
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intraskill.rollout import records
from intraskill.rollout.agent import Limits
from intraskill.rollout.chat import Chat
from intraskill.rollout.collect import Assignment, Rollout, collect_groups
from intraskill.types import Completion, Health, Mask, MaskKind, Sampling, ToolCall
from launch.shop import ClientShop
from pocket.skills import mechanisms
from pocket.warm_start import make_chat
from shop_env.client import ShopClient
from shop_env.scripted import PROCEDURES, Shopper
from shop_env.server import ServerThread
from shop_env.session import Shop
from shop_env.synthetic import COLOURS, SIZES, SyntheticConfig, generate
from shop_env.tasks import World

KEY = "a-privileged-key"
CHUNKS = tuple(m.paraphrases[0] for m in mechanisms().values())
MARK = "zq"


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Chat:
    return make_chat(tmp_path_factory.mktemp("pocket-tokenizer"))


def marked_world(seed: int) -> World:
    """A synthetic world whose private fields all carry MARK; half of the goals still name real options, so purchases can succeed in part."""
    world = generate(SyntheticConfig(seed=seed, num_products=60, split_sizes=(("train", 12), ("test", 12))))
    tasks = {}
    for number, task in enumerate(world.tasks.values()):
        options = {axis: f"{MARK}{axis}value" for axis in task.goal.options} if number % 2 else task.goal.options
        attributes = (f"{MARK}attribute", *task.goal.attributes)
        goal = dataclasses.replace(task.goal, attributes=attributes, options=options, price_ceiling=7654.25)
        tasks[task.id] = dataclasses.replace(task, full_instruction=f"{MARK} {task.full_instruction}", goal=goal, user_id=f"{MARK}-{task.user_id}")
    return World(world.catalog, tasks, world.splits)


class ScriptedEngine:
    """Reads its prompt as an agent would and writes canonical calls, or nonsense."""

    def __init__(self, chat: Chat, seed: int):
        self.chat, self.seed = chat, seed
        self.prompts: list[str] = []
        self._shoppers: dict[str, Shopper] = {}

    async def generate(self, prompt_ids, *, session, sampling):
        text = self.chat.decode(prompt_ids)
        self.prompts.append(text)
        rng = random.Random(f"{self.seed} {session.id} {len(prompt_ids)}")
        ids = tuple(self._write(text, session, rng))[: sampling.max_new_tokens]
        reason = "stop" if ids[-1] in sampling.stop_ids else "length"
        return Completion(ids, (-1.0,) * len(ids), reason, (0,), 0, 0.0)

    def _write(self, text: str, session, rng: random.Random) -> list[int]:
        instruction, first = re.search(r"<\|im_start\|>user\n(find [^\n]*)\n(.*?)<\|im_end\|>", text).groups()
        observation = [first, *re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.S)][-1]
        persona = dict(re.findall(r"^(likes \w+) ([^\s<]+)", text.split("<|im_start|>user")[0], re.M))
        kind = session.noise[-1] % 3
        if kind == 0:
            shopper = self._shoppers.setdefault(session.id, Shopper(instruction, persona, PROCEDURES, rng))
            action = shopper.act(observation)
            return self.chat.assistant(action.thought, ToolCall(action.tool, action.arguments))
        target = rng.choice(
            [*"ABCDE", *(f"colour={c}" for c in COLOURS), *(f"size={s}" for s in SIZES), "buy now", "next", "previous", "back to search"]
        )
        call = ToolCall("search", {"query": instruction}) if rng.random() < 0.3 else ToolCall("click", {"target": target})
        ids = self.chat.assistant("", call)
        if kind == 2 and rng.random() < 0.4:  # a part of the turn left out: some protocol error, or a longer ramble
            del ids[rng.randrange(len(ids) - 1)]
        return ids

    async def release(self, session):
        self._shoppers.pop(session.id, None)

    async def load_weights(self, published):
        raise AssertionError("no weights here")

    async def healthy(self):
        return Health(True, 0, "")


async def play(url: str, chat: Chat, engine: ScriptedEngine):
    async with ShopClient(url, KEY) as client:
        shop = ClientShop(client)
        sampling = Sampling(60, stop_ids=chat.stop_ids, banned_ids=chat.banned_ids(chat.vocab_size))
        rollout = Rollout(engine, shop, chat, sampling, Limits(2048, 16), (0, 0), group_size=3, concurrency=16, attempts=1)
        tasks = [t for split in ("train", "test") for t in await shop.tasks(split)]
        masks = [Mask(MaskKind.FULL, tuple(c.id for c in CHUNKS)) if i % 2 else Mask.skill_free() for i in range(len(tasks))]
        assigned = [Assignment(i, t, m, CHUNKS if m.chunk_ids else ()) for i, (t, m) in enumerate(zip(tasks, masks, strict=True))]
        return await collect_groups(rollout, assigned, lambda _: None)


@settings(max_examples=3)
@given(st.integers(0, 10_000))
def test_no_private_field_of_any_task_reaches_a_prompt(chat_of_module, seed):
    chat = chat_of_module
    world = marked_world(seed)
    engine = ScriptedEngine(chat, seed)
    with ServerThread(Shop(world, page_size=5, max_actions=14), privileged_key=KEY) as server:
        groups = asyncio.run(play(server.url, chat, engine))
    trajectories = [t for g in groups for t in g.trajectories]
    assert len(trajectories) == 72 and all(t.scored for t in trajectories), [t.error for t in trajectories if t.error][:1]
    assert {t.status for t in trajectories} >= {"purchase", "action_limit"}
    assert {turn.protocol_error for t in trajectories for turn in t.turns} > {""}
    assert {turn.feedback for t in trajectories for turn in t.turns} > {"ok", "unavailable_target"}
    seen = [*engine.prompts, *(chat.decode(t.tokens) for t in trajectories)]
    for group in groups:
        task = world.tasks[group.task.id]
        private = [MARK, task.goal.product_id, "7654", task.full_instruction, *(p for p in world.catalog)]
        for trajectory in group.trajectories:
            text = chat.decode(trajectory.tokens)
            assert not [word for word in private if word in text]
        # Nor does an unprivileged record hold it, the reward's details included.
        record = str(records.to_json(group))
        assert MARK not in record and "7654" not in record and "goal_product_id" not in record
    assert not [text for text in seen if MARK in text]


@pytest.fixture(scope="module")
def chat_of_module(chat):
    return chat


def test_an_unmarked_world_shows_the_target_only_where_it_is_public(chat):
    """The goal of a plain synthetic task: words that neither instruction nor persona nor a page show do not occur in its episode."""
    world = generate(SyntheticConfig(seed=77, num_products=60, split_sizes=(("train", 12), ("test", 12))))
    engine = ScriptedEngine(chat, 0)
    with ServerThread(Shop(world, page_size=5, max_actions=14), privileged_key=KEY) as server:
        groups = asyncio.run(play(server.url, chat, engine))
    for group in groups:
        task = world.tasks[group.task.id]
        prompt = chat.decode(group.trajectories[0].tokens[: group.trajectories[0].turns[0].prompt_length])
        hidden = {*task.goal.attributes, *task.goal.options.values()} - set(task.instruction.split()) - set(map(str, task.persona.values()))
        skills = {word for chunk in CHUNKS for word in chunk.text.split()} if group.mask.chunk_ids else set()
        assert not hidden & set(prompt.split()) - skills
        assert task.full_instruction not in prompt and task.goal.product_id not in prompt and task.user_id not in prompt
