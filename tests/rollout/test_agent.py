import asyncio
import dataclasses

import pytest
from rollout import fakes
from rollout.fakes import BUY, CLICK, NOISE, PROMPT, SAMPLING, STOP, TASK, completion

from intraskill.rollout.agent import Limits, run_episode
from intraskill.types import Chunk, EngineError, Session, ShopError, Status, StepResult, ToolCall

CHUNK = Chunk("look", 1, "look", "always", "look first")
LIMITS = Limits(max_context=100, max_steps=5)


def play(turns, *, shop=None, limits=LIMITS, sampling=SAMPLING, chunks=()):
    engine, shop = fakes.Engine(turns), shop or fakes.Shop()
    trajectory = asyncio.run(run_episode(engine, shop, fakes.Chat(), TASK, chunks, Session("s", (1,)), sampling, limits))
    assert shop.closed == shop.opened and engine.released == ["s"]
    return trajectory, engine, shop


def test_tokens_only_grow_and_each_sampled_one_is_marked():
    trajectory, engine, shop = play([completion(CLICK, 9, STOP), completion(BUY, STOP)], chunks=(CHUNK,))
    prompt = (*PROMPT, 60, 74)
    assert engine.prompts == [prompt, (*prompt, CLICK, 9, STOP, 80, 84)]
    assert trajectory.tokens == (*prompt, CLICK, 9, STOP, 80, 84, BUY, STOP)
    assert trajectory.loss_mask == (False,) * 5 + (True,) * 3 + (False,) * 2 + (True,) * 2
    assert trajectory.logprobs == (0, 0, 0, 0, 0, -0.5, -1.5, -2.5, 0, 0, -0.5, -1.5)
    assert (trajectory.status, trajectory.reward, trajectory.success) == (Status.PURCHASE, 1.0, True)
    assert trajectory.reward_detail == {"r_type": 1.0} and trajectory.error == ""
    first, last = trajectory.turns
    assert (first.prompt_length, first.call, first.feedback, first.observation) == (5, ToolCall("click", {"value": "x"}), "ok", "page")
    assert (last.prompt_length, last.text, last.observation) == (10, "2 0", "")


def test_protocol_error_costs_a_step_and_no_action():
    trajectory, _, shop = play([completion(NOISE, STOP), completion(BUY, STOP)])
    assert len(shop.calls) == 1 and trajectory.status == Status.PURCHASE
    turn = trajectory.turns[0]
    assert (turn.call, turn.protocol_error, turn.feedback, turn.observation) == (None, "no_tool_call", "", "make exactly one call")
    assert trajectory.tokens[6:8] == (80, 81)  # the repair message is 21 characters long


def test_step_limit_scores_zero_and_keeps_the_record_free_of_a_last_result():
    trajectory, _, shop = play([completion(CLICK, STOP)] * 3, limits=Limits(100, 3))
    assert (trajectory.status, trajectory.reward, len(trajectory.turns), len(shop.calls)) == (Status.ACTION_LIMIT, 0.0, 3, 3)
    assert trajectory.loss_mask[-2:] == (True, True)


def test_protocol_errors_alone_reach_the_step_limit():
    trajectory, _, shop = play([completion(NOISE, STOP)] * 2, limits=Limits(100, 2))
    assert trajectory.status == Status.ACTION_LIMIT and shop.calls == []


def test_length_without_a_stop_scores_zero_even_if_a_call_could_be_read():
    trajectory, _, shop = play([completion(BUY, 9, 9, 9, reason="length")])
    assert (trajectory.status, trajectory.reward, shop.calls) == (Status.GENERATION_LENGTH, 0.0, [])
    assert trajectory.turns[0].protocol_error == "" and sum(trajectory.loss_mask) == 4


def test_a_turn_gets_what_is_left_of_the_context():
    # 4 prompt + 2 sampled + 2 result = 8 of 10 tokens
    trajectory, engine, _ = play([completion(CLICK, STOP), completion(CLICK, 9, reason="length")], limits=Limits(10, 5))
    assert engine.limits == [4, 2]
    assert trajectory.status == Status.GENERATION_LENGTH and len(trajectory.tokens) == 10


def test_a_result_that_fills_the_context_ends_the_episode_without_it():
    trajectory, engine, _ = play([completion(CLICK, STOP)], limits=Limits(8, 5))
    assert trajectory.status == Status.GENERATION_LENGTH and len(trajectory.tokens) == 6 and len(engine.prompts) == 1


def test_the_shops_own_action_limit():
    class Strict(fakes.Shop):
        async def step(self, episode_id, call):
            return StepResult("", "ok", True, "action_limit")

    trajectory, _, _ = play([completion(CLICK, STOP)], shop=Strict())
    assert (trajectory.status, trajectory.reward) == (Status.ACTION_LIMIT, 0.0)


