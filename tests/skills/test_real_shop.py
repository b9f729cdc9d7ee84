"""The analyst in the real shop: what a careless scripted shopper leaves out is what the analyst names, and its trials succeed there."""

import asyncio
import collections
import random

import pytest

from intraskill.skills import firewall
from intraskill.skills.analyst import Mechanism, RuleAnalyst
from intraskill.skills.bank import Bank
from intraskill.skills.cards import CardStatus, Deployable
from intraskill.types import Completion, Opened, Status, StepResult, Task, ToolCall, Trajectory, Turn
from shop_env.scripted import PROCEDURES, Shopper
from shop_env.session import TOOLS, Session, Shop
from shop_env.synthetic import SyntheticConfig, generate

WORDINGS = {str(m): (Deployable("rule", "now", f"follow {m}"),) for m in Mechanism}
LEFT_OUT = {
    "query": "query_all_attributes",
    "persona": "persona_option",
    "stated": "stated_over_persona",
    "page": "page_attributes",
    "stock": "option_available",
    "price": "price_ceiling",
}


class InProcessShop:
    """The shop's state machine behind the loop's protocol, without a server."""

    def __init__(self):
        self.world = generate(SyntheticConfig(num_products=1600, split_sizes=(("train", 60),)))
        self.shop = Shop(self.world, page_size=5, max_actions=16)
        self.sessions: dict[str, Session] = {}
        self.count = 0

    async def tools(self):
        return TOOLS

    async def tasks(self, split):
        return [Task(t.id, t.instruction, t.persona) for t in (self.world.tasks[i] for i in self.world.splits[split])]

    async def goal(self, task_id):
        return self.world.tasks[task_id].goal.to_json()

    async def product(self, product_id):
        return self.world.catalog[product_id].to_json()

    async def open(self, task_id, *, privileged=False):
        task, self.count = self.world.tasks[task_id], self.count + 1
        session = self.sessions[str(self.count)] = Session(self.shop, task)
        return Opened(str(self.count), Task(task.id, task.instruction, task.persona), session.observation)

    async def step(self, episode_id, call):
        s = self.sessions[episode_id].step(call.name, dict(call.arguments))
        return StepResult(s.observation, s.feedback, s.done, s.status, s.reward, s.success, s.reward_detail)

    async def close(self, episode_id):
        del self.sessions[episode_id]


@pytest.fixture(scope="module")
def shop():
    return InProcessShop()


async def failed_cards(shop, procedures, num_tasks):
    analyst, rng, cards = RuleAnalyst(shop, WORDINGS), random.Random(0), []
    for task_id in shop.world.splits["train"][:num_tasks]:
        opened = await shop.open(task_id)
        shopper, observation, turns = Shopper(opened.task.instruction, opened.task.persona, procedures, rng), opened.observation, []
        while not turns or not answer.done:
            action = shopper.act(observation)
            call = ToolCall(action.tool, action.arguments)
            answer = await shop.step(opened.episode_id, call)
            observation = answer.observation
            turns.append(Turn(0, Completion((1,), (0.0,), "stop", (0,), 0, 0.0), "", call, "", answer.feedback, "" if answer.done else observation))
        await shop.close(opened.episode_id)
        if not answer.success:
            n = len(turns)
            retry = Trajectory((1,) * n, (True,) * n, (0.0,) * n, tuple(turns), Status(answer.status), answer.reward, False)
            cards.append(await analyst.analyse(task_id, opened.task, retry, Bank()))
    return cards


@pytest.mark.parametrize("procedure", LEFT_OUT)
def test_the_procedure_that_was_left_out_is_the_one_that_is_proposed(shop, procedure):
    cards = asyncio.run(failed_cards(shop, [p for p in PROCEDURES if p != procedure], 50))
    assert shop.sessions == {}
    proposed = collections.Counter(c.mechanism for c in cards if c.status == CardStatus.PROPOSE_ADD)
    assert proposed.most_common(1)[0][0] == LEFT_OUT[procedure]
    assert sum(proposed.values()) >= len(cards) / 3  # late faults leave too few of the 16 actions for a repair
    general = firewall.vocabulary(text for w in WORDINGS.values() for d in w for text in d.texts)
    assert not [c for c in cards if firewall.inspect(c, general)]