@dataclasses.dataclass
class Bare:
    """A completion without invariants, as a careless client might build one."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str = "stop"


def raising(error):
    def turns(session, turn):
        raise error

    return turns


FAULTS = {
    "abort": ([completion(CLICK, reason="abort")], "aborted after 1"),
    "engine error": (raising(EngineError("replica 2 is gone")), "EngineError: replica 2 is gone"),
    "non-finite": ([completion(CLICK, STOP, logprobs=(-1.0, float("nan")))], "log-prob nan is not finite"),
    "infinite": ([completion(CLICK, STOP, logprobs=(-float("inf"), -1.0))], "log-prob -inf is not finite"),
    "too many": ([completion(CLICK, 9, 9, 9, 9, STOP)], "6 tokens where at most 4 were asked"),
    "lengths": ([Bare((CLICK, STOP), (-1.0,))], "2 ids but 1 log-probs"),
    "lengths refused at birth": (lambda s, t: completion(CLICK, STOP, logprobs=(-1.0,)), "2 ids but 1 log-probs"),
    "unknown reason": (lambda s, t: completion(CLICK, STOP, reason="banana"), "unknown finish reason 'banana'"),
    "stop without stop token": ([completion(CLICK, 9)], "last id is no stop token"),
    "nothing": ([completion()], "last id is no stop token"),
    "tokens after stop": ([completion(CLICK, STOP, STOP)], "tokens follow a stop token"),
    "length too early": ([completion(CLICK, reason="length")], "length after 1 of 4"),
    "length of a stopped turn": ([completion(CLICK, 9, 9, STOP, reason="length")], "length after 4 of 4"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_engine_faults_are_technical(name):
    turns, message = FAULTS[name]
    trajectory, _, shop = play(turns)
    assert trajectory.status == Status.TECHNICAL and not trajectory.scored and message in trajectory.error
    assert trajectory.turns == () and not any(trajectory.loss_mask) and shop.calls == []


def test_a_fault_later_keeps_the_turns_before_it():
    trajectory, _, _ = play([completion(CLICK, STOP), completion(CLICK, reason="abort")])
    assert trajectory.status == Status.TECHNICAL and len(trajectory.turns) == 1 and sum(trajectory.loss_mask) == 2


def test_shop_faults_are_technical():
    def fault(step):
        raise ShopError("503")

    trajectory, _, _ = play([completion(CLICK, STOP)], shop=fakes.Shop(fault=fault))
    assert trajectory.error == "ShopError: 503" and trajectory.turns == ()
    trajectory, _, _ = play([completion(BUY, STOP)], shop=fakes.Shop(reward=lambda t: 1.5))
    assert trajectory.status == Status.TECHNICAL and "reward 1.5" in trajectory.error


def test_a_shop_that_cannot_open_is_technical_and_releases_the_session():
    shop = fakes.Shop()

    async def refuse(task_id, *, privileged=False):
        raise ShopError("connection refused")

    shop.open = refuse
    trajectory, engine, _ = play([], shop=shop)
    assert trajectory.error == "ShopError: connection refused" and trajectory.tokens == () and engine.prompts == []


def test_another_task_than_asked_is_technical():
    shop = fakes.Shop()
    honest = shop.open
    shop.open = lambda task_id: honest("task-2")
    trajectory, _, _ = play([], shop=shop)
    assert "opened task 'task-2' where 'task-1' was asked" in trajectory.error


def test_a_prompt_longer_than_the_context_says_so():
    trajectory, _, _ = play([], limits=Limits(4, 5))
    assert "first prompt has 4 tokens, the context limit is 4" in trajectory.error


def test_stop_ids_are_required():
    with pytest.raises(ValueError, match="stop_ids is empty"):
        play([], sampling=dataclasses.replace(SAMPLING, stop_ids=()))


@pytest.mark.parametrize("moment", ["open", "generate"])
async def test_cancellation_closes_both_sides(moment):
    engine = fakes.Engine([completion(CLICK, STOP)], delay=lambda s: 60.0)
    shop = fakes.Shop(open_delay=0.05 if moment == "open" else 0.0)
    before = asyncio.all_tasks()
    episode = asyncio.create_task(run_episode(engine, shop, fakes.Chat(), TASK, (), Session("s", (1,)), SAMPLING, LIMITS))
    await asyncio.sleep(0.02)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert shop.opened == ["e0"] and shop.closed == ["e0"] and engine.released == ["s"] and engine.running == 0
    assert asyncio.all_tasks() == before


async def test_a_bug_is_not_a_technical_failure():
    engine, shop = fakes.Engine(raising(KeyError("bug"))), fakes.Shop()
    with pytest.raises(KeyError):
        await run_episode(engine, shop, fakes.Chat(), TASK, (), Session("s", (1,)), SAMPLING, LIMITS)
    assert shop.closed == ["e0"] and engine.released == ["s"]


async def test_failing_cleanup_does_not_change_the_outcome(caplog):
    engine, shop = fakes.Engine([completion(BUY, STOP)]), fakes.Shop()

    async def close(episode_id):
        raise ShopError("lease unknown")

    shop.close = close
    trajectory = await run_episode(engine, shop, fakes.Chat(), TASK, (), Session("s", (1,)), SAMPLING, LIMITS)
    assert trajectory.success and "lease unknown" in caplog.text and engine.released == ["s"]
